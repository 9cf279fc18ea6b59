"""The table of models, and what a user puts in its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dflash_bench.core.draft_kinds import KINDS
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import MAX_DRAFTS, WEIGHTS
from dflash_bench.models import presets
from dflash_bench.models.presets import Preset
from helpers.each import each

HUB_ID = re.compile(r"[\w-]+/[\w.-]+")
OF_UNKNOWN_SIZE = {"glm-5.3-flash", "minimax-m3"}
"""No public page that was read gives the size of these targets."""


@each("name", presets.table())
def test_every_preset_is_well_formed(name: str) -> None:
    one = presets.table()[name]
    references = [*([] if one.package else [one.target]), *one.drafts.values()]
    shipped = presets.PACKAGE / name
    assert all(Path(r).parent == shipped if shipped.exists() else HUB_ID.fullmatch(r) for r in references)
    assert (one.drafts or one.package) and {draft.partition("@")[0] for draft in one.drafts} <= set(WEIGHTS)
    numbers = one.num_drafts or {}
    assert numbers.keys() <= one.drafts.keys() and all(1 <= n <= MAX_DRAFTS for n in numbers.values())
    assert one.trained_thinking.keys() | one.unsupported.keys() <= one.drafts.keys()
    # A run's defaults are what the drafts were trained for.
    assert all(trained == one.thinking for trained in one.trained_thinking.values())
    assert one.source and (name in OF_UNKNOWN_SIZE) == (one.billions is None)
    assert one.billions is None or one.billions > 0
    assert one.kinds.keys() <= one.drafts.keys() and set(map(one.kind, one.drafts)) <= KINDS.keys()
    usual = {"nano": ("embedded", 192), "smollm2": ("hub", 256)}
    assert (one.data, one.max_new_tokens) == usual.get(name, ("hub", 2048))


def test_what_is_fetched_is_pinned_to_a_version_and_a_hash() -> None:
    packages = [preset.package for preset in presets.table().values() if preset.package is not None]
    assert packages and all("==" in one.requirement and re.fullmatch("[0-9a-f]{64}", one.sha256) for one in packages)
    assert all(HUB_ID.fullmatch(one.hub) for one in packages)


def test_the_two_models_of_the_paper_draft_blocks_of_16_and_chains_of_7_without_thinking() -> None:
    for name in ("qwen3-4b", "qwen3-8b"):
        one = presets.preset(name)
        assert (one.num_drafts, one.thinking, one.trained_thinking) == (
            {"dflash": 15, "eagle3": 7},
            False,
            {"dflash": False},
        )


BAD = {
    'target = "a/b"\ndrafts = {}\nsource = ""\nblocksize = 8': "mine: .blocksize.; known: .*billions,",
    'target = "a/b"\nsource = ""': "mine: drafts is missing",
    'target = "a/b"\nsource = ""\ndrafts = { dflesh = "c/d" }': r"unknown draft 'dflesh' .did you mean 'dflash'",
    'target = "a/b"\nsource = ""\ndrafts = { dflash = "c/d" }\nkinds = { dflash = "dflesh" }': "unknown kind in ",
    'target = "a/b"\nsource = ""\ndrafts = { dflash = "c/d" }\nkinds = { eagle3 = "eagle3" }': "unknown draft in kinds",
    'target = "a/b"\nsource = ""\ndrafts = { eagle3 = "c/d" }\nkinds = { eagle3 = "dspark" }': "cannot be of kind d",
    'target = "a/b"\nsource = ""\ndrafts = {}\nnum_drafts = { dflash = 99 }': "n must be 1 to 63 tokens, not '99'",
    'target = "a/b"\nsource = ""\ndrafts = {}\nnum_drafts = { dflesh = 9 }': r"unknown method 'dflesh' .did you",
    "drafts = {}\nsource = ''": "mine: target is missing",
    "drafts = {}\ntarget = 'a/b'": "mine: source is missing",
}


@each("content", BAD)
def test_a_table_with_an_unknown_or_a_missing_key_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "presets.toml"
    path.write_text(f"[mine]\n{content}\n")
    with pytest.raises(UserError, match=BAD[content]):
        presets.table(path)


def test_a_draft_of_ones_own_brings_none_of_the_settings_of_the_one_it_replaces() -> None:
    one = presets.combine("qwen3-8b", None, {"eagle3": "me/mine@v2"})
    assert one.target == "Qwen/Qwen3-8B"
    assert one.drafts | {"dflash": "z-lab/Qwen3-8B-DFlash-b16", "eagle3": "me/mine@v2"} == one.drafts
    assert one.num_drafts == {"dflash": 15}
    two = presets.combine("qwen3.5-9b", None, {"dflash": "me/mine"})
    assert (two.thinking, two.trained_thinking, two.num_drafts) == (True, {}, {})
    assert presets.combine("kimi-k3", None, {"dflash": "me/mine"}).unsupported == {"dflash@dspark": "MLA"}
    assert presets.combine("kimi-k3", None, {"dflash": "me/mine"}).kind("dflash") == "dflash"


def test_a_target_alone_is_a_model_without_drafts_and_beside_a_model_is_in_the_place_of_its_own() -> None:
    alone = presets.combine(None, "me/target", {})
    assert (alone.target, alone.drafts, alone.data, alone.max_new_tokens) == ("me/target", {}, "hub", 2048)
    beside = presets.combine("nano", "me/target", {})
    assert (beside.target, beside.drafts, beside.data) == ("me/target", presets.preset("nano").drafts, "embedded")
    assert beside.billions is None
    assert presets.combine(None, None, {}) == presets.preset("nano")


def test_a_method_without_a_draft_says_what_to_give() -> None:
    with pytest.raises(UserError, match=r"eagle3 .*dflash, mtp.*--draft eagle3=PATH"):
        presets.require_drafts(presets.preset("qwen3.5-9b"), ["dflash", "eagle3"])
    with pytest.raises(UserError, match=r"a/b .*dflash"):
        presets.require_drafts(Preset("a/b", {}), ["dflash"])


NO_DRAFT = {
    "dflash": "write METHOD=PATH",
    "dflash=": "write METHOD=PATH",
    "nonsense=x": f"unknown draft 'nonsense'; known: {', '.join(sorted(WEIGHTS))}",
    "eagle3-tree@a=x": "eagle3-tree uses the draft of eagle3; write eagle3@a=",
    "dflash@=x": "after '@' comes a label of 1 to 32",
    "dflash@a/b=x": "after '@' comes a label of 1 to 32",
    "=x": "unknown draft ''",
}


@each("text", NO_DRAFT)
def test_a_draft_that_is_not_written_as_one_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=NO_DRAFT[text]):
        presets.parse_drafts([text])


def test_a_path_may_hold_what_separates() -> None:
    given = ["dflash=/a=b/c@d", "eagle3=org/name@main"]
    assert presets.parse_drafts(given) == {"dflash": "/a=b/c@d", "eagle3": "org/name@main"}
    with pytest.raises(UserError, match="twice"):
        presets.parse_drafts(["dflash=a", "dflash=b"])


def test_the_name_of_a_folder_does_not_say_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine/target").mkdir(parents=True)
    assert presets.name("Qwen/Qwen3-8B@abc") == "Qwen/Qwen3-8B"
    assert presets.name(str(tmp_path / "mine")) == presets.name(str(tmp_path / "mine/target")) == "mine"
