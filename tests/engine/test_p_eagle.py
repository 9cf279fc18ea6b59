"""P-EAGLE: all drafts in one pass, as its publisher's code drafts them and as a whole recomputation has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from dflash_bench.engine.backend import LocalBackend
from dflash_bench.engine.drafter import Committed, NoDrafter
from dflash_bench.engine.forward.choice import has_numba
from dflash_bench.engine.forward.compiled_drafts import CompiledEagle3
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.models.nets.p_eagle import PEagleDraft
from helpers.drafts.p_eagle import drafter, made
from helpers.drafts.tiny import PROMPTS, propose, record
from helpers.each import each
from helpers.golden_drafts import assert_drafts_as_published
from helpers.toy import follows, native, plain, run, tiny

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"num_layers": 1},
    "three layers, the target's embedding": {"num_layers": 3, "own_embedding": False},
    "normed residual": {"norm_before_residual": True},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True},
    "a norm before fc": {"norm_before_fc": True},
    "query and key norms, biases": {"qk_norm": True, "attention_bias": True},
    "a reduced vocabulary": {"draft_vocab_size": 40},
    "windows": {"window": 5},
    "windows shorter than a round": {"window": 2, "num_layers": 1},
}


@pytest.mark.parametrize("settings", [{}, {"engine": "transformers"}, {"kernels": "torch"}], ids=str)
def test_the_golden_case_is_drafted_token_for_token(settings: dict[str, Any]) -> None:
    assert_drafts_as_published("specforge-p-eagle", "p-eagle:5", **settings)


HEADS = {"q": 4, "k": 2, "v": 2}


@torch.inference_mode()
def by_formula(draft: PEagleDraft, table: Tensor, features: Tensor, tokens: list[int], num_drafts: int) -> Tensor:
    """Logits [num_drafts, Vd] of one row, term by term from the weights, with every row's visibility written out."""
    config, w, n = draft.config, draft.state_dict(), len(tokens)
    table = w.get("embed_tokens.weight", table)
    ids = [*tokens, *[config.mask_token_id] * (num_drafts - 1)]
    # Each row's anchor pair and depth: all pairs have depth 0, the masks belong to the last pair.
    anchors = torch.tensor([*range(n), *[n - 1] * (num_drafts - 1)])
    depths = torch.tensor([0] * n + [*range(1, num_drafts)])
    positions = anchors + depths
    within = positions[:, None] - anchors[None] < (config.window or len(ids) + 1)
    seen = ((depths[None] == 0) & (anchors[None] <= anchors[:, None]) & within) | (
        (anchors[None] == anchors[:, None]) & (depths[None] <= depths[:, None])
    )

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (x.shape[-1],), w[f"{name}.weight"], config.rms_norm_eps)

    def turned(x: Tensor) -> Tensor:
        angle = positions[:, None] * 10000.0 ** -(torch.arange(0, 8, 2) / 8)
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
        return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin

    def project(x: Tensor, name: str) -> Tensor:
        return linear(x, w[f"{name}_proj.weight"], w.get(f"{name}_proj.bias"))

    def layer(name: str, stream: Tensor, normed: Tensor) -> Tensor:
        query, key, value = (project(normed, f"{name}.self_attn.{part}").view(-1, h, 8) for part, h in HEADS.items())
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        if config.qk_norm:
            query, key = norm(query, f"{name}.self_attn.q_norm"), norm(key, f"{name}.self_attn.k_norm")
        key, value = turned(key).repeat_interleave(2, dim=0), value.repeat_interleave(2, dim=0)
        scores = (turned(query) @ key.mT / 8**0.5).masked_fill(~seen, -torch.inf)
        x = stream + project((scores.softmax(-1) @ value).transpose(0, 1).flatten(1), f"{name}.self_attn.o")
        inner = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (project(inner, f"{name}.mlp.{part}") for part in ("gate", "up"))
        return x + project(silu(gate) * up, f"{name}.mlp.down")

    wide = torch.cat([features, w["mask_hidden"][0].expand(num_drafts - 1, -1)])
    if config.norm_before_fc:
        wide = norm(wide, "input_norm")
    if config.fc_norm:
        wide = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(wide.split(32, dim=-1))], dim=-1)
    hidden = wide @ w["fc.weight"].T
    normed = norm(hidden, "midlayer.hidden_norm")
    pair = torch.cat([norm(table[torch.tensor(ids)], "midlayer.input_layernorm"), normed], dim=-1)
    x = layer("midlayer", normed if config.norm_before_residual else hidden, pair)
    for index in range(1, config.num_layers):
        x = layer(f"layers.{index}", x, norm(x, f"layers.{index}.input_layernorm"))
    return norm(x[n - 1 :], "norm") @ w["lm_head.weight"].T


@each(
    ("variant", "rows", "num_drafts"),
    [*((variant, [0, 1, 2], 4) for variant in VARIANTS), (next(iter(VARIANTS)), [1], 4), ([*VARIANTS][-1], [0, 1], 1)],
)
def test_cached_drafts_are_what_the_formula_says(variant: str, rows: list[int], num_drafts: int) -> None:
    target = native(tiny("llama"))
    tested = drafter(target, num_drafts, made(**VARIANTS[variant]))
    recorded = record(tested, tested.network.head, target, [PROMPTS[row] for row in rows])
    assert len(recorded.proposed) >= 4
    for tokens, logits, read, following in recorded.proposed:
        assert tokens.shape[1] == num_drafts
        for row, features in enumerate(read):
            expected = by_formula(tested.draft, target.embedding.weight, features, following[row], num_drafts)
            torch.testing.assert_close(logits[row], expected, rtol=2e-4, atol=2e-4)
            assert tokens[row].tolist() == tested.draft.target_ids(expected.argmax(dim=-1)).tolist()
    assert len({tuple(tokens[0].tolist()) for tokens, *_ in recorded.proposed}) > 1


@each(("num_drafts", "num_rows"), [(1, 3), (2, 1), (5, 3), (16, 1)])
def test_its_answers_are_the_plain_ones_to_limits_and_stops(num_drafts: int, num_rows: int) -> None:
    target, prompts = native(tiny("qwen3")), PROMPTS[:num_rows]
    for limit in (1, 2, 12):
        out = run(target, drafter(target, num_drafts), prompts, limit)
        assert out.tokens == plain(target, prompts, limit)
    stops = frozenset({plain(target, prompts, 12)[-1][7]})
    assert run(target, drafter(target, num_drafts), prompts, 12, stops).tokens == plain(target, prompts, 12, stops)


def test_slots_that_are_filled_again_draft_as_alone() -> None:
    target = native(tiny("qwen3"))
    prompts = [*PROMPTS, [9, 8, 7], [50] * 5, [*range(2, 20)]]
    expected = plain(target, prompts, 12)
    alone = [run(target, drafter(target), [prompt], 12) for prompt in prompts]
    for num_rows in (2, 3):
        backend = LocalBackend(target, None, {"p-eagle": drafter(target)}, Limits(12, frozenset()))
        backend.decode = lambda _ids: ""  # type: ignore[method-assign]
        together = backend.generate_ids("p-eagle", prompts, num_rows=num_rows)
        assert [list(answer.token_ids) for answer in together] == expected
        for answer, one in zip(together, alone, strict=True):
            assert list(answer.accepted) == [step.accepted[0] for step in one.rounds]


def test_a_draft_sees_what_is_before_the_anchor_and_nothing_else() -> None:
    tested = drafter(native(tiny("llama")))
    generator = torch.Generator().manual_seed(0)
    hidden, tokens = torch.randn(2, 9, 96, generator=generator), torch.randint(0, 96, (2, 9), generator=generator)
    drafts = propose(tested, hidden, tokens, [6, 9])
    later, first = hidden.clone(), hidden.clone()
    later[0, 6:] += 100
    first[0, 0] *= -3
    assert propose(tested, later, tokens, [6, 9]) == drafts
    changed = propose(tested, first, tokens, [6, 9])
    assert changed[0] != drafts[0] and changed[1] == drafts[1]


def test_a_round_is_one_pass_of_the_network() -> None:
    target, widths = native(tiny("llama")), list[int]()
    tested = drafter(target, 4)
    usual = tested.network.forward

    def counted(embedded: Tensor, *rest: Any) -> Tensor:
        widths.append(embedded.shape[1])
        return usual(embedded, *rest)

    tested.network.forward = counted  # type: ignore[method-assign]
    out = run(target, tested, [PROMPTS[1]], 20)
    # The prompt, then a pass per round: what the round before committed, and three masks.
    kept = [1, *(step.accepted[0] + 1 for step in out.rounds[:-1])]
    assert widths == [len(PROMPTS[1]), *(count + 3 for count in kept)]


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
@pytest.mark.parametrize("variant", [name for name in VARIANTS if "vocabulary" not in name])
def test_compiled_kernels_draft_the_same(variant: str) -> None:
    config = {"head_dim": 8, "num_heads": 4}
    target = native(tiny("llama"))
    usual, compiled = (drafter(target, 4, made(**VARIANTS[variant], **config)) for _ in range(2))
    compiled.compile()
    assert isinstance(compiled.network, CompiledEagle3)
    generator = torch.Generator().manual_seed(0)
    hidden, tokens = torch.randn(3, 7, 96, generator=generator), torch.randint(0, 96, (3, 7), generator=generator)
    logits = []
    for tested in (usual, compiled):
        tested.begin(3, 40)
        with torch.inference_mode():
            anchor = tokens[torch.arange(3), torch.tensor([7, 2, 4]) - 1]
            tested.observe(Committed(hidden, tokens, anchor, [0, 0, 0], [7, 2, 4], is_prompt=True))
            tested.propose()
            tested.observe(Committed(hidden[:, :4], tokens[:, :4], anchor, [7, 2, 4], [1, 4, 2]))
            logits.append(tested.network.logits(tested._read_block()))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_drawn_drafts_follow_the_targets_distribution() -> None:
    """The first two tokens behind a prompt, drawn often: as plain decoding draws them."""
    target, prompts = native(tiny("llama")), [[5, 6, 7]] * 400
    sampling, seeds = Sampling(1.0, seed=3), list(range(400))
    tested = drafter(target, 3, rule="rejection")
    drawn = run(target, tested, prompts, 3, sampling=sampling, seeds=seeds)
    counts = torch.tensor([tokens[1] for tokens in drawn.tokens])
    first = torch.tensor([tokens[0] for tokens in drawn.tokens])
    with torch.inference_mode():
        logits = target.model(torch.tensor([[5, 6, 7, token] for token in range(97)])).logits
        p = logits[0, 2].softmax(-1)
        after = (p[:, None] * logits[:, 3].softmax(-1)).sum(0)
    assert follows(first, p) and follows(counts, after)
    assert any(step.accepted[row] for step in drawn.rounds for row in range(len(prompts)))
    assert run(target, NoDrafter(), prompts[:5], 3, sampling=sampling, seeds=seeds[:5]).tokens != drawn.tokens[:5]
