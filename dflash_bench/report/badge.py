"""What a model's card on the hub takes from a run: a badge of its fastest method, and scores as `.eval_results`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from dflash_bench import __version__
from dflash_bench.analysis.metrics import BASELINE, Cell
from dflash_bench.analysis.stats import Interval
from dflash_bench.core import labels
from dflash_bench.core.files import write_output
from dflash_bench.core.labels import visible
from dflash_bench.core.methods import is_lossy
from dflash_bench.report.document import Document, MethodLine
from dflash_bench.report.screen import judged, standing
from dflash_bench.report.tables import bounds, number

BADGE = "dflash-bench.svg"
RESULTS = Path(".eval_results") / "dflash-bench.yaml"
CHARACTER, PADDING, HEIGHT = 6.6, 8, 20
"""Pixels of the badge: of an average letter, beside a text, and of its height."""
COLOURS = {"better": "#2e7d32", "unclear": "#616161", "wrong": "#b3261e"}


def write_hub_card(document: Document, folder: Path) -> list[Path]:
    """Write the badge, and scores where prompts are those of public datasets, and return the files.

    Raises UserError for a run without a speed-up.
    """
    is_forbidden = not any(speedup for _, speedup, _ in document.means()) and any(c.forbidden for c in document.cells)
    line, speedup = (document.lines[0], None) if is_forbidden else document.fastest()
    write_output(folder / BADGE, badge(document, line, document.typical(line) or speedup))
    entries = _entries(document, line)
    if not entries:
        return [folder / BADGE]
    import yaml

    write_output(folder / RESULTS, yaml.safe_dump(entries, sort_keys=False, allow_unicode=True))
    return [folder / BADGE, folder / RESULTS]


def badge(document: Document, line: MethodLine, speedup: Interval | None) -> str:
    """Return an SVG such as `dflash | 3.67x, 128/128 exact`.

    Green where the method gains beyond chance, nothing weakens the number and its answers were judged; red where a
    finding forbids the speed-up, which is then None.
    """
    embedded = any(labels.is_embedded(cell.source) for cell in document.cells if cell.num_prompts)
    exact = None if is_lossy(line.method) else judged(document, line)
    how = standing(document, line)
    alike = {"text": "equal as text"}.get(how, "exact")
    said_of_it = f"{exact[0]:,}/{exact[1]:,} {alike}" if exact else "lossy" if is_lossy(line.method) else "not judged"
    parts = [
        f"{number(speedup.value)}x" if speedup else "no speed-up",
        said_of_it,
        *(["embedded text"] if embedded else []),
    ]
    left, right = visible(line.name), ", ".join(parts)
    is_faster = speedup and speedup.low is not None and speedup.low > 1 and not document.badges(line)
    kind = "wrong" if speedup is None else "better" if exact and is_faster and how != "text" else "unclear"
    widths = [round(CHARACTER * len(text) + 2 * PADDING) for text in (left, right)]
    said = escape(f"{left}: {right}", {'"': "&quot;"})
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{sum(widths)}" height="{HEIGHT}" role="img" '
        f'aria-label="{said}">'
        f"<title>{said}</title>"
        f'<rect width="{sum(widths)}" height="{HEIGHT}" rx="3" fill="#424242"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="{HEIGHT}" rx="3" fill="{COLOURS[kind]}"/>'
        '<g fill="#ffffff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="{widths[0] / 2:g}" y="14">{escape(left)}</text>'
        f'<text x="{widths[0] + widths[1] / 2:g}" y="14">{escape(right)}</text></g></svg>\n'
    )


def _entries(document: Document, line: MethodLine) -> list[dict[str, Any]]:
    """Return the target's own score on each public suite, with what the method gained there in the notes."""
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
                dataset_id=dataset, task_id=cell.suite, dataset_revision=revision or None,
                value=round(100 * right / scored, 2), date=document.results.info.started or None,
                notes=_note(document, cell, line),
            )
        )  # fmt: skip
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
