"""A llama.cpp server as a child process on 127.0.0.1, always stopped at the end.

This file is also the child process, run by a Python with xllamacpp and settings as JSON: it prints its address, and
ends when its standard input is closed, so that no server outlives its parent.
"""

from __future__ import annotations

import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 600.0
TYPES = {"dflash": "DRAFT_DFLASH", "eagle3": "DRAFT_EAGLE3", "ngram": "NGRAM_SIMPLE"}
"""Suffixes of llama.cpp's names, by our names of methods."""
COUNTERS = {
    "at": r'^llamacpp:spec_decode_num_accepted_tokens_per_pos_total\{position="(\d+)"\} (\S+)$',
    "rounds": r"^llamacpp:spec_decode_num_drafts_total(?:\{[^}]*\})? (\S+)$",
    "drafted": r"^llamacpp:spec_decode_num_draft_tokens_total(?:\{[^}]*\})? (\S+)$",
    "accepted": r"^llamacpp:spec_decode_num_accepted_tokens_total(?:\{[^}]*\})? (\S+)$",
}


class ServerError(Exception):
    """The server did not start, or did not respond correctly."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a server. `method` "ar" is plain decoding; `num_drafts` is per round, for drafting methods."""

    target: str
    method: str = "ar"
    draft: str | None = None
    num_drafts: int = 0
    model_length: int = 1024
    num_threads: int = 1
    flash_attention: bool = False
    slots: int = 1
    """Concurrent answers, which share `model_length`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer; `decode_s` is the server's own measurement of the time after the first token."""

    tokens: tuple[int, ...]
    num_rounds: int
    num_drafted: int
    accepted_at: tuple[int, ...]
    """The number of rounds that accepted each position of the draft."""
    decode_s: float

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)


class Server(AbstractContextManager["Server"]):
    def __init__(self, python: Path, settings: Settings) -> None:
        self.python, self.settings = python, settings

    def __enter__(self) -> Server:
        self.log = tempfile.TemporaryFile("w+", prefix="llamacpp-")
        self.process = subprocess.Popen(
            [self.python, __file__, json.dumps(asdict(self.settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        )
        try:
            self.address = self._address()
            self.counted = self._counters()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _address(self) -> str:
        assert self.process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: lines.put(self.process.stdout.readline()), daemon=True).start()  # type: ignore[union-attr]
        try:
            address = lines.get(timeout=START_TIMEOUT_S).strip()
        except queue.Empty as error:
            raise ServerError(f"llama.cpp was not ready after {START_TIMEOUT_S:.0f} s:\n{self.last_lines()}") from error
        if not address.startswith("http://127.0.0.1:"):
            raise ServerError(f"llama.cpp did not start {self.settings}:\n{self.last_lines()}")
        return address

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def last_lines(self) -> str:
        self.log.seek(0)
        return "\n".join(self.log.read().splitlines()[-25:])

    def complete(self, prompt: list[int], max_tokens: int) -> Completion:
        """Return the greedy answer to a single prompt, without a prompt cache."""
        body = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        answer = self.ask("/completion", body)
        timings = answer["timings"]
        before, self.counted = self.counted, self._counters()
        new = {name: value - before.get(name, 0) for name, value in self.counted.items()}
        at = tuple(new.get(f"at {k}", 0) for k in range(self.settings.num_drafts))
        drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        if (drafted, accepted, sum(at)) != (new["drafted"], new["accepted"], accepted):
            raise ServerError(f"llama.cpp's timings and counters differ: {timings}, {new}")
        return Completion(tuple(answer["tokens"]), new["rounds"], drafted, at, timings["predicted_ms"] / 1000)

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Return the tokens without adding special tokens; with `special`, special tokens in the text are parsed."""
        body = {"content": text, "add_special": False, "parse_special": special}
        return [int(token) for token in self.ask("/tokenize", body)["tokens"]]

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render a chat by the file's chat template."""
        return str(self.ask("/apply-template", {"messages": messages})["prompt"])

    def _counters(self) -> dict[str, int]:
        text = self._read("/metrics")
        totals = {name: re.search(COUNTERS[name], text, re.M) for name in ("rounds", "drafted", "accepted")}
        counted = {name: int(float(match[1])) if match else 0 for name, match in totals.items()}
        return counted | {f"at {k}": int(float(value)) for k, value in re.findall(COUNTERS["at"], text, re.M)}

    def ask(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._read(path, body))
        return answer

    def _read(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            raise ServerError(f"llama.cpp answered {path} with {error.code}: {error.read().decode()[:500]}") from error
        except OSError as error:
            raise ServerError(f"llama.cpp did not answer {path} ({error}):\n{self.last_lines()}") from error


def version(python: Path) -> str:
    code = "from importlib.metadata import version; print(version('xllamacpp'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def serve(settings: Settings) -> None:
    """Run the server, in the Python that has xllamacpp."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = settings.target
    params.n_ctx, params.n_parallel = settings.model_length, settings.slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.num_threads
    # All in float32, as in our engine. Flash attention on the CPU computes in float16, whatever the cache's dtype.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    flash = xllamacpp.llama_flash_attn_type
    on, off = flash.LLAMA_FLASH_ATTN_TYPE_ENABLED, flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.flash_attn_type = on if settings.flash_attention else off
    params.endpoint_metrics, params.warmup, params.ui = True, True, False
    params.hostnames, params.port = ["127.0.0.1"], 0
    if settings.method in TYPES:
        kind = getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{TYPES[settings.method]}")
        params.speculative.types = [kind]
        draft = params.speculative.draft
        draft.n_max = settings.num_drafts
        draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = settings.num_threads
        if settings.draft is not None:
            draft.mparams.path = settings.draft
        if settings.method == "ngram":
            # The last three tokens are looked up, as in our engine; of several matches llama.cpp takes another.
            params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = 3, settings.num_drafts
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    # The server's threads have nothing to save.
    os._exit(0)


if __name__ == "__main__":
    serve(Settings(**json.loads(sys.argv[1])))
