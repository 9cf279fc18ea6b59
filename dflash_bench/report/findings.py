"""Findings in words: a text and a remedy for each code, and the badges that findings put beside a speed-up.

`WORDS` is the complete list. The words of a code are filled with its fields: the values that a check observed, and the
`cell`, the code of the `remedy`, the `tally` and `how` to set the number of draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from string import Formatter
from typing import Any

from dflash_bench.analysis import stats
from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.findings import observe
from dflash_bench.analysis.findings.base import Observation
from dflash_bench.analysis.findings.speed import parts_of
from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.analysis.stats import MIN_PROMPTS
from dflash_bench.core import dialects
from dflash_bench.core.measurement import measurements
from dflash_bench.core.methods import METHODS, name_of, shown
from dflash_bench.core.types import CellKey, Divergence
from dflash_bench.report.tables import Badge
from dflash_bench.results.run_info import RunIdentity, RunInfo
from dflash_bench.tasks import sandbox


@dataclass(frozen=True, slots=True)
class Finding:
    """`kind` is its code; `text` and `remedy` are for people."""

    kind: str
    text: str
    remedy: str
    places: tuple[CellKey, ...] = ()
    """The cells it was found in; without a method if all methods of the suite share the fault under these settings."""
    remedy_code: str = ""
    """The code of its remedy; empty for a kind with only one remedy."""
    values: tuple[Mapping[str, Any], ...] = ()
    """The numbers and names that show it, for each place."""
    forbids: bool = False
    """Whether it forbids the speed-ups of its places on every screen; the run then exits with 1."""


def findings(
    rows: Any, cells: Sequence[Cell], identity: RunIdentity | None = None, info: RunInfo | None = None
) -> list[Finding]:
    """Return the findings of a run, faults before weaknesses; observations with the same remedy share a finding."""
    alike: dict[tuple[object, ...], list[Observation]] = {}
    for seen in observe(rows, cells, identity, info):
        fields = _fields(seen)
        about = [fields[name] for name in fields_of(_remedy(seen))]
        alike.setdefault((seen.kind, seen.remedy, *about, seen.kind in APART and seen.place), []).append(seen)
    return [_finding(group) for group in alike.values()]


def _finding(alike: Sequence[Observation]) -> Finding:
    first, *others = alike
    also = f"; also {_wheres(others)}" if others else ""
    fields = _fields(first)
    text, remedy = _filled(WORDS[first.kind][0], fields), _filled(_remedy(first), fields)
    return Finding(
        first.kind,
        f"{_wheres([first])}: {text}{also}",
        remedy,
        tuple(seen.place for seen in alike),
        first.remedy,
        tuple(seen.values for seen in alike),
        first.forbids,
    )


def _wheres(others: Sequence[Observation]) -> str:
    """Return suites with their methods: `gsm8k (hub) eagle3, math500 (hub) dflash and eagle3`."""
    by_suite: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for seen in others:
        place = seen.place
        by_suite.setdefault((place.suite, place.settings_id), (seen.cell.heading, []))[1].append(shown(place.method))
    return ", ".join(" ".join(filter(None, [label, " and ".join(methods)])) for label, methods in by_suite.values())


# Words and their fields.


Wording = str | Callable[..., str]
"""A template of fields, or a function whose parameters are fields."""


def fields_of(wording: Wording) -> list[str]:
    if isinstance(wording, str):
        return [name for _, name, _, _ in Formatter().parse(wording) if name]
    return list(signature(wording).parameters)


def _filled(wording: Wording, fields: Mapping[str, Any]) -> str:
    return wording.format(**fields) if isinstance(wording, str) else wording(*(fields[n] for n in fields_of(wording)))


def _fields(seen: Observation) -> dict[str, Any]:
    values = seen.values
    tally = f"{values['num_answers']} of {_answers(values['num_all'])}" if "num_all" in values else ""
    return {**values, "cell": seen.cell, "remedy": seen.remedy, "tally": tally, "how": _how(seen.cell.method)}


def _remedy(seen: Observation) -> Wording:
    remedies = WORDS[seen.kind][1]
    return remedies[seen.remedy] if isinstance(remedies, Mapping) else remedies


def _answers(number: int) -> str:
    return f"{number} answer{'' if number == 1 else 's'}"


def _how(label: str) -> str:
    """Return how a user sets the number of draft tokens, in parentheses.

    Empty for a method that is not in the table, or that chooses the number itself.
    """
    kind = METHODS.get(name_of(label))
    is_tree = kind is not None and any(option.name == "nodes" for option in kind.options)
    if kind is None or not (kind.count or is_tree):
        return ""
    return f" (--method {label.partition(':')[0]}:{'N' if kind.count else 'nodes=N'})"


# Words that need more than a template.


def _imposed(cell: Cell, length: float | None, al_pooled: float | None) -> str:
    source = "from a profile" if "profile=" in cell.method else "at given rates"
    told = "" if length is None else f", {length:.2f} tokens per round"
    counted = "" if al_pooled is None else f" (al.pooled {al_pooled:.2f}; the end of an answer cuts its last round)"
    return (
        f"acceptance was imposed {source}{told}{counted}: its server accepted drafts right or wrong, so these are not "
        "the model's answers, and were neither judged nor scored"
    )


def _mismatch(
    remedy: str, tally: str, prompt_id: str, turn: int, index: int | None, gap: float | None, tolerance: float | None
) -> str:
    what = {
        "engine": f"{tally} are not the published model's own output",
        "control": f"plain decoding disagrees with itself in {tally}",
        "method": f"{tally} differ from the plain answer",
    }
    at = "" if index is None else f" {Divergence(index, gap, tolerance)}"
    return f"{what[remedy]}; the first is prompt {prompt_id} turn {turn}{at}"


def _worse(lost: int, gained: int, num_prompts: int, p: float) -> str:
    change = stats.paired_difference(lost, gained, num_prompts)
    low, high = 100 * (change.low or 0), 100 * (change.high or 0)
    return (
        f"answers got worse: {lost} of {num_prompts} prompts that plain decoding gets right are wrong, and {gained} "
        f"the other way ({100 * change.value:+.1f} points [{low:+.1f}, {high:+.1f}], McNemar p = {p:.2g})"
    )


def _unjudged(cell: Cell, tally: str, prompt_id: str, turn: int) -> str:
    whose = "another plain answer to the same prompt" if cell.method == BASELINE else "the plain answer"
    where = f"first prompt {prompt_id} turn {turn}, and nothing here could judge whether rounding explains it"
    return f"{tally} differ from {whose}, {where}"


def _slower(cell: Cell, speedup_decode: float) -> str:
    return f"speedup.decode is {speedup_decode:.2f}: {_why_slow(cell)}"


def _why_slow(cell: Cell) -> str:
    parts, al, needed = parts_of(cell), cell.value("al.pooled"), cell.value("break_even_al")
    if al is not None and cell.counted_by:
        return f"al.pooled is {al:.2f}, and a server does not report the cost of a round"
    if al is None or needed is None or not parts:
        return "the backend does not report rounds, so the reason is unknown"
    compared = "below" if al < needed else "not below"
    besides = "" if al < needed else ", which leaves out overhead and the draft's prefill"
    known = {name if name != "other" else "overhead": part_ms for name, part_ms in parts.items()}
    round_ms = ", ".join(f"{name} {part_ms:.3g}" for name, part_ms in known.items())
    largest = f"{max(known, key=lambda name: known[name])} is the largest part of a round ({round_ms} ms)"
    return f"al.pooled {al:.2f} is {compared} break_even_al {needed:.2f}{besides}; {largest}"


def _unclear(cell: Cell, speedup_decode: float, low: float, high: float) -> str:
    within = f"its interval, {low:.2f} to {high:.2f}, contains 1"
    why = "its interval is too wide to tell" if cell.figures["speedup.decode"].is_vague else within
    return f"speedup.decode {speedup_decode:.2f} may be faster or slower than plain decoding: {why}"


def _drift(first_s_per_token: float, last_s_per_token: float) -> str:
    first, last = 1000 * first_s_per_token, 1000 * last_s_per_token
    change = f"from {first:.3g} to {last:.3g} ms per token ({last / first - 1:+.0%})"
    return f"the machine's speed drifted from the first to the last quarter, {change}"


MOST_NAMED = 5
"""Prompts with looping answers that are named."""


def _loops(prompts: Sequence[str], methods: Mapping[str, Mapping[str, Any]]) -> str:
    more = f" and {len(prompts) - MOST_NAMED} more" if len(prompts) > MOST_NAMED else ""
    named = f"prompt{'s' * (len(prompts) > 1)} {', '.join(prompts[:MOST_NAMED])}{more}"
    shares = "; ".join(_looping(method, values) for method, values in methods.items())
    return f"answers repeat themselves until the limit cut them ({named}), which is easy to draft: {shares}"


def _looping(method: str, values: Mapping[str, Any]) -> str:
    """Return, say, `dflash 5 of 40, without them al.pooled 2.31 (not 6.10), speedup.decode 1.20 (not 2.90)`."""
    share = f"{shown(method)} {values['num_answers']} of {values['num_all']}"
    if method == BASELINE:
        return share
    changed = [f"{name} {both['without']:.2f} (not {both['all']:.2f})" for name, both in values["metrics"].items()]
    return f"{share}, without them {', '.join(changed)}" if changed else f"{share}, and without them nothing is left"


def _of_dialect(code: str, otherwise: str) -> Callable[[str], str]:
    """Return the finding's wording by the dialect that the remedy's code names."""
    return lambda remedy: dialects.remedy(remedy, code) or otherwise


NO_PLAIN = "there are no answers of plain decoding, so there is no speed-up"
UNJUDGED = ", and nothing shows whether these answers are the model's own"
ADD_PLAIN = "also give a server that drafts nothing: --server plain=URL"
REPEATS = "this method drafts repetitions, and these answers repeat little: use a method with a trained draft"
MORE, FEWER = "draft more tokens per round{how}", "draft fewer tokens per round{how}"
FLATTERED = "plain decoding is slower than its own forward passes allow, which flatters speed-ups"
SLOWER_CODE = "plain decoding is slower this way, and speed-ups over it are higher; choose it by"
ON = {True: "on", False: "off"}
APART = ("loops",)
"""Kinds whose text differs by place, so that they are not merged with others that have the same remedy."""
WORDS: dict[str, tuple[Wording, Wording | Mapping[str, Wording]]] = {
    "mismatch": (
        _mismatch,
        {
            "engine": "rounding does not explain this: the engine has a bug; do not use these numbers",
            "control": "the control failed: use --dtype float32, or find out what makes plain decoding random",
            "method": "rounding does not explain this: the method has a bug; do not use these numbers",
        },
    ),
    "hidden_time": (
        lambda num_answers, more_s, took_s: (
            f"beside the times of its {num_answers:,} answers ({1000 * took_s:.3g} ms), calls take {1000 * more_s:.3g} "
            "ms more than those of plain decoding: part of the work is in no figure"
        ),
        "the method works before or after it is timed; do not use these numbers",
    ),
    "clock_doubt": (
        lambda num_answers, num_all, reason: (
            f"the runner's clock contradicts the times of {num_answers:,} of {num_all:,} answers ({reason})"
        ),
        "their tokens and rounds agree; run again where nothing else uses the GPU before relying on these times",
    ),
    "slow_plain": (
        lambda round_s, pass_s: (
            f"{FLATTERED}; a round takes {1000 * round_s:.3g} ms, and a pass over one token {1000 * pass_s:.3g} ms"
        ),
        "keep the machine free of other work and run again; if it stays, find out where the rest of a round goes",
    ),
    "launch_bound": (
        lambda num_launches, share, pass_s, floor_s: (
            f"plain decoding waits for the host: launching the {num_launches:,} operations of a pass takes at least "
            f"{share:.0%} of its {1000 * pass_s:.3g} ms, and reading its weights {1000 * floor_s:.3g} ms; a captured "
            f"baseline would be up to {pass_s / floor_s:.1f} times as fast, and speed-ups lower"
        ),
        "use a model whose passes the engine captures ('models NAME' names its forward pass), or compare such runs "
        "only with each other",
    ),
    "worse_answers": (
        _worse,
        {
            "judge": "give --model or --target with the same weights, so that a judge says where its tokens depart "
            "from the model's",
            "exactness": "see exactness in 'compare': a lossless method gives the target's own answers",
        },
    ),
    "plain_drafts": (
        'the "plain" server is speculating ({num_drafted:,} draft tokens): this is no baseline',
        "start that server without speculation, or swap the two URLs, and run again",
    ),
    "failed": (
        "{tally} failed and are left out of all numbers; the first error: {error:.160}",
        "fix the cause and run again with a new --out",
    ),
    "no_baseline": (
        lambda remedy: f"{NO_PLAIN}{UNJUDGED if remedy == 'plain_server_and_judge' else ''}",
        {
            "unfinished": "finish the run with --resume, or run it again",
            "plain_server": ADD_PLAIN,
            "plain_server_and_judge": f"{ADD_PLAIN}; and --model or --target with the same weights, so that a judge "
            "reads the answers",
        },
    ),
    "unjudged": (
        _unjudged,
        {
            "judge": "give --model or --target with the same weights, and --dtype as the server computes",
            "token_ids": "use a server that returns token ids, which can be judged",
        },
    ),
    "lossy": (
        "the method changes the target's output, so its speed-up is for different answers, which were only scored",
        "compare its passed % with that of plain decoding, on suites with a scorer",
    ),
    "imposed": (_imposed, "use its times alone; a draft's own acceptance is measured by its method"),
    "near_tie": (
        lambda tally, gap: (
            f"{tally} chose the other of two tokens that only rounding separates"
            + ("" if gap is None else f", at most {gap:.2g} logits apart")
        ),
        "rounding explains this; --dtype float32 avoids it",
    ),
    "nothing_drafted": (
        lambda num_answers, num_rounds: (
            f"no token was drafted in {f'{num_rounds} rounds' if num_rounds else _answers(num_answers)}"
        ),
        {
            "more_tokens": f"{MORE}, and check that the draft belongs to this model",
            "trained_draft": REPEATS,
            "draft_of_server": "start its server with a draft, and check in its log that the draft was loaded",
        },
    ),
    "loops": (
        _loops,
        "read these answers, check the chat template, --dtype and --repetition-penalty, and use the other answers",
    ),
    "other_mode": (
        lambda thinking, trained_thinking: (
            f"thinking is {ON[thinking]} in this run, but the draft was trained with thinking {ON[trained_thinking]}"
        ),
        lambda trained_thinking: f"add --thinking {ON[trained_thinking]}, or use another draft",
    ),
    "other_target": (
        "the draft was made for {verifier}, but this run's target is {target}",
        "expect lower acceptance than with --target {verifier}",
    ),
    "dead_draft": (
        "al.pooled is {al_pooled:.2f}: almost no draft token is accepted",
        {
            "check_training": "check that the draft was trained for this model: revision, chat template, tapped layers",
            "trained_draft": REPEATS,
        },
    ),
    "unknown_text": (
        lambda first_kept, al_pooled: (
            f"the draft does not fit this text: its first token is rejected in {1 - first_kept:.0%} of rounds "
            f"(accept_at[1] {first_kept:.2f}, al.pooled {al_pooled:.2f})"
        ),
        {
            "check_texts": "check that it was trained for exactly this target, chat template and thinking mode, and on "
            "texts like these prompts; drafting fewer tokens per round will not help",
            "trained_draft": REPEATS,
        },
    ),
    "slower": (
        _slower,
        {
            "other_texts": "drafting fewer tokens per round will not help: use a draft trained on text like this",
            "fewer_tokens_of_server": "start its server with fewer draft tokens, or measure the same draft here to see "
            "where a round spends its time",
            "fewer_tokens": f"{FEWER}, and run a local model to see where a round spends its time",
            "cost_of_draft": f"{FEWER}, or use a smaller draft",
            "cost_of_verify": f"{FEWER}: on this device, verifying this many tokens per pass costs too much",
            "cost_of_other": "the time is not spent in the models: try --threads 1, and keep the machine free of other "
            "work",
        },
    ),
    "unclear": (_unclear, "raise --limit, or omit it to use every prompt"),
    "saturated": (
        lambda num_whole, num_rounds: (
            f"{num_whole} of {num_rounds} rounds ({num_whole / num_rounds:.0%}) accept the whole draft"
        ),
        {"more_tokens": MORE, "more_tokens_if_trained": f"{MORE}, if the draft was trained for more"},
    ),
    "slow_first": (
        lambda step_s, over_median: (
            f"the first answer took {1000 * step_s:.3g} ms per step, {over_median:.1f} times the median"
        ),
        "the warm-up was too short; a higher --repeats gives this answer less weight",
    ),
    "outliers": (
        "{tally} took far longer per step; worst prompt {prompt_id} turn {turn}, {over_median:.1f} times the median",
        "the numbers include them; keep the machine free of other work and run again",
    ),
    "drift": (_drift, "let the machine cool, stop other work, set --threads, and run again"),
    "truncated": ("{tally} were cut at the token limit", "raise --max-new-tokens"),
    "few_prompts": (
        lambda cell, num_prompts: (
            f"only {num_prompts} {'session' if num_prompts < cell.num_prompts else 'prompt'}"
            f"{'s' if num_prompts != 1 else ''}, too few to trust the interval"
        ),
        f"raise --limit to {MIN_PROMPTS} or more, or omit it to use every prompt",
    ),
    "wide_interval": (
        lambda speedup_decode, half_width: (
            f"speedup.decode {speedup_decode:.2f} is only known to ± {half_width:.2f} "
            f"({half_width / speedup_decode:.0%})"
        ),
        "raise --limit, or add suites",
    ),
    "code_not_run": (
        f"the answers are code, which was not run and so is not scored: {sandbox.NO_SANDBOX}",
        sandbox.REMEDY,
    ),
    "code_unsafe": (
        "the answers are code, which ran without a sandbox and can have forged its verdict",
        "run it on a system that has a sandbox",
    ),
    "code_by_heart": (
        "the answers are code, judged by what it returned in the run (check --rescore runs it again): an answer that "
        "has memorised the tests also passes",
        "also score questions that are newer than the model",
    ),
    "other_servers": (
        "plain decoding was measured on {plain}, but this method on {own}: part of the speed-up is the server's",
        "measure both on the same version of one server",
    ),
    "compared_by_text": (
        "{tally} were compared by their text, because the server does not report token ids",
        "different tokens can make the same text; only token ids show it",
    ),
    "reused_prompts": (
        "{tally} reused {num_tokens} tokens of prompts that the server had cached: its time to the first token, and "
        "tps.e2e, are too good",
        _of_dialect("reused_prompts", "switch the server's prefix cache off"),
    ),
    "uncounted": (
        "acceptance is not available for {tally}: {reason}",
        _of_dialect("uncounted", "speed and exactness need no counts; use a server that reports its rounds"),
    ),
    "no_decode_speed": (
        "decode speed is not available for {tally}: the server sends several tokens at once, and does not say how many "
        "came first; tps.e2e and the time to the first token are measured",
        "give --model or --target, so that servers that take token ids return them, or use a server that counts tokens "
        "as it sends them (stream_options.continuous_usage_stats)",
    ),
    "derived_rounds": (
        "rounds of {tally} were derived ({counted_by}), which is off by one where the limit cut the last round; it cut "
        "{num_cut} of them",
        _of_dialect("uncounted", "use a version of the server that reports its rounds"),
    ),
    "shared_machine": (
        "{num_workers} workers measured on one machine at the same time and shared its memory and caches: times are "
        "longer than alone, and not equally so for all methods; tokens, acceptance and verdicts are the same",
        "to measure speed leave --workers out, or use one worker per machine",
    ),
    "unlike_machines": (
        lambda num_kinds, machines: (
            f"workers ran on {num_kinds} kinds of machines ({'; '.join(machines)}): times and speeds are a mixture; "
            "each prompt's speed-up compares times of the same machine"
        ),
        "for absolute speeds use machines of one kind",
    ),
    "unpinned": (
        lambda commits: (
            f"{' and '.join(commits)} came from the hub by names that can change; here they were "
            f"{' and '.join(commits.values())}"
        ),
        "to measure the same again, name these commits: ID@COMMIT",
    ),
    "shared_weights": (
        "there was no memory for a second copy of the weights: the judge read the engine's, which were the same after "
        "loading, after packing and when the run ended",
        "a fault in loading them cannot be found; free memory, or use a smaller --dtype or model",
    ),
    "fallback": (
        "the target was computed by transformers' code, because the engine's own {reason}",
        {
            "not_covered": f"{SLOWER_CODE} --engine transformers",
            "disagrees": "plain decoding is slower this way, and speed-ups over it are higher: fetch or join the "
            "weights again, or report a fault of the engine; --engine transformers accepts it",
        },
    ),
    "torch_kernels": (
        "the target was computed by torch, because numba's kernels could not: {reason}",
        f"{SLOWER_CODE} --kernels torch",
    ),
    "slow_paths": (
        "the GPU did not compute passes in the fastest way: {reason}",
        "update torch and the driver, or install what is missing; all times, and ratios of times, change with it",
    ),
    **{code: (text, remedy) for one in measurements() for code, (_, text, remedy) in one.findings.items()},
}
"""Text and remedy by kind; if a kind has several remedies, these by the code of the remedy."""


# Badges: findings that weaken a speed-up so much that a mark must stand beside the number itself.


BADGES = {
    "unclear": Badge(
        "?", "interval contains 1", "the interval contains 1: may be faster or slower than plain decoding"
    ),
    "few_prompts": Badge("n", "few prompts", f"fewer than {MIN_PROMPTS} prompts, too few to trust the interval"),
    "drift": Badge("d", "drift", "the machine's speed drifted while this suite was measured"),
    "loops": Badge("r", "repeating answers", "some answers repeat themselves until the limit, which is easy to draft"),
    "slow_plain": Badge(
        "b", "slow baseline", "plain decoding was slower than its forward passes allow, which flatters"
    ),
    "launch_bound": Badge("l", "launch-bound baseline", "plain decoding waited for launches, which flatters"),
    "shared_machine": Badge("w", "workers shared a machine", "several workers measured on one machine at once"),
}
"""Badges by the kind of the finding that explains them."""


def beside(findings: Iterable[Finding], cell: Cell) -> list[Badge]:
    """Return the badges of a cell's speed-up."""
    places = {cell.key._replace(slice="", method=method) for method in (cell.method, "")}
    return _of({finding.kind for finding in findings if places.intersection(finding.places)})


def beside_mean(findings: Iterable[Finding], settings_id: str, is_unclear: bool) -> list[Badge]:
    """Return the badges of a method's mean over suites; `is_unclear` if its interval contains 1."""
    here = [finding for finding in findings if any(place.settings_id == settings_id for place in finding.places)]
    kinds = {finding.kind for finding in here} - {"unclear"}
    return _of(kinds | ({"unclear"} if is_unclear else set()))


def _of(kinds: set[str]) -> list[Badge]:
    return [badge for kind, badge in BADGES.items() if kind in kinds]


def legend_of(badges: Sequence[Badge]) -> list[str]:
    """Return a line for each badge, in the order of `BADGES`."""
    return [f"{badge.mark} = {badge.meaning}" for badge in BADGES.values() if badge in badges]
