"""run.json and the prompts stored beside it: types, writing and reading."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from dflash_bench.core import environment, files
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import io_error, require_file, write_text, write_whole
from dflash_bench.core.labels import visible
from dflash_bench.core.measurement import measurements
from dflash_bench.core.types import SCHEMA_VERSION, SESSION, Settings

SCHEMA = "schema"
"""The key of the schema version, in `run.json`, parts and baselines."""

# The types of `run.json`. Undeclared keys, such as those of a newer version, are kept unchanged.


MOST = 2**53
"""Upper bound of counts: not every integer above it is exact as a float."""
Whole = Annotated[int, Field(gt=-MOST, lt=MOST)]
Count = Annotated[int, Field(ge=0, lt=MOST)]
Number = Annotated[float, Field(gt=-MOST, lt=MOST)]
Positive = Annotated[float, Field(gt=0, lt=MOST)]
Width = Annotated[str, Field(pattern="^[1-9][0-9]{0,5}$")]
"""A number of tokens in decimal digits, as an object key."""


class StoredModel(BaseModel):
    """A JSON object of a file that users may edit: values are not converted, and numbers must be finite."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="allow", allow_inf_nan=False, populate_by_name=True, protected_namespaces=()
    )

    def to_json(self) -> dict[str, Any]:
        """Return the object as it was read, with undeclared keys and without defaults."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    def entry(self, name: str) -> Any:
        """Return the entry of a measurement; None if there is none."""
        return (self.model_extra or {}).get(name)


class Gpu(StoredModel):
    name: str


class GitCommit(StoredModel):
    commit: str
    dirty: bool | None = None


class Environment(StoredModel):
    """The machine and software of a run."""

    cpu: str | None
    gpus: list[Gpu]
    machine: str
    packages: dict[str, str | None]
    python: str
    platform: str = ""
    num_cores: Whole | None = None
    num_usable_cores: Whole | None = None
    git: GitCommit | None = None

    @field_validator("packages")
    @classmethod
    def _has_torch(cls, packages: dict[str, str | None]) -> dict[str, str | None]:
        if "torch" not in packages:
            raise ValueError("torch is missing")
        return packages

    def one_line(self) -> str:
        return environment.one_line(self.model_dump())


class MemoryForecast(StoredModel):
    """Memory use as predicted before the models were loaded."""

    free_bytes: Whole | None
    target_weights_bytes: Whole
    target_cache_bytes: Whole
    draft_weights_bytes: Whole
    draft_cache_bytes: Whole
    largest_context: Whole | None
    largest_context_without_drafts: Whole | None


class SettingsEntry(StoredModel):
    temperature: Number
    top_k: Whole
    top_p: Number
    min_p: Number
    repetition_penalty: Number
    thinking: bool | None
    concurrency: Whole
    context: Whole | None
    rate: Number | None

    def to_settings(self) -> Settings:
        return Settings(**{name: getattr(self, name) for name in SettingsEntry.model_fields})


class MethodEntry(StoredModel):
    name: str
    num_drafts: Whole | None
    """The most tokens drafted per round; None for a server, which does not report it."""
    draft: str | None = None
    options: dict[str, Any] = {}
    imposed: list[float] = []
    """The shares of rounds in which a server was to accept the first 1, 2, ... drafted tokens, right or wrong."""


class DraftEntry(StoredModel):
    name: str | None = None
    trained_thinking: bool | None = None
    verifier: str | None = None
    kind: str | None = None
    """For the method dflash, the publisher's name for the kind of draft; None for others, and in older runs."""


class SuiteEntry(StoredModel):
    version: Whole
    source: str
    prompts: Whole
    sha256: str | None = None
    revision: str | None = None
    """For a user's own copy, OWNER/NAME@COMMIT if known."""
    scorer: str = "none"
    style: str = "paper"
    """The prompt style: `paper` or `verbatim`."""
    unscored: list[str] = []
    """The ids of prompts whose answers the scorer cannot score."""
    metric: dict[str, str] = {}
    """Identifies the code of a metric of evaluate: its SHA-256, or its revision on the hub."""
    rendered: dict[str, str] = {}
    """The hash of the rendered texts of all first turns, by thinking ("on", "off")."""
    contexts: dict[str, str] = {}
    """The hash of the padding, by context."""


class ServerEntry(StoredModel):
    address: str
    dialect: str
    version: str | None
    model: str | None
    prompts: str
    prefix_cache: str
    facts: dict[str, Any]


class WorkersEntry(StoredModel):
    number: Whole
    on_one_machine: Whole
    kinds: list[str]


class ShardEntry(StoredModel):
    number: Whole
    of: Whole
    plan: str
    """The SHA-256 of the whole plan."""


class LatencyObjectives(StoredModel):
    ttft_s: Number | None = None
    tpot_s: Number | None = None


class JudgeEntry(StoredModel):
    target: str
    dtype: str
    weights: str | None = None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return pydantic's checker of a type, which is slow to build."""
    return TypeAdapter(kind)


def _check_entries(stored: StoredModel) -> StoredModel:
    """Check the entries of measurements, which only their own files know. Raises ValueError."""
    for one in measurements():
        if one.entry is not None and (value := stored.entry(one.name)) is not None:
            try:
                _adapter(one.entry).validate_python(value, strict=True)
            except ValidationError as error:
                fault = error.errors(include_url=False)[0]
                raise ValueError(f"{one.name} is {_short(fault['input'])}: {fault['msg']}") from error
    return stored


class GpuPath(StoredModel):
    """The way in which a GPU computes a part of the target's passes."""

    used: str
    why_slow: str | None = None
    """Why the engine's fastest way could not be used; None if it was."""


class RunIdentity(StoredModel):
    """Settings that determine the answers of a run, which can be continued only under the same identity."""

    model: str
    dtype: str
    settings: list[SettingsEntry]
    target: str | None = None
    methods: dict[str, MethodEntry] = {}
    drafts: dict[str, DraftEntry] = {}
    revisions: dict[str, str | None] = {}
    unpinned: list[str] = []
    suites: dict[str, SuiteEntry] = {}
    max_new_tokens: Whole | None = None
    stop_ids: list[Whole] | None = None
    context_length: Whole | None = None
    seed: Whole | None = None
    repeats: Whole | None = None
    engine: str | None = None
    network: str | None = None
    capture: str | None = None
    attention: str | None = None
    quantize: str | None = None
    device: str | None = None
    threads: Whole | None = None
    workers: WorkersEntry | None = None
    tensor_parallel: Whole | None = None
    clients: Whole | None = None
    shard: ShardEntry | None = None
    audit: str | None = None
    code: str | None = None
    plan: str | None = None
    """The SHA-256 of the plan."""
    order: str | None = None
    """`drawn` if prompts come in random order, for a time limit."""
    servers: dict[str, ServerEntry] = {}
    slo: LatencyObjectives | None = None
    date: str | None = None
    """The date passed to the chat template, if it uses one."""
    judge: JudgeEntry | None = None
    fallback: str | None = None
    why_torch: str | None = None
    paths: dict[str, GpuPath] = {}
    """How a GPU computes attention, passes and small operations; empty on a CPU and in older runs."""

    _entries = model_validator(mode="after")(_check_entries)

    def source_of(self, suite: str) -> str:
        """Return "embedded", "shipped", "hub ID@COMMIT", "folder PATH" or "file PATH"; empty for an unknown suite."""
        return self.suites[suite].source if suite in self.suites else ""


class AttentionSize(StoredModel):
    num_layers: Count
    window: Count | None
    query_size: Count
    cache_bytes: Count


class TargetSize(StoredModel):
    weight_bytes: Positive
    matrix_elements: Count
    attention: list[AttentionSize]
    row_bytes: Count = 0
    stored_bytes: Count = 0
    num_experts: Count = 0
    experts_per_token: Count = 0
    expert_bytes: Count = 0
    expert_elements: Count = 0
    state_bytes: Count = 0
    num_layers: Count = 0
    vocab_size: Count = 0
    itemsize: Count = 0


class ForwardTimes(StoredModel):
    """Times of forward passes of several widths at the start of the run."""

    rows: Count
    context: Count
    seconds: Annotated[dict[Width, Positive], Field(min_length=1)]
    bandwidth: Positive
    products: Positive
    size: TargetSize
    read_bandwidth: Positive | None = None
    """Bytes per second at which the device sums memory; None in runs that did not measure it."""
    least_s: Positive | None = None
    wide_s: dict[Width, Positive] = {}
    """The shortest of many passes by width; empty on GPUs, and where passes take long."""
    num_launches: Count | None = None
    """Operations of a pass over one token that a GPU launches one by one; None on CPUs and if passes are captured."""
    launch_s: Positive | None = None
    """The seconds that launching a tiny operation takes."""


class MethodTimes(StoredModel):
    """Sums over the answers of one method."""

    answers: Whole
    between_s: Number
    prefill_s: Number
    decode_s: Number


class ChosenModel(StoredModel):
    """The command line's options that readers need."""

    target: str | None = None
    model: str | None = None
    drafts: list[str] = []
    """Drafts given with --draft, as METHOD=REFERENCE."""


class ResumedProcess(StoredModel):
    started: str | None = None
    sandbox: str | None = None
    environment: Environment | None = None
    boot: str | None = None
    dropped: Whole = 0
    """Number of stored answers left out."""


class WorkerEntry(StoredModel):
    machine: Whole
    environment: Environment | None = None


NumTurns = Annotated[int, Field(gt=0, lt=2**31)]
PromptEntry = Annotated[tuple[str, NumTurns, str], Field(strict=False)]


class StoredPlan(StoredModel):
    """See `results/plan.py`. `prompts` holds (id, number of turns, hash) by suite."""

    methods: Annotated[list[str], Field(min_length=1)]
    repeats: Annotated[int, Field(gt=0, lt=MOST)]
    prompts: dict[str, list[PromptEntry]]


class RunInfo(StoredModel):
    """The content of `run.json`."""

    schema_version: int = Field(alias="schema")
    identity: RunIdentity
    environment: Environment
    command: str
    run_id: str | None = None
    plan: StoredPlan | None = None
    state: str | None = None
    started: str | None = None
    finished: str | None = None
    sandbox: str | None = None
    options: ChosenModel = ChosenModel()
    resumed: list[ResumedProcess] = []
    measured: dict[str, Whole] | None = None
    """For a run with a time limit, the number of prompts it measured, by suite."""
    spoiled: str | None = None
    objections: dict[str, Whole] = {}
    span_s: Number | None = None
    times: dict[str, MethodTimes] = {}
    since_s: Number = 0.0
    """Start of the answers that `times` covers: an earlier process that did not finish leaves no sums."""
    memory: MemoryForecast | None = None
    workers: list[WorkerEntry] = []
    forwards: ForwardTimes | None = None
    pass_at_end_s: Number = 0.0
    boot: str | None = None
    """An id of the machine since its last boot, for shards."""
    _entries = model_validator(mode="after")(_check_entries)

    @property
    def environments(self) -> list[Environment]:
        """The machines of all processes and workers of the run, as far as they are recorded."""
        others = [*(one.environment for one in self.resumed), *(one.environment for one in self.workers)]
        return [self.environment, *filter(None, others)]


FILE = "run.json"
Stored = TypeVar("Stored", bound=StoredModel)


def parse(model: type[Stored], content: Any, complaint: str, remedy: str = "") -> Stored:
    """Check JSON content against a type. Raises UserError: `complaint`, the first wrong key, and `remedy`."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{complaint}: {_first_fault(error)}{remedy and f'; {remedy}'}") from error


def _first_fault(error: ValidationError) -> str:
    """Describe the first error, such as "identity.dtype is 3, but should be a valid string"."""
    fault = error.errors(include_url=False)[0]
    place = ""
    for key in fault["loc"]:
        shown = f"[{key}]" if isinstance(key, int) else f".{key if key.isprintable() else repr(key)}"
        place += "" if key == "[key]" else shown
    place = place.lstrip(".")
    if fault["type"] == "missing":
        return f"{place} is missing"
    if fault["type"] == "value_error":
        return f"{place}: {fault['msg'].removeprefix('Value error, ')}"
    return f"{place} is {_short(fault['input'])}, but {re.sub('^[A-Z][a-z]+ (?=should)', '', fault['msg'])}"


def _short(value: Any) -> str:
    match value:
        case dict():
            return "an object"
        case list():
            return "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}..."


def read_info(folder: Path) -> RunInfo:
    """Load `run.json`. Raises UserError if there is no run, or if the file is not as a run writes it."""
    path = folder / FILE
    if not folder.exists():
        raise UserError(f"there is no run {folder}; 'dflash-bench runs' lists those in results/runs, @1 is the newest")
    if not path.exists():
        raise UserError(f"{folder} holds no run (no {FILE})")
    content: Any = files.json_of(path)
    is_run = isinstance(content, dict) and isinstance(content.get("identity"), dict)
    if not is_run or not isinstance(content.get(SCHEMA), int):
        raise UserError(f"cannot read {path}: not written by dflash-bench run")
    refuse_other_schema(path, content[SCHEMA])
    info = parse(RunInfo, content, f"{path} is not as dflash-bench run wrote it")
    if info.spoiled is not None:
        raise UserError(f"{folder} proves nothing: {info.spoiled}; delete it, and run again")
    return info


def refuse_other_schema(path: Path, version: object) -> None:
    """Raise UserError if this version cannot read a file with this schema version."""
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise UserError(
            f"{path} has schema {version!r}, but this version reads up to {SCHEMA_VERSION}; update dflash-bench"
        )


def write_info(folder: Path, info: RunInfo) -> None:
    write_text(folder / FILE, f"{files.json_lines(info.to_json())}\n")


def with_changes(info: RunInfo, changes: Mapping[str, Any], without: Sequence[str] = ()) -> RunInfo:
    """Return the info with these keys changed, and the keys in `without` removed."""
    kept = {name: value for name, value in info.to_json().items() if name not in without}
    return RunInfo.model_validate(kept | as_json(changes))


def as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return content as it will be read back: tuples become lists."""
    read_back: dict[str, Any] = json.loads(json.dumps(dict(content)))
    return read_back


def carried(info: RunInfo) -> dict[str, Any]:
    """Return the data that every part of a run carries: its identity, and the run's id."""
    return {**info.identity.to_json(), **({} if info.run_id is None else {"run_id": info.run_id})}


# Differences between two values read from JSON, in words.


def differences(then: Any, now: Any, path: str = "") -> Iterator[str]:
    """Yield the differences key by key: "temperature was 0.0, now 1.0"."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            yield from differences(then.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif _are_lists_of_objects(then, now) and len(then) == len(now):
        for number, pair in enumerate(zip(then, now, strict=True)):
            yield from differences(*pair, path if len(then) == 1 else f"{path}[{number}]")
    elif then != now:
        yield f"{path} was {json.dumps(then)}, now {json.dumps(now)}"


def _are_lists_of_objects(*values: Any) -> bool:
    return all(isinstance(value, list) and all(isinstance(item, dict) for item in value) for value in values)


# The prompts of a run, stored once beside its parts, with the expected answers.
#
# Rows refer to their prompt by suite and id. In a later turn the model got all turns so far, with the plain answers of
# the same settings and repeat between them; those answers are in the rows.


PROMPTS_FILE = "prompts.parquet"
PROMPTS_COLUMNS = tuple(
    """
    suite prompt_id prompt_hash category opening turns closing reference alternatives slices paddings row
    """.split()
)
"""`opening` holds the messages before the first turn, with their roles, and in `more` other fields for chat templates,
as JSON; `turns` the user's messages; `closing` the messages between the only turn and its answer; `alternatives` other
correct references; `slices` the columns by which answers can be grouped; `row` what scorers read besides the reference,
such as tests, as JSON.

`paddings` holds the text before the first turn, for each context that the prompt was padded to.
"""


def write_prompts(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    text = pa.string()
    messages, texts = pa.list_(pa.struct([("role", text), ("content", text), ("more", text)])), pa.list_(text)
    kinds = {
        "opening": messages,
        "turns": texts,
        "closing": messages,
        "alternatives": texts,
        "slices": pa.list_(pa.struct([("column", text), ("value", text)])),
        "paddings": pa.list_(pa.struct([("context", pa.int32()), ("text", text)])),
    }
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in PROMPTS_COLUMNS])
    table = pa.Table.from_pylist([dict(row) for row in rows], schema)
    write_whole(folder / PROMPTS_FILE, lambda file: parquet.write_table(table, file, compression="zstd"))


def read_prompts(folder: Path) -> list[dict[str, Any]]:
    """Return the stored prompts; an empty list if the run stored none. Columns that its version lacked are None.

    Raises UserError for a file that cannot be read.
    """
    return _read_prompts(folder, PROMPTS_COLUMNS)


def read_slices(folder: Path) -> dict[str, dict[tuple[str, str], str]]:
    """Return the values of each column of a run's prompts, by suite and id. Raises UserError like `read_prompts`."""
    slices: dict[str, dict[tuple[str, str], str]] = {}
    for row in _read_prompts(folder, ("suite", "prompt_id", "slices")):
        for one in row["slices"] or ():
            if one["column"] and one["value"]:
                values = slices.setdefault(visible(one["column"]), {})
                values[row["suite"], row["prompt_id"]] = visible(one["value"])
    return slices


def read_sessions(folder: Path) -> dict[tuple[str, str], str]:
    """Return the session of each prompt that has one, by suite and id; intervals resample whole sessions."""
    return read_slices(folder).get(SESSION, {})


def unit_of(sessions: Mapping[tuple[str, str], str], suite: str, prompt_id: str) -> str:
    """Return the id of the unit that intervals resample: the prompt, or its session."""
    if not sessions:
        return prompt_id
    # Prompts without a session must not share an id with a session.
    session = sessions.get((suite, prompt_id))
    return f"prompt {prompt_id}" if session is None else f"session {session}"


def _read_prompts(folder: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / PROMPTS_FILE
    if not path.exists():
        return []
    require_file(path)
    try:
        with parquet.ParquetFile(path) as file:
            known = [name for name in columns if name in file.schema_arrow.names]
            rows: list[dict[str, Any]] = file.read(columns=known).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(str(io_error("read", path, error))) from error
    return [{name: row.get(name) for name in columns} for row in rows]
