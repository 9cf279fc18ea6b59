"""The one decoding loop: draft, verify, commit. Plain decoding is the drafter that proposes nothing.

Every method shares prefill, cache, stop rules and clock, so that a speed-up compares drafts and nothing else. Each
round moves one small tensor to the host; everything else stays where the model is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dflash_bench.engine.clock import Clock
from dflash_bench.engine.drafter import Committed, Drafter, StandAlone
from dflash_bench.engine.sampling import Sampler, Sampling
from dflash_bench.engine.sequences import DecodingError, Limits, Round, Row
from dflash_bench.engine.target import Target
from dflash_bench.engine.transfer import Lists, to_host
from dflash_bench.engine.verify import (
    Draft,
    Verdict,
    take_unverified,
    verify_chain,
    verify_children,
    verify_sampled,
    verify_tree,
)


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    clock: Clock,
    seeds: Sequence[int] | None = None,
) -> Iterator[Round]:
    """Decode rows together, round by round, until each has ended.

    `seeds` are the rows' own, in place of the one of `sampling`: with it a row draws what it would draw alone.

    Raises DecodingError for an empty prompt, one that leaves no room in the context, and NaN or infinite logits.
    """
    if isinstance(drafter, StandAlone):
        target = drafter.reader
    rows = [Row(prompt, _room(target, prompt, limits)) for prompt in prompts]
    # A block may reach past a row's limit; what lies there is cut off, but needs its place in the cache.
    capacity = max(len(row.prompt) + row.limit for row in rows) + drafter.num_drafts + 1
    target.tap(drafter.taps)
    try:
        target.begin(len(rows), capacity)
        drafter.begin(len(rows), capacity)
        num_places = limits.max_new_tokens + drafter.num_drafts + 1
        sampler = Sampler(sampling, seeds or [sampling.seed] * len(rows), num_places, target.device)
        state = _State(target, drafter, rows, limits, sampler, clock)
        yield state.prefill()
        while not state.ended:
            yield state.round()
    finally:
        # The model may be shared: taps must not slow down, or hold memory for, whoever uses it next.
        target.tap(())


def _room(target: Target, prompt: Sequence[int], limits: Limits) -> int:
    if not prompt:
        raise DecodingError("an empty prompt")
    room = min(limits.max_new_tokens, target.context_length - len(prompt))
    if room < 1:
        raise DecodingError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {target.context_length}")
    return room


class _State:
    def __init__(
        self, target: Target, drafter: Drafter, rows: list[Row], limits: Limits, sampler: Sampler, clock: Clock
    ) -> None:
        self.target, self.drafter, self.rows = target, drafter, rows
        self.stop_ids, self.sampler, self.clock = limits.stop_ids, sampler, clock
        self.starts = [0] * len(rows)
        self.anchor = torch.zeros(len(rows), dtype=torch.long, device=target.device)

    @property
    def ended(self) -> bool:
        return all(row.finish for row in self.rows)

    def prefill(self) -> Round:
        begin = self.clock.mark()
        lengths = [len(row.prompt) for row in self.rows]
        output = self.target.prefill([row.prompt for row in self.rows])
        self.sampler.begin([row.prompt for row in self.rows], output.logits.shape[-1])
        self.anchor = self.sampler.choose(self.sampler.penalise(output.logits), self.sampler.places(1))[:, 0]
        self.sampler.commit(self.anchor[:, None], torch.zeros_like(self.anchor))
        host = to_host({"tokens": self.anchor[:, None], "broken": _broken(output.logits)})
        self._refuse_broken(host["broken"], [0] * len(self.rows))
        first = host["tokens"]
        emitted: list[list[int] | None] = [
            row.emit(tokens, self.stop_ids) for row, tokens in zip(self.rows, first, strict=True)
        ]
        seen = self.clock.mark()
        if not self.ended:
            width = max(lengths)
            following = [
                [*row.prompt[1:], *token, *[0] * (width - len(row.prompt))]
                for row, token in zip(self.rows, first, strict=True)
            ]
            self._commit(output.hidden, torch.tensor(following, device=self.target.device), lengths)
        none = [0] * len(self.rows)
        return Round(emitted, none, none, [[] for _ in none], None, (begin, seen, seen, seen, self.clock.mark()))

    def round(self) -> Round:
        begin = self.clock.mark()
        draft = self.drafter.propose()
        drafted = self.clock.mark()
        block = self.anchor[:, None] if draft is None else torch.cat([self.anchor[:, None], draft.tokens], dim=1)
        tree = draft.parents if draft else None
        output = self.target.forward(block, self.starts, tree)
        verdict = self._verify(draft, self.sampler.penalise(output.logits, block, tree))
        tokens = following_tokens(block, verdict)
        self.sampler.commit(tokens, verdict.num_accepted)
        host = to_host(_parts(draft, verdict, tokens, output.logits))
        kept = [count for (count,) in host["accepted"]]
        self._refuse_broken(host["broken"], kept)
        alive = [row.finish is None for row in self.rows]
        accepted = [count * live for count, live in zip(kept, alive, strict=True)]
        moved = any(live and last > count for (last,), count, live in zip(host["last"], kept, alive, strict=True))
        # What it costs a target to forget the rest belongs to verifying.
        self.target.commit([(count + 1) * live for count, live in zip(accepted, alive, strict=True)])
        verified = self.clock.mark()
        emitted = [
            row.emit(new[: count + 1], self.stop_ids) if live else None
            for row, count, new, live in zip(self.rows, kept, host["tokens"], alive, strict=True)
        ]
        self.anchor = verdict.next_token
        observing = self.clock.mark()
        if not self.ended:
            self._keep(verdict, output.hidden, tokens, accepted, moved, host.get("choices", ()))
        lengths = (draft.lengths or [draft.width] * len(alive)) if draft else [0] * len(alive)
        end = self.clock.mark()
        counts = [length * live for length, live in zip(lengths, alive, strict=True)]
        ids = _first(host.get("drafted", [[]] * len(counts)), counts)
        parents = _first(host["parents"], counts) if "parents" in host else None
        return Round(emitted, counts, accepted, ids, parents, (begin, drafted, verified, observing, end))

    def _verify(self, draft: Draft | None, logits: Tensor) -> Verdict:
        """By penalised logits."""
        if draft is not None and draft.following is not None:
            return take_unverified(draft.tokens, draft.following)
        sampler = self.sampler
        if draft is None:
            choices = sampler.choose(logits, sampler.places(1))
            return verify_chain(choices[:, :0], choices)
        padding, parents = draft.padding, draft.parents
        places = sampler.places(logits.shape[1], parents)
        # At temperature 0 p is one-hot, and rejection sampling is the match rule: the draft's q changes nothing.
        if draft.probs is not None and places is not None:
            p = sampler.probabilities(logits)
            accept, draw = sampler.numbers("accept", places), sampler.numbers("draw", places)
            if parents is not None:
                return verify_children(draft.tokens, parents, p, draft.probs, accept, draw, padding)
            return verify_sampled(draft.tokens, p, draft.probs, accept[:, :-1], draw, padding)
        choices = sampler.choose(logits, places)
        if parents is not None:
            return verify_tree(draft.tokens, parents, choices, padding)
        return verify_chain(draft.tokens, choices, padding)

    def _keep(
        self,
        verdict: Verdict,
        hidden: Tensor | None,
        tokens: Tensor,
        accepted: list[int],
        moved: bool,
        choices: Sequence[list[int]],
    ) -> None:
        """Rows that have ended stand still, from the round that ended them on.

        Their work is repeated over the same places and thrown away; they must not move past what the cache holds.
        """
        counts = [0 if row.finish else count + 1 for row, count in zip(self.rows, accepted, strict=True)]
        longest = max(counts)
        if verdict.path is not None and moved:
            path = verdict.path[:, :longest]
            self.target.cache.keep_path(self.starts, path)
            hidden = hidden if hidden is None else hidden.take_along_dim(path[..., None], dim=1)
        self._commit(None if hidden is None else hidden[:, :longest], tokens[:, :longest], counts, choices)

    def _commit(
        self, hidden: Tensor | None, tokens: Tensor, counts: list[int], choices: Sequence[list[int]] = ()
    ) -> None:
        texts = [row.text for row in self.rows]
        self.sampler.emitted([len(row.tokens) for row in self.rows])
        starts = list(self.starts)
        self.drafter.observe(Committed(hidden, tokens, self.anchor, starts, counts, texts, self.sampler, choices))
        self.starts = [start + count for start, count in zip(self.starts, counts, strict=True)]

    def _refuse_broken(self, broken: Lists, accepted: list[int]) -> None:
        """Broken logits at one of a row's first accepted + 1 places end the generation."""
        for b, (row, flags, count) in enumerate(zip(self.rows, broken, accepted, strict=True)):
            if row.finish is None and any(flags[: count + 1]):
                raise DecodingError(f"NaN or infinite logits after {len(row.tokens)} tokens (row {b})")


def _parts(draft: Draft | None, verdict: Verdict, tokens: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """What the host wants to know of a round, each [B, n]."""
    parts = {
        "accepted": verdict.num_accepted[:, None],
        "last": verdict.last[:, None],
        "tokens": tokens,
        "broken": _broken(logits, verdict.path),
    }
    if draft is not None:
        parts["drafted"] = draft.tokens
        if draft.parents is not None:
            parts["parents"] = draft.parents
        if draft.wants_choices and verdict.choices is not None:
            parts["choices"] = verdict.choices
    return parts


def _first(rows: Lists, counts: list[int]) -> Lists:
    """Of each row so many values: without what pads them."""
    return [values[:count] for values, count in zip(rows, counts, strict=True)]


def following_tokens(block: Tensor, verdict: Verdict) -> Tensor:
    """[B, N + 1]: along the kept path the token after each place, the next token in place of the last."""
    path, last = verdict.path, verdict.next_token[:, None]
    tokens = torch.cat([block[:, 1:] if path is None else block.gather(1, path[:, 1:]), last], dim=1)
    return tokens.scatter(1, verdict.num_accepted[:, None], last)


def _broken(logits: Tensor, path: Tensor | None = None) -> Tensor:
    """[B, N]: where, along the path, is the best logit NaN or infinite? A maximum carries NaN along."""
    best = logits.amax(dim=-1)
    # Of finite numbers alone is the difference to themselves 0.
    broken = (best - best).ne(0)
    return broken if path is None else broken.gather(1, path)
