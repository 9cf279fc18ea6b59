"""Training sees what decoding sees: the same blocks, the same context, the same chain; and it can be interrupted."""

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch

from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.dflash import AutoregressiveDrafter, DFlashDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.models.nets import dflash as dflash_models
from dflash_bench.models.nets import eagle3 as eagle3_models
from dflash_bench.models.nets.bodies import FUSIONS
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Config, Eagle3Draft
from dflash_bench.models.nets.layers import Rotary
from dflash_bench.training import dflash, drafts, eagle3, masks
from dflash_bench.training.data import Batch
from dflash_bench.training.dflash import DFlashObjective, MarkovObjective, SelectorObjective
from dflash_bench.training.drafts import DraftVocab
from dflash_bench.training.eagle3 import Eagle3Objective
from dflash_bench.training.mtp import MTPObjective
from dflash_bench.training.trainer import (
    DraftRecipe,
    apply_gradients,
    batches,
    optimisers,
    restore,
    save,
    set_rate,
    train,
)
from helpers.each import each
from helpers.toy import tiny
from nano.answers import Rows

V, H = 40, 32
DFLASH = DFlashConfig(
    hidden_size=H,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=V,
    block_size=4,
    mask_token_id=V - 1,
    target_layer_ids=(1, 2),
    num_target_layers=6,
)
EAGLE3 = Eagle3Config(
    hidden_size=H,
    intermediate_size=48,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=V,
    draft_vocab_size=24,
    target_layer_ids=(1, 2, 3),
    num_target_layers=6,
)


def big(module):
    """Weights large enough that a wrong mask or position changes the result visibly."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3, generator=generator)
    return module


def rows(count=70, length=24, layers=(1, 2, 3)):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V - 1, (count, length), generator=generator)
    document = (torch.arange(length) >= 14).long().repeat(count, 1)
    position = torch.cat([torch.arange(14), torch.arange(length - 14)]).repeat(count, 1)
    answer = position >= 4
    states = torch.randn(count, length, len(layers) + 1, H, generator=generator).half().numpy()
    return Rows(Batch(ids, answer.float(), document, position), states, layers)


EMBEDDING = torch.randn(V, H, generator=torch.Generator().manual_seed(2)) * 0.5
VOCAB = DraftVocab.of(EMBEDDING, EMBEDDING)


def tables():
    return Rotary(16, 10000.0, 64, torch.device("cpu"), torch.float32)


class Lookup(torch.nn.Module):
    def forward(self, ids):
        return EMBEDDING[ids]


class Head(torch.nn.Module):
    def forward(self, hidden):
        return hidden @ EMBEDDING.T


def test_a_block_sees_its_conversation_strictly_before_the_anchor():
    data = rows(1)
    batch, _ = data.take([0], (1, 2))
    anchors = torch.tensor([[6, 17]])
    visible = masks.context_mask(batch, anchors)[0]
    assert visible[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert visible[1].nonzero().flatten().tolist() == [14, 15, 16]


def test_labels_stop_at_the_end_of_the_conversation():
    data = rows(1)
    batch, _ = data.take([0], (1, 2))
    labels, valid = masks.block_labels(batch, torch.tensor([[12, 20]]), torch.tensor([[True, True]]), 4)
    assert valid.tolist() == [[[True, True, False, False], [True, True, True, True]]]
    assert labels[0, 1].tolist() == data.ids[0, 20:24].tolist()


def test_anchors_are_distinct_places_with_an_answer_token_next():
    batch, _ = rows(3).take([0, 1, 2], (1,))
    anchors, real = masks.sample_anchors(batch, 20, torch.Generator().manual_seed(0))
    for row, keep in zip(anchors, real, strict=True):
        chosen = row[keep].tolist()
        assert sorted(chosen) == [4, 5, 6, 7, 8, 9, 10, 11, 12, 18, 19, 20, 21, 22]


def test_uniform_anchors_follow_each_other_by_a_block_from_an_answers_first_token():
    batch, _ = rows(2).take([0, 1], (1,))
    for block, places in ((4, [4, 8, 12, 18, 22]), (5, [4, 9, 18])):
        anchors, real = masks.uniform_anchors(batch, 20, block)
        assert [sorted(row[keep].tolist()) for row, keep in zip(anchors, real, strict=True)] == [places, places]


@each("fusion", list(FUSIONS))
@each("is_autoregressive", [False, True])
def test_training_blocks_are_what_the_drafter_proposes(fusion, is_autoregressive):
    body = drafts.body_of(fusion, is_autoregressive, DFLASH.num_layers)
    config = replace(DFLASH, body=body, shifted_labels=is_autoregressive)
    draft, data = big(DFlashDraft(config)), rows(1)
    batch, features = data.take([0], config.target_layer_ids)
    anchors = torch.tensor([[6, 10, 18]])
    objective = DFlashObjective(draft, data, VOCAB, 4, 4.0)
    kind = AutoregressiveDrafter if is_autoregressive else DFlashDrafter
    for i, (anchor, start) in enumerate([(6, 0), (10, 0), (18, 14)]):
        drafter = kind(draft, Lookup(), Head())
        drafter.begin(1, 24)
        text = data.ids[0, start : anchor + 1]
        with torch.inference_mode():
            hidden = features[:, start:anchor] if drafter.taps else None
            told = Committed(hidden, text[None, 1:], text[-1:], [0], [anchor - start], [text.tolist()])
            drafter.observe(told)
            proposed = drafter.propose().tokens
            # The draft's own tokens stand where training has the text's.
            given = batch
            if is_autoregressive:
                given = replace(batch, ids=batch.ids.clone())
                given.ids[0, anchor + 1 : anchor + 5] = proposed[0]
            ids = objective.block_ids(given, anchors)
            hidden = dflash.block_hidden(draft, features, EMBEDDING, tables(), given, ids, anchors)
        first = 1 - is_autoregressive
        assert proposed.tolist() == [VOCAB.logits(hidden)[0, i, first:].argmax(dim=-1).tolist()]


def test_an_autoregressive_slot_learns_the_token_after_it():
    config = replace(DFLASH, body=drafts.body_of("kv", True, DFLASH.num_layers), shifted_labels=True)
    data = rows(1)
    objective = DFlashObjective(DFlashDraft(config), data, VOCAB, 4, 4.0)
    batch, _ = data.take([0], config.target_layer_ids)
    anchors, real = torch.tensor([[5]]), torch.tensor([[True]])
    labels, valid = objective.labels(batch, anchors, real)
    assert labels[0, 0].tolist() == data.ids[0, 6:10].tolist() and valid.all()
    assert objective.block_ids(batch, anchors)[0, 0].tolist() == data.ids[0, 5:9].tolist()
    assert objective.weights.tolist() == dflash.slot_weights(5, 4.0)[1:].tolist()
    assert dflash.teacher_places(anchors, 4, 24, 1).tolist() == [[[5, 6, 7, 8]]]


def test_training_steps_are_what_the_chain_proposes():
    draft, data = big(Eagle3Draft(EAGLE3)), rows(1)
    draft.d2t, draft.t2d = eagle3_models.vocabulary_map(torch.arange(V), 24)
    batch, features = data.take([0], EAGLE3.target_layer_ids)
    # The chain's own tokens stand where training has the data's.
    row = 7
    drafter = Eagle3Drafter(draft, Lookup(), 4)
    drafter.begin(1, 24)
    following = data.ids[:, 1 : row + 2]
    with torch.inference_mode():
        drafter.observe(Committed(features[:, : row + 1], following, following[:, -1], [0], [row + 1]))
        proposed = drafter.propose().tokens[0].tolist()
    ids = data.ids.clone()
    ids[0, row + 2 : row + 6] = torch.tensor(proposed)
    states = eagle3.step_states(draft, features, EMBEDDING, tables(), replace(batch, ids=ids), 4)
    assert [int(draft.target_ids(draft.logits(step[0, row]).argmax())) for step in states] == proposed


def test_the_loss_is_the_papers_over_places_that_have_an_answer():
    """Slot k weighs exp(-(k - 1) / gamma), divided by the weights that count; summed here one by one."""
    data, draft = rows(2), big(DFlashDraft(DFLASH))
    made = DFlashObjective(draft, data, VOCAB, num_anchors=4, gamma=4.0)
    hidden, labels, valid, _ = made._forward([0, 1], 9)
    scores = torch.log_softmax(VOCAB.logits(hidden.float()), dim=-1)
    total = weight = 0.0
    for row, anchor, slot in valid.nonzero().tolist():
        if slot:
            w = math.exp(-(slot - 1) / 4.0)
            total, weight = total - w * scores[row, anchor, slot, labels[row, anchor, slot]].item(), weight + w
    assert made.loss([0, 1], 9).item() == pytest.approx(total / weight, rel=0.02)


def test_a_reduced_vocabulary_leaves_out_what_it_cannot_say():
    counts = torch.arange(V)
    vocab = DraftVocab.of(EMBEDDING, EMBEDDING, counts, 24)
    assert vocab.token_ids.tolist() == list(range(V - 24, V)) and vocab.index_of[: V - 24].eq(-1).all()
    data, draft = rows(2), big(DFlashDraft(DFLASH))
    whole, reduced = (DFlashObjective(draft, data, one, 4, 4.0) for one in (VOCAB, vocab))
    data.ids.clamp_(min=V - 24)  # all of the answers can be said
    small = reduced.loss([0, 1], 3)
    assert 0 < small < whole.loss([0, 1], 3)  # fewer tokens to tell apart
    data.ids.clamp_(max=V - 25)  # and now none can
    assert reduced.loss([0, 1], 3) == 0


def test_distilling_from_a_certain_teacher_is_learning_its_tokens():
    data, draft = rows(2), big(DFlashDraft(DFLASH))
    taught = [DFlashObjective(draft, data, VOCAB, 4, 4.0, distil) for distil in (0.0, 1.0, 0.5)]
    embedding = EMBEDDING / EMBEDDING.norm(dim=-1, keepdim=True)
    certain = DraftVocab.of(EMBEDDING, embedding * 100)
    states = torch.zeros_like(data.final([0, 1]))
    states[:, :-1] = embedding[data.ids[:2, 1:]]
    for one in taught:
        one.rows = Known(data, states)
        one._teacher = lambda index, places, use, one=one: torch.softmax(
            certain.logits(one.rows.final(index)[torch.arange(2)[:, None, None].expand_as(places)[use], places[use]]),
            -1,
        )
    hard, soft, both = (one.loss([0, 1], 3).item() for one in taught)
    assert soft == pytest.approx(hard, rel=1e-3) and both == pytest.approx(hard, rel=1e-3)


class Known:
    """Rows with other last states than those stored."""

    def __init__(self, data, states):
        self.data, self.states, self.ids, self.answer = data, states, data.ids, data.answer

    def take(self, index, layers):
        return self.data.take(index, layers)

    def final(self, index):
        return self.states[index]


def test_places_outside_the_draft_vocabulary_teach_nothing():
    teacher = torch.randn(5, 24)
    everywhere = torch.ones(1, 5, dtype=torch.bool)
    states, head = torch.randn(1, 5, 8), torch.randn(8, 24)
    given = [states], teacher, everywhere, [everywhere]
    assert eagle3.distillation_loss(lambda hidden: hidden @ head, *given, ~everywhere) == 0
    assert eagle3.distillation_loss(lambda hidden: hidden @ head, *given, everywhere) > 0


@each("is_own", [False, True])
def test_the_loss_of_eagle3_is_that_of_each_step_summed_one_by_one(is_own):
    """Step i at place t learns what the target says at place t + 1 + i, by weight 0.8^i over the places that count."""
    data, draft = rows(2), big(Eagle3Draft(EAGLE3))
    draft.d2t, draft.t2d = eagle3_models.vocabulary_map(torch.arange(V), 24)
    own = DraftVocab.only(EMBEDDING, EMBEDDING, torch.arange(24) + draft.d2t)
    made = Eagle3Objective(draft, data, own if is_own else VOCAB, 3)
    states, _, masks = made._forward([0, 1])
    target = VOCAB.logits(data.final([0, 1]))
    total = 0.0
    for step in range(3):
        losses = []
        for row, at in masks[step].nonzero().tolist():
            teacher, logits = target[row, at + 1 + step], draft.logits(states[step][row, at].float())
            # The draft's own rows do not say which of all tokens is the likeliest: the text's next token counts.
            if draft.t2d[data.ids[row, at + 2 + step] if is_own else teacher.argmax()]:
                losses.append(-(torch.softmax(teacher[draft.t2d], -1) * torch.log_softmax(logits, -1)).sum())
        assert 0 < len(losses) < masks[step].sum()
        total += 0.8**step * sum(losses).item() / len(losses)
    assert made.loss([0, 1], 0).item() == pytest.approx(total, rel=0.02)


def test_every_epoch_visits_every_row_once():
    first, second = (list(islice(batches(12, 4, seed), 6)) for seed in (1, 2))
    assert sorted(i for batch in first[:3] for i in batch) == sorted(i for batch in first[3:] for i in batch)
    assert first[:3] != first[3:] and first != second


def test_fewer_rows_than_a_batch_are_a_batch():
    assert list(islice(batches(3, 4, 1), 2)) == [[0, 1, 2], [0, 1, 2]]


def test_the_rate_warms_up_and_falls_to_zero_in_every_cycle():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    made = optimisers([weight], [torch.nn.Parameter(torch.ones(2))], 0.1, 0.01)
    rates = []
    for step in range(30):
        set_rate(made, step, (20, 10), 4)
        rates.append(made[0].param_groups[0]["lr"])
    assert rates[3] == rates[23] == pytest.approx(0.1)
    assert rates[0] == pytest.approx(0.025)
    assert rates[19] < 0.002 and rates[29] < 0.01


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_an_interrupted_training_ends_where_an_unbroken_one_does(kind, tmp_path):
    data, recipe = rows(), DraftRecipe(steps=8, matrix_lr=0.02, other_lr=0.002, rows=2, warmup=2)

    def objective():
        if kind == "dflash":
            draft = DFlashDraft(DFLASH)
            dflash_models.initialise(draft, 1)
            made = DFlashObjective(draft, data, VOCAB, 4, 4.0, distil=0.5)
        else:
            draft = Eagle3Draft(EAGLE3)
            dflash_models.initialise(draft, 1)
            draft.d2t, draft.t2d = eagle3_models.vocabulary_map(torch.arange(V), 24)
            made = Eagle3Objective(draft, data, VOCAB, 2)
        return made

    whole = objective()
    history = train(whole, data, recipe, tmp_path / "whole.pt", lambda _: None)
    broken = objective()

    def interrupt(text):
        if "step 5 " in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(broken, data, recipe, tmp_path / "broken.pt", interrupt)
    again = objective()
    train(again, data, recipe, tmp_path / "broken.pt", lambda _: None)
    for a, b in zip(whole.draft.parameters(), again.draft.parameters(), strict=True):
        assert torch.equal(a, b)
    assert history[-1]["step"] == 8 and history[-1]["accepted"] >= 1.0


def grown(kind):
    """An objective of each kind that begins as another network: as the DFlash draft, or as the target's last layer."""
    data = rows(4)
    if kind == "mtp":
        return MTPObjective(drafts.new_mtp(tiny("llama"), 1), data, VOCAB, 3)
    draft = DFlashDraft(DFLASH)
    dflash_models.initialise(draft, 1)
    grow, objective = {
        "dflash2": (drafts.as_dflash2, SelectorObjective),
        "dspark": (drafts.as_dspark, MarkovObjective),
    }[kind]
    return objective(grow(draft, VOCAB, 6, 2), data, VOCAB, 4, 4.0)


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "mtp"])
def test_a_grown_draft_learns_the_rows_that_it_sees(kind):
    made, index = grown(kind), [0, 1, 2, 3]
    heads = {id(parameter) for parameter in made.heads()}
    matrices, others = (
        [p for p in made.draft.parameters() if (p.ndim == 2 and id(p) not in heads) == wanted]
        for wanted in (True, False)
    )
    before = {name: parameter.clone() for name, parameter in made.draft.named_parameters()}
    first, accepted = made.loss(index, 0).item(), made.accepted(index).mean()
    steps = optimisers(matrices, others, 0.03, 0.02)
    for _ in range(25):
        made.loss(index, 0).backward()
        apply_gradients(steps, made.draft.parameters())
    assert made.loss(index, 0).item() < 0.5 * first
    # MTP heads learn what the target says, and these rows are not the target's.
    assert kind == "mtp" or made.accepted(index).mean() > accepted + 1
    # Each part learns, the heads, too; only slots that draft nothing may have weights that stand still.
    assert not [name for name, parameter in made.draft.named_parameters() if torch.equal(parameter, before[name])]


def test_a_checkpoint_is_whole_or_absent(tmp_path):
    layer = torch.nn.Linear(2, 2)
    made = optimisers([layer.weight], [layer.bias], 0.1, 0.1)
    assert restore(tmp_path / "x.pt", layer, made) == (0, [])
    save(tmp_path / "x.pt", layer, made, 7, [{"loss": 1.0}])
    other = torch.nn.Linear(2, 2)
    assert restore(tmp_path / "x.pt", other, optimisers([other.weight], [other.bias], 0.1, 0.1)) == (7, [{"loss": 1.0}])
    assert torch.equal(layer.weight, other.weight)
    assert not list(tmp_path.glob("*.part"))


def test_batch_features_come_from_the_named_layers():
    data = rows()
    _, features = data.take([3], (2,))
    assert torch.equal(features[0], torch.from_numpy(data.states[3, :, 1]).float())
    assert torch.equal(data.final([3])[0], torch.from_numpy(data.states[3, :, 3]).float())
    assert isinstance(data.take([3], (2,))[0], Batch)
