"""Suites: their TOML files, and the rows of their prompts, embedded, from the hub, or from a folder."""

from __future__ import annotations

import hashlib
import json
import math
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from decimal import Decimal
from functools import partial
from heapq import heappop, heappush
from itertools import zip_longest
from pathlib import Path
from string import Formatter
from typing import Any, TypeGuard, TypeVar

import numpy as np

from dflash_bench.core import files
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.labels import shortened, visible
from dflash_bench.core.types import NO_VALUE, Message, Prompt
from dflash_bench.tasks.conversations import RecordedChat, answers_in, in_text, of_messages, refuse_placeholder
from dflash_bench.tasks.rows import DataSet, Row, Rows, from_folder, from_hub, json_lines, rows_file

# A suite is a TOML file that defines how a row becomes a prompt. Runs show and record where its rows come from, and
# `--limit` draws by id, so that every machine draws the same prompts.


T = TypeVar("T")
LONGEST_NAME = 200
LETTERS = "ABCDEFGH"
"""Names of the options of a multiple-choice question."""
HOMES = ("hub", "shipped", "folder")
"""A suite's rows are on the hub, with an embedded sample of our own; all shipped with this project; or in a user's own
folder."""
STYLES = ("paper", "verbatim")
"""Wordings of prompts: with the instructions of the paper's harness, or only the publisher's text, as in AIPerf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One TOML file. `turns` and `reference` are `str.format` templates over the columns."""

    name: str
    version: int
    title: str
    source: str
    scorer: str
    licence: str = "unknown"
    subset: str | None = None
    split: str = "test"
    revision: str = "main"
    columns: tuple[str, ...] = ()
    """Columns that every row must have: texts, or lists of texts if in `list_columns`."""
    list_columns: tuple[str, ...] = ()
    optional_columns: tuple[str, ...] = ()
    """The subset that may be missing or null, and is then empty; turns are stripped of empty lines around them."""
    options: tuple[str, ...] = ()
    """Columns of the options, the correct one first. Templates get them as {A}, {B}, ... in an order determined by the
    prompt's id; the letter of the correct option is the reference."""
    seed: int = 0
    id: str | None = None
    category: str | None = None
    reference: str | None = None
    turns: tuple[str, ...] = ()
    turns_column: str | None = None
    messages: str | None = None
    """Column that holds a conversation, as a list of messages or its JSON; in place of `turns`."""
    conversation: str | None = None
    """Column that holds turns, each a list of messages; the later ones are asked after the model's answers."""
    functions: str | None = None
    """Column that holds the functions available in `conversation`, in BFCL's format."""
    session: str | None = None
    """Column that names a conversation of which every recorded answer is a prompt, not only the last."""
    verbatim: tuple[str, ...] = ()
    """Templates with only the publisher's text, where `turns` add words to it."""
    style: str = STYLES[0]
    """The style of the prompts, one of `STYLES`. Chosen by the user, so it is in no TOML file."""
    files: str = ""
    """Pattern of the publisher's file names (`*qualitative*`), for suites whose rows are in a user's folder."""
    file_columns: str = ""
    """A regular expression for the names of those files, whose named groups become columns of their rows."""
    home: str = "hub"
    """The location of its rows: one of `HOMES`."""
    worked: str | None = None
    """Template of a worked answer, from columns that not every source has; used to pad prompts with examples."""

    @property
    def data(self) -> DataSet:
        return DataSet(self.name, self.source, self.split, self.subset, self.revision)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The prompts of one suite in a run, with their source and hash."""

    suite: Suite
    prompts: tuple[Prompt, ...]
    source: str
    sha256: str
    """Hash of the rows behind `prompts`, as canonical JSON."""
    num_rows: int
    """Number of rows to draw from."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as ignored columns."""
    unscored: tuple[str, ...] = ()
    """The ids of prompts whose answers the suite's scorer cannot score."""
    pool: tuple[Prompt, ...] = field(default=(), repr=False)
    """All prompts read from the source, which others can be padded with."""
    order: tuple[str, ...] = field(default=(), repr=False)
    """The ids of `prompts` in the order they were drawn."""
    revision: str | None = None
    """For a user's own copy, "OWNER/NAME@REVISION" if known; see `origins`."""


@dataclass(frozen=True, slots=True)
class SuiteListing:
    """One line of `dflash-bench suites`."""

    suite: Suite
    groups: tuple[str, ...]
    num_embedded: int


def data_folder() -> Path:
    """Return the folder of TOML files: `_suites` in an installed package, `suites` at the root of a checkout."""
    package = Path(__file__).parent.parent
    installed = package / "_suites"
    return installed if installed.is_dir() else package.parent / "suites"


def known_suites() -> dict[str, Suite]:
    paths = sorted(path for path in data_folder().glob("*.toml") if path.stem != "groups")
    return {path.stem: _parse(path) for path in paths}


def known_groups() -> dict[str, tuple[str, ...]]:
    groups = files.toml_of(data_folder() / "groups.toml")
    return {name: tuple(members) for name, members in groups.items()}


def _parse(path: Path) -> Suite:
    """Read a suite. Raises UserError for an unknown or missing key, and for a value of the wrong type."""
    entry = files.toml_of(path)
    known = {item.name: str(item.type) for item in fields(Suite) if item.name != "name"}
    del known["style"]
    required = [item.name for item in fields(Suite) if item.default is MISSING and item.name != "name"]
    for key in required:
        if key not in entry:
            raise UserError(f"{path}: {key} is missing")
    for key, value in entry.items():
        if key not in known:
            raise unknown(f"key in {path}:", key, list(known))
        is_texts_of = known[key].startswith("tuple") and is_texts(value)
        is_one = not known[key].startswith("tuple") and type(value) is (int if known[key] == "int" else str)
        if not (is_texts_of or is_one):
            raise UserError(f"{path}: {key} cannot be {shortened(repr(value), 40)}")
        entry[key] = tuple(value) if isinstance(value, list) else value
    if (home := entry.get("home", HOMES[0])) not in HOMES:
        raise unknown(f"home in {path}:", home, list(HOMES))
    suite = Suite(name=path.stem, **entry)
    _check_columns(path, suite)
    return suite


def _check_columns(path: Path, suite: Suite) -> None:
    """Raise UserError if a part of a prompt is not a column, or if a template does more than fill in columns."""
    one = "id", "category", "turns_column", "messages", "conversation", "functions", "session"
    parts = [(part, getattr(suite, part)) for part in one]
    parts += [(part, column) for part in ("optional_columns", "options") for column in getattr(suite, part)]
    try:
        parts += [("file_columns", column) for column in re.compile(suite.file_columns).groupindex]
    except re.error as error:
        raise UserError(f"{path}: file_columns is no regular expression ({error})") from error
    for part, column in parts:
        if column is not None and column not in suite.columns:
            raise UserError(f"{path}: {part} is '{shortened(column, 40)}', which is not among its columns")
    if len(suite.options) > len(LETTERS):
        raise UserError(f"{path}: there are {len(suite.options)} options, and letters for {len(LETTERS)}")
    known = {*suite.columns, *LETTERS[: len(suite.options)]}
    for template in (*suite.turns, *suite.verbatim, *filter(None, [suite.reference])):
        try:
            gaps = [gap for gap in Formatter().parse(template) if gap[1] is not None]
        except ValueError as error:
            raise UserError(f"{path}: '{shortened(template, 40)}' is not a template ({error})") from error
        for _, name, spec, conversion in gaps:
            if name not in known or spec or conversion:
                raise UserError(f"{path}: a template uses '{shortened(str(name), 40)}', which is not a column")


def _columns_in(*templates: str) -> set[str]:
    return {name for template in templates for _, name, _, _ in Formatter().parse(template) if name}


def expand(names: Sequence[str]) -> list[Suite]:
    """Return the suites named by suites and groups, each once, in the order given. Raises UserError if unknown."""
    suites, groups = known_suites(), known_groups()
    chosen: dict[str, Suite] = {}
    for name in names:
        if name not in suites and name not in groups:
            raise unknown("suite", name, [*suites, *groups])
        chosen |= {member: suites[member] for member in groups.get(name, (name,))}
    return list(chosen.values())


def in_style(several: Sequence[Suite], style: str) -> list[Suite]:
    """Return suites with prompts in one of `STYLES`. Raises UserError if no suite has another wording."""
    if style == STYLES[0] or not several:
        return list(several)
    if not any(suite.verbatim for suite in several):
        names = ", ".join(suite.name for suite in several)
        raise UserError(f"--prompt-style {style} has no effect on {names}, whose prompts have one wording")
    return [replace(suite, turns=suite.verbatim, style=style) if suite.verbatim else suite for suite in several]


def listings() -> list[SuiteListing]:
    """Return all suites, those with embedded prompts first."""
    lines = []
    for suite in known_suites().values():
        groups = tuple(group for group, members in known_groups().items() if suite.name in members)
        shipped = data_folder() / "embedded" / suite.name / f"{suite.split}.jsonl"
        num_embedded = sum(1 for _ in json_lines(shipped)) if shipped.exists() else 0
        lines.append(SuiteListing(suite, groups, num_embedded))
    return sorted(lines, key=lambda one: not one.num_embedded)


def load_prompts(
    suite: Suite,
    data: str | Path = "embedded",
    limit: int | None = None,
    balance: str | None = None,
    *,
    padded: bool = True,
) -> Loaded:
    """Load prompts from `data`: `embedded`, `hub`, or a folder of NAME/SPLIT.jsonl or .parquet in the hub's columns.

    `limit` and `balance` are passed to `draw`. Unless prompts are `padded` with others, only those drawn are held.
    """
    if suite.home == "folder" and data in ("embedded", "hub"):
        raise UserError(
            f"suite '{suite.name}' is neither embedded nor on the hub: get {suite.source}, prepare it with "
            f"'dflash-bench suites prepare {suite.name} --from FOLDER', and give --data data"
        )
    revision = None
    if data == "embedded" or (data == "hub" and suite.home == "shipped"):
        source = "shipped" if suite.home == "shipped" else "embedded"
        rows = from_folder(suite.data, data_folder() / "embedded")
    elif data == "hub":
        rows, source = from_hub(suite.data)
    else:
        rows, source = from_folder(suite.data, Path(data)), f"folder {data}"
        from dflash_bench.tasks import origins

        revision = origins.of_rows(rows_file(suite.data, Path(data)))
    templates = _columns_in(*suite.turns, suite.reference or "")
    read = {suite.id, suite.turns_column, suite.messages, *suite.options, *templates}
    if padded or balance is not None or limit is None:
        return replace(draw(suite, [*each_prompt(suite, rows)], source, limit, read, balance), revision=revision)
    prompts, num_rows = first_drawn(
        suite, _each_row(suite, rows), source, limit, partial(_id_of, suite), partial(to_prompt, suite)
    )
    return replace(draw(suite, prompts, source, limit, read), revision=revision, num_rows=num_rows)


def each_prompt(suite: Suite, rows: Rows) -> Iterator[Prompt]:
    """Yield prompts made of rows, without slices. Raises UserError for a row that does not fit the suite."""
    for index, (where, row) in enumerate(_each_row(suite, rows)):
        yield to_prompt(suite, where, index, row)


def _each_row(suite: Suite, rows: Rows) -> Rows:
    return _answers_of(suite, rows) if suite.session else rows


def _answers_of(suite: Suite, rows: Rows) -> Rows:
    """Yield a row for each recorded answer of each conversation."""
    assert suite.session is not None and suite.messages is not None
    for where, row in rows:
        _require_columns(suite, where, row)
        messages = row[suite.messages]
        messages = in_text(messages)[0] if isinstance(messages, str) else messages
        if not isinstance(messages, list):
            raise UserError(f"{where}: '{suite.messages}' must be a list of messages, or its JSON")
        for place, until in answers_in(text_of(where, suite.session, row), messages):
            yield f"{where} answer {place['answer_number']}", {**row, **place, suite.messages: until}


def chats(loaded: Loaded) -> Iterator[tuple[str, list[Message]]]:
    """Yield each prompt's name and its messages up to the last turn, with "Yes." in place of earlier answers."""
    for prompt in loaded.prompts:
        *earlier, last = (Message("user", turn) for turn in prompt.turns)
        answered = [message for turn in earlier for message in (turn, Message("assistant", "Yes."))]
        yield f"{prompt.prompt_id} of suite {prompt.suite}", [*prompt.opening, *answered, last, *prompt.closing]


def prompt_hash(prompt: Prompt) -> str:
    """Return a hash that is equal for two prompts exactly if they send the same messages."""
    opening, closing = (
        [[message.role, message.content, *filter(None, [message.more])] for message in several]
        for several in (prompt.opening, prompt.closing)
    )
    return _sha256([opening, prompt.turns, *filter(None, [closing])])[:16]


def _sha256(value: object) -> str:
    # Parquet can hold dates and decimals; written as text, different values stay different.
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def draw(
    suite: Suite,
    prompts: Sequence[Prompt],
    source: str,
    limit: int | None,
    read: Collection[str | None] = (),
    balance: str | None = None,
) -> Loaded:
    """Return the `limit` prompts whose hashed ids come first, in file order; a larger limit only adds prompts.

    With `balance`, which is `category` or a column in their slices, take equally many of each of its values, as far as
    available. `read` are columns that are no slices. Raises UserError if there are no prompts, if two share an id, or
    if none has that column.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be at least 1, not {limit}")
    order = sorted(numbers_by_id(suite, prompts, source), key=lambda prompt_id: _rank(suite, prompt_id))
    if balance is not None:
        order = _in_turns(suite, order, _values_of(suite, with_slices(prompts, read), balance))
    drawn_ids = set(order[:limit])
    drawn = tuple(with_slices([prompt for prompt in prompts if prompt.prompt_id in drawn_ids], read))
    sha256 = _sha256([prompt.row for prompt in drawn])
    return Loaded(suite, drawn, source, sha256, len(prompts), pool=tuple(prompts), order=tuple(order[:limit]))


def first_drawn(
    suite: Suite,
    rows: Rows,
    source: str,
    limit: int,
    id_of: Callable[[str, int, Row], str],
    made: Callable[[str, int, Row], T | None],
) -> tuple[list[T], int]:
    """Make only the prompts that `draw` takes of these rows, skipping None; return them with the number of rows.

    Of other rows only the id is read and eight bytes are held: a file may be larger than memory.
    Raises UserError if two rows share an id.
    """
    ranks, first, kept = array("Q"), list[tuple[int, int]](), dict[int, T]()
    for number, (where, row) in enumerate(rows):
        rank = int.from_bytes(_rank(suite, id_of(where, number, row)))
        ranks.append(rank >> 192)
        if len(first) >= limit and (not first or -rank < first[0][0]):
            continue
        if (value := made(where, number, row)) is not None:
            kept[number] = value
            heappush(first, (-rank, number))
            if len(first) > limit:
                del kept[heappop(first)[1]]
    values = np.frombuffer(ranks, dtype=np.uint64)
    order = np.argsort(values, kind="stable")
    twins = np.flatnonzero(values[order][1:] == values[order][:-1])
    if len(twins):
        one, other = order[twins[0]], order[twins[0] + 1]
        raise UserError(f"{source}: rows {one + 1} and {other + 1} share an id")
    return [*kept.values()], len(ranks)


def numbers_by_id(suite: Suite, prompts: Iterable[Prompt], source: str) -> dict[str, int]:
    """Return the numbers of prompts, from 1 on, by id. Raises UserError if there are none, and if two share an id."""
    numbers: dict[str, int] = {}
    for number, prompt in enumerate(prompts, start=1):
        first = numbers.setdefault(prompt.prompt_id, number)
        if first != number:
            raise UserError(f"{source}: rows {first} and {number} share the id '{prompt.prompt_id}'")
    if not numbers:
        raise UserError(f"{source}: no rows for suite '{suite.name}'")
    return numbers


def _rank(suite: Suite, prompt_id: str) -> bytes:
    return hashlib.sha256(f"{suite.seed}:{prompt_id}".encode()).digest()


def _in_turns(suite: Suite, order: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return the ids so that each value, in an order drawn like prompts, occurs once per round."""
    groups: dict[str, list[str]] = {}
    for prompt_id in order:
        groups.setdefault(values[prompt_id], []).append(prompt_id)
    rounds = zip_longest(*(groups[value] for value in sorted(groups, key=lambda value: _rank(suite, value))))
    return [prompt_id for some in rounds for prompt_id in some if prompt_id is not None]


def _values_of(suite: Suite, prompts: Sequence[Prompt], column: str) -> dict[str, str]:
    """Return the value of each prompt in a column, by id. Raises UserError if no prompt has the column."""
    if column == "category":
        found = {prompt.prompt_id: prompt.category for prompt in prompts}
    else:
        found = {prompt.prompt_id: prompt.slices.get(column) for prompt in prompts}
    if not any(found.values()):
        known = dict.fromkeys(name for prompt in prompts for name in prompt.slices)
        has_category = any(prompt.category for prompt in prompts)
        names = [*known, *(["category"] if has_category else [])]
        if not names:
            raise UserError(f"--balance {column}: the prompts of {suite.name} have no column of names; leave it out")
        raise unknown(f"--balance column of {suite.name}", column, names)
    return {prompt_id: value or NO_VALUE for prompt_id, value in found.items()}


def as_drawn(loaded: Loaded) -> Loaded:
    """Sort prompts so that those drawn with a smaller limit come first."""
    places = {prompt_id: place for place, prompt_id in enumerate(loaded.order)}
    return replace(loaded, prompts=tuple(sorted(loaded.prompts, key=lambda prompt: places[prompt.prompt_id])))


def with_scorer(loaded: Loaded, scorer: str, column: Mapping[str, Any]) -> Loaded:
    """Replace a suite's scorer, with a column that is added to every row."""
    prompts = tuple(replace(prompt, row={**prompt.row, **column}) for prompt in loaded.prompts)
    suite = replace(loaded.suite, scorer=scorer)
    return replace(loaded, suite=suite, prompts=prompts, sha256=_sha256([prompt.row for prompt in prompts]))


def without(loaded: Loaded, prompt_ids: Collection[str]) -> Loaded:
    """Remove prompts, as if they had not been drawn."""
    kept = tuple(prompt for prompt in loaded.prompts if prompt.prompt_id not in prompt_ids)
    order = tuple(prompt_id for prompt_id in loaded.order if prompt_id not in prompt_ids)
    return replace(loaded, prompts=kept, sha256=_sha256([prompt.row for prompt in kept]), order=order)


def without_first(several: Sequence[Loaded], number: int) -> list[Loaded]:
    """Remove the first `number` prompts drawn of each suite, and suites without any left.

    Raises UserError if nothing is left.
    """
    kept = [without(loaded, loaded.order[:number]) for loaded in several]
    if not any(loaded.prompts for loaded in kept):
        most = max(len(loaded.prompts) for loaded in several)
        raise UserError(
            f"--skip {number} leaves out all prompts, of which there are {most}; lower it, or raise --limit"
        )
    return [loaded for loaded in kept if loaded.prompts]


def with_slices(prompts: Sequence[Prompt], read: Collection[str | None]) -> list[Prompt]:
    """Add the slices of prompts: their rows' columns that hold only names, except those in `read`."""
    columns = dict.fromkeys(name for prompt in prompts for name in prompt.row if name not in read and is_name(name))
    for column in list(columns):
        values = (prompt.row.get(column) for prompt in prompts)
        if column == "category" or not all(value in (None, "") or is_name(value) for value in values):
            del columns[column]
    if not columns:
        return list(prompts)
    return [
        replace(
            prompt,
            slices={name: str(value) for name in columns if (value := prompt.row.get(name)) not in (None, "")},
        )
        for prompt in prompts
    ]


def is_name(value: object) -> bool:
    """Return whether it is a text, number or boolean that tables, files and terminals can show."""
    if not isinstance(value, str | int):
        return False
    text = str(value)
    return len(text) <= LONGEST_NAME and bool(text.strip()) and visible(text) == text


def _require_columns(suite: Suite, where: str, row: Row) -> None:
    for column in suite.columns:
        if column not in row and column not in suite.optional_columns:
            raise UserError(f"{where}: no column '{column}' (the row has {', '.join(row)})")


def to_prompt(suite: Suite, where: str, index: int, row: Row) -> Prompt:
    """Return a row's prompt. Raises UserError, which begins with `where`, for a row that does not fit the suite."""
    id_column = suite.id if suite.id and not suite.session else "id"
    prompt_id = name_of(where, id_column, _id_of(suite, where, index, row))
    empty = dict.fromkeys((column for column in suite.optional_columns if row.get(column) is None), "")
    texts = {
        column: text_of(where, column, {**row, **empty}, column in suite.list_columns)
        for column in suite.columns
        if column not in (suite.messages, suite.conversation, suite.functions)
    }
    letters: list[str] = []
    if suite.options:
        choices, letters = _choices(suite, where, prompt_id, texts)
        texts |= choices
    chat = _chat_of(suite, where, row)
    from_templates = [template.format_map(texts) for template in suite.turns]
    if suite.optional_columns:
        from_templates = [turn.strip("\n") for turn in from_templates]
    turns = chat.turns if chat else row[suite.turns_column] if suite.turns_column else from_templates
    reference = suite.reference.format_map(texts) if suite.reference else chat.answer if chat else None
    return Prompt(
        suite=suite.name,
        prompt_id=prompt_id,
        turns=filled(where, turns),
        opening=chat.opening if chat else (),
        closing=chat.closing if chat else (),
        category=name_of(where, suite.category, texts[suite.category]) if suite.category else None,
        reference=letters[0] if letters else reference,
        alternatives=tuple(letters[1:]),
        row=row,
    )


def _id_of(suite: Suite, where: str, index: int, row: Row) -> str:
    _require_columns(suite, where, row)
    key = "id" if suite.session else suite.id
    return text_of(where, key, row) if key else str(index)


def _chat_of(suite: Suite, where: str, row: Row) -> RecordedChat | None:
    """Return the conversation that a row holds; None if the suite's rows hold none."""
    if suite.conversation and suite.functions:
        from dflash_bench.tasks import functions

        return functions.chat_of(where, suite.conversation, suite.functions, row)
    if not suite.messages:
        return None
    chat = of_messages(where, suite.messages, row[suite.messages], row.get("tools"))
    if chat is None:
        raise UserError(f"{where}: '{suite.messages}' holds no message of the user")
    return chat


def _choices(suite: Suite, where: str, prompt_id: str, texts: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the options by their letters, and the letters of the correct one (several if it recurs)."""
    order = sorted(suite.options, key=lambda column: _rank(suite, f"{prompt_id}:{column}"))
    by_letter = {letter: texts[column].strip() for letter, column in zip(LETTERS, order, strict=False)}
    for column in order:
        if not texts[column].strip():
            raise UserError(f"{where}: '{column}', an answer to choose from, is empty")
    return by_letter, [letter for letter, text in by_letter.items() if text == texts[suite.options[0]].strip()]


def text_of(where: str, column: str, row: Row, is_list: bool = False) -> str:
    """Return a column as text for templates; a list becomes lines. Raises UserError for other types."""
    value = row[column]
    if is_list and is_texts(value):
        return "\n".join(value)
    if not is_list and (text := as_text(value)) is not None:
        return text
    expected = "a list of strings" if is_list else "a string or a number"
    raise UserError(f"{where}: '{column}' must be {expected}, not {type(value).__name__}")


def as_text(value: object) -> str | None:
    """Return a text, or a number as text; else None. In Parquet, integer columns with nulls are floats."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE:
        return str(int(value))
    is_number = isinstance(value, int | float | Decimal) and math.isfinite(value)
    return str(value) if is_number or isinstance(value, str) else None


_WHOLE = 2.0**53
"""Every integer up to this is exact as a float."""


def name_of(where: str, column: str, text: str) -> str:
    """Return an id or a category. Raises UserError if tables, files and terminals could not show it."""
    if not is_name(text):
        expected = f"a name of 1 to {LONGEST_NAME} visible characters"
        raise UserError(f"{where}: '{column}' must be {expected}, not '{shortened(visible(text), 40)}'")
    return text


def filled(where: str, turns: Sequence[str]) -> tuple[str, ...]:
    """Return the turns. Raises UserError if there are none, or if one is blank or a placeholder."""
    if not turns or not all(turn.strip() for turn in turns):
        raise UserError(f"{where}: a prompt needs at least one turn, and no turn may be blank")
    for turn in turns:
        refuse_placeholder(where, turn)
    return tuple(turns)


def is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
