"""Medusa: the heads read what the target's own head reads, the tree is verified exactly, and files are checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import parse
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.medusa import MedusaDrafter, build
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.formats import TargetShape, medusa
from dflash_bench.models.loading import Models
from helpers.drafts.medusa import drafter, heads
from helpers.each import each
from helpers.plain_answers import plain_answers
from helpers.toy import native, plain, run, tiny

PROMPTS: list[list[int]] = [[5], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [i * 7 % 97 for i in range(40)]]
NEW = 24
SHAPE = TargetShape(32, 97, 4)


class Recording:
    """Hands on what the heads propose, and keeps it with the texts that it was proposed behind."""

    def __init__(self, inner: MedusaDrafter) -> None:
        self.inner, self.num_drafts, self.taps = inner, inner.num_drafts, inner.taps
        self.proposed: list[tuple[list[list[int]], Draft]] = []

    def begin(self, num_rows: int, capacity: int) -> None:
        self.inner.begin(num_rows, capacity)

    def observe(self, committed: Committed) -> None:
        self.texts = [list(text) for text in committed.texts]
        self.inner.observe(committed)

    def propose(self) -> Draft:
        self.proposed.append((self.texts, self.inner.propose()))
        return self.proposed[-1][1]


def last_states(model: Any, text: list[int]) -> Tensor:
    """The states [N, H] that transformers passes to the head."""
    with torch.no_grad():
        states: Tensor = model.get_decoder()(torch.tensor([text])).last_hidden_state[0]
    return states


@each("kind", ["qwen3", "llama", "gpt2"])
@each(("nodes", "top_k"), [(12, 3), (3, 1), (1, 1), (40, 10)])
def test_the_output_is_the_plain_one_whatever_the_heads_say(kind: str, nodes: int, top_k: int) -> None:
    target = Target(tiny(kind))
    prompts = [prompt[:30] for prompt in PROMPTS]
    expected = plain_answers(target, prompts, NEW)
    assert run(target, drafter(target, nodes, top_k), prompts, NEW).tokens == expected
    stops = frozenset({expected[0][9], expected[2][14]})
    assert run(target, drafter(target, nodes, top_k), prompts, NEW, stops).tokens == plain_answers(
        target, prompts, NEW, stops
    )


def test_sampled_tokens_are_those_of_plain_decoding() -> None:
    target, sampling = native(tiny("qwen3")), Sampling(temperature=0.8, seed=3)
    expected = plain(target, PROMPTS[1:2], NEW, sampling=sampling)
    assert run(target, drafter(target), PROMPTS[1:2], NEW, sampling=sampling).tokens == expected


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_heads_read_the_state_behind_the_last_norm_of_the_token_before_the_anchor(kind: str) -> None:
    target, made = Target(tiny(kind)), heads()
    prompts = [prompt[:30] for prompt in PROMPTS]
    watching = Recording(drafter(target, nodes=3, top_k=1))
    run(target, watching, prompts, NEW)
    for texts, draft in watching.proposed:
        for prompt, text, tokens in zip(prompts, texts, draft.tokens.tolist(), strict=True):
            # A row that has ended stands still, and what is proposed for it is thrown away.
            if len(text) < len(prompt) + NEW:
                state = last_states(target.model, text)[-2]
                assert tokens == made(state).argmax(dim=-1).tolist()


def test_the_tree_holds_the_likeliest_ways_through_the_heads() -> None:
    target, made = native(tiny("qwen3")), heads(2)
    watching = Recording(drafter(target, nodes=5, top_k=5, num_heads=2))
    run(target, watching, PROMPTS[1:2], 2)
    texts, draft = watching.proposed[0]
    first, second = made(last_states(target.model, texts[0])[-2]).log_softmax(dim=-1).tolist()
    ways = {(a,): first[a] for a in range(97)} | {(a, b): first[a] + second[b] for a in range(97) for b in range(97)}
    best = sorted(ways, key=lambda way: ways[way], reverse=True)[:5]
    assert draft.parents is not None
    nodes: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True):
        nodes.append((*(nodes[parent] if parent >= 0 else ()), token))
    assert sorted(nodes) == sorted(best)


def test_right_heads_are_accepted() -> None:
    """Heads that say what a one-layer reading of the state cannot know would: the next tokens, as they will be."""
    target = native(tiny("qwen3"))
    answer = plain(target, PROMPTS[1:2], NEW)[0]
    inner = drafter(target, nodes=3, top_k=1)
    told = iter(range(0, NEW, 4))

    def knowing(_hidden: Tensor, _num: int) -> Tensor:
        at = next(told)
        return torch.nn.functional.one_hot(torch.tensor([[*answer[at + 1 : at + 4]]]), 97).float()

    inner.heads = knowing  # type: ignore[assignment]
    decoded = run(target, inner, PROMPTS[1:2], NEW - 3)
    assert decoded.tokens == [answer[: NEW - 3]] and all(step.accepted == [3] for step in decoded.rounds[:-1])


def test_options_reach_the_drafter() -> None:
    target, models = native(tiny("qwen3")), Models(tiny("qwen3"), None, {"medusa": heads(3)}, {})
    built = build(models, target, parse("medusa:heads=2,nodes=7,top_k=4"))
    assert (built.num_heads, built.num_drafts, built.top_k, built.taps) == (2, 7, 4, (4,))
    assert build(models, target, parse("medusa")).num_heads == 3
    with pytest.raises(UserError, match="method medusa:heads=4: these weights have 3 heads"):
        build(models, target, parse("medusa:heads=4"))


def saved(folder: Path, num_heads: int = 3, num_layers: int = 1) -> Path:
    medusa.save(heads(num_heads, num_layers), folder, "org/base")
    return folder


@pytest.mark.parametrize("num_layers", [1, 2])
def test_saved_heads_are_read_as_they_were_under_the_published_names(num_layers: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, num_layers=num_layers)
    names = set(load_file(folder / "medusa_lm_head.safetensors"))
    blocks = {f"{i}.{j}.linear.{part}" for i in range(3) for j in range(num_layers) for part in ("weight", "bias")}
    assert names == blocks | {f"{i}.{num_layers}.weight" for i in range(3)}
    read = medusa.load(folder, SHAPE, torch.float32, "cpu")
    hidden = torch.randn(2, 32)
    assert torch.equal(read(hidden), heads(3, num_layers)(hidden)) and read(hidden).shape == (2, 3, 97)
    assert torch.equal(read(hidden, 2), read(hidden)[:, :2])


def test_published_pickles_are_read_and_those_that_run_code_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    (folder / "medusa_lm_head.safetensors").unlink()
    torch.save(tensors, folder / "medusa_lm_head.pt")
    assert medusa.load(folder, SHAPE, torch.float32, "cpu").config.num_heads == 3
    torch.save({"0.1.weight": print}, folder / "medusa_lm_head.pt")
    with pytest.raises(UserError, match=r"medusa_lm_head.pt is refused: it is damaged, or a pickle"):
        medusa.read(folder)


def test_a_config_may_name_fewer_heads_than_the_file_holds(tmp_path: Path) -> None:
    folder = saved(tmp_path, num_heads=5)
    _config(folder, medusa_num_heads=2)
    assert medusa.load(folder, SHAPE, torch.float32, "cpu").config.num_heads == 5


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "medusa_lm_head.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@each(
    ("damage", "message"),
    [
        (lambda f: (f / "medusa_lm_head.safetensors").unlink(), "holds no Medusa heads: medusa_lm_head.safet"),
        (lambda f: _config(f, version="2"), "Medusa heads of version 2 are not supported"),
        (lambda f: _config(f, medusa_num_heads=4), "holds 3 heads, but config.json says 4"),
        (lambda f: _config(f, medusa_num_heads="3"), "medusa_num_heads cannot be '3'"),
        (lambda f: _config(f, medusa_num_heads=10**9), "medusa_num_heads cannot be 1000000000"),
        (lambda f: _config(f, medusa_num_layers=2), "missing tensor 0.2.weight"),
        (lambda f: _config(f, medusa_num_layers=None), "medusa_num_layers cannot be None"),
        (lambda f: _tensors(f, lambda t: t.pop("1.0.linear.bias")), "missing tensor 1.0.linear.bias"),
        (lambda f: _tensors(f, lambda t: t.update({"0.3.weight": torch.zeros(2)})), "surplus tensor 0.3.weight"),
        (lambda f: _tensors(f, lambda t: t.update({"lm_head.weight": torch.zeros(2)})), "holds tensor lm_head.weight"),
        (lambda f: _tensors(f, lambda t: t.update({"1.1.weight": torch.zeros(97, 31)})), r"1.1.weight is \[97, 31\]"),
        (lambda f: _tensors(f, lambda t: t.update({"1.1.weight": t["1.1.weight"].char()})), "holds torch.int8"),
        (lambda f: _tensors(f, lambda t: t.update({"900.1.weight": torch.zeros(2)})), "in the file cannot be 901"),
        (lambda f: _tensors(f, lambda t: t.clear()), "holds no tensors"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(damage: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    medusa.load(folder, SHAPE, torch.float32, "cpu")
    damage(folder)
    with pytest.raises(UserError, match=message):
        medusa.load(folder, SHAPE, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (TargetShape(64, 97, 4), "hidden size 32, but the target's is 64; use heads made for this target"),
        (TargetShape(32, 98, 4), "vocabulary of 97, but the target's is 98"),
    ],
)
def test_heads_of_another_target_are_refused(shape: TargetShape, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        medusa.load(saved(tmp_path), shape, torch.float32, "cpu")
