"""How a server that hides its rounds counts them: what its totals are, by the id that a row names."""

from __future__ import annotations

COUNTED = {
    "vllm.request": "metrics.speculative_decoding of the answer: S is num_spec_steps, with num_draft_tokens and "
    "num_accepted_draft_tokens",
    "vllm.counters": "differences of vllm:spec_decode_num_drafts, _num_draft_tokens and _num_accepted_tokens "
    "around the answer; S is the first of them and, as they leave out steps that draft nothing, at least "
    "T - 1 - sum(a_i)",
    "tensorrt_llm.request": "speculative_decoding of the answer's choice: S is num_spec_steps, with total_draft_tokens "
    "and total_accepted_draft_tokens",
    "lmdeploy.counters": "differences of lmdeploy:spec_decode_num_drafts, _num_draft_tokens and "
    "_num_accepted_tokens around the answer; S is the first of them, and at least T - 1 - sum(a_i)",
    "llamacpp.counters": "differences of llamacpp:spec_decode_num_drafts, _num_draft_tokens and "
    "_num_accepted_tokens around the answer; S is the first of them and, as these leave out steps without drafts, at "
    "least T - 1 - sum(a_i); what the last round accepts behind the end is not in them",
    "llamacpp.timings": "draft_n and draft_n_accepted of the answer's timings, without what the last round accepts "
    "behind the end; S = T - 1 - draft_n_accepted, as it is not told, which is too few where the limit cut that round",
    "sglang.request": "meta_info of the answer: S is spec_verify_ct, with the proposed and accepted drafts",
    "sglang.derived": "meta_info of the answer: S is spec_verify_ct, and sum(a_i) = T - 1 - S, without what the limit "
    "cut off the last round",
}
"""For an answer of T tokens in S rounds. All of these are totals; `al.pooled` is 1 + sum(a_i) / S."""
