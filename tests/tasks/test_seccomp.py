"""The filter of system calls, run by hand for both architectures, and its numbers against the system's headers."""

from __future__ import annotations

import errno
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from dflash_bench.tasks.isolation import restrictions
from helpers.each import each

PID = 4321
MACHINES = {"x86_64": (0xC000003E, restrictions.X86_64), "aarch64": (0xC00000B7, restrictions.AARCH64)}
ALLOWED, KILLED, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS


def verdict(machine: str, number: int, *args: int, architecture: int | None = None) -> int:
    """Results of the filter: its five instructions, applied to the kernel's view of a call."""
    seen = struct.pack("=IIQ6Q", number, architecture or MACHINES[machine][0], 0, *args, *[0] * (6 - len(args)))
    code = list(struct.iter_unpack("=HBBI", restrictions.program(machine, PID)))
    value, place = 0, 0
    while True:
        operation, if_so, if_not, operand = code[place]
        place += 1
        if operation == 0x20:
            value = struct.unpack_from("=I", seen, operand)[0]
        elif operation == 0x54:
            value &= operand
        elif operation in (0x15, 0x25):
            place += if_so if (value == operand if operation == 0x15 else value > operand) else if_not
        else:
            assert operation == 0x06
            return int(operand)


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_listed_is_allowed_and_nothing_else(machine: str) -> None:
    numbers = MACHINES[machine][1]
    conditional = {numbers[name] for name in restrictions._conditions(PID) if name in numbers}
    for number in range(1000):
        if number in set(numbers.values()) - conditional:
            assert verdict(machine, number) == ALLOWED
        elif number not in conditional:
            assert verdict(machine, number) == (ENOSYS if number == 435 or number > 450 else EPERM)


@each("machine", MACHINES)
@each(
    ("name", "good", "bad"),
    [
        ("clone", [(0x3D0F00,), (0x10900,)], [(17,), (0x4111,), (0x900,), (0x103D0F00,), (0x3F0F00,), (0x3D2F00,)]),
        ("kill", [(PID, 9)], [(0, 9), (-1 & 0xFFFFFFFF, 9), (1, 9)]),
        ("tgkill", [(PID, 1, 6)], [(1, 1, 6)]),
        ("prlimit64", [(0, 7), (PID, 7)], [(1, 7)]),
        ("openat", [(0, 0, 0), (0, 0, 0o101), (0, 0, 0o1102)], [(0, 0, 0o1000), (0, 0, 3), (0, 0, 0o1003)]),
        ("renameat2", [(0, 0, 0, 0, 0), (0, 0, 0, 0, 1)], [(0, 0, 0, 0, 4), (0, 0, 0, 0, 2)]),
        ("fcntl", [(5, 1), (5, 1030)], [(5, 8), (5, 10), (5, 1024), (5, 1031), (5, 1033)]),
        ("ioctl", [(1, 0x5401)], [(1, 0x5412), (1, 0x8901), (1, 0x894C)]),
        ("prctl", [(15,)], [(1,), (4,), (22,), (38,), (36,)]),
        ("socketpair", [(1, 1), (1, 0x80001), (1, 0x801)], [(1, 2), (1, 5), (2, 1), (16, 1)]),
    ],
)
def test_arguments_decide(machine: str, name: str, good: list[tuple[int, ...]], bad: list[tuple[int, ...]]) -> None:
    number = MACHINES[machine][1][name]
    assert [verdict(machine, number, *args) for args in good] == [ALLOWED] * len(good)
    assert [verdict(machine, number, *args) for args in bad] == [EPERM] * len(bad)


@pytest.mark.parametrize("machine", MACHINES)
def test_another_architecture_is_killed_and_x32_refused(machine: str) -> None:
    read = MACHINES[machine][1]["read"]
    for architecture in (0x40000003, 0x40000028, *(known for known, _ in MACHINES.values())):
        expected = ALLOWED if architecture == MACHINES[machine][0] else KILLED
        assert verdict(machine, read, architecture=architecture) == expected
    assert verdict(machine, 2**30 + read) == ENOSYS


@pytest.mark.parametrize(
    ("numbers", "places"),
    [
        (restrictions.X86_64, ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h")),
        (restrictions.AARCH64, ("/usr/include/asm-generic/unistd.h",)),
    ],
    ids=MACHINES,
)
def test_numbers_are_those_of_the_headers(numbers: Mapping[str, int], places: tuple[str, ...]) -> None:
    header = next((Path(place) for place in places if Path(place).exists()), None)
    if header is None:
        pytest.skip("the headers of Linux are not installed")
    known = re.findall(r"^#define\s+__NR(?:3264)?_(\w+)\s+(\d+)$", header.read_text(), re.MULTILINE)
    by_name = {name: int(number) for name, number in known}
    by_name |= {"newfstatat": by_name.get("newfstatat", by_name.get("fstatat", -1))}
    assert {name: by_name.get(name) for name in numbers} == dict(numbers)


def test_an_unknown_machine_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "", "", "", "riscv64")))
    with pytest.raises(OSError, match="riscv64"):
        restrictions.restrict_calls()
