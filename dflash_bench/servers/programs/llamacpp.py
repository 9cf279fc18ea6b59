"""`llama-server`: options as in llama.cpp's documentation of its server and of speculation (docs/speculative.md)."""

from __future__ import annotations

from dflash_bench.servers.programs.program import Program, Serving

EXACT = (
    "--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32",
)  # fmt: skip
"""Flash attention computes in float16 on a CPU, and the cache holds float16, whatever the weights are."""
EXACT_DRAFT = ("--cache-type-k-draft", "f32", "--cache-type-v-draft", "f32")


def words(serving: Serving, port: int) -> list[str]:
    exact = serving.dtype == "float32"
    return [
        "--model", serving.target, "--alias", serving.model, "--host", "127.0.0.1", "--port", str(port),
        # It divides its context between the answers at a time.
        "--ctx-size", str(serving.length * serving.slots), "--parallel", str(serving.slots), "--metrics",
        *(EXACT if exact else ()),
        *(_speculation(serving) + list(EXACT_DRAFT if exact else ()) if serving.draft is not None else ()),
    ]  # fmt: skip


def _speculation(serving: Serving) -> list[str]:
    return [
        "--model-draft", str(serving.draft), "--spec-type", f"draft-{serving.method.name}",
        "--spec-draft-n-max", str(serving.num_drafts),
    ]  # fmt: skip


LLAMACPP = Program("llama.cpp", "llama-server", True, ("dflash", "eagle3"), "LLAMA_API_KEY", words)
