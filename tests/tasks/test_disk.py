"""Programs that try to fill the disk, and hold what they took so that nobody sees it; each stops by itself in time."""

from __future__ import annotations

import errno
import re

from dflash_bench.tasks.sandbox import ProgramLimits
from helpers.each import each
from helpers.sandboxes import Box

LIMITS = ProgramLimits(folder_bytes=2**24, num_files=500)
MOST_TAKEN = 2**24 + LIMITS.file_bytes
"""Limit of the folder, including standard error, which counts as a file."""
SELF_RESTRAINT = 150  # pieces of 1 MiB, then the program stops, so that a sandbox that leaks harms nobody

GREED = f"""
import ctypes, mmap, os
MIB = 2**20
taken, kept, number = 0, [], 0
def new(flags=os.O_RDWR | os.O_CREAT):
    global number
    number += 1
    return os.open(f'file{{number}}', flags)
def hold(file):
    global taken
    taken += os.fstat(file).st_blocks * 512
def let_go(file):
    os.close(file)
    os.unlink(f'file{{number}}')
refused = None
try:
    for _ in range({SELF_RESTRAINT}):
        PIECE
except OSError as error: refused = error
assert taken <= {MOST_TAKEN}, f'{{taken}} bytes'
assert refused is not None, 'never refused'
"""
PIECES = {
    "reserved and mapped": "file = new(); os.posix_fallocate(file, 0, MIB); kept.append(mmap.mmap(file, 4096))\n"
    "        hold(file); let_go(file)",
    "written and mapped": "file = new(); os.write(file, bytes(MIB)); kept.append(mmap.mmap(file, 4096))\n"
    "        hold(file); let_go(file)",
    "written and open": "file = new(); os.write(file, bytes(MIB)); hold(file); os.unlink(f'file{number}')",
    "sparse, then touched": "file = new(); os.ftruncate(file, MIB); page = mmap.mmap(file, MIB)\n"
    "        page[::4096] = bytes(256); page.flush(); kept.append(page); hold(file); let_go(file)",
    "mapped for reading only": "file = new(); os.write(file, bytes(MIB))\n"
    "        kept.append(mmap.mmap(file, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ)); hold(file); let_go(file)",
    "renamed over": "file = new(); os.write(file, bytes(MIB)); kept.append(mmap.mmap(file, 4096)); hold(file)\n"
    "        os.close(file); os.rename(f'file{number}', 'same')",
    "in a folder that is gone": "os.mkdir('d'); os.chdir('d'); file = new(); os.write(file, bytes(MIB)); hold(file)\n"
    "        kept.append(mmap.mmap(file, 4096)); let_go(file); os.chdir('..'); os.rmdir('d')",
    "without a name": "file = os.open('.', os.O_TMPFILE | os.O_RDWR); os.write(file, bytes(MIB)); hold(file)\n"
    "        kept.append(mmap.mmap(file, 4096)); os.close(file)",
    "in memory that is a file": "file = os.memfd_create('x'); os.write(file, bytes(MIB)); hold(file)\n"
    "        kept.append(mmap.mmap(file, 4096)); os.close(file)",
    "beyond the end of standard error": "before = os.fstat(2).st_blocks * 512\n"
    "        if ctypes.CDLL(None, use_errno=True).fallocate(2, 1, ctypes.c_long(_ * MIB), ctypes.c_long(MIB)):\n"
    "            raise OSError(ctypes.get_errno(), 'reserve')\n"
    "        taken += os.fstat(2).st_blocks * 512 - before",
    "beyond the end of a file": "file = new()\n"
    "        if ctypes.CDLL(None, use_errno=True).fallocate(file, 1, ctypes.c_long(0), ctypes.c_long(8 * MIB)):\n"
    "            raise OSError(ctypes.get_errno(), 'reserve')\n"
    "        hold(file); kept.append(mmap.mmap(-1, 4096)); let_go(file)",
    "all in standard error": "os.write(2, bytes(MIB)); taken += MIB",
}


@each("piece", PIECES.values())
def test_the_limit_holds_for_what_is_held_without_a_name(box: Box, piece: str) -> None:
    assert box.passes(GREED.replace("PIECE", piece), LIMITS)


MANY = """
import errno, os
made = 0
try:
    for n in range(2000):
        ENTRY
        made += 1
except OSError as error: assert error.errno in (errno.ENOSPC, errno.EACCES, errno.EPERM), error
assert made <= 500, made
"""


@each(
    "entry",
    ["open(str(n), 'w').close()", "os.mkdir(str(n))", "os.symlink('/', str(n))", "os.mkdir('d'); os.chdir('d')"],
)
def test_files_cannot_be_multiplied(box: Box, entry: str) -> None:
    assert box.passes(MANY.replace("ENTRY", entry), LIMITS)


def test_without_a_disk_of_its_own_nothing_can_be_written(box: Box) -> None:
    """A plain error says so; with namespaces the folder lies in memory, and is limited by the kernel."""
    reason = box.run("import tempfile\nwith tempfile.TemporaryFile() as file: file.write(b'x')\n" * 2).reason
    if box.isolation.namespaces:
        assert reason == "passed"
        return
    assert re.search("No usable temporary directory", reason), reason
    for attempt in ("open('x', 'w')", "os.mkdir('x')", "os.symlink('/', 'x')", "open(os.path.join(HOME, 'x'), 'a')"):
        number = errno.EACCES
        assert f"[Errno {number}]" in box.fails(f"import os\nHOME = os.environ['HOME']\n{attempt}")
