"""The environment of a measurement (machine, versions, commit) as a JSON record.

It ends up in committed tables, so it contains no user, host or folder names. The packages that it describes are never
imported, so that a report can be written without loading torch.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from copy import copy
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dflash_bench import __version__
from dflash_bench.core import plugins

COMMAND_TIMEOUT_S = 10.0
PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "datasets", "torchao", "bitsandbytes")
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE")


def describe() -> dict[str, Any]:
    """Return machine, versions, commit and GPUs as one record; None if absent or unknown."""
    return {
        "platform": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "num_usable_cores": num_usable_cores(),
        "memory_bytes": _memory_bytes(),
        "python": platform.python_version(),
        # The running code's version: the metadata of a checkout can be older.
        "packages": {"dflash-bench": __version__} | {name: _version(name) for name in PACKAGES} | plugins.used(),
        "git": copy(_running_code()),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "gpus": gpus(),
    }


def memory_bytes() -> tuple[int | None, list[int]]:
    """Return the memory of the machine (None if unknown), and of each GPU that reports its own."""
    return _memory_bytes(), [gpu["memory_bytes"] for gpu in gpus() if gpu["memory_bytes"] is not None]


def boot_id() -> str | None:
    """Return an id of this machine since its last boot; None if the system does not provide it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def free_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the available memory of the machine, or of its container if less; None if unknown."""
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB$", meminfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    of_machine = int(match[1]) * 1024 if match else _memory_bytes()
    limits = [of_machine, _left_in_group(group)]
    return min((limit for limit in limits if limit is not None), default=None)


def _left_in_group(group: Path) -> int | None:
    """Return the bytes that a control group (version 2) may still allocate, counting its unused file cache as free."""
    try:
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        files = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(most) - int(used) + (int(files[1]) if files else 0) if most.isdecimal() else None


def cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Return the size of the processor's largest cache; None if unknown."""
    try:
        sizes = [re.fullmatch(r"(\d+)K", path.read_text().strip()) for path in folder.glob("index*/size")]
    except OSError:
        return None
    return max((int(size[1]) * 1024 for size in sizes if size), default=None)


def one_line(env: dict[str, Any]) -> str:
    """Return a line such as "Intel Xeon, 2 cores, Linux; Python 3.11.7, torch 2.13.0"."""
    cores = env["num_usable_cores"] or env["num_cores"]
    machine = [
        *_counted([gpu["name"] for gpu in env["gpus"]]),
        _short_cpu(env["cpu"] or env["machine"]),
        f"{cores} core{'' if cores == 1 else 's'}",
        env["platform"],
    ]
    torch = env["packages"]["torch"]
    software = [f"Python {env['python']}", f"torch {torch}" if torch else "no torch"]
    return f"{', '.join(machine)}; {', '.join(software)}"


def kind(env: dict[str, Any]) -> str:
    """Return the processor and GPUs of a machine; times are comparable only between machines of the same kind."""
    return ", ".join([str(env["cpu"] or env["machine"]), *(gpu["name"] for gpu in env["gpus"])])


def _counted(names: list[str]) -> list[str]:
    counts = {name: names.count(name) for name in names}
    return [name if count == 1 else f"{count} x {name}" for name, count in counts.items()]


def _short_cpu(model: str) -> str:
    bare = re.sub(r"\((R|TM)\)|\b(CPU|Processor)\b|@.*", " ", model, flags=re.IGNORECASE)
    return " ".join(bare.split()) or model


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or None


def num_usable_cores() -> int | None:
    """Return how many processors this process may use, which CPU affinity can limit; None except on Linux."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no such call, no such name, no answer
        return None


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _running_code() -> dict[str, Any] | None:
    """Return `_git` at the first call: later edits do not change the code of this process."""
    return _git()


def _git(package: Path = Path(__file__).parent.parent) -> dict[str, Any] | None:
    """Return the commit of the checkout that the package is part of, or None for an installed package."""
    git = ("git", "--no-optional-locks", "-C", str(package.parent))
    answer = _output(*git, "rev-parse", "--show-toplevel", "HEAD")
    root, commit = answer.splitlines() if answer else ("", "")
    # An installed package may lie inside another repository, for instance in a virtual environment.
    if not answer or Path(root).resolve() != package.parent.resolve():
        return None
    # Only code and suites count: a run's results must not mark the next run's code as changed.
    changes = _output(*git, "status", "--porcelain", "--", package.name, "suites")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def gpus() -> list[dict[str, Any]]:
    """Return name, driver and memory of the GPUs that nvidia-smi lists, whether or not torch can use them."""
    query = "--query-gpu=name,driver_version,memory.total"
    table = _output("nvidia-smi", query, "--format=csv,noheader") or ""
    return [_gpu(*line.rsplit(", ", 2)) for line in table.splitlines() if line.count(", ") >= 2]


def _gpu(name: str, driver: str, memory: str) -> dict[str, Any]:
    mebibytes = re.fullmatch(r"(\d+) MiB", memory)  # "[N/A]" if CPU and GPU share memory
    return {"name": name, "driver": driver, "memory_bytes": int(mebibytes[1]) * 2**20 if mebibytes else None}


def _output(*command: str) -> str | None:
    """Return what a command prints; None if it is not installed, fails or hangs."""
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=COMMAND_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
