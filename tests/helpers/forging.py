"""Forged runs: a run measured on nano, changed with care for everything that a reader checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_bench.core.types import Answer, Divergence, Generation
from dflash_bench.models import presets
from dflash_bench.models.chat import decoder_of
from dflash_bench.results import integrity, parts, plan, run_info, store

DECODE = decoder_of(presets.preset("nano").target, False)
FOREIGN = 77
"""A token that nano would not choose after a question of arithmetic."""
Rows = Callable[[list[Answer]], Sequence[Answer]]
Info = Callable[[dict[str, Any]], object]


def forge(run: Path, out: Path, rows: Rows, info: Info) -> Path:
    """Write the run again with other rows and another `run.json`, with the checksums and sums that belong to them."""
    about, answers = store.load(run)
    content = about.to_json()
    forged = rows(sorted(answers, key=lambda one: one.order))
    span_s = max(float(about.span_s or 0), *(one.end_s or 0.0 for one in forged))
    content |= integrity.of_run(span_s, forged)
    info(content)
    content["identity"]["plan"] = plan.sha256(content["plan"])
    out.mkdir()
    (out / run_info.FILE).write_text(json.dumps(content))
    carried = run_info.carried(run_info.read_info(out))
    parts.write(parts.to_table(forged, carried), out / parts.name(0, 0), carried)
    return out


def each(change: Callable[[Answer], Answer], method: str | None = None) -> Rows:
    """Change every answer, or every answer of a method."""
    return lambda rows: [change(one) if method in (None, one.method) else one for one in rows]


def of_generation(change: Callable[[Generation], Generation], method: str | None = None) -> Rows:
    return each(lambda row: replace(row, generation=change(row.generation)), method)


def one_after_another(rows: Rows) -> Rows:
    """Change the answers, and put them one after another on the run's clock, each for as long as it says it took."""

    def change(given: list[Answer]) -> list[Answer]:
        at, found = 0.0, []
        for row in rows(given):
            took = row.generation.prefill_s + row.generation.decode_s + 1e-3
            found.append(replace(row, start_s=at, end_s=at + took, clock_s=took))
            at += took + 1e-3
        return found

    return change


def scaled(row: Answer, factor: float) -> Answer:
    """The answer with all its own times scaled; not its place on the run's clock."""
    own = row.generation

    def times(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return None if values is None else tuple(factor * value for value in values)

    generation = replace(
        own,
        prefill_s=factor * own.prefill_s,
        decode_s=factor * own.decode_s,
        draft_prefill_s=None if own.draft_prefill_s is None else factor * own.draft_prefill_s,
        draft_s=times(own.draft_s),
        verify_s=times(own.verify_s),
        round_s=times(own.round_s),
    )
    return replace(row, generation=generation, clock_s=None if row.clock_s is None else factor * row.clock_s)


def perfect(own: Generation) -> Generation:
    """The answer as if every draft token had been right: fewer rounds, each with as much time as the mean round."""
    assert own.drafted is not None and own.round_s is not None
    block, rest = max(own.drafted), len(own.token_ids) - 1
    emitted, at = [], 0
    while at < rest:
        emitted.append(min(block + 1, rest - at))
        at += emitted[-1]
    num, tokens = len(emitted), own.token_ids
    drafts, position = [], 1
    for count in emitted:
        right = list(tokens[position : position + block])
        drafts += right + [0] * (block - len(right))
        position += count

    def times(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return None if values is None else (sum(values) / num,) * num

    return replace(
        own,
        drafted=(block,) * num,
        drafted_ids=tuple(drafts),
        accepted=tuple(min(block, count) for count in emitted),
        emitted=tuple(emitted),
        draft_s=times(own.draft_s),
        verify_s=times(own.verify_s),
        round_s=times(own.round_s),
        verified=None,
    )


def said(own: Generation, tokens: list[int]) -> Generation:
    assert DECODE is not None
    return replace(own, token_ids=tuple(tokens), text=DECODE([tokens])[0])


def other_token(row: Answer) -> Answer:
    """The answer with another token in its middle, where no score sees it; a draft that had it has the other, too."""
    own, index = row.generation, len(row.generation.token_ids) // 2
    tokens, drafts = [*own.token_ids], [*(own.drafted_ids or ())]
    tokens[index] = FOREIGN
    at, before = 1, 0
    for drafted, accepted, emitted in zip(own.drafted or (), own.accepted or (), own.emitted or (), strict=True):
        if at <= index < at + min(accepted, emitted):
            drafts[before + index - at] = FOREIGN
        at, before = at + emitted, before + drafted
    drafted_ids = None if own.drafted_ids is None else tuple(drafts)
    return replace(row, generation=replace(said(own, tokens), drafted_ids=drafted_ids))


def without_rounds(own: Generation) -> Generation:
    """The answer as of a server that tells only the sums of its rounds: its acceptance is then free text."""
    hidden = dict.fromkeys(("drafted", "drafted_ids", "accepted", "emitted", "draft_s", "verify_s", "round_s"))
    num = max((len(own.token_ids) - 1) // 16, 1)
    totals = {"total_rounds": num, "total_drafted": 15 * num, "total_accepted": 15 * num}
    return replace(own, **hidden, **totals)  # type: ignore[arg-type]


def without_tokens(row: Answer) -> Answer:
    """The same, with hidden tokens: its text and its score are then free, too."""
    hidden = replace(
        without_rounds(row.generation), token_ids=(), num_hidden_tokens=len(row.generation.token_ids), text="#### 42"
    )
    return replace(row, generation=hidden, audit=None, departure=None, measured={})


def unscored(row: Answer) -> Answer:
    return replace(row, passed=row.passed or None)


def failed(row: Answer) -> Answer:
    """The answer as one that failed, if it was wrong."""
    if row.passed is not False:
        return row
    unjudged = replace(row, exactness=None, divergence=None, audit=None, departure=None, passed=None, answer=None)
    return replace(unjudged, generation=row.generation.refused("out of memory"), measured={}, pass_s=None)


def admitted(row: Answer) -> Answer:
    """The answer with another token, which its own verdict admits: its rounds would then be free."""
    gap = Divergence(len(row.generation.token_ids) // 2, 5.0, 1e-4)
    verdicts: dict[str, Any] = {"audit": "mismatch", "departure": gap}
    if row.exactness is not None:
        verdicts |= {"exactness": "mismatch", "divergence": gap} if row.method != "ar" else {}
    return replace(other_token(row), **verdicts)


def with_thinking(own: Generation) -> Generation:
    """The answer with its first tokens as thinking, which scores then leave out."""
    assert DECODE is not None
    return replace(own, num_thinking_tokens=3, num_thinking_chars=len(DECODE([own.token_ids[:3]])[0]))


def with_quick_prefill(row: Answer) -> Answer:
    own = row.generation
    return replace(row, generation=replace(own, prefill_s=0.1 * own.prefill_s))


def of_another_prompt(rows: list[Answer]) -> list[Answer]:
    """Each prompt has the answers of the next one."""
    num = len({row.method for row in rows})
    found = []
    for place in range(0, len(rows), num):
        for own in rows[place : place + num]:
            after = rows[(place + num) % len(rows) :][:num]
            (other,) = (row for row in after if row.method == own.method)
            generation = replace(other.generation, num_prompt_tokens=own.generation.num_prompt_tokens)
            found.append(replace(own, generation=generation, measured=other.measured, answer=other.answer))
    return found


def fewer_prompts(content: dict[str, Any]) -> None:
    content["plan"]["prompts"]["gsm8k"] = content["plan"]["prompts"]["gsm8k"][1:]


def without_the_first(rows: list[Answer]) -> list[Answer]:
    first = rows[0].prompt_id
    return [row for row in rows if row.prompt_id != first]


def picked(content: dict[str, Any]) -> None:
    """Only the first prompt was measured, as under a time limit."""
    content["identity"]["order"] = "drawn"
    content["measured"] = {"gsm8k": 1}


def picked_in_time(content: dict[str, Any]) -> None:
    """The same, and the limit is among the options."""
    prompts = content["plan"]["prompts"]["gsm8k"]
    content["plan"]["prompts"]["gsm8k"] = [*prompts[-1:], *prompts[:-1]]
    content["options"]["budget"] = "3s"
    picked(content)


def of_the_first(rows: list[Answer]) -> list[Answer]:
    return [row for row in rows if row.prompt_id == rows[0].prompt_id]


def of_the_last(rows: list[Answer]) -> list[Answer]:
    return [row for row in rows if row.prompt_id == rows[-1].prompt_id]


def faster(factor: float) -> Callable[[dict[str, Any]], None]:
    """Scale everything in `run.json` that tells of time."""

    def change(content: dict[str, Any]) -> None:
        forwards = content["forwards"]
        for name in ("seconds", "wide_s"):
            forwards[name] = {width: factor * seconds for width, seconds in forwards[name].items()}
        forwards["least_s"] *= factor
        content["pass_at_end_s"] *= factor

    return change


def renamed(content: dict[str, Any]) -> None:
    content["environment"]["cpu"] = "AMD EPYC 9965 192-Core Processor"


def in_another_suite(rows: list[Answer]) -> list[Answer]:
    return [replace(row, suite="math500") for row in rows]


def called_math(content: dict[str, Any]) -> None:
    for part in (content["identity"]["suites"], content["plan"]["prompts"]):
        part["math500"] = part.pop("gsm8k")


def identity(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["identity"].update(changes)


def as_served(content: dict[str, Any]) -> None:
    """The run of the own engine named as one of servers, whose rounds nobody recomputes."""
    server = {
        "address": "http://127.0.0.1:1",
        "dialect": "vllm",
        "version": None,
        "model": None,
        "prompts": "token ids",
    }
    content["identity"]["servers"] = {"dflash": {**server, "prefix_cache": "off", "facts": {}}}


def with_other_weights(content: dict[str, Any]) -> None:
    content["identity"]["revisions"]["target"] = "f" * 64


@dataclass(frozen=True, slots=True)
class Forgery:
    """A forged run: what was changed, and the check that finds it or names what cannot be told."""

    name: str
    check: str
    state: str
    rows: Rows = list
    info: Info = lambda _: None


FORGERIES = (
    Forgery("another token, by every method", "tokens", "refuted", rows=each(other_token)),
    Forgery("answers of another prompt", "tokens", "refuted", rows=one_after_another(of_another_prompt)),
    Forgery("every draft token right", "counts", "refuted", rows=of_generation(perfect, "dflash")),
    Forgery("all answers scored right", "scores", "refuted", rows=each(lambda row: replace(row, passed=True))),
    Forgery("another text", "texts", "refuted", rows=of_generation(lambda own: replace(own, text=own.text + "!"))),
    Forgery(
        "other sums of times",
        "arithmetic",
        "refuted",
        info=lambda content: content["times"]["dflash"].update(decode_s=0.1),
    ),
    Forgery(
        "a method's times, a fiftieth", "arithmetic", "refuted", rows=each(lambda row: scaled(row, 0.02), "dflash")
    ),
    Forgery("a method's times, a third", "times", "doubtful", rows=each(lambda row: scaled(row, 0.34), "dflash")),
    Forgery(
        "all times and passes, a fifth", "times", "doubtful", rows=each(lambda row: scaled(row, 0.2)), info=faster(0.2)
    ),
    Forgery(
        "plain decoding's times, eightfold",
        "times",
        "doubtful",
        rows=one_after_another(each(lambda row: scaled(row, 8.0), "ar")),
    ),
    Forgery("another processor's name", "times", "unchecked", info=renamed),
    Forgery("a prompt's rows left out", "arithmetic", "refuted", rows=without_the_first),
    Forgery("a prompt left out of rows and plan", "plan", "refuted", rows=without_the_first, info=fewer_prompts),
    Forgery("another suite's name", "plan", "refuted", rows=in_another_suite, info=called_math),
    Forgery("a higher limit of tokens", "arithmetic", "refuted", info=identity(max_new_tokens=64)),
    Forgery("another seed", "plan", "refuted", info=identity(seed=7)),
    Forgery("other weights named", "models", "refuted", info=with_other_weights),
    Forgery("rounds hidden, and their sums", "arithmetic", "refuted", rows=of_generation(without_rounds, "dflash")),
    Forgery(
        "the same, of another engine",
        "models",
        "refuted",
        rows=of_generation(without_rounds, "dflash"),
        info=identity(engine="other"),
    ),
    Forgery("tokens hidden, and another text", "arithmetic", "refuted", rows=each(without_tokens, "dflash")),
    Forgery("prompts picked as if in time", "arithmetic", "refuted", rows=of_the_first, info=picked),
    Forgery("the same, with a time limit", "plan", "refuted", rows=of_the_last, info=picked_in_time),
    Forgery("wrong answers marked as failed", "failures", "doubtful", rows=each(failed)),
    Forgery("wrong answers left unscored", "arithmetic", "refuted", rows=each(unscored)),
    Forgery("another model named", "models", "refuted", info=identity(model="qwen3-32b")),
    Forgery("servers named", "models", "refuted", info=as_served),
    Forgery("wrong tokens, admitted", "tokens", "refuted", rows=each(admitted, "dflash")),
    Forgery(
        "prompts of more tokens",
        "tokens",
        "refuted",
        rows=of_generation(lambda own: replace(own, num_prompt_tokens=own.num_prompt_tokens + 1)),
    ),
    Forgery("the begin of answers as thinking", "texts", "refuted", rows=of_generation(with_thinking)),
    Forgery("another category", "plan", "refuted", rows=each(lambda row: replace(row, category="easy"))),
    Forgery("another number taken from a text", "scores", "refuted", rows=each(lambda row: replace(row, answer="7"))),
    Forgery(
        "other kinds of text",
        "measurements",
        "refuted",
        rows=each(lambda row: replace(row, measured={"text_kinds": (1,) * len(row.generation.token_ids)})),
    ),
    Forgery(
        "energy that nothing measured",
        "measurements",
        "unchecked",
        rows=each(lambda row: replace(row, measured={**row.measured, "energy_j": 0.1})),
    ),
    Forgery("a method's prefill, a tenth", "times", "doubtful", rows=each(with_quick_prefill, "dflash")),
    Forgery("another dtype named", "models", "refuted", info=identity(dtype="bfloat16")),
)
