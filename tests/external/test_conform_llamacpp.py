"""`conform` against a real llama.cpp server: a golden draft with full layers alone, which its GGUF form can hold.

Our engine, which computes the case as published, says what a sound server counts; a server whose draft taps other
layers differs, and the misreading is named.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import served
import torch
from llamacpp_here import serving

from dflash_bench.core.errors import UserError
from dflash_bench.diagnose import conform, conform_server, golden_cases
from dflash_bench.diagnose.conform import CaseSubject, Conformance
from dflash_bench.diagnose.golden_cases import GoldenCase
from dflash_bench.engine.selection import target_of
from dflash_bench.models import formats, gguf_writer, targets
from dflash_bench.runner.config import RunRequest

pytestmark = pytest.mark.llamacpp
Main = Callable[..., tuple[int, str, str]]
NAME, LENGTH, NUM_LAYERS = "zlab-sliding-noncausal", 40, 3
PLAIN = {
    "layer_types": ["full_attention"] * NUM_LAYERS,
    "sliding_window": None,
    "use_sliding_window": False,
    "is_causal": False,
}
OTHER_TAPS = "other layers tapped"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The case, and beside it a target and two drafts as GGUF: one as it is, and one that taps other layers."""
    folder = tmp_path_factory.mktemp("golden")
    shutil.copytree(golden_cases.CASES / "_targets", folder / "_targets")
    case = golden_cases.read_case(NAME)
    assert case.draft is not None
    (folder / NAME).mkdir()
    case = replace(case, draft=golden_cases.edited_copy(case.draft, PLAIN, folder / NAME / "draft"))
    subject = CaseSubject.load(case, "cpu")
    target = target_of(subject.models.target, "transformers")
    asked = [replace(one, max_new_tokens=LENGTH, stop_ids=frozenset()) for one in case.prompts]
    decoded = conform.decode_prompts(target, subject.drafter(target), asked)
    subject.close()
    stored: dict[str, Any] = json.loads((golden_cases.CASES / NAME / golden_cases.GOLDEN).read_text())
    stored["cases"] = [
        {
            "prompt": list(prompt.prompt),
            "max_new_tokens": LENGTH,
            "tokens": list(one.tokens),
            "rounds": [
                {"anchor_at": step.anchor_at, "drafted": list(step.drafted), "accepted": step.accepted}
                for step in one.rounds
            ],
        }
        for prompt, one in zip(asked, decoded, strict=True)
    ]
    stored["wrong_readings"] = [
        {
            "reading": OTHER_TAPS,
            "edit": {"dflash_config.target_layer_ids": [1, 2]},
            "prompts_with_other_rounds": 6,
            "accepted_per_round": 0.0,
        }
    ]
    (folder / NAME / golden_cases.GOLDEN).write_text(json.dumps(stored))
    used = {token for one in decoded for token in one.tokens}
    shape = targets.shape_of(case.target)
    words = vocabulary(shape.vocab_size, next(token for token in range(shape.vocab_size) if token not in used))
    gguf_writer.write(folder / "target.gguf", gguf_writer.read(case.target), "target", words)
    network = gguf_writer.describe(formats.read_checkpoint(folder / NAME / "draft", shape)[1], shape.num_layers)
    gguf_writer.write(folder / "draft.gguf", network, "draft", words)
    faulty = replace(network, settings={**network.settings, "target_layers": [2, 3]})
    gguf_writer.write(folder / "faulty.gguf", faulty, "draft", words)
    return folder


def vocabulary(size: int, end: int) -> dict[str, Any]:
    """A tokenizer in name only: prompts are ids. Its end of text is a token that no answer has."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"t{number}" for number in range(size)],
        "tokenizer.ggml.token_type": [1] * size,
        "tokenizer.ggml.merges": ["t 1"],
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.mark.parametrize(("draft", "state"), [("draft.gguf", "equal"), ("faulty.gguf", "differs")])
def test_a_draft_that_taps_other_layers_is_named(
    draft: str,
    state: str,
    cases: Path,
    tmp_path: Path,
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
    server_environment: Callable[[str], Path],
) -> None:
    monkeypatch.setattr(golden_cases, "CASES", cases)
    python = server_environment("llamacpp") / "bin" / "python"
    num_drafts = golden_cases.read_case(NAME).num_drafts
    words = f"--alias case --ctx-size 512 --parallel 1 --spec-type draft-dflash --spec-draft-n-max {num_drafts}"
    with serving(python, cases / "target.gguf", cases / draft, words.split(), tmp_path / "log") as url:
        code, out, err = main("conform", NAME, "--server", url, "--json")
    (found,) = json.loads(out)
    assert (code, found["state"]) == (int(state == "differs"), state), err
    assert found["compared"] == ["counts", "tokens"]
    assert [one["reading"] for one in found["named"]] == ([OTHER_TAPS] if state == "differs" else [])
    assert (found["num_equal_rounds"] == found["num_rounds"]) == (state == "equal")


# Every golden case that a GGUF file can hold.


TARGET_LENGTH = 512


def launched(case: GoldenCase, folder: Path) -> list[str]:
    """Write a case's files; returns the server's options. Raises UserError for what llama.cpp cannot compute."""
    shape = targets.shape_of(case.target)
    used = {token for prompt in case.prompts for token in prompt.tokens}
    words = vocabulary(shape.vocab_size, next(token for token in range(shape.vocab_size) if token not in used))
    gguf_writer.write(folder / "target.gguf", gguf_writer.read(case.target), "target", words)
    method = "mtp"
    if case.draft is not None:
        checkpoint = formats.read_checkpoint(case.draft, shape)[1]
        network = gguf_writer.describe(checkpoint, shape.num_layers)
        gguf_writer.write(folder / "draft.gguf", network, "draft", words)
        # Those whose first slot drafts are its DSpark.
        method = "dspark" if getattr(checkpoint.config, "shifted_labels", False) else "dflash"
    options = f"--alias case --ctx-size {TARGET_LENGTH} --parallel 1 --spec-type draft-{method} --spec-draft-n-max"
    return [*options.split(), str(case.num_drafts)]


def asked_of_server(case: GoldenCase, folder: Path, python: Path) -> Conformance:
    try:
        options = launched(case, folder)
    except UserError as error:
        return Conformance(case, "llamacpp", "inapplicable", str(error).replace(f"{golden_cases.CASES}/", ""))
    draft = None if case.draft is None else folder / "draft.gguf"
    with serving(python, folder / "target.gguf", draft, options, folder / "log") as url:
        return conform_server.check_server(case, RunRequest(servers=(url,)), lambda told: None)


def test_every_golden_case_that_a_gguf_file_can_hold(
    tmp_path: Path,
    server_environment: Callable[[str], Path],
    write_page: Callable[..., None],
    command: Callable[[str], str],
) -> None:
    python = server_environment("llamacpp") / "bin" / "python"
    found = []
    for name in golden_cases.known_cases():
        (tmp_path / name).mkdir()
        found.append(asked_of_server(golden_cases.read_case(name), tmp_path / name, python))
    asked = {one.case.name: one for one in found if one.state != "inapplicable"}
    assert asked.keys() == {"deepspec-dspark-vanilla", "jetspec-causal-head", "zlab-causal-full", "mtp-qwen3.5-hybrid"}
    for one in asked.values():
        assert one.compared == ("counts", "tokens") and one.accepted is not None and one.expected
        # The text is always the target's own; counts differ by a few tokens at most.
        assert one.difference is None or one.difference.part == "counts"
        assert abs(one.accepted / one.expected - 1) < 0.1
    write_page("servers/conformance-llamacpp.md", served.conformance_page(found, "llama.cpp", command("llamacpp")))


MTP = "mtp-qwen3.5-hybrid"


@pytest.mark.parametrize("are_swapped", [False, True])
def test_the_heads_of_a_hybrid_target_draft_from_its_own_file(
    are_swapped: bool, tmp_path: Path, main: Main, server_environment: Callable[[str], Path]
) -> None:
    """The texts are the target's own. It accepts some fewer drafts than the publisher's code; with the halves of the
    heads' input swapped, hardly any."""
    case = golden_cases.read_case(MTP)
    used = {token for prompt in case.prompts for token in prompt.tokens}
    size = targets.shape_of(case.target).vocab_size
    words = vocabulary(size, next(token for token in range(size) if token not in used))
    network = gguf_writer.read(case.target)
    (name,) = [name for name in network.tensors if name.endswith("nextn.eh_proj.weight")]
    if are_swapped:
        halves = network.tensors[name].chunk(2, dim=1)
        network = replace(network, tensors={**network.tensors, name: torch.cat(halves[::-1], dim=1).contiguous()})
    gguf_writer.write(tmp_path / "target.gguf", network, "target", words)
    options = f"--alias case --ctx-size 512 --parallel 1 --spec-type draft-mtp --spec-draft-n-max {case.num_drafts}"
    python = server_environment("llamacpp") / "bin" / "python"
    with serving(python, tmp_path / "target.gguf", None, options.split(), tmp_path / "log") as url:
        _, out, err = main("conform", MTP, "--server", url, "--json")
    (found,) = json.loads(out)
    assert found["compared"] == ["counts", "tokens"], err
    assert found["state"] == "equal" or found["difference"]["part"] == "counts"
    share = found["accepted_per_round"] / found["expected_per_round"]
    assert share < 0.1 if are_swapped else share > 0.9
