"""What a user types for a method: its name, and after a colon how many tokens it drafts per round."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_bench.errors import UserError, unknown

KNOWN = {
    "ar": "plain decoding, one token per forward pass; always runs, as the baseline",
    "dflash": "block diffusion drafting (arXiv 2602.06036)",
    "eagle3": "autoregressive drafting on target features (arXiv 2503.01840), as a chain",
}
MAX_DRAFTS = 63
"""The widest block is this and the anchor."""


@dataclass(frozen=True, slots=True)
class Method:
    """`label` is what a user types for it, and results are filed under."""

    label: str
    name: str
    num_drafts: int | None = None


def parse(text: str) -> Method:
    """`eagle3` or `eagle3:7`. Raises UserError for an unknown name or a count out of range."""
    name, colon, count = text.partition(":")
    if name not in KNOWN:
        raise unknown("method", name, list(KNOWN))
    if not colon:
        return Method(text, name)
    if name == "ar":
        raise UserError("method ar drafts nothing; write it without ':'")
    if not count.isdecimal() or not 1 <= int(count) <= MAX_DRAFTS:
        raise UserError(f"method '{text}': after the colon comes the number of tokens per round, 1 to {MAX_DRAFTS}")
    return Method(f"{name}:{int(count)}", name, int(count))


def chosen(texts: list[str]) -> list[Method]:
    """The methods of a run, each once, the plain baseline first."""
    return list({method.label: method for method in (parse("ar"), *map(parse, texts))}.values())
