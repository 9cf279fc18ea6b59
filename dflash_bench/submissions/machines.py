"""Whether this machine computes as those that measured a run did, so that rounding and times must be the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_bench.core import environment
from dflash_bench.results.run_info import RunIdentity, RunInfo

OF_ROUNDING = ("device", "network", "attention", "threads", "tensor_parallel", "capture")
"""Identity fields that decide in which order sums are rounded, and how long a pass takes."""
PACKAGES = ("torch", "transformers")


def kinds(info: RunInfo) -> list[str]:
    """Return the kinds of all machines that measured a run: of its processes, first its own, and of its workers."""
    own = [environment.kind(one.to_json()) for one in info.environments]
    return list(dict.fromkeys([*own, *(info.identity.workers.kinds if info.identity.workers else [])]))


def unlike(info: RunInfo, identity: RunIdentity, here: Mapping[str, Any]) -> list[str]:
    """Return how this machine, with the environment `here` and the run planned again, computes otherwise; [] if not."""
    return [*_other_machines(info, here), *_other_ways(info.identity, identity)]


def _other_machines(info: RunInfo, here: Mapping[str, Any]) -> Iterator[str]:
    own = environment.kind(dict(here))
    if other := [kind for kind in kinds(info) if kind != own]:
        yield f"this machine ({own}) is of another kind than {', '.join(other)}"
    for name in PACKAGES:
        versions = {one.packages.get(name) for one in info.environments}
        if versions != {here["packages"].get(name)}:
            yield f"{name} is {here['packages'].get(name)} here, not {', '.join(sorted(map(str, versions)))}"


def _other_ways(then: RunIdentity, now: RunIdentity) -> Iterator[str]:
    for name in OF_ROUNDING:
        was, is_now = getattr(then, name), getattr(now, name)
        if name == "device":
            was, is_now = ((one or "").partition(":")[0] for one in (was, is_now))
        if was != is_now:
            yield f"{name.replace('_', ' ')} is {is_now} here, not {was}"
