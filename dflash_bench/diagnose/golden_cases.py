"""The golden cases: small drafts in publishers' formats, and the drafted tokens of the publishers' code.

They are stored in `conformance/`, whose README describes every key. This module reads them, and applies misreadings
that are edits of the draft's config.json to a copy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_bench.core.dialects import DecodedAnswer
from dflash_bench.core.errors import unknown

CASES = Path(__file__).parents[1] / "conformance"
GOLDEN = "golden.json"
CHAINS = ("mtp", "p-eagle")
"""Kinds that are separate methods with a number of drafted tokens; all others are kinds of dflash."""


@dataclass(frozen=True, slots=True)
class CaseRound:
    """A round, the publisher's or ours; some publishers' loops draft no more than the limit still allows."""

    anchor_at: int
    """Index of the anchor in the concatenated prompt and answer."""
    drafted: tuple[int, ...]
    accepted: int
    """Leading drafts that equal the target's choice, also beyond the end of the answer."""
    verified: int | None = None
    """Drafts left after a cut by confidence, if any."""


@dataclass(frozen=True, slots=True)
class GoldenPrompt:
    """A prompt, its answer (equal to plain greedy decoding's) and the rounds after the first token."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int]
    tokens: tuple[int, ...]
    rounds: tuple[CaseRound, ...]
    overruns: bool = False
    """Whether the publisher's loop drafts once more after the last token; that round is not included here."""


@dataclass(frozen=True, slots=True)
class FirstTree:
    """The tree of a prompt's first round in the publisher's code, and the number of rounds of the answer."""

    prompt: int
    """Index of the prompt in the case."""
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """Indices of nodes; -1 is the anchor."""
    num_rounds: int

    @property
    def paths(self) -> frozenset[tuple[int, ...]]:
        return paths(self.tokens, self.parents)


@dataclass(frozen=True, slots=True)
class DrawnSlot:
    """A slot's drawn token, and the largest probabilities of draft (q) and target (p) given the previous tokens."""

    token: int
    q: Mapping[int, float]
    p: Mapping[int, float]
    supports: Mapping[str, int]
    """The number of tokens that "q" and "p" allow."""


@dataclass(frozen=True, slots=True)
class DrawnBlock:
    """A block drawn after a prompt and an anchor, with the run's temperature and filters."""

    prompt: tuple[int, ...]
    anchor: int
    temperature: float
    top_p: float
    top_k: int
    slots: tuple[DrawnSlot, ...]


@dataclass(frozen=True, slots=True)
class WrongReading:
    """A misreading, and the results of the publisher's code under it.

    `edit` maps keys of config.json ("dflash_config.causal_head") to other values (None: no such key), and `method` is a
    method that misreads the unchanged checkpoint in this way; both are None if neither can express it.
    """

    name: str
    num_prompts: int
    """The number of prompts whose rounds differ from the correct rounds."""
    accepted_per_round: float
    """Four significant digits."""
    edit: Mapping[str, Any] | None = None
    method: str | None = None

    @property
    def can_be_tried(self) -> bool:
        return self.edit is not None or self.method is not None


@dataclass(frozen=True, slots=True)
class GoldenCase:
    name: str
    kind: str
    """The name in `golden.json`: dflash, dflash2, mtp, ..."""
    what: str
    """A description of the behaviour that the case tests."""
    source: str
    """The repository of the publisher's code."""
    target: Path
    draft: Path | None
    """None if the draft is in the target's checkpoint."""
    method: str
    """The method of the case, as a user types it."""
    num_drafts: int
    prompts: tuple[GoldenPrompt, ...]
    readings: tuple[WrongReading, ...]
    tree_method: str | None = None
    """The method that grows the case's trees."""
    trees: tuple[FirstTree, ...] = ()
    drawn: tuple[DrawnBlock, ...] = ()

    @property
    def shrinks(self) -> bool:
        """Whether the publisher's loop drafts no more than may still be emitted."""
        return any(len(one.drafted) < self.num_drafts for prompt in self.prompts for one in prompt.rounds)

    @property
    def overruns(self) -> bool:
        """Whether the publisher's loop drafts once more after the last token of an answer."""
        return any(prompt.overruns for prompt in self.prompts)

    @property
    def num_rounds(self) -> int:
        return sum(len(prompt.rounds) for prompt in self.prompts)

    @property
    def accepted_per_round(self) -> float:
        return sum(one.accepted for prompt in self.prompts for one in prompt.rounds) / self.num_rounds


def known_cases() -> list[str]:
    """Return the names of all cases, sorted."""
    return sorted(path.parent.name for path in CASES.glob(f"*/{GOLDEN}"))


def read_cases(names: Sequence[str] = ()) -> list[GoldenCase]:
    """Return the named cases without repetition; by default all. Raises UserError for an unknown name."""
    known = known_cases()
    for name in names:
        if name not in known:
            raise unknown("golden case", name, known)
    return [read_case(name) for name in dict.fromkeys(names or known)]


def read_case(name: str) -> GoldenCase:
    folder = CASES / name
    stored = json.loads((folder / GOLDEN).read_text(encoding="utf-8"))
    kind, settings = stored["kind"], stored["settings"]
    draft = folder / "draft"
    return GoldenCase(
        name,
        kind,
        stored["what"],
        stored["source"]["repository"],
        (folder / stored["target"]).resolve(),
        draft if draft.is_dir() else None,
        method_of(kind, settings),
        settings["drafts_per_round"],
        tuple(map(_prompt, stored["cases"])),
        tuple(map(_reading, stored["wrong_readings"])),
        *_trees(stored.get("tree")),
        tuple(map(_drawn, stored.get("sampled", ()))),
    )


def method_of(kind: str, settings: Mapping[str, Any]) -> str:
    """Return the method of a case's settings; a threshold of 0 cuts nothing."""
    if kind in CHAINS:
        return f"{kind}:{settings['drafts_per_round']}"
    threshold, shifted = settings.get("confidence_threshold"), settings.get("draft_shift")
    options = [*([f"cut={threshold:g}"] if threshold else []), *(["shift=yes"] if shifted else [])]
    return ":".join(["dflash", *([",".join(options)] if options else [])])


def _prompt(stored: Mapping[str, Any]) -> GoldenPrompt:
    prompt, tokens = tuple(stored["prompt"]), tuple(stored["tokens"])
    last = len(prompt) + len(tokens) - 1
    rounds = [
        CaseRound(one["anchor_at"], tuple(one["drafted"]), one["accepted"], one.get("verified"))
        for one in stored["rounds"]
    ]
    within = tuple(one for one in rounds if one.anchor_at < last)
    stop_ids = frozenset(stored.get("stop_token_ids") or ())
    return GoldenPrompt(prompt, stored["max_new_tokens"], stop_ids, tokens, within, len(within) < len(rounds))


def paths(tokens: Sequence[int], parents: Sequence[int]) -> frozenset[tuple[int, ...]]:
    """Return the path to each node of a tree."""
    made: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        made.append((*(made[parent] if parent >= 0 else ()), token))
    return frozenset(made)


def _trees(stored: Mapping[str, Any] | None) -> tuple[str | None, tuple[FirstTree, ...]]:
    """Return a case's trees and their method. In stored trees node 0 is the anchor, which the budget includes."""
    if stored is None:
        return None, ()
    method = f"ddtree:nodes={stored['budget'] - 1},top_k={stored['tree_width']},tree=expanded"
    firsts = [
        FirstTree(
            one["prompt_index"],
            tuple(one["first_tree"]["token_ids"][1:]),
            tuple(parent - 1 for parent in one["first_tree"]["parent_indices"][1:]),
            len(one["nodes_verified"]),
        )
        for one in stored["cases"]
    ]
    return method, tuple(firsts)


def _drawn(stored: Mapping[str, Any]) -> DrawnBlock:
    return DrawnBlock(
        tuple(stored["prompt"]),
        stored["anchor"],
        stored["temperature"],
        stored["top_p"],
        stored["top_k"],
        tuple(map(_slot, stored["slots"])),
    )


def _slot(stored: Mapping[str, Any]) -> DrawnSlot:
    q, p = (dict(zip(stored[f"{name}_ids"], stored[name], strict=True)) for name in "qp")
    return DrawnSlot(stored["token"], q, p, {name: stored[f"{name}_support"] for name in "qp"})


def _reading(stored: Mapping[str, Any]) -> WrongReading:
    return WrongReading(
        stored["reading"],
        stored["prompts_with_other_rounds"],
        stored["accepted_per_round"],
        stored.get("edit"),
        stored.get("method"),
    )


def edited_copy(draft: Path, edit: Mapping[str, Any], folder: Path) -> Path:
    """Copy a draft to a new folder, with these keys of its config.json changed."""
    shutil.copytree(draft, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key, value in edit.items():
        *outer, last = key.split(".")
        inner = config
        for name in outer:
            inner = inner[name]
        if value is None:
            inner.pop(last, None)
        else:
            inner[last] = value
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


# Requests to a server


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """A prompt, and the requested part of the publisher's answer."""

    number: int
    """Number in the case, from 1."""
    prompt: GoldenPrompt
    """The prompt with only the requested rounds and tokens, and the limit of the request."""

    def decoded(self, num_drafts: int) -> DecodedAnswer:
        return answer_of(self.prompt.tokens, [one.accepted for one in self.prompt.rounds], num_drafts, self.limit)

    @property
    def limit(self) -> int:
        return self.prompt.max_new_tokens

    @property
    def emitted(self) -> list[int]:
        """The number of tokens added by every round."""
        done, emitted = 1, []
        for one in self.prompt.rounds:
            emitted.append(min(one.accepted + 1, self.limit - done))
            done += emitted[-1]
        return emitted


def answer_of(tokens: Sequence[int], accepted: Sequence[int], num_drafts: int, limit: int) -> DecodedAnswer:
    return DecodedAnswer(len(tokens), tuple(accepted), num_drafts, limit)


def asked_prompts(case: GoldenCase) -> Iterator[AskedPrompt]:
    """Yield what a server is asked: whole answers, or up to the last round that drafts in full and is not cut.

    So requests end before a limit or a stop cuts the publisher's loop, where engines count differently.
    """
    for number, prompt in enumerate(case.prompts, start=1):
        if not case.shrinks and not prompt.stop_ids:
            yield AskedPrompt(number, prompt)
            continue
        kept, done = 0, 1
        for one in prompt.rounds:
            if len(one.drafted) < case.num_drafts or done + one.accepted + 1 > len(prompt.tokens):
                break
            kept, done = kept + 1, done + one.accepted + 1
        if kept:
            part = replace(
                prompt,
                tokens=prompt.tokens[:done],
                rounds=prompt.rounds[:kept],
                max_new_tokens=done,
                stop_ids=frozenset(),
            )
            yield AskedPrompt(number, part)
