"""Setup of nano runs, done once or shortened for tests that ask for `shared_models`.

How fast this machine reads, copies and multiplies takes a second each time, and is the same for all runs. Tests of the
measurement itself ask for `measured_in_full`, and one that plants a fault in the clock measures with that.

So are nano's files, which no test changes: each reader gets a copy of its own, as changeable as weights just read, and
engine and judge read them apart. Tests of reading and of damage have files of their own, which are read each time.
"""

from __future__ import annotations

import copy
import fcntl
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dflash_bench.core.methods import parse
from dflash_bench.engine import judge_weights
from dflash_bench.engine.backend import open_backend
from dflash_bench.engine.forward import choice
from dflash_bench.engine.rows import HostClock
from dflash_bench.models import chat, hub, loading, presets, targets
from dflash_bench.models.chat import Chat
from dflash_bench.models.loading import Source
from dflash_bench.models.presets import NANO
from dflash_bench.models.targets import PLAIN
from dflash_bench.models.weights import empty_copies
from dflash_bench.perf import measure

MOST_PASSES = 8
WIDE_CALLS = 5
SECONDS = HostClock.seconds
KNOWN: dict[Any, Any] = {}


def apply(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone."""
    sound, medians_s, wide_s = measure.forward_curve, measure.medians_s, measure.shortest_wide_s

    def once(measured: Callable[..., Any]) -> Callable[..., Any]:
        def known(*of: Any) -> Any:
            if HostClock.seconds is not SECONDS:
                return measured(*of)
            if (measured, of) not in KNOWN:
                KNOWN[measured, of] = measured(*of)
            return KNOWN[measured, of]

        return known

    rates, bandwidth = once(measure.measure_rates), once(measure.read_bandwidth)

    def wide(target: Any, *of: Any) -> dict[str, float]:
        """Time fewer calls, and keep the shortest of earlier runs."""
        shortest = wide_s(target, *of)
        if HostClock.seconds is not SECONDS:
            return shortest
        known = KNOWN.setdefault((wide_s, type(target.network), target.config._name_or_path, target.model.dtype), {})
        known |= {width: min(seconds, known.get(width, seconds)) for width, seconds in shortest.items()}
        return {width: known[width] for width in shortest}

    @wraps(sound)
    def quick(target: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "measure_rates", rates)
            patch.setattr(measure, "read_bandwidth", bandwidth)
            patch.setattr(measure, "medians_s", partial(medians_s, least=1, most=1))
            patch.setattr(measure, "WIDE_CALLS", WIDE_CALLS)
            patch.setattr(measure, "shortest_wide_s", wide)
            return sound(target)

    patch.setattr(measure, "forward_curve", quick)
    patch.setattr(measure, "least_s", wraps(measure.least_s)(partial(measure.least_s, most=MOST_PASSES)))
    for place, name, key in (
        (hub, "weights_sha256", _nanos),
        (targets, "load", _nanos),
        (targets, "check", _nanos),
        (targets, "tokenizer_of", _nanos),
        (chat, "decoder", _nanos),
        (judge_weights, "_read", _judges),
        (chat, "check", _prompts),
    ):
        patch.setattr(place, name, _read_once(getattr(place, name), key))


def compile_once() -> None:
    """Kernels, by one of the processes of the tests; the others wait, and no run says that it compiles them."""
    if (folder := choice.code_folder() if choice.has_numba() else None) is None:
        return
    with (folder / "compiling").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if choice.compile_note():
            models = loading.load("nano", ["dflash", "eagle3"], "cpu", torch.float32)
            backend = open_backend(models, presets.preset("nano"), list(map(parse, ("ar", "dflash", "eagle3"))), 4)
            for label in backend.drafters:
                backend.generate_ids(label, [[5, 6, 7]])


def _nanos(folder: Path, *words: Any) -> Hashable:
    """The stored reading of nano's files; None for files of others, which may change."""
    return (
        (folder, *words)
        if folder.parent == NANO and [replace(one, date=None) for one in words[2:]] in ([], [PLAIN])
        else None
    )


def _judges(source: Source, options: Mapping[str, Any]) -> Hashable:
    return None if options else _nanos(source.folder, source.device, source.dtype, source.placement)


def _prompts(tokenizer: Any, chats: Sequence[Chat], thinking: bool) -> Hashable:
    """Nano's template was tried on these in a process of its own, which takes long to fork from one with torch."""
    return (repr(chats), thinking) if tokenizer.chat_template == _template() else None


@cache
def _template() -> str:
    return (NANO / "target" / "chat_template.jinja").read_text(encoding="utf-8")


def _read_once(sound: Callable[..., Any], key: Callable[..., Hashable]) -> Callable[..., Any]:
    """A function that reads files gives a copy of what it read under the same key; the judge's reading is its own."""
    known = KNOWN.setdefault(sound, {})

    @wraps(sound)
    def read(*words: Any, **named: Any) -> Any:
        at = None if named else key(*words)
        if at is None:
            return sound(*words, **named)
        if at not in known:
            known[at] = _as_in_files(sound(*words))
        whole = known[at]
        return copy.deepcopy(whole, empty_copies(whole) if isinstance(whole, nn.Module) else None)

    return read


def _as_in_files(read: Any) -> Any:
    """Nobody planted a fault in what all later tests get."""
    if isinstance(read, nn.Module):
        folder = Path(read.config._name_or_path)
        stored, held = load_file(folder / hub.WHOLE), read.state_dict()
        assert all(torch.equal(held[name], tensor.to(held[name])) for name, tensor in stored.items()), folder
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in read.modules()), folder
    return read
