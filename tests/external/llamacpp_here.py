"""The llama.cpp server of the external tests, started for one target and one draft."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAM = Path(__file__).parent / "servers" / "llama_server_here.py"
EXACT = "--flash-attn off --cache-type-k f32 --cache-type-v f32 --cache-type-k-draft f32 --cache-type-v-draft f32"
START_S = 60.0


@contextmanager
def serving(python: Path, target: Path, draft: Path | None, options: Sequence[str], log: Path) -> Iterator[str]:
    """Yield the address of a server that computes in float32 and shows its counts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"--host 127.0.0.1 --port {port} --metrics {EXACT}"
    drafting = [] if draft is None else ["--model-draft", str(draft)]
    command = [str(python), str(PROGRAM), "--model", str(target), *drafting, *words.split(), *options]
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            until = time.monotonic() + START_S
            while "listening at" not in log.read_text():
                assert process.poll() is None and time.monotonic() < until, log.read_text()[-2000:]
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
