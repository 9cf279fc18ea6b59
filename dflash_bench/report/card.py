"""The result in eleven lines, to paste into an issue or a chat, and one more where the speed-up is weak."""

from __future__ import annotations

from dflash_bench.analysis.findings import badges
from dflash_bench.analysis.metrics import FORMULAS
from dflash_bench.report import curve
from dflash_bench.report.document import Document, over_all
from dflash_bench.report.tables import ABSENT, number
from dflash_bench.report.words import facts, speedups, tally, with_badges


def card(document: Document) -> str:
    """Raises nothing for what a run does not hold: that line says n/a."""
    info, about = document.results.info, facts(document.results.info)
    means = [(line, *over_all(document.cells, line)) for line in document.lines]
    faster = ", ".join(f"{line.name} {with_badges(document, line, speedup)}" for line, speedup, _ in means)
    weak = badges.legend([badge for line in document.lines for badge in document.badges(line)])
    is_known = any(speedup for _, speedup, _ in means)
    meaning = f"{speedups(document, is_known)}{', 95 %' if is_known else ''}"
    lengths = ", ".join(f"{line.name} {number(al)}" for line, _, al in means)
    exact, audit, passed = (tally(document, name) for name in ("exact", "audit", "passed"))
    answers = f"{f'{exact[0]}/{exact[1]} equal the plain output, token for token' if exact else ABSENT}"
    answers += f"; {audit[0]}/{audit[1]} are the published model's own choice" if audit else ""
    answers += f"; {passed[0]}/{passed[1]} right" if passed else ""
    commit = f", commit {about['commit']}" if "commit" in about else ""
    lines = {
        "model": about["model"],
        "draft": about.get("draft", ABSENT),
        "suite": about.get("suite", ABSENT),
        "machine": about["machine"],
        "settings": about["settings"],
        "acceptance": f"{lengths or ABSENT} (al.pooled = {FORMULAS['al.pooled']})",
        "speed-up": f"{faster or ABSENT} ({meaning})",
        "forward": curve.line_of(info),
        **({"weak": "; ".join(weak)} if weak else {}),
        "answers": answers,
        "versions": f"{about['versions']}{commit}",
        "command": " ".join(info["command"].split()),
    }
    marked = [f"{note}\n" for note in document.notes]
    return "".join(marked) + "".join(f"{name:<10}  {text}\n" for name, text in lines.items())
