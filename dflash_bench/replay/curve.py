"""The acceptance length of a draft by number of drafted tokens, from one run, for servers to impose.

The file has the form of InferenceX's golden_al_distribution/*.yaml (August 2026): model, thinking mode, and for each
number of drafted tokens the acceptance length, bonus token included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dflash_bench.analysis.peers import benches
from dflash_bench.analysis.stats import Interval
from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Settings
from dflash_bench.replay.replay import changes_of, replay, why_not
from dflash_bench.replay.stored_answers import ReplayCell, cells_of
from dflash_bench.results.table import RunTable

LONGEST = 8
"""Drafted tokens per round of the longest entry."""
ON, OFF = benches.MODES
HOW_TO_IMPOSE = (
    'vLLM, in --speculative-config: "rejection_sample_method": "synthetic", "synthetic_acceptance_length": LENGTH',
    "SGLang: SGLANG_SIMULATE_ACC_LEN=LENGTH SGLANG_SIMULATE_ACC_METHOD=match-expected",
    "TensorRT-LLM: TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS=LENGTH-1, as it does not count the bonus token",
    "llama.cpp and vLLM take rates by position: card --profile, and run --launch with --method synthetic:profile=FILE",
)
"""The options by which servers accept at a given length, whatever they draft."""


@dataclass(frozen=True, slots=True)
class AcceptanceCurve:
    mode: str
    settings: Settings
    num_prompts: int
    lengths: dict[int, Interval]
    """al.pooled by the number of drafted tokens per round."""
    is_exact: bool


def curves_of(run: RunTable, method: str) -> list[AcceptanceCurve]:
    """Return a curve for each setting of the run, over all of its suites.

    Raises UserError for a method without rounds of its own, for trees, and for two settings of one thinking mode.
    """
    cells = [cell for cell in cells_of(run) if cell.method == method]
    if not cells:
        raise UserError(f"{run.name} has no rounds of {method}; give a method of the run, as it names it")
    curves = [_curve(run, settings, cells) for settings in dict.fromkeys(cell.settings for cell in cells)]
    if len({curve.mode for curve in curves}) < len(curves):
        raise UserError(
            "--curve has one entry per thinking mode, and this run has several settings; measure one of them"
        )
    return curves


def _curve(run: RunTable, settings: Settings, cells: Sequence[ReplayCell]) -> AcceptanceCurve:
    own = [cell for cell in cells if cell.settings == settings]
    # Suites may use the same prompt ids.
    answers = (replace(one, prompt_id=f"{cell.suite}/{one.prompt_id}") for cell in own for one in cell.answers)
    whole = ReplayCell("all", own[0].method, settings, tuple(answers), {})
    changes = changes_of(n=range(1, min(whole.most, LONGEST) + 1))
    if (why := why_not(whole, changes[0], run.info)) is not None:
        raise UserError(why)
    found = [replay(whole, change, run.info) for change in changes]
    lengths = {number: one.length for number, one in enumerate(found, start=1) if one.length is not None}
    mode = ON if settings.thinking else OFF
    return AcceptanceCurve(mode, settings, found[0].num_prompts, lengths, all(one.is_exact for one in found))


def text(curves: Sequence[AcceptanceCurve], run: RunTable, method: str) -> str:
    """Return the YAML file, with intervals and the settings that impose a length as comments."""
    return "\n".join(_lines(curves, run, method)) + "\n"


def _lines(curves: Sequence[AcceptanceCurve], run: RunTable, method: str) -> Iterator[str]:
    info = run.info
    suites = ", ".join(dict.fromkeys(run.rows["suite"].astype(str)))
    yield f"# Acceptance lengths of {method}: tokens per round, bonus token included, by the tokens drafted per round."
    yield f"# Measured by: {info.command}"
    for curve in curves:
        how = "replayed exactly from drafts recorded at every position" if curve.is_exact else "estimated from rounds"
        temperature = curve.settings.temperature
        yield f"# {curve.mode}: {curve.num_prompts} prompts of {suites}, temperature {temperature:g}, {how}"
    yield "# Imposed on servers:"
    yield from (f"#   {line}" for line in HOW_TO_IMPOSE)
    yield f"{info.identity.model}:"
    for curve in curves:
        yield f"  {curve.mode}:"
        for number, length in curve.lengths.items():
            bounds = "" if length.low is None or length.high is None else f"  # {length.low:.3f} to {length.high:.3f}"
            yield f"    {number}: {length.value:.3f}{bounds}"
