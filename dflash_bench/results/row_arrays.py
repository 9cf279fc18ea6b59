"""The rows of an Arrow batch as arrays, for checking them; and numbering of a frame's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dflash_bench.core.methods import name_of
from dflash_bench.core.types import CEILINGS

if TYPE_CHECKING:
    from dflash_bench.results.run_info import MethodEntry, RunIdentity

COUNTS = ("drafted", "accepted", "emitted")
SECONDS = ("draft_s", "verify_s", "round_s")
WHOLE_BLOCKS = ("dflash", "draft-model", "eagle3")
"""Methods that draft the same number of tokens in every round, unless the option is "auto"."""


class Block(NamedTuple):
    """The most tokens that a method drafts per round, and whether it always drafts that many."""

    widest: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts in `run.json` that rows are checked against; None if absent."""

    blocks: Mapping[str, Block]
    ceiling: float
    """Largest gap in logits that rounding can explain."""
    is_engine: bool = False
    """Whether it was measured in our process."""
    max_new_tokens: int | None = None
    context_length: int | None = None
    stop_ids: tuple[int, ...] | None = None

    @classmethod
    def of(cls, identity: RunIdentity) -> RunFacts:
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
    def __init__(self, batch: Any, facts: RunFacts) -> None:
        self.batch, self.facts, self.num = batch, facts, len(batch)
        self._lengths: dict[str, Any] = {}

    def only(self, chosen: Any) -> RowArrays:
        """Return the rows of the mask `chosen`, [rows]."""
        import pyarrow as pa

        return self if chosen.all() else RowArrays(self.batch.filter(pa.array(chosen)), self.facts)

    def among(self, chosen: Any, broken: Callable[[RowArrays], Any]) -> Any:
        """Return the mask of rows that are `chosen` and `broken`, which is evaluated on these rows only, [rows]."""
        found = np.zeros(self.num, dtype=bool)
        if chosen.any():
            found[chosen] = broken(self.only(chosen))
        return found

    def numbers(self, name: str) -> Any:
        """Return a column of numbers, NaN for null, [rows]."""
        return numbers_of(self.batch, name)

    def counts(self, name: str) -> Any:
        """Return an integer column, -1 for null, [rows]."""
        return self.batch.column(name).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)

    def is_known(self, name: str) -> Any:
        """Return the mask of rows where the column is not null, [rows]."""
        return self.batch.column(name).is_valid().to_numpy(zero_copy_only=False)

    def is_one_of(self, name: str, words: Any) -> Any:
        """Return the mask of rows with one of these words in a column of text, [rows]."""
        import pyarrow as pa
        from pyarrow import compute

        words = pa.array(list(words), pa.string())
        return compute.is_in(self.batch.column(name), words).to_numpy(zero_copy_only=False)

    def lengths(self, name: str) -> Any:
        """Return the length of each list, -1 for null, [rows]."""
        if name not in self._lengths:
            self._lengths[name] = lengths_of(self.batch.column(name))
        return self._lengths[name]

    def flat(self, name: str) -> Any:
        """Return the concatenated values of all lists."""
        return self.batch.column(name).flatten().to_numpy(zero_copy_only=False)

    @cached_property
    def succeeded(self) -> Any:
        return ~self.is_known("error")

    @cached_property
    def methods(self) -> tuple[list[str], Any]:
        """Return the labels, and each row's index among them, [rows]."""
        encoded = self.batch.column("method").dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return [*map(str, encoded.dictionary.to_pylist()), "?"], codes

    def by_method(self, value: Callable[[str], Any]) -> Any:
        """Return the value of each row's method, [rows]."""
        labels, codes = self.methods
        return np.array([value(label) for label in labels])[codes]

    def owning(self, name: str, wrong: Any) -> Any:
        """Return the mask of rows with a `wrong` value in their list; `wrong` is a mask over `flat(name)`, [rows]."""
        return self.per_row(wrong, self.owners(name)) if wrong.any() else np.zeros(self.num, dtype=bool)

    def per_row(self, places: Any, owners: Any) -> Any:
        """Return the mask of rows that own any of these places, [rows]."""
        mask = np.zeros(self.num, dtype=bool)
        mask[owners[places]] = True
        return mask

    def owners(self, name: str) -> Any:
        """Return the row of each value in `flat`."""
        return np.repeat(np.arange(self.num), np.maximum(self.lengths(name), 0))

    def round_sum(self, name: str) -> Any:
        """Return the sum of each list, 0 for null, [rows]."""
        return np.bincount(self.owners(name), weights=self.flat(name), minlength=self.num)

    @cached_property
    def is_counted(self) -> Any:
        """Return the mask of rows with all counts of their rounds, [rows]."""
        return np.logical_and.reduce([self.lengths(name) >= 0 for name in COUNTS])

    @cached_property
    def num_decoded(self) -> Any:
        """Return the number of tokens after those that came with the first, [rows]."""
        tokens = np.maximum(np.maximum(self.lengths("token_ids"), 0), self.counts("num_hidden_tokens"))
        first = self.counts("num_first_tokens")
        return np.where(first > 0, tokens - first, np.maximum(self.round_sum("emitted"), tokens - 1))

    @cached_property
    def verified(self) -> Any:
        """Return the number of verified drafted tokens per round, [rounds]: all, if not recorded."""
        counts = self.flat("drafted").astype(np.int32)
        stored = np.repeat(self.lengths("verified") >= 0, np.maximum(self.lengths("drafted"), 0))
        counts[stored] = self.flat("verified")
        return counts

    @cached_property
    def has_ids(self) -> Any:
        """Return the mask of rows with the ids of all tokens drafted in their rounds, [rows]."""
        return self.is_counted & (self.lengths("drafted_ids") >= 0)

    @cached_property
    def ids_off_count(self) -> Any:
        """Return the mask of rows with another number of drafted ids than drafted tokens, [rows]."""
        counts, parents = self.round_sum("drafted"), self.lengths("drafted_parents")
        return self.has_ids & ((self.lengths("drafted_ids") != counts) | ((parents >= 0) & (parents != counts)))

    @cached_property
    def drafts(self) -> Drafts:
        return Drafts.of(self)

    @cached_property
    def along_the_drafts(self) -> tuple[Any, Any]:
        """Return masks of rows with a round that kept undrafted tokens, and that rejected a right token, [rows]."""
        drafts = self.drafts
        in_chain = ~drafts.is_tree[drafts.round]
        same = drafts.ids == drafts.emitted(drafts.round, drafts.place)
        kept = drafts.kept[drafts.round]
        other = in_chain & (drafts.place < kept) & ~same
        more = in_chain & (drafts.place == kept) & drafts.is_uncut[drafts.round] & same
        more &= drafts.place < drafts.verified[drafts.round]
        owners = drafts.owner[drafts.round]
        other, more = self.per_row(other, owners), self.per_row(more, owners)
        if drafts.parents is not None:
            lost, right = _down_the_trees(drafts)
            other, more = other | self.per_row(lost, drafts.owner), more | self.per_row(right, drafts.owner)
        return other, more


@dataclass(frozen=True, slots=True)
class Drafts:
    """Each drafted token with the tokens emitted in its round, for rows whose ids match their counts.

    Arrays [rounds] cover the rounds of these rows, and [drafted] the tokens drafted in them.
    """

    owner: Any
    """The row of each round, [rounds]."""
    kept: Any
    """Number of drafted tokens emitted: all accepted, unless the round was truncated, [rounds]."""
    is_uncut: Any
    """Whether everything was emitted, including the target's own token at the end, [rounds]."""
    verified: Any
    """Number of drafted tokens verified, [rounds]."""
    round: Any
    """The round of each drafted token, [drafted]."""
    place: Any
    """Its position in the round, [drafted]."""
    ids: Any
    begins: Any
    """Index in `tokens` of each round's first token, [rounds]."""
    tokens: Any
    """The concatenated tokens of all answers."""
    parents: Any | None
    """The parent of each drafted token, -1 for the anchor; None if all are chains, [drafted]."""
    is_tree: Any
    """[rounds]"""

    @classmethod
    def of(cls, rows: RowArrays) -> Drafts:
        usable = rows.has_ids & ~rows.ids_off_count
        chosen = rows.only(usable)
        at = np.flatnonzero(usable)
        drafted, accepted, emitted = (chosen.flat(name).astype(np.int32) for name in ("drafted", "accepted", "emitted"))
        of_round = chosen.owners("accepted")
        tokens = np.maximum(chosen.lengths("token_ids"), 0)
        # The first token of an answer comes from prefill.
        before = np.cumsum(emitted, dtype=np.int64) - emitted
        num_rounds = np.maximum(chosen.lengths("accepted"), 0)
        first = (np.cumsum(num_rounds) - num_rounds)[of_round]
        begins = (np.cumsum(tokens) - tokens)[of_round] + 1 + before - before[first]
        of_token, place = places_of(drafted)
        parents, is_tree = _parents(chosen, of_round)
        return cls(
            owner=at[of_round],
            kept=np.minimum(accepted, emitted),
            is_uncut=emitted == accepted + 1,
            verified=chosen.verified,
            round=of_token,
            place=place,
            ids=chosen.flat("drafted_ids"),
            begins=begins,
            tokens=chosen.flat("token_ids"),
            parents=parents,
            is_tree=is_tree,
        )

    def emitted(self, rounds: Any, place: Any) -> Any:
        """Return the tokens that these rounds emitted at these positions; beyond the end, an arbitrary token."""
        if not len(self.tokens):
            return np.zeros(len(rounds), dtype=np.int64)
        return self.tokens[np.minimum(self.begins[rounds] + place, len(self.tokens) - 1)]


def places_of(drafted: Any) -> tuple[Any, Any]:
    """Return the round of each drafted token, and its position in it, [drafted]; 32 bits, since there are many."""
    of_token = np.repeat(np.arange(len(drafted), dtype=np.int32), drafted)
    begins = (np.cumsum(drafted, dtype=np.int64) - drafted).astype(np.int32)
    return of_token, np.arange(len(of_token), dtype=np.int32) - np.repeat(begins, drafted)


def _parents(rows: RowArrays, of_round: Any) -> tuple[Any | None, Any]:
    """Return the parents of all drafted tokens, also of chains, and which rounds are of a row that stores parents."""
    named = rows.lengths("drafted_parents") >= 0
    is_tree = named[of_round]
    if not named.any():
        return None, is_tree
    of_token, place = places_of(rows.flat("drafted").astype(np.int32))
    parents = place - 1
    parents[is_tree[of_token]] = rows.flat("drafted_parents")
    return parents, is_tree


def _down_the_trees(drafts: Drafts) -> tuple[Any, Any]:
    """Return rounds whose tokens are no path of their tree, and rounds whose path could be longer, [rounds]."""
    assert drafts.parents is not None
    nodes = np.flatnonzero(drafts.is_tree[drafts.round])
    rounds, ids = drafts.round[nodes], drafts.ids[nodes]
    # Index of each node's parent in `nodes`; the anchor is past the end. Another check looks for bad parents.
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


def lengths_of(column: Any, of_null: int = -1) -> Any:
    """Return the length of each list."""
    from pyarrow import compute

    return compute.fill_null(compute.list_value_length(column), of_null).to_numpy(zero_copy_only=False).astype(np.int64)


def numbers_of(batch: Any, name: str) -> Any:
    """Return a column of numbers, NaN for null, [rows]."""
    return batch.column(name).cast("double").fill_null(np.nan).to_numpy(zero_copy_only=False)


def numbered(rows: Any, names: Sequence[str]) -> Any:
    """Number the distinct values of these columns of a frame, in their order, and return each row's number, [rows].

    Columns are categories, of which none comes first, or integers. Combining their codes costs less than grouping by
    each column, as pandas does.
    """
    numbers = np.zeros(len(rows), dtype=np.int64)
    for name in names:
        column = rows[name]
        values = (column.cat.codes if hasattr(column, "cat") else column).to_numpy().astype(np.int64)
        values -= values.min(initial=0)
        if values.any():
            # Renumbered after each column, so that the product cannot overflow.
            numbers = np.unique(numbers * (values.max() + 1) + values, return_inverse=True)[1]
    return numbers
