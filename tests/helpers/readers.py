"""Everything that reads files by others, each with a file that it can read: what the fuzz and the lists go through."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_bench import report
from dflash_bench.analysis.gate import baselines
from dflash_bench.analysis.peers import benches
from dflash_bench.core.errors import UserError
from dflash_bench.core.files import check_same_options
from dflash_bench.models import convert, datastore, gguf, mtp_heads, presets, targets, weights
from dflash_bench.models.formats import TargetShape, medusa, problems, read_checkpoint, save_draft
from dflash_bench.models.nets.dflash import DFlashConfig, DFlashDraft, initialise
from dflash_bench.models.nets.medusa import MedusaConfig, MedusaHeads
from dflash_bench.models.nets.mtp import MTPConfig, MTPDraft
from dflash_bench.models.nets.p_eagle import PEagleConfig, PEagleDraft
from dflash_bench.report import answers
from dflash_bench.results import run_info, table
from dflash_bench.tasks import prompts, rows, suites
from helpers import runs, tiny

TARGET = TargetShape(tiny.HIDDEN, tiny.VOCABULARY, tiny.LAYERS)
MOST_CPU_S = 10
"""That reading one small file may take; a reader that waits or loops takes far more."""


@dataclass(frozen=True)
class Reader:
    """`make` puts a folder there with everything whole; `file` in it is what gets damaged, and `read` reads it."""

    make: Callable[[Path], object]
    file: str
    read: Callable[[Path], object]
    is_json: bool = True


class TookTooLongError(Exception):
    """Not a UserError, so that a test sees it."""


@contextmanager
def in_time() -> Iterator[None]:
    """Raises TookTooLongError after so much processor time, which a busy machine does not use up."""

    def stop(*_: object) -> None:
        raise TookTooLongError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def outcome(reader: Reader, folder: Path) -> str | None:
    """The user's error message, None if it reads. Any other exception is raised."""
    try:
        with in_time():
            reader.read(folder)
    except UserError as error:
        return str(error)
    return None


def _run(folder: Path) -> None:
    size = {
        "weight_bytes": 1000,
        "matrix_elements": 500,
        "row_bytes": 4,
        "attention": [{"num_layers": 2, "window": None, "query_size": 8, "cache_bytes": 16}],
    }
    runs.stored(folder / "run", runs.answers(4))
    path = folder / "run/run.json"
    forwards = {
        "rows": 1,
        "context": 128,
        "seconds": {"1": 0.01, "2": 0.011, "16": 0.02},
        "bandwidth": 1e9,
        "products": 1e10,
        "size": size,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"forwards": forwards}))


def _read_run(folder: Path) -> None:
    document = report.read_document(folder / "run")
    report.FORMATS["table"](document)
    report.card(document)


def _prompts_of_run(folder: Path) -> None:
    row: dict[str, Any] = {name: [] for name in ("opening", "closing", "alternatives", "slices", "paddings")}
    row |= {"suite": "s", "prompt_id": "p", "turns": ["Hi"]}
    run_info.write_prompts(folder, [{name: row.get(name, "x") for name in run_info.PROMPTS_COLUMNS}])


def _draft(kind: str, form: str | None = None) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        if form == "deepspec":
            save_draft(_shifted(), folder / "draft", form)
        elif form is None:
            shutil.copytree(_model() / kind, folder / "draft")
        else:
            convert.convert(str(_model() / kind), folder / "draft", form, str(_model() / "target"))

    return make


def _shifted() -> DFlashDraft:
    """DeepSpec's labels are shifted, and its files include embedding and head."""
    config = DFlashConfig(
        head_dim=16,
        num_layers=1,
        block_size=4,
        mask_token_id=3,
        target_layer_ids=(0, 2),
        shifted_labels=True,
        own_embedding=True,
        own_head=True,
        **tiny.BODY,  # type: ignore[arg-type]
    )
    draft = DFlashDraft(config)
    initialise(draft, 0)
    return draft


@cache
def _model() -> Path:
    return tiny.build(Path(mkdtemp()) / "model")


def _read_draft(folder: Path) -> None:
    for headers_only in (True, False):
        list(problems(*read_checkpoint(folder / "draft", TARGET, headers_only), TARGET))


def _p_eagle(form: str) -> Callable[[Path], object]:
    config = PEagleConfig(
        head_dim=16,
        draft_vocab_size=64,
        target_layer_ids=(0, 1, 2),
        num_layers=2,
        mask_token_id=3,
        own_embedding=True,
        **tiny.BODY,  # type: ignore[arg-type]
    )

    def make(folder: Path) -> None:
        draft = PEagleDraft(config)
        initialise(draft, 0)
        save_draft(draft, folder / "draft", form)

    return make


def _mtp_heads(folder: Path) -> None:
    config = targets.config_of(_model() / "target")
    draft = MTPDraft(MTPConfig.of(config)).to_empty(device="cpu")
    for parameter in draft.parameters():
        parameter.detach().fill_(1)  # `initialise` fills matrices alone
    initialise(draft, 0)
    stored = json.loads((_model() / "target/config.json").read_text())
    mtp_heads.save(draft, folder / "draft", stored)


def _read_mtp_heads(folder: Path) -> None:
    for headers_only in (True, False):
        config, _ = mtp_heads.read(folder / "draft", headers_only)
        list(mtp_heads.misfits(config, TARGET))


def _medusa(folder: Path) -> None:
    medusa.save(MedusaHeads(MedusaConfig(tiny.HIDDEN, tiny.VOCABULARY, 2, 1)), folder / "draft", "nano")


def _read_medusa(folder: Path) -> None:
    config, _ = medusa.read(folder / "draft")
    list(medusa.misfits(config, TARGET))


def _copied(*names: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        for name in names:
            (folder / name).write_bytes((_model() / "target" / name).read_bytes())

    return make


def _weights(folder: Path) -> None:
    save_file({"a.weight": torch.ones(4, 4), "b": torch.arange(3)}, folder / "model.safetensors")


def _index(folder: Path) -> None:
    save_file({"a": torch.ones(4, 4)}, folder / "one.safetensors")
    index = {"metadata": {"total_size": 64}, "weight_map": {"a": "one.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _pickle(folder: Path) -> None:
    torch.save({"a": torch.ones(4)}, folder / "pytorch_model.bin")


@cache
def _tokenizer() -> Any:
    return targets.tokenizer_of(_model() / "target")


def _datastore(folder: Path) -> None:
    datastore.write(folder / "store", datastore.of_texts([[1, 2, 3, 4]]), _tokenizer(), ["here"])


def _baseline(folder: Path) -> None:
    runs.stored(folder / "run", runs.answers(4))
    baselines.write([table.read_run(folder / "run")], folder / "base.json", with_timings=True, limits={})


LIMITS = '["al.pooled"]\nfall = 0.01\n["tps.decode"]\nat_least = 4\nrun_noise = 0.02\n'
SERVED = {
    "completed": 80,
    "failed": 0,
    "max_concurrency": 4,
    "model_id": "org/name",
    "output_throughput": 88.0,
    "mean_tpot_ms": 9.0,
    "mean_ttft_ms": 40.0,
    "spec_decode_num_drafts": 100,
    "spec_decode_accepted_tokens": 250,
    "spec_decode_acceptance_length": 3.5,
    "spec_decode_acceptance_rate": 50.0,
    "spec_decode_per_position_acceptance_rates": [0.9, 0.8],
}
PROMPTS = [
    {"prompt": "Hi", "id": "a", "category": "c", "reference": "1"},
    {"turns": ["Hi", "Why?"], "question_id": 7, "reference": ["1", "2"]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    {"turns": ["Where?"], "reference": [["here", "there"]]},
]
TALK = [
    {"role": "user", "content": "Is it warm?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "31"},
]
TALKS = [
    {"messages": TALK, "tools": [{"type": "function", "function": {"name": "look"}}], "level": 1},
    {"custom_id": "b", "body": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
    {"prompt": json.dumps(TALK), "answer": "Yes."},
]
GSM8K = [{"question": "1 + 1?", "answer": "Two.\n#### 2"}, {"question": "2 + 2?", "answer": "Four.\n#### 4"}]
TABLE = """
[one]
target = "org/target"
drafts = { dflash = "org/draft" }
num_drafts = { dflash = 7 }
revision = { target = "0123456789012345678901234567890123456789" }
source = "here"
"""
SUITE = """
version = 1
title = "sums"
source = "org/name"
scorer = "gsm8k_number"
columns = ["question", "answer"]
turns = ["{question}"]
reference = "{answer}"
"""


def _text(name: str, text: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return make


def _lines(name: str, content: list[Any]) -> Callable[[Path], object]:
    return _text(name, "".join(json.dumps(row) + "\n" for row in content))


def _parquet(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (folder / "gsm8k").mkdir()
    parquet.write_table(pa.Table.from_pylist(GSM8K), folder / "gsm8k/test.parquet")


def _prompts_in_parquet(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist([{"messages": TALK, "level": 1}]), folder / "p.parquet")


def _gguf(folder: Path) -> None:
    config = LlamaConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    for name in tiny.TOKENIZER:
        shutil.copy(_model() / "target" / name, folder / "llama" / name)
    convert.convert(str(folder / "llama"), folder / "m.gguf", convert.GGUF, None)


def _read_suite(folder: Path) -> None:
    (suite,) = suites.expand(["gsm8k"])
    suites.load_prompts(suite, folder)


def _read_toml_of_suite(folder: Path) -> None:
    suites.prompt_hash(
        suites.to_prompt(suites._parse(folder / "suite.toml"), "row 1", 0, {"question": "1?", "answer": "#### 1"})
    )


def _read_table(folder: Path) -> None:
    presets.table.__wrapped__(folder / "table.toml")


def _claimed(folder: Path) -> None:
    check_same_options(folder / "work.json", {"rate": 0.1, "seed": 0}, "a training")


READERS: dict[str, Reader] = {
    "run.json": Reader(_run, "run/run.json", _read_run),
    "part": Reader(_run, "run/part-000000.parquet", _read_run, is_json=False),
    "prompts of a run": Reader(_prompts_of_run, run_info.PROMPTS_FILE, run_info.read_prompts, is_json=False),
    "prompts": Reader(_lines("p.jsonl", PROMPTS), "p.jsonl", lambda f: prompts.load(f / "p.jsonl")),
    "scored prompts": Reader(
        _lines("p.jsonl", PROMPTS[:1]), "p.jsonl", lambda f: prompts.load(f / "p.jsonl", scorer="gsm8k_number")
    ),
    "conversations": Reader(_lines("p.jsonl", TALKS), "p.jsonl", lambda f: prompts.load(f / "p.jsonl")),
    "prompts in an array": Reader(
        _text("p.json", json.dumps([*PROMPTS, *TALKS])), "p.json", lambda f: prompts.load(f / "p.json")
    ),
    "prompts in Parquet": Reader(
        _prompts_in_parquet, "p.parquet", lambda f: prompts.load(f / "p.parquet"), is_json=False
    ),
    "rows of a suite": Reader(_lines("gsm8k/test.jsonl", GSM8K), "gsm8k/test.jsonl", _read_suite),
    "rows in Parquet": Reader(_parquet, "gsm8k/test.parquet", _read_suite, is_json=False),
    "suite": Reader(_text("suite.toml", SUITE), "suite.toml", _read_toml_of_suite, is_json=False),
    "table of presets": Reader(_text("table.toml", TABLE), "table.toml", _read_table, is_json=False),
    "limits": Reader(
        _text("limits.toml", LIMITS), "limits.toml", lambda f: baselines.read_limits(f / "limits.toml"), is_json=False
    ),
    "baseline": Reader(_baseline, "base.json", lambda f: baselines.read(f / "base.json")),
    "result of vLLM": Reader(
        _text("served.json", json.dumps(SERVED)), "served.json", lambda f: benches.read_results(f / "served.json")
    ),
    "draft by z-lab": Reader(_draft("dflash"), "draft/config.json", _read_draft),
    "draft by speculators": Reader(_draft("dflash", "speculators"), "draft/config.json", _read_draft),
    "draft by DeepSpec": Reader(_draft("dflash", "deepspec"), "draft/config.json", _read_draft),
    "EAGLE-3 by SafeAILab": Reader(_draft("eagle3"), "draft/config.json", _read_draft),
    "EAGLE-3 by speculators": Reader(_draft("eagle3", "speculators"), "draft/config.json", _read_draft),
    "P-EAGLE by SpecForge": Reader(_p_eagle("specforge"), "draft/config.json", _read_draft),
    "P-EAGLE by speculators": Reader(_p_eagle("speculators"), "draft/config.json", _read_draft),
    "MTP heads": Reader(_mtp_heads, "draft/config.json", _read_mtp_heads),
    "tensors of MTP heads": Reader(_mtp_heads, "draft/model.safetensors", _read_mtp_heads, is_json=False),
    "Medusa heads": Reader(_medusa, "draft/config.json", _read_medusa),
    "target": Reader(_copied("config.json"), "config.json", targets.config_of),
    "weights": Reader(_weights, "model.safetensors", weights.read_tensors, is_json=False),
    "headers": Reader(
        _weights, "model.safetensors", lambda f: weights.read_tensors(f, weights.only_maps), is_json=False
    ),
    "index of shards": Reader(_index, "model.safetensors.index.json", weights.read_tensors),
    "pickle": Reader(_pickle, "pytorch_model.bin", weights.read_tensors, is_json=False),
    "vocabulary": Reader(_copied("tokenizer.json"), "tokenizer.json", targets.vocabulary_in),
    "tokenizer of a page": Reader(
        _copied("tokenizer.json"), "tokenizer.json", lambda f: answers.read_tokenizer(f / "tokenizer.json")
    ),
    "datastore": Reader(
        _datastore, "store", lambda f: datastore.read(f / "store", _tokenizer(), tiny.VOCABULARY), is_json=False
    ),
    "claim of a training": Reader(
        _claimed, "work.json", lambda f: check_same_options(f / "work.json", {"rate": 0.1, "seed": 0}, "a training")
    ),
    "texts": Reader(_lines("t.jsonl", [{"text": "a"}]), "t.jsonl", lambda f: list(rows.json_lines(f / "t.jsonl"))),
    "GGUF": Reader(_gguf, "m.gguf", lambda f: gguf.convert(f / "m.gguf", Path(mkdtemp(dir=f)) / "out"), is_json=False),
}


PROGRESS = re.compile(r"(starting|reading prompts|connecting|loading [a-z0-9 ]+)( \([0-9]+ s\))?")


def without_progress(stderr: str) -> list[str]:
    """The lines of a process, apart from what it shows every few seconds: on a busy machine its start takes longer."""
    return [line for line in stderr.splitlines() if not PROGRESS.fullmatch(line)]
