"""Scores of a run's target on public datasets, as `.eval_results` of its card on the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_bench import __version__
from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.core import labels
from dflash_bench.core.files import write_output
from dflash_bench.report.document import Document, MethodLine
from dflash_bench.report.tables import bounds, number

RESULTS = Path(".eval_results") / "dflash-bench.yaml"


def write_hub_card(document: Document, folder: Path) -> Path | None:
    """Write scores on public datasets, and return the file; None without public prompts.

    Raises UserError for a run without a speed-up.
    """
    is_forbidden = not any(speedup for _, speedup, _ in document.means()) and any(c.forbidden for c in document.cells)
    entries = _entries(document, document.lines[0] if is_forbidden else document.fastest()[0])
    if not entries:
        return None
    import yaml

    write_output(folder / RESULTS, yaml.safe_dump(entries, sort_keys=False, allow_unicode=True))
    return folder / RESULTS


def _entries(document: Document, line: MethodLine) -> list[dict[str, Any]]:
    """Return the target's own score on each public suite, with the method's gain in the notes."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries = []
    for cell in document.cells:
        kind, place = labels.PromptSource.read(cell.source)
        if cell.method != BASELINE or cell.settings != line.settings or kind != "hub" or not cell.passed:
            continue
        dataset, _, revision = place.partition("@")
        right, scored = cell.passed
        entries.append(
            EvalResultEntry(
                dataset_id=dataset,
                task_id=cell.suite,
                dataset_revision=revision or None,
                value=round(100 * right / scored, 2),
                date=document.results.info.started or None,
                notes=_note(document, cell, line),
            )
        )
    written: list[dict[str, Any]] = eval_result_entries_to_yaml(entries)
    return written


def _note(document: Document, plain: Cell, line: MethodLine) -> str:
    own = [cell for cell in line.cells_of(document.cells) if cell.suite == plain.suite and cell.num_prompts]
    gained = [
        f"{line.name} {number(one.value)}x as fast as plain decoding"
        + (f" ({within})" if (within := bounds(one)) else "")
        for cell in own
        if (one := cell.figures.get("speedup.decode"))
    ]
    exact = [f"{cell.exact[0]}/{cell.exact[1]} answers equal plain decoding's" for cell in own if cell.exact]
    return ", ".join([f"{plain.num_prompts} prompts", *gained, *exact, f"dflash-bench {__version__}"])
