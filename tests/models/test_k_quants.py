"""A model for code as users have it, but of random weights: Qwen2 in a k-quant GGUF file, measured and trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

import dflash_bench as db
from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.models import inspect, presets, targets
from dflash_bench.report import document
from dflash_bench.report.document import Document
from dflash_bench.training import session
from dflash_bench.training.config import TrainRequest
from helpers import k_quants
from models.test_llamacpp_files import build, convert
from studies import _code_prompts, real
from studies._study import Work

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 5,
}
NAMES = {
    "token_embd": "embed_tokens",
    "blk.1.attn_q": "layers.1.self_attn.q_proj",
    "blk.0.ffn_down": "layers.0.mlp.down_proj",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def _home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(presets.HOME, str(home))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    plain = build(folder / "model", "qwen2", **SIZES, tie_word_embeddings=True)
    convert(str(plain), folder / "plain.gguf", "gguf", None)
    return k_quants.quantised(folder / "plain.gguf", folder / "code-q4_k_m.gguf")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of our own in the columns of both suites."""
    folder = tmp_path_factory.mktemp("data")
    tasks = list(_code_prompts.composed())[:2]
    rows = {"humaneval": map(_code_prompts.to_complete, tasks), "mbpp": map(_code_prompts.to_write, tasks)}
    for suite, made in rows.items():
        (folder / suite).mkdir()
        (folder / suite / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


def test_the_target_is_the_dequantised_file(file: Path) -> None:
    model = targets.load(targets.find_target(str(file)), "cpu", torch.float32)
    stored = {tensor.name.removesuffix(".weight"): tensor for tensor in GGUFReader(file).tensors}
    for name, ours in NAMES.items():
        kept = torch.from_numpy(dequantize(stored[name].data, stored[name].tensor_type))
        assert torch.equal(model.model.get_submodule(ours).weight, kept)


@pytest.fixture(scope="module")
def made(file: Path, data: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Document]]:
    """The study's runs, shortened."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(presets.HOME, str(home))
        return {
            group.title: [
                document.read_document(
                    db.run(
                        target=str(file),
                        suite=suite,
                        data=str(data),
                        methods=group.methods,
                        quantize="int8" if group.name == "int8" else None,
                        max_new_tokens=24,
                        threads=1,
                        out=tmp_path_factory.mktemp(suite) / "run",
                    ).folder
                )
                for suite in real.LIMITS
            ]
            for group in real.groups([])
        }


def test_every_answer_is_exact_in_float32_and_in_int8(made: dict[str, list[Document]]) -> None:
    cells = [cell for runs in made.values() for run in runs for cell in run.cells]
    assert {cell.method for cell in cells} == {BASELINE, "ngram", "ngram:prompt=no", "suffix"}
    assert all(cell.exact == (2, 2) for cell in cells if cell.method != BASELINE)


def test_the_studys_page_has_every_run(made: dict[str, list[Document]], file: Path, tmp_path: Path) -> None:
    text = real.page(Work(tmp_path, "scripts/study real"), file, made, "![places](p.svg)", has_counters=False)
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    for suite in real.LIMITS:
        of_suite = [line for line in lines if line[0].startswith(f"| {suite} ")]
        methods = [method for group in real.groups([]) for method in ("plain", *group.methods)]
        assert [line[1] for line in of_suite if len(line) == 9] == methods
        assert [line[1] for line in of_suite if len(line) == 6] == [*made]  # pass rates
        assert [line[1] for line in of_suite if len(line) == 8] == [one for one in methods if one != "plain"]
        assert len([line for line in of_suite if len(line) == 4]) == 1  # copies


def test_another_file_drafts_for_it(file: Path, tmp_path: Path) -> None:
    other = k_quants.quantised(file.with_name("plain.gguf"), tmp_path / "small-q4_k_m.gguf", seed=1)
    run = db.run(
        target=str(file),
        drafts={"draft-model": str(other)},
        suite="gsm8k",
        data="embedded",
        limit=2,
        methods=["draft-model"],
        max_new_tokens=24,
        threads=1,
        out=tmp_path / "run",
    )
    (cell,) = (cell for cell in document.read_document(run.folder).cells if cell.method == "draft-model")
    assert cell.exact == (2, 2)


def test_a_draft_is_trained_on_it(file: Path, tmp_path: Path) -> None:
    request = TrainRequest(
        target=str(file),
        method="eagle3",
        out=tmp_path,
        written=4,
        sampled=0,
        max_new_tokens=8,
        steps=1,
        rate=0.02,
        draft_vocab=64,
        slim=True,
        threads=1,
    )
    folder = session.perform(request, lambda _: None)
    assert folder is not None and not inspect.inspect(str(folder), str(file)).problems
