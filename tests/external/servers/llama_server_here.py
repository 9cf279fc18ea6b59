"""The options of `llama-server` that `--launch` gives, for the server in the package xllamacpp; run by its Python."""

from __future__ import annotations

import argparse
import threading

import xllamacpp


def main() -> None:
    options = parsed()
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = options.model, {options.alias}
    params.hostnames, params.port = [options.host], options.port
    params.n_ctx, params.n_parallel = options.ctx_size, options.parallel
    params.n_batch = options.batch_size or params.n_batch
    params.n_ubatch = options.ubatch_size or params.n_ubatch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.endpoint_metrics = options.metrics
    flash = xllamacpp.llama_flash_attn_type
    if options.flash_attn is not None:
        on, off = flash.LLAMA_FLASH_ATTN_TYPE_ENABLED, flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = {"on": on, "off": off}[options.flash_attn]
    if options.cache_type_k == options.cache_type_v == "f32":
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # The heads of MTP are in the target's file, and only read where they are asked for.
    params.load_mtp = options.spec_type == "draft-mtp"
    if options.spec_type:
        types = xllamacpp.common_speculative_type
        kind = options.spec_type.upper().replace("-", "_")
        params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        draft = params.speculative.draft
        draft.mparams.path, draft.n_max = options.model_draft or "", options.spec_draft_n_max or draft.n_max
        params.speculative.synth_rates = [float(rate) for rate in filter(None, options.spec_synth_rates.split(","))]
        simple = params.speculative.ngram_simple
        simple.size_n = options.spec_ngram_simple_size_n or simple.size_n
        simple.size_m = options.spec_ngram_simple_size_m or simple.size_m
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = options.threads
        if options.cache_type_k_draft == options.cache_type_v_draft == "f32":
            draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    print(f"listening at {server.listening_address}", flush=True)
    threading.Event().wait()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in (
        "--model",
        "--alias",
        "--host",
        "--flash-attn",
        "--cache-type-k",
        "--cache-type-v",
        "--model-draft",
        "--spec-type",
        "--cache-type-k-draft",
        "--cache-type-v-draft",
    ):
        parser.add_argument(name)
    for name in (
        "--port",
        "--ctx-size",
        "--parallel",
        "--spec-draft-n-max",
        "--batch-size",
        "--ubatch-size",
        "--spec-ngram-simple-size-n",
        "--spec-ngram-simple-size-m",
    ):
        parser.add_argument(name, type=int)
    parser.add_argument("--spec-synth-rates", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--metrics", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
