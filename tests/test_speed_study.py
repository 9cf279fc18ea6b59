"""The study beside llama.cpp with times that are known: its figures, its page, and the runs that it keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

from dflash_bench.core.errors import UserError
from dflash_bench.core.forwards import Size
from studies import _beside_llamacpp, speed
from studies._beside_llamacpp import DRAFTING, FLOAT32, OURS, THEIRS, Arm, Timed, Turn
from studies._study import StudyError
from studies.speed import GOALS, Run

PLAIN, INT8 = Arm(OURS, FLOAT32, "ar"), Arm(OURS, "int8", "ar")
STEP_BYTES = {"ours float32": 4_000_000, "llama.cpp float32": 4_000_000, "llama.cpp Q8_0": 1_000_000}
MILLISECONDS = {
    PLAIN: 1.0, Arm(OURS, FLOAT32, "dflash"): 0.4, Arm(OURS, FLOAT32, "eagle3"): 0.5,
    Arm(THEIRS, FLOAT32, "ar"): 1.2, Arm(THEIRS, FLOAT32, "ar", True): 1.5,
    Arm(THEIRS, FLOAT32, "dflash"): 1.0, Arm(THEIRS, FLOAT32, "dflash", True): 0.8,
    Arm(THEIRS, FLOAT32, "eagle3"): 1.0, Arm(THEIRS, FLOAT32, "eagle3", True): 1.0,
    Arm(THEIRS, "Q8_0", "ar"): 0.5, Arm(THEIRS, "Q8_0", "ar", True): 0.6,
}  # fmt: skip
"""Per token, at best."""
DISTURBED = (1.0, 1.25, 4.0)
"""By how much the answers to a prompt are slowed down; memory is not."""


def timed(
    times: Mapping[Arm, float] = MILLISECONDS, tokens: Mapping[Arm, list[int]] | None = None, **about: Any
) -> Any:
    """Three turns of two prompts; memory gives 5 GB/s."""
    turns = [
        Turn(
            prompt, 5e9, {arm.name: (ms * slower / 1000, (tokens or {}).get(arm, [1, 2])) for arm, ms in times.items()}
        )
        for slower in DISTURBED
        for prompt in range(2)
    ]
    known = {"begun": "2026-01-02T03:04+00:00", "network": "native", "step_bytes": STEP_BYTES, "absent": {}}
    return Timed(**(known | about), turns=turns)


def both(**about: Any) -> dict[str, Any]:
    return {model: timed(**about) for model in speed.SIZES}


def page_of(measured: Mapping[str, Timed], runs: list[Run]) -> str:
    return speed.page("scripts/study speed", "a machine", "1.2", measured, runs)


# Figures.


def test_the_faster_setting_of_flash_attention_counts() -> None:
    assert speed.faster(timed(), FLOAT32, "ar") == Arm(THEIRS, FLOAT32, "ar")
    assert speed.faster(timed(), FLOAT32, "dflash") == Arm(THEIRS, FLOAT32, "dflash", True)
    assert speed.beside(FLOAT32, "ar")(timed()) == pytest.approx((1.2, 1.2))
    assert speed.beside(FLOAT32, "dflash")(timed()) == pytest.approx((2.0, 2.0))


def test_a_ratio_is_the_median_over_prompts_of_the_quickest_and_of_the_median_answers() -> None:
    slow, fast = [[2.0, 4.0, 9.0], [3.0, 3.0, 3.0], [8.0, 8.0, 8.0]], [[1.0, 1.0, 5.0], [1.0, 2.0, 9.0], [4.0] * 3]
    assert speed.ratio(slow, fast) == (2.0, 2.0)
    assert speed.ratio(slow[:2], fast[:2]) == (2.5, (4.0 + 1.5) / 2)


def test_the_share_of_the_bandwidth_is_the_weights_that_a_step_reads_over_its_time() -> None:
    # 4 MB at 5 GB/s are 0.8 ms of a step's 1.0, or of its 1.25.
    assert speed.share(timed(), PLAIN) == pytest.approx((0.8, 0.64))
    assert speed.share(timed(), INT8) is None


def test_the_lower_of_both_figures_counts_and_an_absent_arm_has_none() -> None:
    run = speed.run_of(both(), "a machine")
    assert run.figures["smollm2.bandwidth"] == pytest.approx(0.64)
    assert run.figures["nano.dflash"] == pytest.approx(2.0)
    assert run.figures["nano.int8"] is None and run.bandwidth == 5e9
    with_int8 = both(times={**MILLISECONDS, INT8: 0.25}, step_bytes={**STEP_BYTES, "ours int8": 1_000_000})
    assert speed.run_of(with_int8, "a machine").figures["nano.int8"] == pytest.approx(2.0)


def test_no_speed_counts_of_a_draft_that_changes_our_tokens() -> None:
    measured = both(tokens={Arm(OURS, FLOAT32, "dflash"): [1, 3]})
    runs = [speed.run_of(measured, "a machine")]
    assert runs[0].figures["nano.dflash"] is None
    assert "nano: ours float32 dflash has other tokens than plain decoding" in speed.problems(measured, runs)
    assert "(0/6)" in page_of(measured, runs)
    # llama.cpp's may be near ties.
    measured = both(tokens={Arm(THEIRS, FLOAT32, "ar"): [1, 3]})
    assert speed.run_of(measured, "a machine").figures["nano.plain"] == pytest.approx(1.2)


# The page.


def test_the_page_has_every_arm_both_speedups_and_the_goals_that_were_missed() -> None:
    measured = both(absent={INT8.name: "it needs more"})
    runs = [speed.run_of(measured, "a machine")]
    page = page_of(measured, runs)
    for line in (
        "`scripts/study speed` makes this page",
        "| nano | plain decoding over llama.cpp's | 1.20 | 1.20 | at least 1.1 |",
        "| smollm2 | plain decoding, share of the bandwidth | 0.64 | 0.64 | at least 0.8, missed |",
        "| nano | plain int8 over llama.cpp's Q8_0 | n/a | n/a | at least 1, missed |",
        "| float32 | dflash | 2500.0 [2000.0] (6/6) | 1000.0 [800.0] (6/6) | 1250.0 [1000.0] (6/6) | 2.00 [2.00] |",
        "| int8, Q8_0 | ar | n/a | 2000.0 [1600.0] (6/6) | 1666.7 [1333.3] (6/6) | n/a |",
        "`ours int8 ar` was not measured: it needs more.",
        "| ours | dflash | 2.50 [2.50] | 1.25 [1.25] |",
        "| llama.cpp | dflash | 1.50 [1.50] | 0.62 [0.62] |",
        "| ours | float32 | 4.0 | 4.0 | 0.80 [0.64] |",
        "| llama.cpp | Q8_0 | 1.0 | 2.0 | 0.40 [0.32] |",
    ):
        assert line in page
    assert "missed: smollm2, plain decoding, share of the bandwidth: 0.64 of 0.8" in speed.problems(measured, runs)
    assert not any("nano, plain decoding" in problem for problem in speed.problems(measured, runs))


def test_three_runs_of_each_machine_are_kept_and_the_worst_counts(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    one = speed.run_of(both(), "a machine")
    for hour, figure in ((9, 0.2), (10, 1.3), (11, 0.9), (12, 1.4)):
        latest = replace(one, begun=f"2026-01-02T{hour:02}:00+00:00", figures={**one.figures, "nano.plain": figure})
        path.write_text(json.dumps([asdict(run) for run in speed.kept(path, latest)]))
    runs = speed.kept(path, latest)
    assert [run.figures["nano.plain"] for run in runs] == [1.3, 0.9, 1.4]
    assert speed.worst("nano.plain", runs) == 0.9 and speed.is_missed("nano.plain", runs)
    head = "| model | what | 2026-01-02 10:00 | 2026-01-02 11:00 | 2026-01-02 12:00 | worst | goal |"
    assert head in page_of(both(), runs)
    assert "| nano | plain decoding over llama.cpp's | 1.30 | 0.90 | 1.40 | 0.90 | at least 1.1, missed |" in (
        page_of(both(), runs)
    )
    elsewhere = replace(latest, begun="2026-01-02T11:30+00:00", machine="another machine")
    beside = speed.kept(path, elsewhere)
    assert speed.by_machine(beside) == {"another machine": [elsewhere], "a machine": runs}
    page = page_of(both(), beside)
    assert page.index("another machine; its memory") < page.index("a machine; its memory")
    assert "| model | what | 2026-01-02 11:30 | worst | goal |" in page and head in page


def test_every_goal_is_of_a_model_that_is_measured() -> None:
    assert {goal.model for goal in GOALS.values()} == set(speed.SIZES)


def test_without_llamacpp_the_study_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(speed, "LLAMACPP", tmp_path / "none")
    with pytest.raises(StudyError, match="nox -s llamacpp"):
        speed.make(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]


# Measuring, with engines and servers that answer at once.


class Engine:
    about = {"network": "native"}  # noqa: RUF012
    target = SimpleNamespace(model=None)
    drafters = dict.fromkeys(("ar", *DRAFTING))

    def encode(self, chat: Any) -> list[int]:
        return [len(chat[0].content)]

    def generate(self, method: str, chat: Any) -> Any:
        return SimpleNamespace(decode_s=0.2, token_ids=(1, 2, 3))


class Answering:
    """As a server; it fails when its answers are used up."""

    left = 1000

    def __init__(self, python: Path, settings: str) -> None:
        pass

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def complete(self, prompt: list[int], max_tokens: int) -> Any:
        if not Answering.left:
            raise KeyboardInterrupt
        Answering.left -= 1
        return SimpleNamespace(decode_s=0.4, tokens=(1, 2, 4))


def test_an_interrupted_measurement_goes_on_with_the_next_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    theirs = Arm(THEIRS, FLOAT32, "ar")
    monkeypatch.setattr(_beside_llamacpp, "opened", lambda *_: ({FLOAT32: Engine()}, {}))
    monkeypatch.setattr(_beside_llamacpp, "served", lambda *_: ({theirs: "settings"}, {"llama.cpp float32": 3}))
    monkeypatch.setattr(_beside_llamacpp, "Server", Answering)
    monkeypatch.setattr(_beside_llamacpp, "read_bandwidth", lambda *_: 7.0)
    monkeypatch.setattr(_beside_llamacpp.memory, "size_of", lambda _: Size(5, 5))
    path = tmp_path / "nano.json"
    Answering.left = 3
    with pytest.raises(KeyboardInterrupt):
        _beside_llamacpp.measured(path, tmp_path, "nano", 2, 8)
    first = Timed.read(path)
    assert [turn.prompt for turn in first.turns] == [0, 1]
    Answering.left = 5
    found = _beside_llamacpp.measured(path, tmp_path, "nano", 2, 8)
    assert [turn.prompt for turn in found.turns] == [0, 1] * _beside_llamacpp.TIMES
    assert found.begun == first.begun and found.turns[:2] == first.turns
    assert found.step_bytes == {"ours float32": 5, "llama.cpp float32": 3}
    assert found.seconds(theirs) == [[0.2] * 3] * 2 and found.seconds(PLAIN) == [[0.1] * 3] * 2
    # Finished: nothing is asked again.
    assert Answering.left == 0 and _beside_llamacpp.measured(path, tmp_path, "nano", 2, 8) == Timed.read(path)


def test_an_answer_of_one_token_times_nothing() -> None:
    with pytest.raises(StudyError, match="fewer than two tokens"):
        _beside_llamacpp.per_token(1.0, [3])


# Eight bits.


def test_matrices_are_written_in_q8_0_and_the_rest_as_it_is(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": rng.normal(size=(5, 64)), "output.weight": rng.normal(size=(5, 64)),
        "output_norm.weight": rng.normal(size=64), "odd.weight": rng.normal(size=(3, 20)),
    }  # fmt: skip
    writer = GGUFWriter(tmp_path / "plain.gguf", "llama")
    writer.add_key_value("llama.block_count", 2, GGUFValueType.UINT32)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    for name, values in tensors.items():
        writer.add_tensor(name, values.astype(np.float32))
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        part()
    _beside_llamacpp.quantise(tmp_path / "plain.gguf", tmp_path / "q8_0.gguf")
    read = GGUFReader(tmp_path / "q8_0.gguf")
    assert read.fields["llama.block_count"].contents() == 2
    assert read.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    kinds = {tensor.name: tensor.tensor_type for tensor in read.tensors}
    in_q8_0 = {name for name, kind in kinds.items() if kind == GGMLQuantizationType.Q8_0}
    assert in_q8_0 == {"token_embd.weight", "output.weight"}
    for tensor in read.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensors[tensor.name].shape)
        assert np.abs(values - tensors[tensor.name]).max() < (0.02 if tensor.name in in_q8_0 else 1e-6)
    # 34 bytes for 32 weights; the embedding's table is not read.
    assert _beside_llamacpp.step_bytes(tmp_path / "q8_0.gguf") == 5 * 68 + 64 * 4 + 60 * 4


def test_a_tied_head_is_read_whole(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "tied.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        part()
    assert _beside_llamacpp.step_bytes(tmp_path / "tied.gguf") == 128


def test_our_eight_bits_are_absent_with_the_reason_where_the_engine_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(kind: str, device: str) -> None:
        raise UserError(f"no {kind} on {device}")

    monkeypatch.setattr(_beside_llamacpp.loading, "load", lambda *_: None)
    monkeypatch.setattr(_beside_llamacpp, "open_backend", lambda *_: Engine())
    monkeypatch.setattr(_beside_llamacpp.quantization, "check", refused)
    engines, absent = _beside_llamacpp.opened("nano", 8)
    assert list(engines) == [FLOAT32] and absent == {"ours int8 ar": "no int8 on cpu"}
    monkeypatch.setattr(_beside_llamacpp.quantization, "check", lambda *_: None)
    engines, absent = _beside_llamacpp.opened("nano", 8)
    assert list(engines) == [FLOAT32, "int8"] and not absent
