"""The kind of a method's draft is named beside the draft: in the facts of a report, and in every row."""

from __future__ import annotations

from dflash_bench.report import words
from dflash_bench.results.identity import columns_of_method
from helpers.runs import about

METHODS = {"dflash": {"name": "dflash", "num_drafts": 7, "draft": "dflash"}}


def facts_with(kind: str | None) -> str:
    drafts = {"dflash": {"name": "org/draft", "kind": kind}}
    return words.facts(about(identity={"methods": METHODS, "drafts": drafts}))["draft"]


def test_the_facts_of_a_report_name_it_where_the_method_does_not() -> None:
    assert "(DFlash 2)" in facts_with("DFlash 2") and " 7 " in facts_with("DFlash 2")
    assert facts_with("DFlash") == facts_with(None) == facts_with("DFlash 2").replace(" (DFlash 2)", "")


def test_rows_carry_it_and_those_of_older_runs_none() -> None:
    drafts = {"dflash": {"name": "org/draft", "kind": "DSpark"}}
    assert columns_of_method({"methods": METHODS, "drafts": drafts}, "dflash")["draft_kind"] == "DSpark"
    older = {"methods": METHODS, "drafts": {"dflash": {"name": "org/draft"}}}
    assert columns_of_method(older, "dflash")["draft_kind"] is None
