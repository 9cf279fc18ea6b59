"""A run and its result in words: for the card, and for the head of the page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import geometric_mean

from dflash_bench.analysis.cells import Share
from dflash_bench.analysis.metrics import BASELINE, COLUMN
from dflash_bench.analysis.stats import Interval
from dflash_bench.core import labels
from dflash_bench.core.draft_kinds import DFLASH, with_kind
from dflash_bench.core.methods import draft_of, shown
from dflash_bench.core.types import OWN_WEIGHTS, Settings
from dflash_bench.report.document import Document, MethodLine
from dflash_bench.report.tables import marks, number, with_interval
from dflash_bench.results.identity import NAMES, OF_SAMPLING, settings_of, value_words
from dflash_bench.results.run_info import (
    DraftEntry,
    GitCommit,
    MethodEntry,
    RunIdentity,
    RunInfo,
    ServerEntry,
    SuiteEntry,
)

GB = 1e9
PLAIN_WORDS = {"speedup.decode": "speed-up", "al.pooled": "tokens per round", "tps.total": "tokens/s of all answers"}
"""Names of figures where space is short: at the axes of plots, which explain the ids below."""


def sentences(document: Document) -> list[str]:
    """Return the headline in sentences, without methods that cannot be compared."""
    means = document.means()
    faster = [
        f"{line.name} is {_as_fast(document, line, speedup)}{_weak(document, line)}"
        for line, speedup, _ in means
        if speedup
    ]
    longer = [f"{line.name} {number(al)}" for line, _, al in means if al]
    lines = []
    if faster:
        lines.append(
            f"Compared with plain decoding: {'; '.join(faster)} (speedup.decode{geometric_note(document)}, 95 %)."
        )
    if longer:
        lines.append(f"Tokens per forward pass of the target: {', '.join(longer)} (al.pooled).")
    return [*lines, *of_answers(document)]


def of_answers(document: Document) -> list[str]:
    """Return sentences on the answers: whether they are exact, the model's own, and right."""
    exact, audit, passed = (tally(document, name) for name in ("exact", "audit", "passed"))
    lines = []
    if exact and exact[0] == exact[1]:
        lines.append(f"All {exact[1]:,} compared answers match plain decoding, {compared(document)}.")
    elif exact:
        lines.append(_not_plain(document, exact))
    if audit and audit[0] == audit[1]:
        lines.append(f"In all {audit[1]:,} judged answers, every token is the published model's own choice.")
    if passed:
        own = [cell.passed for cell in document.cells if cell.method == BASELINE and cell.passed]
        plain = f" (plain decoding: {_percent(*map(sum, zip(*own, strict=True)))})" if own else ""
        lines.append(f"Accuracy with drafts: {_percent(*passed)}{plain}{cut_note(document)}.")
    return lines


def _percent(right: int, num: int) -> str:
    return f"{100 * right / num:.1f} %"


def cut_note(document: Document) -> str:
    """Return how many of the drafting methods' scored answers the token limit cut; empty if it cut none."""
    cut = tally(document, "cut")
    return f" ({cut[0]:,} were cut at the token limit)" if cut else ""


def _as_fast(document: Document, line: MethodLine, speedup: Interval) -> str:
    if (typical := document.typical(line)) is None:
        return f"{with_interval(speedup)} times as fast"
    return f"{with_interval(typical)} times as fast over prompts, {with_interval(speedup)} over all tokens together"


def _not_plain(document: Document, exact: Share) -> str:
    others = exact[1] - exact[0]
    ties = sum(cell.num_near_ties for cell in document.cells if cell.method != BASELINE)
    explained = f"rounding explains {'all' if ties >= others else ties or 'none'} of them"
    return f"{others:,} of {exact[1]:,} compared answers differ from plain decoding; {explained}."


def speedups(document: Document, is_known: bool) -> str:
    """Explain the speed-ups, or why there are none."""
    plain = {(cell.suite, cell.settings) for cell in document.cells if cell.method == BASELINE and cell.num_prompts}
    if not is_known and any(cell.forbidden for cell in document.cells):
        return document.why_no_speedup()
    bare = dict.fromkeys(
        (cell.suite, cell.source)
        for cell in document.cells
        if cell.num_prompts and (cell.suite, cell.settings) not in plain
    )
    if bare and not is_known:
        return f"no plain answers to compare with on {labels.suite_list(bare)}"
    return f"speedup.decode{geometric_note(document)}"


def bandwidth_note(document: Document) -> str:
    """Return the share of memory bandwidth that plain decoding uses; empty if the run did not measure it."""
    plain = [cell.sums for cell in document.cells if cell.method == BASELINE and cell.num_prompts]
    needed_s, taken_s = (sum(sums[:, COLUMN[name]].sum() for sums in plain) for name in ("weights_s", "reading_s"))
    return f"plain decoding uses {100 * needed_s / taken_s:.0f} % of memory bandwidth" if taken_s else ""


def _weak(document: Document, line: MethodLine) -> str:
    names = ", ".join(badge.name for badge in document.badges(line))
    return f" ({names})" if names else ""


def with_badges(document: Document, line: MethodLine, speedup: Interval | None) -> str:
    """Return the speed-up with its interval, followed by the marks of its badges."""
    return " ".join(filter(None, [with_interval(speedup), marks(document.badges(line))]))


def geometric_note(document: Document) -> str:
    num_suites = len({cell.suite for cell in document.cells if cell.method != BASELINE and cell.num_prompts})
    return f", geometric mean over {num_suites} suites" if num_suites > 1 else ""


def tally(document: Document, name: str, line: MethodLine | None = None) -> Share | None:
    """Sum a share over all suites, for one drafting method or for all; None if nothing was judged."""
    cells = [cell for cell in document.cells if cell.method != BASELINE]
    cells = line.cells_of(cells) if line else cells
    known = [counts for cell in cells if (counts := getattr(cell, name))]
    return (sum(right for right, _ in known), sum(judged for _, judged in known)) if known else None


def compared(document: Document) -> str:
    """Return how answers were compared with the plain output: `token for token`, `as text`, or some of each."""
    num, exact = num_as_text(document), tally(document, "exact")
    if not num or not exact:
        return "token for token"
    return "as text" if num == exact[1] else f"token for token, but {num:,} as text"


def num_as_text(document: Document, line: MethodLine | None = None) -> int:
    """Return how many answers of the drafting methods, or of one, were compared as text."""
    cells = line.cells_of(document.cells) if line else document.cells
    return sum(cell.as_text for cell in cells if cell.method != BASELINE)


def facts(info: RunInfo) -> dict[str, str]:
    """Return the conditions of the results, from `run.json`, by topic. Topics that were not recorded are left out."""
    identity, env = info.identity, info.environment
    revisions = identity.revisions
    lines = {
        "model": f"{_model(identity)}{_revision(revisions.get('target'))}",
        "draft": ", ".join(_draft(name, method, identity) for name, method in _drafting(identity)),
        "servers": "; ".join(_server(name, server) for name, server in identity.servers.items()),
        "suite": "; ".join(_suite(name, suite, info) for name, suite in identity.suites.items()),
        "machine": env.one_line().partition(";")[0] + _whose(identity),
        "settings": ", ".join(_settings(identity)),
        "memory": memory(info),
        "versions": ", ".join([f"Python {env.python}", *(f"{n} {v}" for n, v in env.packages.items() if v)]),
        "commit": _commit(env.git),
        "code ran in": info.sandbox or "",
        "started": str(info.started or ""),
    }
    return {name: text for name, text in lines.items() if text}


PARTS = {"verify_ms": "verification", "draft_ms": "drafting", "other_ms": "overhead"}
"""The parts of a round, in words."""


def why_not_faster(document: Document, line: MethodLine) -> str:
    """Return what a method's rounds give and cost, in plain steps, and which part of them costs most.

    Over several suites these are geometric means. Empty if the times of a round's parts are unknown.
    """
    rounds = []
    for cell in line.cells_of(document.cells):
        values = [cell.value(name) for name in ("al.pooled", "plain_ms", *PARTS)]
        if cell.num_prompts and all(value is not None for value in values) and values[1]:
            rounds.append([value or 0.0 for value in values])
    if not rounds:
        return ""
    lengths, plain, *parts = zip(*rounds, strict=True)
    costs = [sum(several) / step for step, *several in zip(plain, *parts, strict=True)]
    name, most = max(zip(PARTS.values(), map(sum, parts), strict=True), key=lambda one: one[1])
    share = most / sum(map(sum, parts))
    length, cost = geometric_mean(lengths), geometric_mean(costs)
    steps = f"each as long as {number(cost)} plain steps"
    return f"{number(length)} tokens per round, {steps}; {name} takes {share:.0%} of it"


def memory(info: RunInfo) -> str:
    """Describe the memory predicted before the models were loaded; empty for a run that recorded none."""
    known = info.memory
    if not known:
        return ""
    weights, caches = (
        f"{_size(getattr(known, f'target_{part}_bytes'))} for the target"
        + (f" and {_size(getattr(known, f'draft_{part}_bytes'))} for drafts" if known.draft_weights_bytes else "")
        for part in ("weights", "cache")
    )
    free, largest, without = known.free_bytes, known.largest_context, known.largest_context_without_drafts
    words = f"weights {weights}; caches {caches}"
    if info.identity.judge and info.identity.judge.weights == OWN_WEIGHTS:
        words = f"weights {weights}, plus a second copy of the target for the judge; caches {caches}"
    if free is None:
        return words
    others = f", {without:,} without drafts" if without != largest else ""
    return f"{words}; {_size(free)} were free, enough for a context of {largest:,} tokens{others}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= GB else f"{num_bytes / 1e6:.0f} MB"


def _model(identity: RunIdentity) -> str:
    name, target = str(identity.model), identity.target
    return f"{name}, target {target}" if target and target != name else name


def _drafting(identity: RunIdentity) -> Sequence[tuple[str, MethodEntry]]:
    return [(name, method) for name, method in identity.methods.items() if name != BASELINE]


def _draft(label: str, method: MethodEntry, identity: RunIdentity) -> str:
    """Describe a draft by its revision, and by its name if that adds to the label."""
    draft = draft_of(label) or ""
    entry = identity.drafts.get(draft, DraftEntry())
    name, kind = entry.name or draft, entry.kind if entry.kind != DFLASH else None
    source = f" from {name}" if name != draft else ""
    revision = _revision(identity.revisions.get(draft))
    if method.imposed:
        return f"{label}, whose server accepts {len(method.imposed)} drafted tokens per round at given rates"
    if method.num_drafts is None:
        return f"{label}, as its server was started"
    return f"{with_kind(label, kind)} with {method.num_drafts} tokens per round{source}{revision}"


def _server(label: str, server: ServerEntry) -> str:
    version = f"{server.dialect} {server.version or ''}".rstrip()
    model = f" with {server.model}" if server.model else ""
    how = f"prompts as {server.prompts}, prefix cache {server.prefix_cache}"
    return f"{shown(label)} from {version}{model} at {server.address} ({how})"


def _whose(identity: RunIdentity) -> str:
    """Note that the machine is the client's: servers may run elsewhere and do not report theirs."""
    return " (of the client; the servers' is not known)" if identity.servers else ""


def _revision(text: str | None) -> str:
    """Return a revision in brackets; a hash, such as of weights, is cut to its first digits."""
    short = re.sub(r"(?<![^@])([0-9a-f]{12})[0-9a-f]{28,52}$", r"\1", text or "")
    return f" ({short})" if short else ""


def _suite(name: str, suite: SuiteEntry, info: RunInfo) -> str:
    """Describe a suite, with its full source if the short form leaves something out: a commit, or a folder's path."""
    place = labels.PromptSource.read(suite.source).place
    number = f"{suite.prompts:,}"
    if info.identity.shard is not None and info.plan is not None:
        number = f"{len(info.plan.prompts.get(name, ())):,} of {number}"
    elif info.measured is not None:
        number = f"{info.measured.get(name, 0):,} of {number}"
    where = f" from {place}" if place else ""
    return (
        f"{labels.suite_label(name, suite.source)} v{suite.version}, {number} prompts{where}{_revision(suite.revision)}"
    )


def _settings(identity: RunIdentity) -> list[str]:
    known = {
        "dtype": identity.dtype,
        "quantize": identity.quantize,
        "device": identity.device,
        "threads": identity.threads,
        "workers": _workers(identity),
        "clients": identity.clients,
        "tensor parallel": identity.tensor_parallel,
        "attention": None if identity.paths else identity.attention,
        **{part: path.used for part, path in identity.paths.items()},
        "engine": _engine(identity),
        "judge": identity.judge.weights if identity.judge else None,
        "capture": None if identity.capture == "off" or identity.paths else identity.capture,
        **_of_settings(settings_of(identity)),
        "max new tokens": identity.max_new_tokens,
        "repeats": identity.repeats,
    }
    return [
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in known.items()
        if value is not None
    ]


def _engine(identity: RunIdentity) -> str | None:
    network = identity.network
    return f"{network} (the engine's own {identity.fallback})" if identity.fallback else network


def _workers(identity: RunIdentity) -> str | None:
    """Return `4, at most 2 on one machine`."""
    workers = identity.workers
    return None if workers is None else f"{workers.number}, at most {workers.on_one_machine} on one machine"


def _of_settings(several: Sequence[Settings]) -> dict[str, str]:
    """Return each changed setting with all its values, such as `temperature 0 and 1`, and always thinking."""
    usual = Settings()
    sampled = [settings for settings in several if not settings.greedy]
    values = {
        name: list(dict.fromkeys(getattr(settings, name) for settings in (sampled if name in OF_SAMPLING else several)))
        for name in NAMES
    }
    changed = {
        name.replace("_", " "): " and ".join(value_words(name, of_name).values())
        for name, of_name in values.items()
        if name != "thinking" and (name == "temperature" or {*of_name} - {getattr(usual, name)})
    }
    modes = {True: "on", False: "off", None: "cannot be switched"}
    return changed | {"thinking": " and ".join(modes[mode] for mode in values["thinking"])}


def _commit(git: GitCommit | None) -> str:
    return f"{git.commit[:12]}{' with uncommitted changes' if git.dirty else ''}" if git else ""
