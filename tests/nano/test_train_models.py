"""Training a draft model, Medusa heads and a block-diffusion model: what they learn is what they are asked later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dflash_bench.engine.target import Target
from dflash_bench.training import drafts
from dflash_bench.training.data import Batch
from dflash_bench.training.masks import is_answer_after
from dflash_bench.training.medusa import MedusaObjective
from dflash_bench.training.trainer import DraftRecipe, Objective, train
from helpers.toy import tiny
from nano import block_diffusion, draft_model
from nano.answers import Rows
from nano.block_diffusion import BlockDiffusionObjective, Noise
from nano.draft_model import DraftModelObjective

V, H, LENGTH, SPLIT = 97, 32, 24, 14
NOISE = Noise(block_size=4, num_blocks=3, mask_token_id=96, stop_token_id=1)


def rows(count: int = 70) -> Rows:
    """Two conversations a row, of 14 and 10 tokens; the first four of each are its prompt."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, V - 1, (count, LENGTH), generator=generator)
    document = (torch.arange(LENGTH) >= SPLIT).long().repeat(count, 1)
    position = torch.cat([torch.arange(SPLIT), torch.arange(LENGTH - SPLIT)]).repeat(count, 1)
    states = torch.randn(count, LENGTH, 1, H, generator=generator).half().numpy()
    return Rows(Batch(ids, (position >= 4).float(), document, position), states, ())


EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(2)) * 0.5


def heads(num_heads: int = 3) -> Any:
    made = drafts.new_medusa(EMBEDDING, num_heads)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def small_model() -> Any:
    return draft_model.new_model(tiny("qwen3").config, 2, EMBEDDING, torch.ones(H), seed=4)


def objective(kind: str, data: Rows) -> Objective:
    if kind == "medusa":
        return MedusaObjective(heads(), data)
    if kind == "draft-model":
        return DraftModelObjective(small_model(), data, EMBEDDING)
    return BlockDiffusionObjective(block_diffusion.new_model(tiny("qwen3")), data, NOISE, compiled=False)


def test_fresh_medusa_heads_say_what_the_target_says_next() -> None:
    hidden = torch.randn(2, 5, H)
    logits = drafts.new_medusa(EMBEDDING, 3)(hidden)
    for head in range(3):
        torch.testing.assert_close(logits[:, :, head], hidden @ EMBEDDING.T)


def test_head_i_learns_the_token_i_plus_two_places_on() -> None:
    data = rows(2)
    right, wrong = [], []
    for shift, losses in ((2, right), (1, wrong), (3, wrong)):
        made = MedusaObjective(heads(1), data)
        # A head that reads the label off its hidden state: each state is the embedding of the token `shift` places on.
        made.draft[0][0].linear.weight.data.zero_()  # type: ignore[index, union-attr]
        made.draft[0][0].linear.bias.data.zero_()  # type: ignore[index, union-attr]
        made.draft[0][1].weight.data.copy_(4 * EMBEDDING)  # type: ignore[index, union-attr]
        moved = torch.roll(data.ids, -shift, dims=1)
        data.states[:, :, 0] = EMBEDDING[moved].numpy()
        losses.append(made.loss([0, 1], 0).item())
    assert right[0] < 0.1 * min(wrong)


def test_accepted_heads_are_counted_up_to_the_first_wrong_one() -> None:
    data, made = rows(2), heads(3)
    with torch.no_grad():
        for head in made:
            head[0].linear.weight.zero_()
            head[0].linear.bias.zero_()
            head[1].weight.zero_()
    # Every head says token 5: right is, who stands before one, two or three of them.
    for head in made:
        head[1].weight.data[5] = 1
    data.states[:] = 1
    data.ids[:] = 7
    data.ids[0, 8:11] = 5
    lengths = MedusaObjective(made, data).accepted([0])
    # Places 2 to 11 and 16 to 21 stand before an answer token two places on; of these 6, 7 and 8 see a five there.
    assert lengths.tolist()[:10] == [1, 1, 1, 1, 4, 3, 2, 1, 1, 1]


def test_the_draft_model_starts_with_the_targets_vocabulary() -> None:
    model = small_model()
    assert len(model.model.layers) == 2 and model.config.num_hidden_layers == 2
    assert torch.equal(model.get_input_embeddings().weight, EMBEDDING)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_the_draft_model_learns_the_targets_distribution_and_not_the_text() -> None:
    """The loss is smallest where it says what the target says: there it is the target's own entropy."""
    data = rows(1)
    made = DraftModelObjective(small_model(), data, EMBEDDING)
    teacher = (data.final([0]) @ EMBEDDING.T).float()
    batch, _ = data.take([0], ())
    made._forward = lambda index: (teacher, batch)  # type: ignore[method-assign]
    best = made.loss([0], 0)
    use = is_answer_after(batch, 1)
    assert use[0].nonzero().flatten().tolist() == [*range(3, 13), *range(17, 23)]
    torch.testing.assert_close(best, torch.distributions.Categorical(logits=teacher[use]).entropy().mean())
    made._forward = lambda index: (teacher.roll(1, dims=-1), batch)  # type: ignore[method-assign]
    assert made.loss([0], 0) > best


def test_right_tokens_in_a_row_are_counted_up_to_seven() -> None:
    data = rows(1)
    made = DraftModelObjective(small_model(), data, EMBEDDING)
    batch, _ = data.take([0], ())
    logits = torch.nn.functional.one_hot(data.ids.roll(-1, dims=1), V).float()
    logits[0, 12] = 0
    made._forward = lambda index: (logits, batch)  # type: ignore[method-assign]
    first, second = made.accepted([0]).tolist()[:10], made.accepted([0]).tolist()[10:]
    assert first == [8, 8, 8, 7, 6, 5, 4, 3, 2, 1] and second == [7, 6, 5, 4, 3, 2]


def test_a_block_ends_in_stop_tokens_where_its_answer_ends() -> None:
    data = rows(1)
    batch, _ = data.take([0], ())
    tokens = block_diffusion.block_tokens(batch, torch.tensor([[6, 11, 21]]), NOISE)
    assert tokens[0, 0].tolist() == data.ids[0, 6:11].tolist()
    assert tokens[0, 1].tolist() == [*data.ids[0, 11:14].tolist(), 1, 1]
    assert tokens[0, 2].tolist() == [*data.ids[0, 21:24].tolist(), 1, 1]


def test_the_first_token_of_a_block_is_never_masked_and_the_one_behind_it_always_guessed() -> None:
    tokens = torch.zeros(1, 2, 5, dtype=torch.long)
    draws = torch.tensor([0.0, 0.2, 0.9, 0.4, 0.6]).expand(1, 2, 5)
    hidden = block_diffusion.hide(tokens, torch.tensor([[0.5, 0.0]]), draws)
    assert hidden.tolist() == [[[False, True, False, True, True], [False, False, False, False, True]]]


def test_training_blocks_read_what_decoding_reads() -> None:
    """One joint pass over text and blocks gives the logits that the engine gets block by block, from its cache."""
    model = tiny("qwen3")
    data = rows(1)
    made = BlockDiffusionObjective(copy.deepcopy(model), data, NOISE, compiled=False)
    seen: dict[str, Any] = {}

    def spy(ids: torch.Tensor, **options: Any) -> Any:
        seen.update(ids=ids, **options)
        return model(ids, **options)

    made.draft = spy
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        made._forward([0], 5)
        joint = model(**{"input_ids": seen["ids"], **{k: v for k, v in seen.items() if k != "ids"}}).logits
    blocks = seen["ids"][0, LENGTH:].view(3, 4)
    starts = seen["position_ids"][0, LENGTH:].view(3, 4)[:, 0].tolist()
    answers = joint[0, LENGTH:].view(3, 4, V)
    for block, start, expected in zip(blocks, starts, answers, strict=True):
        # The block's own conversation is the one that holds its clean first token at that place.
        first = next(f for f in (0, SPLIT) if int(data.ids[0, f + start]) == int(block[0]) and _fits(f, start))
        target = Target(model)
        target.begin(1, 40)
        target.prefill([data.ids[0, first : first + start].tolist()])
        got = target.forward(block[None], [start], whole_block=True).logits[0]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def _fits(first: int, start: int) -> bool:
    return first + start < (SPLIT if first == 0 else LENGTH)


@pytest.mark.parametrize("kind", ["medusa", "draft-model", "block-diffusion"])
@pytest.mark.in_full
def test_an_interrupted_training_ends_where_an_unbroken_one_does(kind: str, tmp_path: Any) -> None:
    data, recipe = rows(), DraftRecipe(steps=8, matrix_lr=0.02, other_lr=0.002, rows=2, warmup=2)
    whole = objective(kind, data)
    history = train(whole, data, recipe, tmp_path / "whole.pt", lambda _: None)

    def interrupt(text: str) -> None:
        if "step 5 " in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(objective(kind, data), data, recipe, tmp_path / "broken.pt", interrupt)
    again = objective(kind, data)
    train(again, data, recipe, tmp_path / "broken.pt", lambda _: None)
    for a, b in zip(whole.draft.parameters(), again.draft.parameters(), strict=True):
        assert torch.equal(a, b)
    assert history[-1]["step"] == 8 and history[-1]["accepted"] >= 1.0
    assert history[-1]["loss"] < history[0]["loss"]
