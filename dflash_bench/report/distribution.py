"""`verify-distribution` as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dflash_bench.analysis.distribution import LEVEL, Comparison, Verdict
from dflash_bench.records import Draws, Settings
from dflash_bench.report.tables import ABSENT, aligned, p_value
from dflash_bench.text import shortened

NAMES = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings that are said where they are not these, which change nothing."""

LEGEND = (
    "kept = answers whose first draft was accepted at least in part; cells = outcomes that are compared\n"
    "off by = total variation distance from the model's probabilities; by chance = that of a method that is right"
)


def text(draws: Sequence[Draws], tests: Sequence[Comparison], verdicts: Sequence[Verdict], settings: Settings) -> str:
    heads = ["method", "prompt", "tested", "kept", "cells", "off by", "by chance", "G", "p", "adjusted", ""]
    rows = [_row(test, draws) for test in tests]
    num_draws = sum(draws[0].counts.values())
    number = f"{len(tests)} tests" if len(tests) != 1 else "1 test"
    return "\n".join(
        [
            f"{num_draws:,} answers to each prompt, at {_settings(settings)}, against the published model",
            "",
            aligned(heads, rows, left=3),
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
    return {
        "settings": {name: value for name, value in asdict(settings).items() if name in ("temperature", *NAMES)},
        "draws": sum(draws[0].counts.values()),
        "level": LEVEL,
        "tests": [
            {
                "method": test.method,
                "prompt": test.prompt,
                "view": test.view,
                "cells": test.fit.num_cells,
                "g": test.fit.g if test.fit.p else None,
                "p": test.fit.p,
                "p_adjusted": test.adjusted,
                "total_variation": test.fit.distance,
                "total_variation_by_chance": test.fit.noise,
                "failed": test.failed,
            }
            for test in tests
        ],
        "drafts": [
            {"method": d.method, "prompt": d.prompt, "kept": d.num_kept, "refused": d.num_refused} for d in draws
        ],
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def _row(test: Comparison, draws: Sequence[Draws]) -> list[str]:
    (drawn,) = (one for one in draws if (one.method, one.prompt) == (test.method, test.prompt))
    fit = test.fit
    kept = ABSENT if drawn.num_kept is None else f"{drawn.num_kept / sum(drawn.counts.values()):.0%}"
    g = "impossible token" if fit.p == 0 and fit.g == float("inf") else f"{fit.g:.1f}"
    prompt = shortened(" ".join(test.prompt.split()), 32)
    return [
        test.method, prompt, test.view, kept, str(fit.num_cells), f"{fit.distance:.1%}", f"{fit.noise:.1%}", g,
        p_value(fit.p), p_value(test.adjusted), "fails" if test.failed else "",
    ]  # fmt: skip


def _sentence(verdict: Verdict) -> str:
    said = {
        "as the model": "draws as the published model does",
        "differs": "does NOT draw as the published model does",
        "not tested": "was not tested",
    }[verdict.state]
    return f"{verdict.method} {said}" + (f": {verdict.why}" if verdict.why else "")


def _settings(settings: Settings) -> str:
    named_values = [("temperature", settings.temperature)]
    named_values += [
        (name, getattr(settings, name)) for name, plain in NAMES.items() if getattr(settings, name) != plain
    ]
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in named_values)
