"""A newcomer's path: the README's first command, and the ones that it names next, in the set-up that it made."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from helpers import shown

FIRST = "scripts/run --suite math --method dflash,eagle3"
PROGRAM = shown.ROOT / ".venv" / "bin" / "dflash-bench"


def say(*words: object, folder: Path) -> str:
    done = subprocess.run([*map(str, words)], cwd=folder, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.in_full
@pytest.mark.skipif(not PROGRAM.exists(), reason="not run by scripts/test, whose set-up the path goes through")
def test_the_first_commands_answer_and_what_they_name_next_works(tmp_path: Path) -> None:
    assert f"{FIRST} " in (shown.ROOT / "README.md").read_text(encoding="utf-8")
    _, *words = shlex.split(FIRST)
    small = ["--limit", 1, "--max-new-tokens", 16]
    screen = say(shown.ROOT / "scripts" / "run", *words, *small, folder=tmp_path)
    assert re.search(r"^ *dflash +\d\.\d\dx", screen, re.MULTILINE) and "4/4" in screen
    assert "dflash-bench report" in screen and "dflash-bench open" in screen
    assert "speedup" in say(PROGRAM, "report", folder=tmp_path)
