"""`vllm serve`: options as in vLLM's documentation of speculative decoding (docs/features/speculative_decoding)."""

from __future__ import annotations

import json

from dflash_bench.servers.programs.program import Program, Serving


def words(serving: Serving, port: int) -> list[str]:
    return [
        "serve", serving.target, "--served-model-name", serving.model, "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", str(serving.length), "--dtype", serving.dtype,
        "--gpu-memory-utilization", f"{serving.memory_share:.2f}",
        *(["--trust-remote-code"] if serving.trust_remote_code else []),
        *_speculation(serving),
    ]  # fmt: skip


def _speculation(serving: Serving) -> list[str]:
    if serving.draft is None:
        return []
    # Its number is of drafted tokens, without the anchor that a block has besides.
    speculation = {
        "method": serving.method.name, "model": serving.draft, "num_speculative_tokens": serving.num_drafts,
    }  # fmt: skip
    # Its counters cannot tell several answers at a time apart; its answers can say their own rounds.
    return ["--speculative-config", json.dumps(speculation), "--per-request-spec-decode-metrics", "summary"]


VLLM = Program("vllm", "vllm", False, ("dflash", "eagle3"), "VLLM_API_KEY", words)
