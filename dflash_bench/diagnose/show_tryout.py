"""A tryout in twelve lines: the server, its drafting, its figures by kind of text, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from dflash_bench.core.labels import clipped, shortened, visible, wrapped
from dflash_bench.diagnose.published import PublishedDraft
from dflash_bench.diagnose.tryout import SEVERAL, Tryout
from dflash_bench.report.tables import ABSENT, aligned, number

WIDTH = 80
LONGEST_ERROR = 120
MOST_NAMED = 2
HEADS = ["", "tokens per round", "tokens/s", "first token"]


def text(found: Tryout, width: int = WIDTH) -> str:
    """Return the result; only commands to paste are wider than `width`."""
    head = [clipped(_server(found), width), *(wrapped(line, width) for line in _drafting(found))]
    end = [*(wrapped(line, width) for line in _answers(found)), *map(visible, _next(found))]
    return "\n\n".join(["\n".join(head), _table(found), "\n".join(end)])


def _server(found: Tryout) -> str:
    version = f" {found.version}" if found.version else ""
    context = f", {found.context:,} tokens of context" if found.context else ""
    return f"{found.dialect}{version} serves {_model(found) or 'a model without a name'}{context}"


def _model(found: Tryout) -> str | None:
    """Return the model's name; of a file on the server's disk, its last part."""
    return found.model.rpartition("/")[2] if found.model and found.model.startswith("/") else found.model


def _drafting(found: Tryout) -> Iterator[str]:
    stream = found.tokens_at_a_time
    several = stream is not None and stream >= SEVERAL
    beside = (
        f"; its stream brings {number(stream)} at a time" if several or (found.drafts and stream is not None) else ""
    )
    if found.drafts is None:
        yield f"it counts no rounds, and {'probably drafts' if several else 'shows no sign of drafting'}{beside}"
        if found.uncounted:
            yield f"to see its rounds: {found.uncounted}"
    elif found.drafts:
        yield f"it drafts: {number(found.tokens_per_round)} tokens per round by its counters{beside}"
    else:
        doubt = ", although its counters show no drafts" if several else ""
        yield f"it does not draft, by its counters{beside}{doubt}"


def _table(found: Tryout) -> str:
    rows = [
        [
            one.kind,
            number(one.tokens_per_round),
            number(one.tokens_per_s, 1),
            ABSENT if one.ttft_s is None else f"{1000 * one.ttft_s:,.0f} ms",
        ]
        for one in found.kinds
    ]
    return aligned(HEADS, rows)


def _answers(found: Tryout) -> Iterator[str]:
    if found.num_repeated:
        differ = "" if found.num_same == found.num_repeated else "; the others differ from run to run"
        yield f"asked again, {found.num_same} of {found.num_repeated} greedy answers were the same{differ}"
    if found.errors:
        yield f"{len(found.errors)} answers failed, the last: {shortened(visible(found.errors[-1]), LONGEST_ERROR)}"


def _next(found: Tryout) -> Iterator[str]:
    if found.drafts:
        yield f"to compare with plain decoding: dflash-bench run --server plain=URL --server dflash={found.url}"
        return
    usable = [one for one in found.published if one.flags is not None]
    if usable:
        yield from _draft(usable[0])
    elif found.published:
        yield f"drafts for it: {', '.join(f'{one.kind} {one.reference}' for one in found.published[:MOST_NAMED])}"
    if not found.published:
        yield f"no published draft for {_model(found) or 'this model'} is known: dflash-bench train makes one"
    method = usable[0].method if usable else "dflash"
    yield f"then: dflash-bench run --server plain={found.url} --server {method}=URL --suite gsm8k"


def _draft(one: PublishedDraft) -> Iterator[str]:
    assert one.flags is not None
    words, head = shlex.join(one.flags.words), f"to draft with {one.kind}"
    if one.flags.first:
        yield f"{head}, once: dflash-bench {shlex.join(one.flags.first)}"
        yield f"  and start the server with {words}"
    else:
        yield f"{head}, start the server with {words}"
