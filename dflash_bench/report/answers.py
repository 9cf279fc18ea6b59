"""The answers of a run for its page: texts by the target's tokenizer, aligned by method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.core import files, labels
from dflash_bench.core.errors import UserError
from dflash_bench.core.labels import shortened
from dflash_bench.core.methods import is_tree
from dflash_bench.core.types import CODE_SCORERS, TOOLS, CellKey, Settings
from dflash_bench.report.document import Document
from dflash_bench.results import run_info
from dflash_bench.results.identity import NAMES, short_names
from dflash_bench.results.run_info import RunInfo

# The text of each token, from the tokenizer that made it, where that is at hand.


NANO = Path(__file__).parent.parent / "nano" / "target"
NOT_AT_HAND = "Tokens are not coloured, because the target's tokenizer was not found: give --tokenizer FOLDER."
OTHER = "Some answers are not coloured, because this tokenizer does not decode their tokens to the stored text."


def load_tokenizer(info: RunInfo, chosen: Path | None) -> Any | None:
    """Load the target's tokenizer, without fetching; None if none is found. Raises UserError if `chosen` has none."""
    if chosen is not None and not any(path.is_file() for path in _places(chosen)):
        raise UserError(f"{chosen} holds no tokenizer.json")
    candidates = _places(chosen) if chosen else known(info)
    path = next((path for path in candidates if path.is_file()), None)
    return None if path is None else read_tokenizer(path)


def read_tokenizer(path: Path) -> Any:
    """Load a tokenizer.json. Raises UserError for other files."""
    from tokenizers import Tokenizer

    text = files.text_of(path)
    match files.parse_json(str(path), text):
        case {"model": dict()}:
            pass
        case _:
            raise UserError(f"cannot read {path}: not a tokenizer (it holds no model)")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:
        if type(error) is not Exception:  # tokenizers, which is Rust, raises nothing more exact
            raise
        raise UserError(f"cannot read {path}: not a tokenizer ({error})") from error


def _places(folder: Path) -> list[Path]:
    return [folder, folder / "tokenizer.json", folder / "target" / "tokenizer.json"]


def known(info: RunInfo) -> Iterator[Path]:
    """Yield possible places of the tokenizer of a run's model: as the run recorded it, or in the hub's local cache."""
    from huggingface_hub import try_to_load_from_cache

    identity, options = info.identity, info.options
    if identity.model == "nano":
        yield NANO / "tokenizer.json"
    for name in filter(None, (options.target, options.model)):
        yield from _places(Path(name))
    repository = str(identity.target or "").partition("@")[0]
    if repository.count("/") == 1:
        commit = str(identity.revisions.get("target")).rpartition("@")[2]
        cached = try_to_load_from_cache(repository, "tokenizer.json", revision=commit)
        if isinstance(cached, str):
            yield Path(cached)


def pieces(tokenizer: Any, token_ids: Sequence[int], text: str) -> list[str] | None:
    """Return one text per token, empty while a letter is incomplete; None if together they are not `text`."""
    from tokenizers.decoders import DecodeStream

    try:
        if tokenizer.decode(list(token_ids), skip_special_tokens=True) != text:
            return None
    except OverflowError:  # an id that no tokenizer has
        return None
    stream = DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in token_ids]


# The answers that a page shows one by one: as many whole prompts of each suite as fit.


LONGEST_REFERENCE = 80
"""Characters of a reference that are shown."""
MOST_PADDING = 1200
"""Characters of the padding before a prompt that are shown."""
COLUMNS = (
    *"""
        suite prompt_id turn repeat method order token_ids text finish_reason decode_s drafted drafted_ids verified
        accepted emitted draft_s verify_s error answer passed exactness first_divergence divergence_gap
        divergence_tolerance audit audit_index audit_gap audit_tolerance num_thinking_tokens num_thinking_chars
        """.split(),
    *NAMES,
)
NUL, REPLACED = "\0", "\ufffd"
COUNTS = ["num_tokens", "decode_tokens", "num_rounds", "num_accepted"]
"""Columns of the run's table, which are also known for servers that hide rounds."""


@dataclass(frozen=True, slots=True)
class PageAnswers:
    """Answers packed for the page's script: ten thousand answers have millions of tokens and rounds."""

    rows: Sequence[dict[str, Any]]
    """`counts`: each round's drafted, accepted and emitted tokens, one after the other; `times`: each round's
    microseconds of drafting and verifying; `rejected`: the texts of all rounds, joined by `NUL`."""
    texts: Sequence[str]
    """Texts, to which rows refer by index."""
    lengths: Sequence[list[int] | None]
    """Lengths of each text's tokens, in UTF-16 units; None for a text that is not split."""
    prompts: Sequence[str]
    """The user's messages, to which rows refer by index; empty for a run that kept no prompts."""
    num_all: int
    why_plain: str
    """Why texts are not split into tokens; empty if they are."""


def first_prompts(rows: Any, most: int) -> Any:
    """Return the mask of answers [rows] to show: to the first prompts of each suite, up to `most`, at least one's."""
    by_prompt = rows.groupby(["suite", "prompt_id"], observed=True, sort=False)
    sizes = by_prompt.size().reset_index(name="answers")
    sizes["rank"] = sizes.groupby("suite", observed=True).cumcount()
    sizes = sizes.sort_values("rank", kind="stable")
    fits = sizes["answers"].cumsum() <= most
    fits.iloc[0] = True
    return by_prompt.ngroup().isin(sizes.index[fits]).to_numpy()


def page_answers(document: Document, stored: Sequence[dict[str, Any]], tokenizer: Path | None) -> PageAnswers:
    """Return a page's answers from rows of `COLUMNS` and `COUNTS`. Raises UserError if `tokenizer` has none."""
    stored = sorted(stored, key=lambda row: row["order"])
    decoder = load_tokenizer(document.results.info, tokenizer)
    plain = {_place(row): row for row in stored if row["method"] == BASELINE}
    forbidden = {cell.key for cell in document.cells if cell.forbidden}
    named = short_names(document.results.stored.settings)
    stored_prompts = run_info.read_prompts(document.folder)
    asked, expected = _asked(stored_prompts), _references(stored_prompts, document.results.info)
    questions = [asked.get(_turn(row), asked.get((*_turn(row)[:3], None))) for row in stored]
    prompts = list(dict.fromkeys(text for text in questions if text is not None))
    texts: dict[tuple[Any, ...], int] = {}
    shown: list[list[str] | str] = []
    rows = []
    for row, question in zip(stored, questions, strict=True):
        key = (*row["token_ids"], row["text"])
        if key not in texts:
            texts[key] = len(shown)
            shown.append((pieces(decoder, row["token_ids"], row["text"]) if decoder else None) or row["text"])
        heading = labels.with_settings(document.label(row["suite"]), named[_settings(row)] if len(named) > 1 else "")
        by_number = {} if question is None else {"asked": prompts.index(question)}
        reference = expected.get((row["suite"], row["prompt_id"])) if row["passed"] is not None else None
        own_key = CellKey(row["suite"], "", _settings(row).id, row["method"])
        page_row = (
            _row(row, None if own_key in forbidden else plain.get(_place(row)))
            | {"suite": heading, "text": texts[key]}
            | by_number
        )
        page_row |= {"bare": row["suite"], "settings": _settings(row).id} | (
            {} if reference is None else {"expected": reference}
        )
        if thinking := _num_thinking(row, isinstance(shown[texts[key]], list)):
            page_row["thinking"] = thinking
        if decoder and "counts" in page_row and (said := _rejected(decoder, row)):
            page_row["rejected"] = NUL.join(text.replace(NUL, REPLACED) for text in said)
        rows.append(page_row)
    is_plain = any(isinstance(text, str) and text for text in shown)
    why = "" if not is_plain else OTHER if decoder else NOT_AT_HAND
    lengths = [None if isinstance(text, str) else [*map(_utf16_length, text)] for text in shown]
    return PageAnswers(rows, ["".join(text) for text in shown], lengths, prompts, len(document.results.rows), why)


def _num_thinking(row: dict[str, Any], is_split: bool) -> int:
    """Return how many tokens of a split text, or UTF-16 units of another text, are thinking."""
    num = row["num_thinking_tokens" if is_split else "num_thinking_chars"] or 0
    return int(num) if is_split else _utf16_length(row["text"][:num])


def _utf16_length(text: str) -> int:
    return len(text) + sum(letter > "\uffff" for letter in text)


def _asked(stored: Sequence[dict[str, Any]]) -> dict[tuple[str, str, int, int | None], str]:
    """Return the user's message in each turn of each prompt.

    A first turn has the messages around it and, for each context, the shortened padding before it.
    """
    return {
        (prompt["suite"], prompt["prompt_id"], turn, context): "\n\n".join(
            [*_texts(prompt["opening"], turn), padding + text, *_texts(prompt["closing"], turn)]
        )
        for prompt in stored
        for turn, text in enumerate(prompt["turns"] or ())
        for context, padding in [(None, ""), *(_paddings(prompt) if turn == 0 else ())]
    }


def _texts(messages: Sequence[dict[str, Any]] | None, turn: int) -> Iterator[str]:
    """Yield the texts of a prompt's other messages, in its first turn only; tool calls have none."""
    for message in messages or () if turn == 0 else ():
        if message["role"] != TOOLS and message["content"]:
            yield message["content"]


def _references(stored: Sequence[dict[str, Any]], info: RunInfo) -> dict[tuple[str, str], str]:
    """Return the last line of each reference, which holds the answer; no reference of code, which is tests."""
    of_code = {name for name, suite in info.identity.suites.items() if suite.scorer in CODE_SCORERS}
    return {
        (prompt["suite"], prompt["prompt_id"]): prompt["reference"].strip().splitlines()[-1][-LONGEST_REFERENCE:]
        for prompt in stored
        if (prompt["reference"] or "").strip() and prompt["suite"] not in of_code
    }


def _rejected(decoder: Any, row: dict[str, Any]) -> list[str]:
    """Return the text that each round drafted and the target rejected; empty for trees and without stored ids."""
    if row["drafted_ids"] is None or is_tree(row["method"]):
        return []
    said, at = [], 0
    verified = row["drafted"] if row["verified"] is None else row["verified"]
    for drafted, read, accepted in zip(row["drafted"], verified, row["accepted"], strict=True):
        ids = [int(token) for token in row["drafted_ids"][at + accepted : at + read]]
        try:
            said.append(decoder.decode(ids, skip_special_tokens=False) if ids else "")
        except OverflowError:  # an id that no tokenizer has
            said.append("")
        at += drafted
    return said


def _paddings(prompt: dict[str, Any]) -> list[tuple[int, str]]:
    return [(one["context"], shortened(one["text"], MOST_PADDING)) for one in prompt["paddings"] or ()]


def _turn(row: dict[str, Any]) -> tuple[str, str, int, int | None]:
    return row["suite"], row["prompt_id"], row["turn"], row["context"]


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["suite"], row["prompt_id"], row["turn"], row["repeat"], *(row[name] for name in NAMES)


def _settings(row: dict[str, Any]) -> Settings:
    return Settings(**{name: row[name] for name in NAMES})


def _row(row: dict[str, Any], plain: dict[str, Any] | None) -> dict[str, Any]:
    ms_per_token, plain_ms_per_token = _ms_per_token(row), _ms_per_token(plain) if plain else None
    accepted = row["accepted"] or []
    page_row = {name: row[name] for name in ("method", "turn", "repeat", "error", "answer", "passed")}
    page_row |= {
        "prompt": row["prompt_id"],
        "exact": row["exactness"],
        "leaves": row["first_divergence"],
        "gap": _short(row["divergence_gap"]),
        "tolerance": _short(row["divergence_tolerance"]),
        "audit": row["audit"],
        "departs": row["audit_index"],
        "audit_gap": _short(row["audit_gap"]),
        "audit_tolerance": _short(row["audit_tolerance"]),
        "finish": row["finish_reason"],
        "tokens": int(row["num_tokens"]),
        "rounds": None if row["num_rounds"] != row["num_rounds"] else int(row["num_rounds"]),
        "al": _short(1 + row["num_accepted"] / row["num_rounds"] if row["num_rounds"] > 0 else None),
        "ms": _short(ms_per_token),
        "speedup": _short(
            plain_ms_per_token / ms_per_token
            if plain_ms_per_token and ms_per_token and row["method"] != BASELINE
            else None
        ),
    }
    if any(row["drafted"] or ()):
        by_round = zip(row["drafted"], accepted, row["emitted"], strict=True)
        page_row["counts"] = [count for counts in by_round for count in counts]
        if row["draft_s"] and row["verify_s"]:
            spent = zip(row["draft_s"], row["verify_s"], strict=True)
            page_row["times"] = [round(1e6 * (seconds or 0.0)) for both in spent for seconds in both]
    return {name: value for name, value in page_row.items() if value is not None}


def _ms_per_token(row: dict[str, Any]) -> float | None:
    return 1000 * row["decode_s"] / row["decode_tokens"] if row["decode_tokens"] > 0 and row["error"] is None else None


def _short(value: float | None) -> float | None:
    return None if value is None or value != value else float(f"{value:.4g}")
