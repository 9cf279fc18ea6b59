"""A vLLM server as a child process on 127.0.0.1, which is always stopped at the end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 1800.0
"""About 80 s on two idle cores; many times that on busy ones."""
ANSWER_TIMEOUT_S = 600.0
MODEL_LENGTH = 512
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
COUNTERS = {
    "rounds": r"^vllm:spec_decode_num_drafts_total(?:\{[^}]*\})? (\S+)$",
    "accepted": r"^vllm:spec_decode_num_accepted_tokens_total(?:\{[^}]*\})? (\S+)$",
    "at": r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{[^}]*position="(\d+)"[^}]*\} (\S+)$',
}


class ServerError(Exception):
    """The server did not start, or did not answer as it should."""


class Server(AbstractContextManager["Server"]):
    """`speculation` is vLLM's --speculative-config; `plugins` a folder whose vLLM plugins it is to load."""

    def __init__(self, python: Path, target: str, speculation: Mapping[str, Any], plugins: Path | None = None) -> None:
        self.python, self.target, self.speculation = python, target, dict(speculation)
        self.environment = {**os.environ, **ENVIRONMENT} | ({"PYTHONPATH": str(plugins)} if plugins else {})

    def __enter__(self) -> Server:
        self.folder = tempfile.TemporaryDirectory(prefix="check_vllm-")
        self.port = free_port()
        self.log = Path(self.folder.name) / "server.log"
        with self.log.open("w") as log:
            # In its own session, so that the engine process it starts can be stopped with it.
            self.process = subprocess.Popen(
                self.command(), env=self.environment, cwd=self.folder.name, stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        try:
            self.wait()
            self.counted = self.read_counters()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def command(self) -> list[str]:
        return [
            str(self.python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", self.target, "--served-model-name", "nano", "--host", "127.0.0.1", "--port", str(self.port),
            "--max-model-len", str(MODEL_LENGTH), "--enforce-eager", "--dtype", "float32",
            "--speculative-config", json.dumps(self.speculation),
        ]  # fmt: skip

    def wait(self) -> None:
        start_s = printed_s = time.monotonic()
        while time.monotonic() - start_s < START_TIMEOUT_S:
            if self.process.poll() is not None:
                raise ServerError(
                    f"vLLM exited with {self.process.returncode} before it was ready:\n{self.last_lines()}"
                )
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10):
                    return
            except OSError:
                time.sleep(1)
            if time.monotonic() - printed_s > 20:
                printed_s = time.monotonic()
                elapsed = f"{printed_s - start_s:.0f} s"
                print(f"vLLM {self.speculation['method']} is starting, {elapsed}", file=sys.stderr, flush=True)
        raise ServerError(f"vLLM was not ready after {START_TIMEOUT_S:.0f} s:\n{self.last_lines()}")

    def last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def stop(self) -> None:
        """Stop the whole process group: a child that outlives the server would keep memory and cores busy."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()
        self.folder.cleanup()

    def complete(
        self, prompt: list[int], max_tokens: int, num_drafts: int
    ) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
        """Tokens, rounds, and accepted drafts by position, for this request alone."""
        body = {
            "model": "nano", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True,
        }  # fmt: skip
        answer = json.loads(self.ask("/v1/completions", body))
        before, self.counted = self.counted, self.read_counters()
        new = {name: value - before.get(name, 0) for name, value in self.counted.items()}
        at = tuple(new.get(f"at {k}", 0) for k in range(num_drafts))
        if sum(at) != new["accepted"]:
            raise ServerError(
                f"vLLM counts {new['accepted']} accepted drafts, but {sum(at)} over {num_drafts} positions"
            )
        return tuple(answer["choices"][0]["token_ids"]), new["rounds"], at

    def read_counters(self) -> dict[str, int]:
        text = self.ask("/metrics")
        counted = {name: int(float(re.search(COUNTERS[name], text, re.M)[1])) for name in ("rounds", "accepted")}  # type: ignore[index]
        return counted | {f"at {k}": int(float(value)) for k, value in re.findall(COUNTERS["at"], text, re.M)}

    def versions(self) -> dict[str, str]:
        code = (
            "from importlib.metadata import version; import json; "
            "print(json.dumps({name: version(name) for name in ('vllm-cpu', 'torch', 'transformers')}))"
        )
        process = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True)
        versions: dict[str, str] = json.loads(process.stdout)
        return versions

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            raise ServerError(f"vLLM answered {path} with {error.code}: {error.read().decode()[:500]}") from error
        except OSError as error:
            raise ServerError(f"vLLM did not answer {path} ({error}):\n{self.last_lines()}") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
