"""What a user types for a method: its name, and after a colon how many tokens it drafts per round (trees: verifies)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash_bench.errors import UserError, unknown

KNOWN = {
    "ar": "plain decoding, one token per forward pass; always runs, as the baseline",
    "dflash": "block diffusion drafting (arXiv 2602.06036)",
    "eagle3": "autoregressive drafting on target features (arXiv 2503.01840), as a chain",
    "eagle3-tree": "the same draft, as a tree that grows where it is sure (arXiv 2406.16858)",
}
TREES = {"eagle3-tree": "eagle3"}
"""Methods whose drafts are trees, and the draft each of them uses."""
DRAFTS = tuple(name for name in KNOWN if name not in TREES and name != "ar")
"""What drafts are made for; `--draft NAME=` takes these."""
MAX_DRAFTS = 63
"""The widest block is this and the anchor."""


@dataclass(frozen=True, slots=True)
class Method:
    """`label` is what a user types for it, and results are filed under.

    How much it drafts in a round is given as tokens or as the size of a block, or left to preset and draft.
    """

    label: str
    name: str
    num_drafts: int | None = None
    block_size: int | None = None
    """Anchor included; how many tokens it drafts depends on the draft's labels, which only its checkpoint knows."""

    @property
    def draft(self) -> str:
        """The draft whose weights it uses."""
        return TREES.get(self.name, self.name)


def drafts_trees(label: str) -> bool:
    """Are the tokens that it drafts in a round alternatives to each other?"""
    return label.partition(":")[0] in TREES


def parse(text: str) -> Method:
    """`eagle3` or `eagle3:7`; a tree is known by all it verifies, so `eagle3-tree:60` drafts 59 tokens.

    Raises UserError for an unknown name or a count out of range.
    """
    name, colon, count = text.partition(":")
    if name not in KNOWN:
        raise unknown("method", name, list(KNOWN))
    if not colon:
        return Method(text, name)
    if name == "ar":
        raise UserError("method ar drafts nothing; write it without ':'")
    anchor = int(drafts_trees(name))
    if not re.fullmatch("[0-9]{1,4}", count) or not 1 <= int(count) - anchor <= MAX_DRAFTS:
        counted = (
            "number of tokens verified per round, the anchor among them" if anchor else "number of tokens per round"
        )
        limits = f"{1 + anchor} to {MAX_DRAFTS + anchor}"
        raise UserError(f"method '{text}': after the colon comes the {counted}, {limits}")
    return Method(f"{name}:{int(count)}", name, int(count) - anchor)


def chosen(texts: list[str]) -> list[Method]:
    """The methods of a run, each once, the plain baseline first."""
    return list({method.label: method for method in (parse("ar"), *map(parse, texts))}.values())
