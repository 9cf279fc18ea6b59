"""`run.json`: what a run records about itself besides its rows, how it is written, and how it is read back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_bench import reading
from dflash_bench.atomic import write_whole
from dflash_bench.errors import UserError
from dflash_bench.results import plan as plans
from dflash_bench.results import shape
from dflash_bench.results.columns import MEASURE_AGAIN, SCHEMA, UNRELEASED, refuse_other_schema
from dflash_bench.results.differences import differences

FILE = "run.json"
Info = dict[str, Any]
"""The content of `run.json`."""


def read_info(folder: Path) -> Info:
    """Checks only what every run must have. Raises UserError if there is no run, or an edit broke its `run.json`."""
    path = folder / FILE
    if not path.exists():
        raise UserError(f"{folder} holds no run (no {FILE})")
    info: Any = reading.json_of(path)
    is_run = isinstance(info, dict) and isinstance(info.get("identity"), dict)
    if not is_run or not any(isinstance(info.get(name), int) for name in (SCHEMA, UNRELEASED)):
        raise UserError(f"cannot read {path}: not written by dflash-bench run")
    refuse_other_schema(path, info, MEASURE_AGAIN)
    check_shape(shape.STORED, info, path)
    if "spoiled" in info:
        raise UserError(f"{folder} proves nothing: {info['spoiled']}; delete it, and run again")
    return dict(info)


def check_shape(expected: Any, info: Info, path: Path) -> None:
    for fault in shape.faults(expected, info, ""):
        raise UserError(f"{path} is not as dflash-bench run wrote it: {fault.lstrip('.')}")


def write_info(folder: Path, info: Info) -> None:
    write_whole(folder / FILE, lambda file: file.write(_text(info).encode()))


def _text(info: Info) -> str:
    """JSON with one line for each prompt of the plan, of which there may be many."""
    text = json.dumps({name: value for name, value in info.items() if name != "plan"}, indent=2, ensure_ascii=False)
    if "plan" not in info:
        return text + "\n"
    plan = info["plan"]
    suites = ",\n".join(
        f"      {json.dumps(suite, ensure_ascii=False)}: [\n{_lines(prompts)}\n      ]"
        for suite, prompts in plan["prompts"].items()
    )
    rest = "".join(f"    {json.dumps(name)}: {json.dumps(plan[name])},\n" for name in ("methods", "repeats"))
    return f'{text[:-2]},\n  "plan": {{\n{rest}    "prompts": {{\n{suites}\n    }}\n  }}\n}}\n'


def _lines(prompts: Sequence[Any]) -> str:
    return ",\n".join(f"        {json.dumps(prompt, ensure_ascii=False)}" for prompt in prompts)


def normalised(info: Mapping[str, Any]) -> Info:
    """As it will be read back: tuples become lists, and the identity gets the hash of the plan."""
    stored: Info = json.loads(json.dumps(dict(info)))
    if "plan" in stored:
        stored["identity"]["plan"] = plans.sha256(stored["plan"])
    return stored


def changes(stored: Info, now: Info) -> Iterator[str]:
    """What decides results and differs from when the run was started."""
    identity_then, identity_now = dict(stored["identity"]), dict(now["identity"])
    if "plan" in stored and "plan" in now:  # the plans say more than their hashes
        yield from plans.differences(stored["plan"], now["plan"])
        del identity_then["plan"], identity_now["plan"]
    yield from differences(identity_then, identity_now)


def carried(info: Mapping[str, Any]) -> dict[str, Any]:
    """What every part of a run carries: its identity, and the run's id."""
    return {**info["identity"], **({"run_id": info["run_id"]} if "run_id" in info else {})}
