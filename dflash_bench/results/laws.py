"""What a row can be: laws of counts and times that no measurement breaks, and texts that fit their tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_bench.core.dialects import UNKNOWN_RULE, AcceptanceCounts, contradiction, rule_of
from dflash_bench.core.methods import is_lossy, name_of
from dflash_bench.core.types import CEILINGS, is_greedy
from dflash_bench.results import validity
from dflash_bench.results.validity import lengths_of

if TYPE_CHECKING:
    from dflash_bench.results.run_info import MethodEntry, RunIdentity

# What no measurement can break: how the times, counts and tokens of a row hang together.
#
# `LAWS` names each law once. Rows are held to them when they are written, where a row that breaks one becomes a failed
# row, and whenever they are read. What no single row shows (answers that overlap, sums over the run) is in
# `integrity.py`. The laws find mistakes, of the engine's bookkeeping too, and careless edits. Whoever forges a row to
# fit them all is not found.


COLUMNS = (
    "method", "token_ids", "drafted_ids", "drafted_parents", "start_s", "end_s", "temperature", "concurrency", "rate",
    "counted_by",
)  # fmt: skip
"""The columns that the laws need besides those of `validity`."""
SHARE, AT_LEAST_S = 1e-3, 1e-4
"""Two readings of one time agree within this share plus these seconds: rounds are stored in float32, and a GPU's clock
is not the host's. The rounds of an answer follow each other without a gap, so nothing else is between them."""
WHOLE_BLOCKS = ("dflash", "draft-model", "eagle3")
"""Methods that draft the same number of tokens in every round, unless they are told "auto"."""


class Block(NamedTuple):
    """How many tokens a method drafts in a round: at most, and always as many?"""

    widest: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What `run.json` says that rows can be held to. None where it does not."""

    blocks: Mapping[str, Block]
    ceiling: float
    """Logits; no gap beyond this is rounding."""
    is_engine: bool = False
    """Was it measured in our process?"""
    max_new_tokens: int | None = None
    context_length: int | None = None
    stop_ids: tuple[int, ...] | None = None

    @classmethod
    def of(cls, identity: RunIdentity) -> Facts:
        return cls(
            blocks={
                label: Block(method.num_drafts, _is_whole(label, method))
                for label, method in identity.methods.items()
                if method.num_drafts is not None
            },
            ceiling=CEILINGS.get(identity.judge.dtype if identity.judge else identity.dtype, CEILINGS["float32"]),
            is_engine=identity.engine == "local",
            max_new_tokens=identity.max_new_tokens,
            context_length=identity.context_length,
            stop_ids=None if identity.stop_ids is None else tuple(identity.stop_ids),
        )


def _is_whole(label: str, method: MethodEntry) -> bool:
    return name_of(label) in WHOLE_BLOCKS and "auto" not in method.options.values()


class RowArrays:
    """Answers that did not fail and whose lists have the right lengths, as arrays."""

    def __init__(self, batch: Any, facts: Facts) -> None:
        self.batch, self.facts, self.num = batch, facts, len(batch)

    def seconds(self, name: str) -> Any:
        """NaN for null, [rows]."""
        return self.batch.column(name).cast("double").fill_null(np.nan).to_numpy(zero_copy_only=False)

    def lengths(self, name: str) -> Any:
        """-1 for null, [rows]."""
        return validity.lengths_of(self.batch.column(name))

    def flat(self, name: str) -> Any:
        """The values of all lists one after another."""
        return self.batch.column(name).flatten().to_numpy(zero_copy_only=False)

    @cached_property
    def methods(self) -> tuple[list[str], Any]:
        """The labels, and which one each row has, [rows]."""
        encoded = self.batch.column("method").dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return [*map(str, encoded.dictionary.to_pylist()), "?"], codes

    def by_method(self, value: Callable[[str], Any]) -> Any:
        """Of each row the value of its method, [rows]."""
        labels, codes = self.methods
        return np.array([value(label) for label in labels])[codes]

    def per_row(self, places: Any, owners: Any) -> Any:
        """The mask of rows that own one of these places, [rows]."""
        mask = np.zeros(self.num, dtype=bool)
        mask[owners[places]] = True
        return mask

    def owners(self, name: str) -> Any:
        """The row of each value of `flat`."""
        return np.repeat(np.arange(self.num), np.maximum(self.lengths(name), 0))

    def round_sum(self, name: str) -> Any:
        """[rows]; 0 where there are none."""
        return np.bincount(self.owners(name), weights=self.flat(name), minlength=self.num)

    @cached_property
    def has_ids(self) -> Any:
        """Rows that name their rounds and all that was drafted in them, [rows]."""
        names = ("drafted", "accepted", "emitted", "drafted_ids")
        return np.logical_and.reduce([self.lengths(name) >= 0 for name in names])

    @cached_property
    def drafts(self) -> Drafts:
        return Drafts.of(self)

    @cached_property
    def along(self) -> tuple[Any, Any]:
        """See `_along_the_drafts`."""
        return _along_the_drafts(self)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Each drafted token beside what was emitted in its round, of rows whose ids are as many as they say.

    Arrays [rounds] belong to the rounds of these rows, and [drafted] to the tokens drafted in them.
    """

    owner: Any
    """The row of each round, [rounds]."""
    kept: Any
    """How many of its drafted tokens were emitted: all that were accepted, unless the round was cut, [rounds]."""
    is_uncut: Any
    """Was all of it emitted, the target's own token at the end too? [rounds]"""
    round: Any
    """The round of each drafted token, [drafted]."""
    place: Any
    """Its place in the round, [drafted]."""
    ids: Any
    begins: Any
    """Where the tokens of each round are in `tokens`, [rounds]."""
    tokens: Any
    """All answers' tokens, one after another."""
    parents: Any | None
    """For each drafted token the one that it follows, -1 for the anchor; None where all are chains, [drafted]."""
    is_tree: Any
    """[rounds]"""

    @classmethod
    def of(cls, rows: RowArrays) -> Drafts:
        import pyarrow as pa

        usable = rows.has_ids & ~_ids_off_count(rows)
        chosen = rows if usable.all() else RowArrays(rows.batch.filter(pa.array(usable)), rows.facts)
        at = np.flatnonzero(usable)
        drafted, accepted, emitted = (chosen.flat(name).astype(np.int32) for name in ("drafted", "accepted", "emitted"))
        of_round = chosen.owners("accepted")
        tokens = np.maximum(chosen.lengths("token_ids"), 0)
        # The first token of an answer comes from prefill.
        before = np.cumsum(emitted, dtype=np.int64) - emitted
        num_rounds = np.maximum(chosen.lengths("accepted"), 0)
        first = (np.cumsum(num_rounds) - num_rounds)[of_round]
        begins = (np.cumsum(tokens) - tokens)[of_round] + 1 + before - before[first]
        of_token, place = _places(drafted)
        parents, is_tree = _parents(chosen, of_round)
        return cls(
            owner=at[of_round],
            kept=np.minimum(accepted, emitted),
            is_uncut=emitted == accepted + 1,
            round=of_token,
            place=place,
            ids=chosen.flat("drafted_ids"),
            begins=begins,
            tokens=chosen.flat("token_ids"),
            parents=parents,
            is_tree=is_tree,
        )

    def emitted(self, rounds: Any, place: Any) -> Any:
        """The tokens that these rounds emitted at these places; of places behind the end, another."""
        if not len(self.tokens):
            return np.zeros(len(rounds), dtype=np.int64)
        return self.tokens[np.minimum(self.begins[rounds] + place, len(self.tokens) - 1)]


def _places(drafted: Any) -> tuple[Any, Any]:
    """The round of each drafted token, and its place in it, [drafted]; 32 bits, as there are many of them."""
    of_token = np.repeat(np.arange(len(drafted), dtype=np.int32), drafted)
    begins = (np.cumsum(drafted, dtype=np.int64) - drafted).astype(np.int32)
    return of_token, np.arange(len(of_token), dtype=np.int32) - np.repeat(begins, drafted)


def _parents(rows: RowArrays, of_round: Any) -> tuple[Any | None, Any]:
    """Those of all drafted tokens, chains' too; and which rounds are of a row that names them."""
    named = rows.lengths("drafted_parents") >= 0
    is_tree = named[of_round]
    if not named.any():
        return None, is_tree
    of_token, place = _places(rows.flat("drafted").astype(np.int32))
    parents = place - 1
    parents[is_tree[of_token]] = rows.flat("drafted_parents")
    return parents, is_tree


# Times


def _rounds_are_longer(rows: RowArrays) -> Any:
    known = rows.lengths("round_s") >= 0
    return known & (rows.seconds("decode_s") < _least(_in_rounds(rows)))


def _rounds_are_shorter(rows: RowArrays) -> Any:
    # An answer without a round takes no time to decode, which `validity` sees to.
    known = rows.lengths("round_s") > 0
    return known & (_least(rows.seconds("decode_s")) > _in_rounds(rows))


def _in_rounds(rows: RowArrays) -> Any:
    return np.nan_to_num(rows.seconds("draft_prefill_s")) + rows.round_sum("round_s")


def _least(seconds: Any) -> Any:
    return seconds * (1 - SHARE) - AT_LEAST_S


def _parts_are_longer(rows: RowArrays) -> Any:
    names = ("draft_s", "verify_s", "round_s")
    known = np.logical_and.reduce([rows.lengths(name) >= 0 for name in names])
    if not known.all():
        import pyarrow as pa

        inside = np.zeros(rows.num, dtype=bool)
        if known.any():
            inside[known] = _parts_are_longer(RowArrays(rows.batch.filter(pa.array(known)), rows.facts))
        return inside
    draft, verify, whole = (rows.flat(name) for name in names)
    return rows.per_row(whole < _least(draft + verify), rows.owners("round_s"))


def _longer_than_its_interval(rows: RowArrays) -> Any:
    between = rows.seconds("end_s") - rows.seconds("start_s")
    wrong: Any = between < _least(rows.seconds("prefill_s") + rows.seconds("decode_s"))
    return wrong


def _shorter_than_its_interval(rows: RowArrays) -> Any:
    """Of answers decoded among others here: they begin with the prompt's first pass and end with the last round."""
    if not rows.facts.is_engine:
        return np.zeros(rows.num, dtype=bool)
    is_shared = (np.nan_to_num(rows.seconds("concurrency"), nan=1.0) > 1) | ~np.isnan(rows.seconds("rate"))
    between = rows.seconds("end_s") - rows.seconds("start_s")
    return is_shared & (_least(between) > rows.seconds("prefill_s") + rows.seconds("decode_s"))


def _before_the_run(rows: RowArrays) -> Any:
    begin: Any = rows.seconds("start_s") < 0
    return begin


# Counts and tokens


def _ids_off_count(rows: RowArrays) -> Any:
    counts = rows.round_sum("drafted")
    wrong = rows.has_ids & (rows.lengths("drafted_ids") != counts)
    parents = rows.lengths("drafted_parents")
    return wrong | (rows.has_ids & (parents >= 0) & (parents != counts))


def _no_tree(rows: RowArrays) -> Any:
    drafts = rows.drafts
    if drafts.parents is None:
        return np.zeros(rows.num, dtype=bool)
    wrong = (drafts.parents < -1) | (drafts.parents >= drafts.place)
    return rows.per_row(wrong, drafts.owner[drafts.round])


def _wider_than_its_method(rows: RowArrays) -> Any:
    widest = rows.by_method(lambda label: rows.facts.blocks[label].widest if label in rows.facts.blocks else 1 << 16)
    owners = rows.owners("drafted")
    return rows.per_row(rows.flat("drafted") > widest[owners], owners)


def _less_than_a_block(rows: RowArrays) -> Any:
    if not rows.facts.is_engine:
        return np.zeros(rows.num, dtype=bool)
    blocks = rows.facts.blocks
    whole = rows.by_method(lambda label: blocks[label].widest if label in blocks and blocks[label].is_whole else 0)
    owners = rows.owners("drafted")
    return rows.per_row(rows.flat("drafted") < whole[owners], owners)


def _kept_what_was_not_drafted(rows: RowArrays) -> Any:
    return rows.along[0]


def _kept_too_little(rows: RowArrays) -> Any:
    """Only where what was right is kept for certain: greedily, by a method that keeps to the target."""
    greedy: Any = is_greedy(rows.seconds("temperature"))
    return rows.along[1] & greedy & ~rows.by_method(is_lossy)


def _along_the_drafts(rows: RowArrays) -> tuple[Any, Any]:
    """Rows with a round that kept other tokens than it drafted, or of which a drafted token more was right, [rows]."""
    drafts = rows.drafts
    in_chain = ~drafts.is_tree[drafts.round]
    same = drafts.ids == drafts.emitted(drafts.round, drafts.place)
    kept = drafts.kept[drafts.round]
    other = in_chain & (drafts.place < kept) & ~same
    more = in_chain & (drafts.place == kept) & drafts.is_uncut[drafts.round] & same
    owners = drafts.owner[drafts.round]
    other, more = rows.per_row(other, owners), rows.per_row(more, owners)
    if drafts.parents is not None:
        lost, right = _down_the_trees(drafts)
        other, more = other | rows.per_row(lost, drafts.owner), more | rows.per_row(right, drafts.owner)
    return other, more


def _down_the_trees(drafts: Drafts) -> tuple[Any, Any]:
    """Rounds whose tokens are no way down their tree, and those whose way could have gone on, [rounds]."""
    assert drafts.parents is not None
    nodes = np.flatnonzero(drafts.is_tree[drafts.round])
    rounds, ids = drafts.round[nodes], drafts.ids[nodes]
    # Where each node's parent is among `nodes`; the anchor of all is behind the last. Bad parents are another law's.
    parents = np.clip(drafts.parents[nodes], -1, drafts.place[nodes] - 1)
    above = np.where(parents < 0, len(nodes), np.arange(len(nodes)) - drafts.place[nodes] + parents)
    kept = drafts.kept[rounds]
    right = np.zeros(len(drafts.kept), dtype=bool)
    depth = np.zeros(len(drafts.kept), dtype=np.int64)
    reached = np.zeros(len(nodes) + 1, dtype=bool)
    reached[-1] = True
    for level in range(int(drafts.kept[drafts.is_tree].max(initial=0)) + 1):
        hit = np.flatnonzero(reached[above] & (kept >= level))
        hit = hit[ids[hit] == drafts.emitted(rounds[hit], level)]
        ends = kept[hit] == level
        right[rounds[hit[ends]]] = True
        goes_on = hit[~ends]
        depth[rounds[goes_on]] = level + 1
        reached = np.zeros(len(nodes) + 1, dtype=bool)
        reached[goes_on] = True
    return drafts.is_tree & (depth < drafts.kept), right & drafts.is_uncut


# Ends


def _wrong_end(rows: RowArrays) -> Any:
    """An answer ends at its first stop token, which it holds, or where there is no more room."""
    facts, num = rows.facts, np.maximum(rows.lengths("token_ids"), 0)
    if facts.stop_ids is None or not facts.is_engine:
        return np.zeros(rows.num, dtype=bool)
    stops, owners = np.isin(rows.flat("token_ids"), facts.stop_ids), rows.owners("token_ids")
    num_stops = np.bincount(owners, weights=stops, minlength=rows.num)
    last = np.zeros(rows.num, dtype=bool)
    last[num > 0] = stops[np.cumsum(num)[num > 0] - 1]
    stopped = validity.among(rows.batch.column("finish_reason"), ["stop"])
    return (num > 0) & np.where(stopped, ~last | (num_stops != 1), num_stops > 0)


def _wrong_length(rows: RowArrays) -> Any:
    facts, num = rows.facts, np.maximum(rows.lengths("token_ids"), 0)
    if facts.max_new_tokens is None or facts.context_length is None or not facts.is_engine:
        return np.zeros(rows.num, dtype=bool)
    room = np.minimum(facts.max_new_tokens, facts.context_length - rows.seconds("num_prompt_tokens"))
    cut = validity.among(rows.batch.column("finish_reason"), ["length"]) & ~rows.by_method(is_lossy)
    return (num > 0) & ((num > facts.max_new_tokens) | (cut & (num != room)))


# What others say


def _excused_too_much(rows: RowArrays) -> Any:
    tolerances = (rows.seconds(columns[2]) for columns in validity.VERDICTS.values())
    return np.logical_or.reduce([tolerance > rows.facts.ceiling * (1 + 1e-6) for tolerance in tolerances])


def _totals_of_no_answer(rows: RowArrays) -> Any:
    """By the server's own way of counting; totals that do not say it are held to what all ways have in common."""
    hidden = rows.seconds("num_hidden_tokens")
    num = np.where(np.isnan(hidden), np.maximum(rows.lengths("token_ids"), 0), hidden)
    rounds, drafted, accepted = (rows.seconds(name) for name in validity.TOTALS)
    wrong = (rounds > num) | (accepted > num + np.nan_to_num(drafted / np.maximum(rounds, 1), nan=1 << 16))
    ways, ends = (rows.batch.column(name).to_pylist() for name in ("counted_by", "finish_reason"))
    for row in np.flatnonzero(~np.isnan(rounds + accepted)):
        if ways[row] is not None and rule_of(ways[row]) is not None:
            drafts = None if np.isnan(drafted[row]) else int(drafted[row])
            counts = AcceptanceCounts(int(rounds[row]), int(accepted[row]), drafts, by=ways[row])
            hides = not np.isnan(hidden[row])
            why = contradiction(counts, int(num[row]), at_limit=ends[row] != "stop", hides_tokens=hides)
            wrong[row] |= why is not None
    return wrong


def _unknown_rule(rows: RowArrays) -> Any:
    ways = rows.batch.column("counted_by").to_pylist()
    unknown = {way for way in set(ways) if way is not None and rule_of(way) is None}
    return np.array([way in unknown for way in ways], dtype=bool)


class RowLaw(NamedTuple):
    why: str
    """What is wrong with a row that breaks it."""
    broken: Callable[[RowArrays], Any]
    """The mask of rows that do, [rows]."""


LAWS = (
    RowLaw("its rounds took longer than decode_s", _rounds_are_longer),
    RowLaw("its rounds took less than decode_s, and nothing else was done", _rounds_are_shorter),
    RowLaw("drafting and verifying took longer than their round", _parts_are_longer),
    RowLaw("prefill_s and decode_s are longer than from start_s to end_s", _longer_than_its_interval),
    RowLaw("prefill_s and decode_s are shorter than from start_s to end_s", _shorter_than_its_interval),
    RowLaw("it began before the run", _before_the_run),
    RowLaw("drafted_ids or drafted_parents are not as many as were drafted", _ids_off_count),
    RowLaw("drafted_parents are no tree", _no_tree),
    RowLaw("a round drafts more tokens than its method can", _wider_than_its_method),
    RowLaw("a round drafts less than its method's block", _less_than_a_block),
    RowLaw("what a round accepted is not what it drafted", _kept_what_was_not_drafted),
    RowLaw("a round accepted less than was right", _kept_too_little),
    RowLaw("it does not end at its first stop token", _wrong_end),
    RowLaw("it is longer than allowed, or was cut off before that", _wrong_length),
    RowLaw("a verdict excuses more than rounding can", _excused_too_much),
    RowLaw("its totals of rounds are not those of its tokens", _totals_of_no_answer),
    RowLaw(f"its rounds follow {UNKNOWN_RULE}", _unknown_rule),
)


def faults(batch: Any, facts: Facts) -> dict[str, Any]:
    """The numbers of rows that no run can have measured, by what is wrong, in an Arrow batch of all `COLUMNS`."""
    import pyarrow as pa

    found = validity.faults(batch)
    sound = batch.column("error").is_null().to_numpy(zero_copy_only=False).copy()
    for rows in found.values():
        sound[rows] = False
    at = np.flatnonzero(sound)
    lawful = RowArrays(batch if sound.all() else batch.filter(pa.array(sound)), facts)
    with np.errstate(invalid="ignore"):
        for law in LAWS:
            broken = law.broken(lawful)
            if broken.any():
                found[law.why] = at[broken]
    return found


# Is a text what its tokens say? By a tokenizer that whoever asks brings along, as results know no models.


Decode = Callable[[Sequence[Sequence[int]]], Sequence[str]]
"""The texts of these answers' tokens, without special tokens. Raises OverflowError for an id that cannot be one."""
TEXT_COLUMNS = ("token_ids", "text", "error")
OTHER = "its text is not what its tokens say"


def other(batch: Any, decode: Decode) -> list[int]:
    """The rows of an Arrow batch whose text is another; those without tokens have none to be held against."""
    told = batch.column("error").is_null().to_numpy(zero_copy_only=False) & (lengths_of(batch.column("token_ids")) > 0)
    rows = np.flatnonzero(told).tolist()
    tokens = [batch.column("token_ids")[row].as_py() for row in rows]
    said: Sequence[str | None]
    try:
        said = decode(tokens)
    except OverflowError:
        said = [_said(decode, one) for one in tokens]
    stored = batch.column("text").to_pylist()
    return [row for row, text in zip(rows, said, strict=True) if stored[row] != text]


def _said(decode: Decode, tokens: Sequence[int]) -> str | None:
    try:
        return decode([tokens])[0]
    except OverflowError:
        return None
