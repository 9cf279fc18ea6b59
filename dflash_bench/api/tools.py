"""Drafts looked at, examined, trained and measured: the commands `inspect`, `doctor`, `crosscheck`, `train`, `profile`.

Each returns what the command shows, as data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from dflash_bench.api.measuring import Options, Words, request_of
from dflash_bench.core.errors import UserError

if TYPE_CHECKING:
    from dflash_bench.diagnose.compare_counts import CrosscheckResult
    from dflash_bench.diagnose.doctor import Diagnosis
    from dflash_bench.models.inspect import Inspection
    from dflash_bench.report.perf import Profiled
    from dflash_bench.runner.config import RunRequest

Tell = Callable[[str], None]
OF_SERVERS = ("servers", "dialect", "served_model", "api_key_env", "timeout", "env_proxy")


def _nobody(_: str) -> None:
    """Nobody is told how far it is."""


def inspect(checkpoint: str | Path, target: str | Path | None = None) -> Inspection:
    """What a draft is, read from its files' headers: format, method, block, taps, sizes (parameters and bytes).

    `checkpoint` is a folder or a hub id. With a `target` (nano, another known model, or a folder), `problems` also says
    whether the draft fits it; a draft that can be run has none. Raises UserError for what is not a draft at all.
    """
    from dflash_bench.models import inspect

    return inspect.inspect(str(checkpoint), None if target is None else str(target))


def doctor(
    method: str | None = None,
    *,
    model: str | Path | None = None,
    suite: Words = (),
    limit: int | None = None,
    tell: Tell = _nobody,
    **options: Unpack[Options],
) -> Diagnosis:
    """Why few drafted tokens are accepted: the draft as it is, and then with one thing changed at a time.

    `method` is dflash or eagle3 (default: dflash). Without `suite` and `prompts` it is examined on prompts of ours.
    Other options are those of `dflash-bench doctor`: target, drafts, max_new_tokens, dtype, ... Returns `findings`
    (cause, evidence, remedy, is_cause), the likeliest first, and `has_cause`. Raises UserError for what cannot be
    loaded; a draft that does not fit is a finding.
    """
    return examine(request_of(methods=method or (), model=model, suite=suite, limit=limit, **options), tell)


def examine(request: RunRequest, tell: Tell) -> Diagnosis:
    """The same for a request, as the command has it."""
    from dflash_bench.diagnose import doctor

    return doctor.diagnose(request, tell)


def crosscheck(
    servers: Mapping[str, str],
    *,
    model: str | Path | None = None,
    suite: Words = (),
    methods: Words = (),
    limit: int | None = None,
    chats: bool = False,
    tell: Tell = _nobody,
    **options: Any,
) -> list[CrosscheckResult]:
    """Is it the weights or the engine? Live servers against our own engine, on the same prompts and weights.

    `servers` maps a method to a URL: {"dflash": "http://127.0.0.1:8000"}. Options are those of `dflash-bench
    crosscheck`; `chats` sends chats in place of token ids. Returns one result for each server: `verdict` is agree,
    differ or cannot tell. Raises UserError for a server that cannot be asked.
    """
    from dflash_bench.diagnose import crosscheck
    from dflash_bench.diagnose.crosscheck import CrosscheckRequest

    of_engine = {name: value for name, value in options.items() if name not in OF_SERVERS}
    of_servers = {name: value for name, value in options.items() if name in OF_SERVERS}
    request = request_of(model=model, suite=suite, methods=methods, limit=limit, **of_engine)
    return crosscheck.crosscheck(CrosscheckRequest(request, request_of(servers=servers, **of_servers), chats), tell)


def train(target: str | Path, out: str | Path, method: str = "dflash", *, tell: Tell = _nobody, **options: Any) -> Path:
    """Trains a draft for a target on the target's own answers, and returns its folder, OUT/METHOD.

    `method` is dflash, eagle3 or medusa. Options are those of `dflash-bench train` by their names: prompts, written,
    invented, epochs, steps, batch_size, seed, ... The same call goes on where one was interrupted. Raises UserError for
    options without effect, and for prompts that stand in a test suite.
    """
    from dflash_bench.training import session

    folder = session.perform(training(target=str(target), out=Path(out), method=method, **options), tell)
    if folder is None:
        raise UserError(f"training of {method} for {target} left no draft in {out}; see what it said by tell=print")
    return folder


def training(*, target: str, out: Path, method: str, **options: Any) -> Any:
    """The request of a training. Raises UserError for an unknown option."""
    from dataclasses import fields

    from dflash_bench.core.errors import unknown
    from dflash_bench.training.config import TrainRequest

    known = [field.name for field in fields(TrainRequest)]
    for name, value in options.items():
        if name not in known:
            raise unknown("option of train", name, known)
        if name in ("prompts", "openings", "allow"):
            options[name] = (str(value),) if isinstance(value, str | Path) else tuple(map(str, value))
    return TrainRequest(target=target, out=out, method=method, **options)


def profile(
    methods: Words = (),
    *,
    model: str | Path | None = None,
    random_weights: bool = False,
    layers: int | None = None,
    batch: Sequence[int] = (1,),
    context: Sequence[int] = (512,),
    width: Sequence[int] = (1, 2, 4, 8, 16),
    acceptance: float | None = None,
    tell: Tell = _nobody,
    **options: Any,
) -> Profiled:
    """What a forward costs on this machine, and from what acceptance on drafting pays.

    `batch`: sequences side by side; `context`: tokens that were read before; `width`: tokens that a pass verifies;
    `acceptance`: tokens a round that speed-ups are predicted for. With `random_weights` nothing is downloaded, and
    `layers` of the target are enough. Other options: target, drafts, device, dtype, attention, engine, graph, threads.
    Returns times in seconds with the least that the device would need. Raises UserError for what does not fit into
    memory.
    """
    from dflash_bench.diagnose import profile

    request = request_of(methods=methods, model=model, **options)
    shapes = (tuple(batch), tuple(context), tuple(width))
    return profile.profile(profile.ProfileRequest(request, random_weights, layers, *shapes, acceptance), tell)
