"""`verify-distribution` as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from dflash_bench.analysis.distribution import LEVEL, Comparison, Kind, Verdict, decided
from dflash_bench.records import Draws, Settings
from dflash_bench.report.tables import aligned, p_value

NAMES = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings that are said where they are not these, which change nothing."""
VIEWS: dict[Kind, str] = {"by_id": "{}, by id", "pairs": "steps to the next"}
HEADS = ["method", "tested", "tokens", "log p", "due", "p", "draft", "due", "p", "off by", "chance", "p", ""]
LEGEND = (
    "tokens = those of which the model was not certain; draft place = so deep in a draft that did not know the token\n"
    "log p = mean log-probability, draft = agreement with the draft (0 to 1), each beside what the model makes it;\n"
    "off by = largest difference in the share of tokens up to some place in the model's order; p = adjusted"
)


def text(draws: Sequence[Draws], tests: Sequence[Comparison], verdicts: Sequence[Verdict], settings: Settings) -> str:
    number = f"{len(tests)} tests" if len(tests) != 1 else "1 test"
    places = max(int(drawn.columns["place"].max()) for drawn in draws)
    return "\n".join(
        [
            f"{draws[0].num_answers:,} answers of {places} tokens by each method, at {_settings(settings)}, "
            "against the published model",
            "",
            aligned(HEADS, _rows(tests), left=2),
            "",
            LEGEND,
            "",
            *(_sentence(verdict) for verdict in verdicts),
            f"if every method is right, one or more of {number} fail by chance in {LEVEL:.1%} of cases",
        ]
    )


def as_json(
    draws: Sequence[Draws], tests: Sequence[Comparison], verdicts: Sequence[Verdict], settings: Settings
) -> dict[str, Any]:
    decisions = [(drawn.method, decided(drawn) or (None, None)) for drawn in draws]
    return {
        "settings": {name: value for name, value in asdict(settings).items() if name in ("temperature", *NAMES)},
        "draws": draws[0].num_answers,
        "level": LEVEL,
        "tests": [
            {
                "method": test.method,
                "view": test.view,
                "kind": test.kind,
                "tokens": test.num_tokens,
                "impossible": test.num_impossible,
                "seen": test.seen if isfinite(test.seen) else None,
                "due": test.due,
                "p": test.p,
                "p_adjusted": test.adjusted,
                "failed": test.failed,
            }
            for test in tests
        ],
        "drafted": [{"method": method, "kept": kept, "refused": refused} for method, (kept, refused) in decisions],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def _rows(tests: Sequence[Comparison]) -> list[list[str]]:
    """One for each view, with its two scores and its order; orders that one view alone has get a row of their own."""
    by_row: dict[tuple[str, str], dict[Kind, Comparison]] = {}
    for test in tests:
        view = VIEWS.get(test.kind, "{}").format(test.view)
        kind: Kind = "rank" if test.kind in VIEWS else test.kind
        by_row.setdefault((test.method, view), {})[kind] = test
    return [[method, view, *_cells(found)] for (method, view), found in by_row.items()]


def _cells(found: dict[Kind, Comparison]) -> list[str]:
    cells = [f"{max(test.num_tokens for test in found.values()):,}"]
    kinds: tuple[Kind, ...] = ("likelihood", "leaning", "rank")
    for kind in kinds:
        test = found.get(kind)
        if test is None:
            cells += ["", "", ""]
        elif test.num_impossible:
            cells += ["impossible", f"{test.due:.3f}", p_value(test.adjusted)]
        else:
            form = "{:.1%}" if kind == "rank" else "{:.3f}"
            cells += [form.format(test.seen), form.format(test.due), p_value(test.adjusted)]
    return [*cells, "fails" if any(test.failed for test in found.values()) else ""]


def _sentence(verdict: Verdict) -> str:
    said = {
        "as the model": "draws as the published model does",
        "differs": "does NOT draw as the published model does",
        "not tested": "was not tested",
    }[verdict.state]
    said = f"{verdict.method} {said}" + (f": {verdict.why}" if verdict.why else "")
    return said + (f" (too few tokens to test: {', '.join(verdict.unreached)})" if verdict.unreached else "")


def _settings(settings: Settings) -> str:
    named_values = [("temperature", settings.temperature)]
    named_values += [
        (name, getattr(settings, name)) for name, plain in NAMES.items() if getattr(settings, name) != plain
    ]
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in named_values)
