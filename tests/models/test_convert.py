"""`convert`: another format, the same bits; and nano's drafts draft the same in every format that can hold them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_bench.core.errors import UserError
from dflash_bench.diagnose import golden_cases
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.target import Target
from dflash_bench.models import formats, loading, weights
from dflash_bench.models.convert import convert
from dflash_bench.models.formats import TargetShape, load_draft, save_draft
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.presets import NANO
from dflash_bench.tasks import suites
from helpers import tiny
from helpers.each import each
from helpers.toy import plain, run

LENGTH = 48


def bits(folder: Path) -> dict[str, bytes]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


ROUTES = [
    ("dflash", "zlab", ["speculators"]),
    ("eagle3", "safeailab", ["speculators"]),
]


@pytest.mark.parametrize(("kind", "home", "stops"), ROUTES)
def test_there_and_back_is_the_same_bit_for_bit(kind: str, home: str, stops: list[str], tmp_path: Path) -> None:
    at = NANO / kind
    for i, stop in enumerate([*stops, home]):
        convert(str(at), tmp_path / str(i), stop, "nano")
        at = tmp_path / str(i)
    assert bits(at) == bits(NANO / kind)
    assert json.loads((at / "config.json").read_text()) == json.loads((NANO / kind / "config.json").read_text())


def test_what_speculators_and_deepspec_can_both_hold_goes_both_ways(model: Path, tmp_path: Path) -> None:
    shape = TargetShape(tiny.HIDDEN, tiny.VOCABULARY, tiny.LAYERS)
    draft: Any = load_draft(model / "dflash", shape, torch.float32, "cpu")
    shifted = type(draft)(replace(draft.config, shifted_labels=True, own_embedding=True, own_head=True))
    save_draft(shifted, tmp_path / "a", "speculators")
    convert(str(tmp_path / "a"), tmp_path / "b", "deepspec", None)
    convert(str(tmp_path / "b"), tmp_path / "c", "speculators", str(model))
    assert bits(tmp_path / "a") == bits(tmp_path / "b") == bits(tmp_path / "c")
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "c" / "config.json").read_text()


def test_what_is_left_out_and_what_is_added_is_told(model: Path, tmp_path: Path) -> None:
    depth, name = "num_target_layers = 4", "the name of its target, Org/Target"
    told = convert(str(model / "dflash"), tmp_path / "a", "speculators", str(model))
    assert told == [f"speculators has no place for {depth}: it is left out"]
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = "Org/Target"
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    assert convert(str(tmp_path / "a"), tmp_path / "b", "zlab", str(model)) == [
        f"{depth} is taken from --target; the draft does not declare it",
        f"zlab has no place for {name}: it is left out",
    ]
    assert convert(str(model / "eagle3"), tmp_path / "c", "speculators", str(model)) == []


def test_a_place_that_cannot_be_written_is_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write "):
        convert(str(model / "dflash"), tmp_path / "file" / "x", "speculators", str(model))


def test_what_cannot_be_converted_is_refused_and_nothing_is_written(model: Path, tmp_path: Path) -> None:
    dflash, eagle3, out = str(model / "dflash"), str(model / "eagle3"), tmp_path / "out"
    refusals = [
        (dflash, "zlab", None, "is already in the zlab format"),
        (
            dflash,
            "safeailab",
            None,
            "unknown format for a draft of kind dflash: 'safeailab'; known: deepspec, lmdeploy, nvidia, spec",
        ),
        (dflash, "speculators", None, r"includes embed_tokens\.weight, .* give --target"),
        (dflash, "deepspec", str(model), "infill_labels"),
        (eagle3, "deepspec", str(model), "draft_vocab_size = 64"),
        (dflash, "speculators", "nano", "hidden size 32, but the target's is 128"),
    ]
    for source, to, target, message in refusals:
        with pytest.raises(UserError, match=message):
            convert(source, out, to, target)
        assert not out.exists()
    out.mkdir()
    with pytest.raises(UserError, match="exists already"):
        convert(dflash, out, "speculators", str(model))


def test_an_embedding_is_left_out_only_where_it_is_the_targets(model: Path, tmp_path: Path) -> None:
    convert(str(model / "dflash"), tmp_path / "a", "speculators", str(model))
    with pytest.raises(UserError, match="--target"):
        convert(str(tmp_path / "a"), tmp_path / "b", "zlab", None)
    convert(str(tmp_path / "a"), tmp_path / "b", "zlab", str(model))
    assert bits(tmp_path / "b") == bits(model / "dflash")
    other = tiny.build(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="includes its own"):
        convert(str(tmp_path / "a"), tmp_path / "c", "zlab", str(other))


# The golden checkpoints, as their publishers' code reads them.


DRAFTS = [name for name in golden_cases.known_cases() if golden_cases.read_case(name).draft is not None]
GOES = {
    "book-dflash-experts": {"speculators"},
    "deepspec-dspark-rnn-cut": {"specforge", "speculators"},
    "deepspec-dspark-vanilla": {"specforge", "speculators"},
    "specforge-dspark-gated": {"deepspec", "speculators"},
    "specforge-p-eagle": {"speculators"},
    "zlab-dflash2": {"speculators"},
}
"""The formats, besides its own, that can hold a golden draft; all others say what they cannot hold."""


@each("name", DRAFTS)
def test_a_golden_draft_is_written_in_its_own_format_as_it_was_read(name: str, tmp_path: Path) -> None:
    case = golden_cases.read_case(name)
    assert case.draft is not None
    form, before = formats.read_checkpoint(case.draft, None)
    weights.write_checkpoint(tmp_path / "a", *form.write(before))
    again, after = formats.read_checkpoint(tmp_path / "a", None)
    assert (again, after.config, after.notes) == (form, before.config, before.notes)
    assert bits(tmp_path / "a") == bits(case.draft)


@each("name", DRAFTS)
def test_a_golden_draft_goes_where_it_can_be_held_and_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    case = golden_cases.read_case(name)
    assert case.draft is not None
    home, before = formats.read_checkpoint(case.draft, None)
    for to in {form for form, kind in formats.FORMATS if kind == home.kind} - {home.name, "lmdeploy"}:
        if to not in GOES.get(name, ()):
            with pytest.raises(UserError, match=r"the \w+ format (cannot hold|holds drafts with)"):
                convert(str(case.draft), tmp_path / to, to, str(case.target))
            assert not (tmp_path / to).exists()
            continue
        convert(str(case.draft), tmp_path / to, to, str(case.target))
        convert(str(tmp_path / to), tmp_path / f"{to}-back", home.name, str(case.target))
        assert bits(tmp_path / f"{to}-back") == bits(case.draft)
        after = formats.read_checkpoint(tmp_path / f"{to}-back", None)[1]
        # Only `num_target_layers` has no place everywhere, and is told.
        assert replace(after.config, num_target_layers=before.config.num_target_layers) == before.config


# Through the engine.


@pytest.fixture(scope="module")
def nano() -> loading.Models:
    return loading.load("nano", ["dflash", "eagle3"], "cpu", torch.float32)


@pytest.fixture(scope="module")
def prompts(nano: loading.Models) -> list[list[int]]:
    loaded = suites.load_prompts(suites.expand(["gsm8k"])[0], "embedded", 4)
    chats = [[{"role": "user", "content": prompt.turns[0]}] for prompt in loaded.prompts]
    texts = [nano.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [nano.tokenizer.encode(text, add_special_tokens=False) for text in texts]


@pytest.fixture(scope="module")
def drafted(nano: loading.Models, prompts: list[list[int]]) -> Callable[[Any], tuple[Any, list[list[int]], float]]:
    """A draft -> (tokens, accepted per round, mean accepted tokens per round) of four short answers."""

    def answer(draft: Any) -> tuple[Any, list[list[int]], float]:
        target = Target(nano.target)
        is_dflash = isinstance(draft, DFlashDraft)
        drafter: Any = (
            DFlashDrafter(draft, target.embedding, target.head)
            if is_dflash
            else Eagle3Drafter(draft, target.embedding, 6)
        )
        out = run(target, drafter, prompts, LENGTH, frozenset({nano.tokenizer.eos_token_id}))
        accepted = [list(step.accepted) for step in out.rounds]
        rounds = sum(new is not None for step in out.rounds for new in step.emitted)
        return out.tokens, accepted, sum(map(sum, accepted)) / rounds

    return answer


@pytest.fixture(scope="module")
def right(nano: loading.Models, drafted: Any) -> dict[str, Any]:
    return {kind: drafted(nano.drafts[kind]) for kind in ("dflash", "eagle3")}


def test_nanos_own_drafts_give_the_plain_tokens(nano: loading.Models, prompts: list[list[int]], right: Any) -> None:
    expected = plain(Target(nano.target), prompts, LENGTH, frozenset({nano.tokenizer.eos_token_id}))
    assert right["dflash"][0] == right["eagle3"][0] == expected


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_nanos_drafts_give_the_same_tokens_and_acceptance_in_every_format(
    kind: str, nano: loading.Models, drafted: Any, right: Any, tmp_path: Path
) -> None:
    convert(str(NANO / kind), tmp_path / "out", "speculators", "nano")
    config = nano.target.config
    shape = TargetShape(config.hidden_size, config.vocab_size, config.num_hidden_layers)
    draft: Any = load_draft(tmp_path / "out", shape, torch.float32, "cpu")
    assert draft.config.own_embedding
    assert drafted(draft) == right[kind]


def rebuilt(nano: loading.Models, kind: str, **changes: Any) -> Any:
    draft: Any = nano.drafts[kind]
    wrong = type(draft)(replace(draft.config, **changes))
    wrong.load_state_dict(draft.state_dict())
    return wrong


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_layers_off_by_one_cost_acceptance_and_not_exactness(
    kind: str, nano: loading.Models, drafted: Any, right: Any
) -> None:
    """The loss in EAGLE-3 is too small to be seen on a few prompts."""
    ids = nano.drafts[kind].config.target_layer_ids
    wrong = drafted(rebuilt(nano, kind, target_layer_ids=tuple(i - 1 for i in ids)))
    assert wrong[0] == right[kind][0]
    assert wrong[1] != right[kind][1]
    if kind == "dflash":
        assert wrong[2] < right[kind][2]


def test_the_wrong_label_convention_costs_acceptance_and_not_exactness(
    nano: loading.Models, drafted: Any, right: Any
) -> None:
    wrong = drafted(rebuilt(nano, "dflash", shifted_labels=True))
    assert wrong[0] == right["dflash"][0]
    assert wrong[2] < right["dflash"][2] / 4


@each("name", DRAFTS)
def test_a_golden_draft_is_written_for_lmdeploy_unchanged_or_refused(name: str, tmp_path: Path) -> None:
    case = golden_cases.read_case(name)
    assert case.draft is not None
    home, before = formats.read_checkpoint(case.draft, None)
    if home.kind == "p-eagle":
        return
    try:
        convert(str(case.draft), tmp_path / "there", "lmdeploy", str(case.target))
    except UserError as refused:
        assert "cannot hold" in str(refused), refused
        assert not (tmp_path / "there").exists()
        return
    after = formats.read_checkpoint(tmp_path / "there", None)[1]
    assert replace(after.config, num_target_layers=before.config.num_target_layers) == before.config
    assert bits(tmp_path / "there") == bits(case.draft)


def test_lmdeploy_gets_the_keys_that_it_reads(model: Path, tmp_path: Path) -> None:
    convert(str(NANO / "dflash"), tmp_path / "dflash", "lmdeploy", None)
    config = json.loads((tmp_path / "dflash" / "config.json").read_text())
    assert config["dflash_config"]["block_size"] == 16
    assert config["layer_types"] == ["full_attention"] * 2 and config["num_target_layers"] == 16
    assert bits(tmp_path / "dflash") == bits(NANO / "dflash")
    convert(str(NANO / "eagle3"), tmp_path / "eagle3", "lmdeploy", "nano")
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    for kind in ("dflash", "eagle3"):
        (old, _), (new, _) = (formats.read_checkpoint(at / kind, None)[1::-1] for at in (NANO, tmp_path))
        assert new.config == old.config


@each(
    ("draft", "target", "words"),
    [
        ("dflash2", None, ("DFlash 2",)),
        ("dspark", None, ("DSpark",)),
        ("eagle3", None, ("--target",)),
    ],
)
def test_what_lmdeploy_does_not_compute_is_refused(
    draft: str, target: str | None, words: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        convert(str(NANO / draft), tmp_path / draft, "lmdeploy", target)
    assert all(word in str(refused.value) for word in words)


def test_lmdeploy_taps_layers_by_its_own_rule() -> None:
    read = formats.read_checkpoint(NANO / "eagle3", None)[1]
    moved = replace(read, config=replace(read.config, target_layer_ids=(0, 4, 9), num_target_layers=16))
    with pytest.raises(UserError, match=r"lmdeploy taps \[1, 7, 12\]"):
        formats.format_named("lmdeploy", "eagle3").write(moved)
