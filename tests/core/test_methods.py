"""Spellings of methods that a user may type, and the one label of their results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import METHODS, Method, MethodSpec, Option, Value, parse
from dflash_bench.report import terminal as listed
from helpers.each import each


def test_a_method_is_a_name_and_perhaps_options() -> None:
    assert parse("dflash") == Method("dflash", "dflash")
    assert parse("eagle3:7") == Method("eagle3:7", "eagle3", None, {"n": 7})
    assert parse("dflash:block=8") == Method("dflash:block=8", "dflash", None, {"block": 8})
    assert parse("dflash@a:block=8") == Method("dflash@a:block=8", "dflash", "a", {"block": 8})
    tree = parse("eagle3-tree:nodes=60,top_k=10,depth=8")
    assert tree.options == {"nodes": 60, "top_k": 10, "depth": 8}


ONE_LABEL = {
    "dflash:n=7": "dflash:7",
    "dflash:007": "dflash:7",
    "dflash@a:n=07": "dflash@a:7",
    "eagle3-tree:depth=2,nodes=09": "eagle3-tree:nodes=9,depth=2",
    "eagle3-tree:nodes=9": "eagle3-tree:nodes=9",
}


@each("text", ONE_LABEL)
def test_two_spellings_of_one_thing_have_one_label(text: str) -> None:
    assert parse(text).label == ONE_LABEL[text]


def values(option: Option) -> st.SearchStrategy[str]:
    words = [st.sampled_from(option.words)] if option.words else []
    if option.kind is str:
        return st.one_of(words or [st.text("abc=/0", min_size=1)])
    assert option.low is not None and option.high is not None
    if option.kind is int:
        return st.one_of(*words, st.integers(int(option.low), int(option.high)).map(str))
    return st.one_of(*words, st.floats(option.low, option.high).map(repr))


@st.composite
def typed(draw: st.DrawFn, kind: MethodSpec) -> str:
    """Any valid spelling: options in any order, numbers with zeros before them."""
    tag = draw(st.none() | st.from_regex("[A-Za-z0-9._-]{1,32}", fullmatch=True)) if kind.weights else None
    options = draw(st.lists(st.sampled_from(kind.options), unique=True)) if kind.options else []
    for group in kind.alternatives:
        same = [option for option in options if option.name in group]
        options = [option for option in options if option not in same[1:]]
    zeros = st.sampled_from(["", "0", "00"])
    parts = []
    for option in options:
        value = draw(values(option))
        parts.append(f"{option.name}={draw(zeros) if value.isdigit() and option.kind is not str else ''}{value}")
    return kind.name + (f"@{tag}" if tag else "") + (f":{','.join(parts)}" if parts else "")


INVENTED = MethodSpec(
    "invented",
    "",
    "dflash",
    "tree",
    True,
    (
        Option("width", "", 4, 1, 99, words=("auto",)),
        Option("rate", "", 0.5, 0, 1, kind=float),
        Option("rule", "", "match", words=("match", "rejection"), kind=str),
        Option("free", "", "", kind=str),
    ),
    count="width",
)


@pytest.mark.parametrize("kind", [*METHODS.values(), INVENTED], ids=lambda kind: kind.name)
@settings(max_examples=20)
@given(data=st.data())
def test_a_label_is_its_own_label(kind: MethodSpec, data: st.DataObject) -> None:
    text = data.draw(typed(kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS.own, kind.name, kind)
        method = parse(text)
        assert parse(method.label) == method
        again = parse(kind.name + (f"@{method.tag}" if method.tag else ""))
        for name, value in reversed(method.options.items()):
            again = again.with_option(name, value)
        assert again == method


@given(st.text("dflash-e3:=@,ntr0189. ", max_size=24))
def test_any_text_is_a_method_or_one_line(text: str) -> None:
    try:
        assert parse(parse(text).label) == parse(text)
    except UserError as error:
        assert "\n" not in str(error)


@each("kind", METHODS.values())
def test_the_table_is_in_order(kind: MethodSpec) -> None:
    names = [option.name for option in kind.options]
    assert len(set(names)) == len(names) and kind.count in {*names, None}
    assert all(group <= set(names) and len(group) > 1 for group in kind.alternatives)
    assert kind.shape == "none" or kind.name != "ar"
    for option in kind.options:
        assert option.default is None or option.read(str(option.default)) == option.default
        assert option.kind is str or (option.low is not None and option.high is not None and option.low < option.high)


def test_an_option_is_as_given_or_the_tables_or_open() -> None:
    assert (parse("eagle3").option("n"), parse("eagle3:3").option("n"), parse("dflash").option("n")) == (7, 3, None)
    with pytest.raises(UserError, match=r"^unknown option of method eagle3 'nodes'; known: n$"):
        parse("eagle3").option("nodes")


COUNTS = {"eagle3": {"n": 4}, "eagle3:9": {"n": 9}, "dflash:block=8": {"block": 8}, "eagle3-tree": {}, "ar": {}}


@each("text", COUNTS)
def test_a_presets_count_is_for_what_the_user_left_open(text: str) -> None:
    method = parse(text).with_count(4)
    assert (method.label, method.options) == (text, COUNTS[text])


def test_a_tree_shares_the_draft_of_the_chain_and_a_label_names_another() -> None:
    texts = ["eagle3", "eagle3-tree:nodes=15", "eagle3-tree@b", "dflash@a"]
    assert [method.draft for method in methods.chosen(texts)] == [None, "eagle3", "eagle3", "eagle3@b", "dflash@a"]
    stored = {"eagle3-tree:60": "eagle3", "dflash": "dflash", "ar": None, "somebody else's": None}
    assert {label: methods.draft_of(label) for label in stored} == stored
    assert methods.users_of("eagle3@b") == ["eagle3@b", "eagle3-tree@b"]


@pytest.mark.parametrize("label", ["eagle3-tree", "eagle3-tree:60", "eagle3-tree@b:nodes=9,depth=2"])
def test_the_shape_is_known_of_labels_of_earlier_versions_too(label: str) -> None:
    assert methods.is_tree(label) and methods.name_of(label) == "eagle3-tree"


@each("label", ["ar", "eagle3:7", "dflash@eagle3-tree", "somebody else's", ""])
def test_other_labels_are_of_chains(label: str) -> None:
    assert not methods.is_tree(label)


def test_the_baseline_comes_first_and_each_method_once() -> None:
    chosen = methods.chosen(["eagle3:7", "ar", "dflash", "eagle3:n=07", "dflash"])
    assert [method.label for method in chosen] == ["ar", "eagle3:7", "dflash"]
    assert [method.label for method in methods.chosen([])] == ["ar"]


@each("text", ["nonsense", "", "DFlash", " dflash", "nonsense:4", "nonsense@a", "@a", ":4"])
def test_an_unknown_name_lists_the_known_ones(text: str) -> None:
    known = ", ".join(sorted(map(methods.shown, METHODS)))
    with pytest.raises(
        UserError, match=rf"^unknown method '.*'(| \(did you mean '.*'\?\)); known: {re.escape(known)}$"
    ):
        parse(text)


REFUSED = {
    "dflash:blok=8": "unknown option of method dflash 'blok' (did you mean 'block'?); known: block, ",
    "dflash:Block=8": "unknown option of method dflash 'Block'",
    "dflash:": "nothing follows the colon; omit it, or write dflash:N or dflash:KEY=VALUE,... with block, n",
    "dflash:block=8,": "'' is not KEY=VALUE; write dflash:N or",
    "dflash:7,block=8": "'7' is not KEY=VALUE",
    "dflash:block=8,block=8": "block is given twice; give it once",
    "dflash:n=7,block=8": "block and n set the same thing; give one of them",
    "dflash:block=1": "block must be 2 to 64 tokens, or auto, not '1'",
    "dflash:block=65": "block must be 2 to 64 tokens, or auto, not '65'",
    "dflash:block=": "block must be 2 to 64 tokens, or auto, not ''",
    "dflash:block=8 ": "block must be 2 to 64 tokens, or auto, not '8 '",
    "dflash:7,8": "n must be 1 to 63 tokens, not '7,8'",
    "eagle3-tree:nodes=256": "nodes must be 1 to 255 nodes, not '256'",
    "eagle3-tree:top_k=0": "top_k must be 1 to 64 nodes, not '0'",
    "eagle3-tree:depth=33": "depth must be 1 to 32 levels, not '33'",
    "eagle3-tree:60": "'60' is not KEY=VALUE",
    "eagle3-tree:1": "'1' is not KEY=VALUE; write eagle3-tree:KEY=VALUE,... with nodes, top_k, depth",
    "ddtree:nodes=256": "nodes must be 1 to 255 nodes, or auto, not '256'",
    "ddtree:block=auto": "block must be 2 to 64 tokens, not 'auto'",
    "dflash:block=auto,n=3": "block and n set the same thing",
    "dflash:steps=0": "steps must be 1 to 16 passes, not '0'",
    "eagle3-tree:x": "'x' is not KEY=VALUE",
    "ar:1": "plain has no options; write it without ':'",
    "ar:": "plain has no options; write it without ':'",
    "ar@a": "plain uses no draft, so it takes no label; write it without '@'",
    "dflash@": "after '@' comes a label of 1 to 32 letters, digits, '.', '_' or '-'",
    "dflash@a b": "after '@' comes a label",
    "dflash@a@b": "after '@' comes a label",
    f"dflash@{'a' * 33}": "after '@' comes a label",
    "dflash@é": "after '@' comes a label",
}


@each("text", REFUSED)
def test_what_cannot_be_is_refused_with_what_can(text: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(text)
    assert REFUSED[text] in str(refused.value) and "\n" not in str(refused.value)


@each("count", ["0", "64", "-1", "x", "1.5", "²", "9" * 400])
def test_a_number_of_tokens_out_of_range_is_refused(count: str) -> None:
    with pytest.raises(UserError, match=r"n must be 1 to 63 tokens, not "):
        parse(f"dflash:{count}")


@each(
    ("option", "text", "value"),
    [
        (Option("", "", 0.5, 0, 1, kind=float), "1", 1.0),
        (Option("", "", 0.5, 0, 1, kind=float), "2.5e-1", 0.25),
        (Option("", "", 0.5, 0, 1, kind=float), "1.1", None),
        (Option("", "", 0.5, 0, 1, kind=float), "nan", None),
        (Option("", "", 0.5, 0, 1, kind=float), "1e999", None),
        (Option("", "", 0.5, -1, 1, kind=float), "-0.0", 0.0),
        (Option("", "", None, 1, 9, words=("auto",)), "auto", "auto"),
        (Option("", "", None, 1, 9, words=("auto",)), "Auto", None),
        (Option("", "", "a", words=("a", "b"), kind=str), "c", None),
        (Option("", "", "a", kind=str), "", None),
    ],
)
def test_a_value_is_read_strictly(option: Option, text: str, value: Value | None) -> None:
    read = option.read(text)
    assert read == value and str(read) == str(value)


def test_a_range_says_its_unit_and_its_words() -> None:
    assert Option("", "", None, 2, 64, "tokens", ("auto",)).range == "2 to 64 tokens, or auto"
    assert Option("", "", 0.5, 0, 1, kind=float).range == "0 to 1"
    assert Option("", "", "a", words=("a", "b"), kind=str).range == "a or b"
    assert Option("", "", None, kind=str).range == "text"


def test_methods_are_listed_in_100_columns() -> None:
    lines = listed.methods_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[1 : 2 * len(METHODS) : 2]] == list(map(methods.shown, METHODS))


@each("name", METHODS)
def test_a_method_is_shown_with_all_its_options(name: str) -> None:
    lines = listed.text_of(name).splitlines()
    assert max(map(len, lines)) <= 100
    for option in METHODS[name].options:
        (line,) = [line for line in lines if line.startswith(f"{option.name} ")]
        assert option.range in line and (option.default is None or f" {option.default} " in line)


def test_a_drafter_is_found_by_the_name_of_its_method() -> None:
    files = {path.stem for path in (Path(methods.__file__).parents[1] / "engine/drafters").glob("*.py")}
    assert {name.replace("-", "_").replace("+", "_") for name in METHODS} <= files


def test_an_unknown_method_is_not_listed() -> None:
    with pytest.raises(
        UserError, match=r"unknown method 'eagle3-tree:9' \(did you mean 'eagle3-tree'\?\); known: block-diffusion, "
    ):
        listed.text_of("eagle3-tree:9")
