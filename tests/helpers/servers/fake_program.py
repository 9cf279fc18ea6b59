"""In place of `vllm`, `sglang` and `llama-server`: a program that `--launch` starts.

It does what FAKE_PROGRAM says as JSON: `late_s` seconds until it listens, `dies_at` the answer at which it kills
itself, `exits` a status to end with at once, `ignores` SIGTERM or not, `child` a file for the ids of its processes, of
which one leaves the group, `answers` by prompt with `words` for their tokens, `drafting` what else holds for a server
that drafts, of which only those that are told the text `only` if there is one. Told rates of acceptance, it accepts
so often, whatever its answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from helpers.servers.fake_server import FakeServer

GOLDEN = (5**0.5 - 1) / 2


def main(words: list[str]) -> None:
    does = json.loads(os.environ["FAKE_PROGRAM"])
    drafts = not {"--speculative-config", "--speculative-algorithm", "--spec-type"}.isdisjoint(words)
    does |= does.get("drafting", {}) if drafts and does.get("only", "") in " ".join(words) else {}
    port = words[1 + next(at for at, word in enumerate(words) if word in ("--port", "--server-port"))]
    say(f"loading for {port}")
    say(f"args: {words} {dict(os.environ)}")
    if does.get("ignores"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if does.get("child"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        Path(does["child"]).write_text(f"{os.getpid()} {child.pid} {os.getppid()}")
    if does.get("exits") is not None:
        say("CUDA error: out of memory")
        sys.exit(does["exits"])
    time.sleep(does.get("late_s", 0))
    of_serve = "lmdeploy" if "api_server" in words else "vllm"
    dialect = "sglang" if "--model-path" in words else of_serve if words[0] == "serve" else "llamacpp"
    rates = imposed(words)
    accepts = {"accepts": accepted(rates) if rates else (2,), "block": len(rates) or 3} if drafts else {}
    with Dying(does, dialect=dialect, port=int(port), **accepts, **answering(does)):
        while True:
            time.sleep(1)


def imposed(words: list[str]) -> list[float]:
    """The shares of rounds that shall accept the first 1, 2, ... tokens; none: as the target says."""
    if "--spec-synth-rates" in words:
        return [float(rate) for rate in words[words.index("--spec-synth-rates") + 1].split(",")]
    if "--speculative-config" not in words:
        return []
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert ("synthetic_acceptance_rates" in config) == (config.get("rejection_sample_method") == "synthetic")
    rates: list[float] = config.get("synthetic_acceptance_rates", [])
    return rates


def accepted(rates: list[float]) -> list[int]:
    """Accepted counts of many rounds at these rates, spread evenly over the rounds instead of drawn."""
    places = ((number * GOLDEN + 0.5) % 1 for number in range(200))
    return [sum(place < rate for rate in rates) for place in places]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def answering(does: Mapping[str, Any]) -> dict[str, Any]:
    answers = does.get("answers")
    if answers is None:
        return {}
    ends = frozenset(tokens[-1] for tokens in answers.values() if len(tokens) < does["most"])
    words = does.get("words", {})
    return {
        "answer": lambda prompt, _: answers[prompt],
        "ends": ends,
        "text": lambda tokens: "".join(words[str(token)] for token in tokens),
    }


class Dying(FakeServer):
    def __init__(self, of_program: Mapping[str, Any], **changes: Any) -> None:
        super().__init__(**changes)
        self.dies_at = of_program.get("dies_at")

    async def _generate(self, path: str, body: dict[str, Any], writer: Any) -> bool:
        if self.num_answers == self.dies_at:
            say("Segmentation fault, as ordered")
            os.kill(os.getpid(), signal.SIGKILL)
        return await super()._generate(path, body, writer)


if __name__ == "__main__":
    main(sys.argv[1:])
