"""Which drafts load on which engine: declared once for readers, and once for launching, and the two agree."""

from __future__ import annotations

import json
from collections.abc import Callable

from dflash_bench.core.dialects import DIALECTS
from dflash_bench.core.draft_kinds import FAMILY, KINDS
from dflash_bench.models import engines
from helpers.refusals import assert_refused

Main = Callable[..., tuple[int, str, str]]


def test_what_can_be_launched_is_what_is_listed() -> None:
    programs = [(one.program, one.support) for one in DIALECTS.values() if one.program is not None]
    assert len(programs) >= 4
    for program, support in programs:
        assert support is not None
        assert {*support.not_launched} <= {*support.kinds} & {*FAMILY}, program.name
        others = {*program.methods} & {*KINDS} - {"dflash"}
        assert others <= {*support.kinds}, program.name


def test_all_kinds_are_named_for_every_engine(main: Main) -> None:
    code, out, err = main("models", "--engines", "--json")
    assert (code, err) == (0, "")
    told = {one["engine"]: one for one in json.loads(out)}
    assert {"vllm", "sglang", "llamacpp", "lmdeploy", "tensorrt_llm"} <= {*told}
    assert all({*one["kinds"]} == {*engines.SERVED} and one["version"] and one["date"] for one in told.values())
    assert "lmdeploy" in told["lmdeploy"]["kinds"]["dflash"] and told["vllm"]["kinds"]["domino"] is None


def test_the_list_fits_a_narrow_terminal() -> None:
    lines = engines.text(80).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("not known to load" in line for line in lines) == len(list(engines.supports()))


def test_a_models_drafts_are_listed_by_engine(main: Main) -> None:
    code, out, err = main("models", "qwen3-8b", "--engines", "--json")
    assert (code, err) == (0, "")
    found = {one["draft"]: one for one in json.loads(out)}
    assert found["dflash@dspark"]["kind"] == "dspark" and "block-diffusion" not in found
    told = {one["engine"]: one["kinds"] for one in engines.as_json()}
    assert all(one["engines"] == {name: kinds[one["kind"]] for name, kinds in told.items()} for one in found.values())
    assert max(map(len, engines.of_preset("qwen3-8b", 80).splitlines())) <= 80


def test_it_lists_all_kinds_or_a_model(main: Main) -> None:
    assert_refused(main("models", "--kind", "dflash", "--engines"), "--engines")
    assert_refused(main("models", "qwen3-80b", "--engines"), "qwen3-8b")
