"""Examine, train, profile and race drafts: `inspect`, `doctor`, `crosscheck`, `train`, `profile`, `recommend`.

Each returns its command's output as data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from dflash_bench.api.measuring import Words, progress_display
from dflash_bench.core.errors import UserError
from dflash_bench.runner.requests import request_of, typed_options

if TYPE_CHECKING:
    from dflash_bench.api.options import Options
    from dflash_bench.diagnose.compare_counts import CrosscheckResult
    from dflash_bench.diagnose.doctor import Diagnosis
    from dflash_bench.models.inspect import Inspection
    from dflash_bench.models.presets import Preset
    from dflash_bench.racing.recommendation import Recommended
    from dflash_bench.report.perf import Profiled
    from dflash_bench.runner.config import RunRequest

Tell = Callable[[str], None]


def _ignore(_: str) -> None:
    """Drop a progress message."""


def inspect(checkpoint: str | Path, target: str | Path | None = None) -> Inspection:
    """Read a draft's properties from its files' headers: format, method, block, taps, sizes (parameters and bytes).

    `checkpoint` is a folder or a hub id. With a `target` (nano, another known model, or a folder), `problems` also list
    where the draft does not fit it; they are empty for a usable draft. Raises UserError for files of no draft.
    """
    from dflash_bench.models import inspect

    return inspect.inspect(str(checkpoint), None if target is None else str(target))


def forward_of(preset: Preset) -> dict[str, Any]:
    """Return which code computes a known model's target: `engine` (None if it is refused), `files` and `reason`."""
    from dflash_bench.engine.selection import ExpectedForward, expected_forward
    from dflash_bench.models.random_weights import expected_config

    try:
        return asdict(expected_forward(expected_config(preset)))
    except UserError as error:
        return asdict(ExpectedForward(None, reason=str(error)))


def doctor(
    method: str | None = None,
    *,
    model: str | Path | None = None,
    suite: Words = (),
    limit: int | None = None,
    tell: Tell = _ignore,
    **options: Unpack[Options],
) -> Diagnosis:
    """Find out why few draft tokens are accepted: measure the draft as it is, then with one thing changed at a time.

    `method` is dflash or eagle3 (default: dflash). Without `suite` and `prompts` it uses prompts of this package. Other
    options are those of `dflash-bench doctor`: target, drafts, max_new_tokens, dtype, ... Returns `findings` (cause,
    evidence, remedy, is_cause), the likeliest first, and `has_cause`. Raises UserError for files that cannot be loaded;
    a draft that does not fit is a finding.
    """
    return examine(request_of(methods=method or (), model=model, suite=suite, limit=limit, **options), tell)


def examine(request: RunRequest, tell: Tell) -> Diagnosis:
    """Diagnose the draft of a request."""
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
    tell: Tell = _ignore,
    **options: Any,
) -> list[CrosscheckResult]:
    """Compare live servers with this engine on the same prompts and weights: is it the weights or the engine?

    `servers` maps a method to a URL: {"dflash": "http://127.0.0.1:8000"}. Options are those of `dflash-bench
    crosscheck`; `chats` sends chats instead of token ids. Returns a result for each server, whose `verdict` is agree,
    differ or cannot tell. Raises UserError for a server that does not answer.
    """
    from dflash_bench.diagnose import conform_server

    request = request_of(servers=servers, model=model, suite=suite, methods=methods, limit=limit, **options)
    return conform_server.crosscheck(request, tell, chats)


def train(target: str | Path, out: str | Path, method: str = "dflash", *, tell: Tell = _ignore, **options: Any) -> Path:
    """Train a draft for a target on the target's own answers, and return its folder, OUT/METHOD.

    `method` is dflash, eagle3 or medusa. Options are those of `dflash-bench train` by their names: prompts, written,
    invented, epochs, steps, batch_size, seed, ... Repeat the call to continue after an interruption. Raises UserError
    for options without effect, and for prompts that are in a test suite.
    """
    from dflash_bench.training import session
    from dflash_bench.training.config import TrainRequest

    given = {"target": target, "out": out, "method": method, **options}
    folder = session.perform(TrainRequest(**typed_options(TrainRequest, given, "option of train")), tell)
    if folder is None:
        raise UserError(
            f"training of {method} for {target} left no draft in {out}; pass tell=print to see its messages"
        )
    return folder


def recommend(
    *,
    suite: Words = (),
    methods: Words = (),
    model: str | Path | None = None,
    limit: int | None = None,
    out: str | Path | None = None,
    tell: Callable[[str], object] = lambda _: None,
    **options: Unpack[Options],
) -> Recommended:
    """Race methods under your loads, and recommend which to serve with.

    The loads are `concurrency` and `context`, each a number or several; `budget` limits the time, such as "30m".
    `methods` are tried with several lengths unless they name one (default: all whose requirements are met). Other
    options are those of `dflash-bench recommend`. `out` is the folder (default: a folder in results/runs, the same for
    the same options); called again, it resumes where it was stopped. `tell` is called with notes and at each round's
    end.

    Raises UserError for options that a race does not support, for another request's folder, and if plain decoding
    fails. A method with wrong answers raises nothing: its verdict is wrong.
    """
    from dflash_bench.racing.rounds import decide

    given = {"suite": suite, "methods": methods, "model": model, "limit": limit, **options}
    request = request_of(**{name: value for name, value in given.items() if value not in (None, ())})
    return decide(request, None if out is None else Path(out), tell, progress_display())


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
    draft_layers: Sequence[int] = (),
    tell: Tell = _ignore,
    **options: Any,
) -> Profiled:
    """Measure forward passes on this machine, and derive the acceptance length from which on drafting pays.

    `batch`: sequences side by side; `context`: tokens already in the cache; `width`: tokens that a pass verifies;
    `acceptance`: acceptance lengths that speed-ups are predicted for. With `random_weights` nothing is downloaded, and
    the first `layers` of the target are enough, and `draft_layers` compares drafts of several depths. Other options:
    target, drafts, device, dtype, attention, engine, graph,
    threads. Returns times in seconds with the device's lower bounds. Raises UserError for models that do not fit into
    memory.
    """
    from dflash_bench.diagnose import profile

    request = request_of(methods=methods, model=model, **options)
    shapes = (tuple(batch), tuple(context), tuple(width))
    asked = profile.ProfileRequest(request, random_weights, layers, *shapes, acceptance, tuple(draft_layers))
    return profile.profile(asked, tell)
