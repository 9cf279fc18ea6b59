"""lmdeploy's own arguments, checks of drafts, HTTP server and counters, over an engine that answers from a table.

The table is a JSON file, ANSWERS: for the token ids of a prompt, joined by spaces, the tokens of its answer and how
many drafts each round accepted.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from lmdeploy.cli.serve import SubCliServe
from lmdeploy.messages import EngineOutput, PytorchEngineConfig, RequestMetrics, ResponseType, ScheduleMetrics
from lmdeploy.pytorch.config import CacheConfig, SpecDecodeConfig
from lmdeploy.serve.core import AsyncEngine

STEP_S = 0.002


class Table:
    """In place of lmdeploy's engine."""

    def __init__(self, config: PytorchEngineConfig, num_drafts: int) -> None:
        self.engine_config, self.num_drafts = config, num_drafts
        config.max_batch_size = config.max_batch_size or 1
        self.answers: dict[str, tuple[list[int], list[int]]] = json.loads(Path(os.environ["ANSWERS"]).read_text())

    def create_instance(self, *_: Any) -> Handle:
        return Handle(self)

    def start_loop(self, *_: Any, **__: Any) -> None:
        pass

    def get_schedule_metrics(self) -> ScheduleMetrics:
        return ScheduleMetrics()

    async def get_health_status(self) -> dict[str, Any]:
        return {"alive": True, "message": "", "schedule_metrics": None}

    def close(self) -> None:
        pass


class Handle:
    """In place of a request's handle on the engine."""

    def __init__(self, engine: Table) -> None:
        self.engine = engine

    async def async_stream_infer(
        self, _session: int, input_ids: list[int], gen_config: Any, **_: Any
    ) -> AsyncIterator[EngineOutput]:
        tokens, accepted = self.engine.answers[" ".join(map(str, input_ids))]
        assert gen_config.top_k == 1, f"not greedy: top_k {gen_config.top_k}"
        tokens = tokens[: gen_config.max_new_tokens]
        for status, piece, kept in self._pieces(tokens, accepted):
            await asyncio.sleep(STEP_S)
            told = None if kept is None else {"num_draft_tokens": self.engine.num_drafts, "num_accepted_tokens": kept}
            yield EngineOutput(status, piece, req_metrics=RequestMetrics(time.time(), spec_info=told))

    def _pieces(self, tokens: list[int], accepted: list[int]) -> Iterator[tuple[ResponseType, list[int], int | None]]:
        """The first token comes from prefill; without a draft, each step brings one."""
        rounds = accepted if self.engine.num_drafts else [0] * (len(tokens) - 1)
        yield (ResponseType.SUCCESS if len(tokens) > 1 else ResponseType.FINISH), tokens[:1], None
        done = 1
        for kept in rounds:
            piece = tokens[done : done + kept + 1]
            done += len(piece)
            status = ResponseType.FINISH if done == len(tokens) else ResponseType.SUCCESS
            yield status, piece, kept if self.engine.num_drafts else None

    async def async_cancel(self, *_: Any) -> None:
        pass

    async def async_end(self, *_: Any) -> None:
        pass


def build(
    _engine: AsyncEngine, model_path: str, backend_config: Any = None, speculative_config: Any = None, **_: Any
) -> Table:
    """In place of AsyncEngine._build_pytorch: lmdeploy's own checks of the draft, and then the table."""
    if speculative_config is None:
        return Table(backend_config, 0)
    cache = CacheConfig(max_batches=1, block_size=64, num_cpu_blocks=0, num_gpu_blocks=0)
    found = SpecDecodeConfig.from_config(
        method=speculative_config.method,
        num_speculative_tokens=speculative_config.num_speculative_tokens,
        model=speculative_config.model,
        target_model=model_path,
        target_cache_cfg=cache,
        dtype=backend_config.dtype,
    )
    print(f"draft: {found.method} {found.target_layer_ids} {found.model_config.hf_config.architectures}", flush=True)
    return Table(backend_config, found.num_speculative_tokens)


def main(words: list[str]) -> None:
    AsyncEngine._build_pytorch = build
    SubCliServe.add_parsers()
    args = SubCliServe.parser.parse_args(words[1:])
    args.run(args)


if __name__ == "__main__":
    assert sys.argv[1] == "serve", sys.argv
    main(sys.argv[1:])
