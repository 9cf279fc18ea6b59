"""The table of methods: what a user may type, what help shows, and what a run loads.

A method is written NAME[@LABEL][:KEY=VALUE,...], or NAME[@LABEL]:N for the number of tokens that it drafts a round. To
add one, add an entry here and a file of the same name in `engine/drafters/`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dflash_bench.errors import UserError, unknown
from dflash_bench.kinds import Kind, Option, Value

MAX_BLOCK = 64
MAX_DRAFTS = MAX_BLOCK - 1
"""The widest block is this and the anchor."""

_BLOCK = Option(
    "block", "size of the block, the anchor included; as the draft was trained if absent", None, 2, MAX_BLOCK, "tokens"
)

METHODS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("ar", "plain decoding, one token per forward pass; always runs, as the baseline", None, "none", True),
        Kind(
            "dflash", "block diffusion: one pass of the draft fills a whole block (arXiv 2602.06036)", "dflash",
            "chain", True,
            (_BLOCK, Option("n", "tokens drafted a round, the same as dflash:N", None, 1, MAX_DRAFTS, "tokens")),
            count="n", alternatives=(frozenset({"block", "n"}),),
        ),
        Kind(
            "eagle3", "a chain, drafted token by token from the target's features (arXiv 2503.01840)", "eagle3",
            "chain", True,
            (Option("n", "tokens drafted a round, the same as eagle3:N", 7, 1, MAX_DRAFTS, "tokens"),), count="n",
        ),
        Kind(
            "eagle3-tree", "EAGLE-3 as a tree that grows where the draft is sure (arXiv 2406.16858)", "eagle3",
            "tree", True,
            (
                Option("nodes", "nodes of the tree, the anchor not counted; all are verified", 59, 1, 255, "nodes"),
                Option("top_k", "nodes of a level that grow children, and children of each", 10, 1, 64, "nodes"),
                Option("depth", "levels of the tree below the anchor", 8, 1, 32, "levels"),
            ),
            old_count="nodes",
        ),
    )
}  # fmt: skip
WEIGHTS = tuple(dict.fromkeys(kind.weights for kind in METHODS.values() if kind.weights))
"""What drafts are made for: `--draft` takes these, with a label or without."""


@dataclass(frozen=True, slots=True)
class Method:
    """`label` is the one spelling that results are filed under; `options` are those that the user gave."""

    label: str
    name: str
    tag: str | None = None
    """Which of several drafts it uses: `a` in dflash@a."""
    options: Mapping[str, Value] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return METHODS[self.name]

    @property
    def draft(self) -> str | None:
        """The key of its weights among the drafts: `dflash`, or `dflash@a`; None for a method without weights."""
        return draft_of(self.label)

    def option(self, name: str) -> Value | None:
        """As given, else the table's default. Raises UserError for a name that the method does not have."""
        return self.options.get(name, self.kind.option(name).default)

    def number(self, name: str) -> int:
        """The same for an option that is a whole number and has a default."""
        value = self.option(name)
        assert isinstance(value, int), f"{name} of {self.label} is {value!r}"
        return value

    def leaves_open(self, name: str) -> bool:
        """Does it have this option, and has the user given neither it nor another that says the same?"""
        same = {name}.union(*(group for group in self.kind.alternatives if name in group))
        return any(option.name == name for option in self.kind.options) and not same & self.options.keys()

    def with_option(self, name: str, value: Value) -> Method:
        """The method that has this too, in its label as well. Raises UserError as `parse` does."""
        return _method(self.kind, self.tag, {**self.options, self.kind.option(name).name: value})

    def with_count(self, count: int | None) -> Method:
        """Under the same label, with a preset's number of drafted tokens where the user left it open."""
        name = self.kind.count
        if count is None or name is None or not self.leaves_open(name):
            return self
        return replace(self, options={**self.options, name: count})


def parse(text: str) -> Method:
    """What a user typed. Raises UserError for an unknown name or option, and for a value that it cannot have."""
    head, colon, rest = text.partition(":")
    name, at, tag = head.partition("@")
    if name not in METHODS:
        raise unknown("method", name, list(METHODS))
    kind, where = METHODS[name], f"method '{text}'"
    if at and kind.weights is None:
        raise UserError(f"{where}: {name} uses no draft, so it takes no label; write it without '@'")
    if at:
        check_tag(tag, where)
    return _method(kind, tag or None, kind.read(rest, where) if colon else {})


def _method(kind: Kind, tag: str | None, options: Mapping[str, Value]) -> Method:
    label = f"{kind.name}@{tag}" if tag else kind.name
    if not options:
        return Method(label, kind.name, tag)
    label += f":{kind.write(options)}"
    return Method(label, kind.name, tag, kind.read(label.partition(":")[2], f"method '{label}'"))


def chosen(texts: Sequence[str]) -> list[Method]:
    """The methods of a run, each once, the plain baseline first."""
    return list({method.label: method for method in (parse("ar"), *map(parse, texts))}.values())


def check_tag(tag: str, where: str) -> None:
    """Raise UserError for a label after '@' that could be mistaken for something else."""
    if not re.fullmatch("[A-Za-z0-9._-]{1,32}", tag):
        raise UserError(f"{where}: after '@' comes a label of 1 to 32 letters, digits, '.', '_' or '-'")


def name_of(label: str) -> str:
    """The method's name, from any label that was ever stored."""
    return re.split("[@:]", label, maxsplit=1)[0]


def draft_of(label: str) -> str | None:
    """The draft behind a label, of an earlier version too: `eagle3@a` of eagle3-tree@a:nodes=9."""
    name, at, tag = label.partition(":")[0].partition("@")
    weights = METHODS[name].weights if name in METHODS else None
    return weights and f"{weights}{at}{tag}"


def users_of(draft: str) -> list[str]:
    """The methods that use a draft, `dflash` or `dflash@a`, labelled as it is."""
    weights, at, tag = draft.partition("@")
    return [f"{kind.name}{at}{tag}" for kind in METHODS.values() if kind.weights == weights]


def is_tree(label: str) -> bool:
    """Are the tokens that it drafts in a round alternatives to each other? Of any label that was ever stored."""
    kind = METHODS.get(name_of(label))
    return kind is not None and kind.shape == "tree"


def is_lossy(label: str) -> bool:
    """May its answers be other than the target's own? Then they are scored, and not judged."""
    kind = METHODS.get(name_of(label))
    return kind is not None and not kind.lossless
