"""SGLang's own server, over a worker that answers from a table.

SGLang's are its arguments, HTTP server, tokenizer and detokenizer managers, and of its scheduler the requests, the
counts of a round, the ends of answers and the output streamer. Not SGLang's are the queue, the memory, and the worker
with its kernels for CUDA. Where SGLang's code asks for those, mocks stand in for them.

The table is a JSON file, ANSWERS: for the token ids of a prompt, joined by spaces, the tokens of its answer and how
many drafts each round accepted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from transformers.utils import is_torchvision_available

# SGLang imports torchvision for models that see. Transformers, which asks once, must not find what stands in for it.
if not is_torchvision_available():
    vision = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    sys.modules.update({name: MagicMock(name=name) for name in vision})

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.managers.io_struct import (
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    ShutdownReq,
    TokenizedGenerateReqInput,
    sock_recv,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import configure_scheduler_process
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.managers.utils import GenerationBatchResult, validate_input_length
from sglang.srt.runtime_context import SpawnRanks, get_spec, publish
from sglang.srt.server_args import PortArgs, ServerArgs, prepare_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

STEP_MS = 2
BEYOND = 0
"""Stands for accepted drafts beyond the end of an answer, which the table does not hold."""


class Scheduler:
    """In place of SGLang's scheduler: each step gives every request a round."""

    def __init__(self, server_args: ServerArgs, port_args: PortArgs) -> None:
        self.model = ModelConfig.from_server_args(server_args)
        self.algorithm = SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm)
        self.answers: dict[str, tuple[list[int], list[int]]] = json.loads(Path(os.environ["ANSWERS"]).read_text())
        self.live: dict[str, Iterator[Req]] = {}
        self.channels = SchedulerIpcChannels.create(
            port_args=port_args,
            is_rank_zero=True,
            skip_tokenizer_init=False,
            metrics_enabled=False,
            enable_scripted_runtime=False,
        )
        self.streamer = SchedulerOutputStreamer(
            send_to_detokenizer=self.channels.send_to_detokenizer,
            tree_cache=MagicMock(),
            server_args=server_args,
            is_generation=True,
            spec_algorithm=self.algorithm,
            disaggregation_mode=DisaggregationMode.NULL,
            enable_hicache_storage=lambda: False,
        )
        mocks: dict[str, Any] = {name: MagicMock() for name in SchedulerBatchResultProcessor.__dataclass_fields__}
        mocks |= {"enable_overlap": False, "enable_overlap_mlx": False}
        mocks |= {"model_config": self.model, "output_streamer": self.streamer}
        self.results = SchedulerBatchResultProcessor(**mocks)

    @property
    def max_input(self) -> int:
        """As SGLang's own scheduler limits it where memory does not."""
        return int(self.model.context_len) - 6

    def run(self) -> None:
        received = self.channels.recv_from_tokenizer
        while True:
            if received.poll(STEP_MS if self.live else None):
                self.take(sock_recv(received))
            self.live = {rid: rounds for rid, rounds in self.live.items() if next(rounds, None)}

    def take(self, received: Any) -> None:
        if isinstance(received, TokenizedGenerateReqInput):
            received.unwrap_pickle_fields()
            self.live[received.rid] = self.rounds(self.request(received))
        elif isinstance(received, FlushCacheReqInput):
            self.channels.send_to_tokenizer.send_output(FlushCacheReqOutput(success=not self.live), received)
        elif isinstance(received, GetInternalStateReq):
            self.channels.send_to_tokenizer.send_output(GetInternalStateReqOutput(internal_state={}), received)
        elif isinstance(received, ShutdownReq):
            sys.exit()

    def request(self, received: TokenizedGenerateReqInput) -> Req:
        req = Req(
            received.rid,
            received.input_text,
            received.input_ids,
            received.sampling_params,
            stream=received.stream,
            eos_token_ids=self.model.hf_eos_token_id,
            vocab_size=self.model.vocab_size,
            http_worker_ipc=received.http_worker_ipc,
            time_stats=received.time_stats,
        )
        if refused := validate_input_length(req, self.max_input, False):
            req.set_finish_with_abort(refused)
        return req

    def rounds(self, req: Req) -> Iterator[Req]:
        """Answer a request, round by round. Prompts that the table lacks end at once, as SGLang's own at its start."""
        nothing: tuple[list[int], list[int]] = ([min(self.model.hf_eos_token_id)], [])
        tokens, accepted = self.answers.get(" ".join(map(str, req.origin_input_ids)), nothing)
        assert req.sampling_params.top_k == 1, f"not greedy: top_k {req.sampling_params.top_k}"
        req.output_ids.append(tokens[0])
        req.update_finish_state()
        self.streamer.stream_output([req], False)
        emitted = self.drafted(tokens, accepted) if self.algorithm.is_some() else ([token] for token in tokens[1:])
        while not req.finished():
            yield req
            self.results.process_batch_result_decode(self.batch(req), self.result(next(emitted)))

    def drafted(self, tokens: list[int], accepted: list[int]) -> Iterator[list[int]]:
        """The tokens of each round: accepted drafts and one more."""
        done = 1
        for kept in accepted:
            piece = tokens[done : done + kept + 1]
            done += len(piece)
            yield piece + [BEYOND] * (kept + 1 - len(piece))

    def batch(self, req: Req) -> SimpleNamespace:
        return SimpleNamespace(
            reqs=[req],
            batch_size=lambda: 1,
            spec_algorithm=self.algorithm,
            has_grammar=False,
            return_logprob=False,
            mamba_track_mask_cpu=None,
        )

    def result(self, emitted: list[int]) -> GenerationBatchResult:
        """A worker's result: with a draft, a row as wide as a verified block, and how much of it was accepted."""
        if not self.algorithm.is_some():
            return GenerationBatchResult(next_token_ids=torch.tensor(emitted))
        width = get_spec().speculative_num_draft_tokens
        return GenerationBatchResult(
            next_token_ids=torch.tensor(emitted + [BEYOND] * (width - len(emitted))),
            accept_lens=torch.tensor([len(emitted)]),
            speculative_num_draft_tokens=width,
        )


def serve(server_args: ServerArgs, port_args: PortArgs, gpu_id: int, *others: Any) -> None:
    """In place of SGLang's run_scheduler_process."""
    *_ranks, parent = others
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=gpu_id))
    configure_scheduler_process(server_args, gpu_id)
    scheduler = Scheduler(server_args, port_args)
    parent.send({"status": "ready", "max_total_num_tokens": 1 << 20, "max_req_input_len": scheduler.max_input})
    scheduler.run()


if __name__ == "__main__":
    assert sys.argv[1] == "serve", sys.argv
    # Unless it is told of a GPU, SGLang looks for one.
    launch_server(prepare_server_args([*sys.argv[2:], "--device", "cuda"]), run_scheduler_process_func=serve)
