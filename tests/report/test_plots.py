"""The plots: what is drawn is what was measured, the same bytes each time, and what cannot be drawn says why."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_bench.analysis.cells import summarise
from dflash_bench.core.types import Answer, Settings
from dflash_bench.report import charts, gate, plots, read_document
from dflash_bench.report.plots import acceptance, speed, style
from dflash_bench.report.plots.curves import training, trend
from dflash_bench.report.plots.style import Material
from dflash_bench.results import table
from helpers.each import each
from helpers.refusals import assert_refused
from helpers.rows import generation, pair, record
from helpers.runs import IDENTITY, SUITES, answers, asked, in_time, known, slower, stored

NO_THINKING = Settings(thinking=False).id
Main = Callable[..., tuple[int, str, str]]


def material(folder: Path, noise: float = 0.01, number: int = 24, **identity: object) -> Material:
    rows = [*answers(number, noise), *[replace(row, suite="math500") for row in answers(number, noise, seed=1)]]
    return Material(read_document(stored(folder, rows, **identity)))


def test_bars_are_the_speedups_and_whiskers_their_intervals(tmp_path: Path) -> None:
    made = material(tmp_path / "run")
    (axes,) = speed.speedup(made).axes
    found = [made.cell((suite, NO_THINKING), "dflash").figures["speedup.decode"] for suite in ("gsm8k", "math500")]  # type: ignore[union-attr]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([interval.value for interval in found])
    ends = [segment[:, 1].tolist() for segment in axes.collections[0].get_segments()]
    assert ends == [pytest.approx([interval.low, interval.high]) for interval in found]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["gsm8k\n(embedded)", "math500"]


def test_no_interval_over_few_prompts_is_drawn(tmp_path: Path) -> None:
    made = material(tmp_path / "run", number=19)
    cell = made.cell(("gsm8k", NO_THINKING), "dflash")
    assert cell is not None and cell.figures["speedup.decode"].low is not None
    figure = speed.speedup(made)
    assert not [segment for segment in figure.axes[0].collections[0].get_segments() if len(segment)]
    assert "none under 20 prompts" in " ".join(figure.legends[0].get_title().get_text().split())


def legend_of(folder: Path, rows: Sequence[Answer], **identity: Any) -> list[str]:
    (legend,) = speed.speedup(Material(read_document(stored(folder, rows, **identity)))).legends
    return [text.get_text() for text in legend.get_texts()]


def drafting(**num_drafts: int) -> dict[str, Any]:
    """Store a run of these methods, each with its tokens per round."""
    methods = {label.replace("_", "-"): {"name": label, "num_drafts": number} for label, number in num_drafts.items()}
    return {"methods": methods} | asked("gsm8k")


def test_a_published_figure_of_the_same_configuration_stands_with_ours_by_the_same_formula(tmp_path: Path) -> None:
    rows = answers(12)
    own, *beside = legend_of(tmp_path / "run", rows, target="Qwen/Qwen3-8B", **drafting(dflash=15))
    assert own == "dflash" and len(beside) == 3
    assert all("speedup.zlab" in text for text in beside)
    assert ["block 16" in text for text in beside] == [True, False, True]
    embedded = legend_of(
        tmp_path / "embedded", rows, target="Qwen/Qwen3-8B", **drafting(dflash=15) | asked("gsm8k", source="embedded")
    )
    assert embedded == ["dflash"]
    assert legend_of(tmp_path / "short", rows, target="Qwen/Qwen3-8B", **drafting(dflash=4)) == ["dflash"]
    other = legend_of(tmp_path / "other", rows, model="qwen3-8b", target="my/Other-7B", **drafting(dflash=15))
    assert other == ["dflash"]


@pytest.mark.parametrize(("method", "number"), [("eagle3", 7), ("eagle3-tree", 59)])
def test_a_published_figure_whose_formula_is_not_stated_stands_beside_none_of_ours(
    tmp_path: Path, method: str, number: int
) -> None:
    rows = [replace(row, method=method) if row.method == "dflash" else row for row in answers(12)]
    methods = {"methods": {method: {"name": method, "num_drafts": number}}} | asked("gsm8k")
    assert legend_of(tmp_path / "run", rows, target="Qwen/Qwen3-8B", **methods) == [method]


def test_the_shares_of_rounds_add_up_and_stand_at_what_was_kept(tmp_path: Path) -> None:
    rows = [row for number in range(4) for row in pair(f"p{number}", [4, 4, 0, 1])]
    figure = acceptance.histogram(Material(read_document(stored(tmp_path / "run", rows))))
    bars = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in figure.axes[0].patches}
    assert bars == {0: 25, 1: 25, 4: 50}


def test_acceptance_by_position_shows_no_share_of_a_handful(tmp_path: Path) -> None:
    rows = [row for number in range(4) for row in pair(f"p{number}", [4, 4, 0, 1])]
    figure = acceptance.positions(Material(read_document(stored(tmp_path / "run", rows))))
    whole, given = figure.axes[0].lines
    assert whole.get_xydata().tolist() == [[1, 75], [2, 50], [3, 50], [4, 50]]
    # 12 of the 16 rounds keep one token, but only 8 keep two.
    assert given.get_xydata().tolist() == [[1, 75], [2, pytest.approx(200 / 3)]]


def test_the_parts_of_a_round_add_up(tmp_path: Path) -> None:
    (axes,) = speed.rounds(material(tmp_path / "run", noise=0)).axes
    widths = [bar.get_width() for bar in axes.patches]
    by_cell = [widths[at::4] for at in range(4)]
    assert by_cell[0] == pytest.approx([0, 9, 1], abs=1e-4)
    assert by_cell[1] == pytest.approx([5, 12, 3], abs=1e-4)


def test_each_prompt_is_a_point(tmp_path: Path) -> None:
    made = Material(read_document(stored(tmp_path / "run", answers(12, noise=0))))
    points = speed.prompts(made).axes[0].lines[0].get_xydata()
    assert len(points) == 12
    assert points[:, 0] == pytest.approx([10.0] * 12)


def test_the_lines_that_are_drawn_are_those_that_are_named(tmp_path: Path) -> None:
    slow = speed.prompts(Material(read_document(stored(tmp_path / "slow", slower(answers(12, noise=0), 5)))))
    fast = speed.prompts(Material(read_document(stored(tmp_path / "fast", slower(answers(12, noise=0), 0.5)))))
    near = speed.prompts(Material(read_document(stored(tmp_path / "near", slower(answers(12, noise=0), 1.2)))))
    drawn = [[text.get_text() for text in figure.axes[0].texts] for figure in (slow, fast, near)]
    named = [figure.legends[0].get_title().get_text() for figure in (slow, fast, near)]
    # Near plain decoding its own line leaves the axes above, and tells who gained from who lost.
    assert drawn == [["1×"], ["4×"], ["1×"]]
    assert [re.findall(r"(\d+)×", title) for title in named] == [["1"], ["4"], ["1"]]
    assert not any("×" in caption for caption in plots.CAPTIONS.values())


@each("name", ["acceptance", "positions", "output", "prompts", "trend"])
def test_every_row_of_panels_has_its_label_and_its_ticks(tmp_path: Path, name: str) -> None:
    made = Material(
        read_document(stored(tmp_path / "run", [row for at in range(3) for row in answers(4, suite=f"s{at}")]))
    )
    figure = style.with_style(lambda: trend([made]) if name == "trend" else plots.PLOTS[name](made))
    figure.draw_without_rendering()
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == (6 if name == "trend" else 3)
    assert all(axes.get_ylabel() for axes in shown[::2])
    for axes in shown:
        assert any(tick.label1.get_visible() and tick.label1.get_text() for tick in axes.xaxis.get_major_ticks())


def test_of_very_many_prompts_a_draw_is_shown_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MOST_POINTS", 5)
    figure = speed.prompts(Material(read_document(stored(tmp_path / "run", answers(12)))))
    assert len(figure.axes[0].lines[0].get_xydata()) == 5
    assert " 5 prompts" in figure.legends[0].get_title().get_text()


def test_acceptance_along_the_answer_starts_with_the_first_stretch(tmp_path: Path) -> None:
    rows = [row for number in range(4) for row in pair(f"p{number}", [4] * 8 + [0] * 30)]
    figure = acceptance.output(Material(read_document(stored(tmp_path / "run", rows))))
    values = figure.axes[0].lines[0].get_ydata()
    assert values[0] == pytest.approx(5)
    assert values[-1] == pytest.approx(1)


def test_acceptance_along_the_answer_is_that_of_compare_by_position(tmp_path: Path) -> None:
    rows = [row for n in range(6) for row in pair(f"p{n}", [n % 5, 3, 4, 0, 4] * 6)]
    folder = stored(tmp_path / "run", rows)
    cells = summarise(table.read_run(folder, by="output-position").rows, known(**IDENTITY))
    expected = {cell.slice: cell.figures["al.pooled"] for cell in cells if cell.method == "dflash"}
    assert len(expected) == 3
    assert Material(read_document(folder)).along["gsm8k", "", NO_THINKING, "dflash"] == expected


def test_a_trend_has_a_point_for_each_run_in_order(tmp_path: Path) -> None:
    runs = [
        Material(read_document(stored(tmp_path / name, slower(answers(12), times))))
        for name, times in (("a", 1), ("b", 2))
    ]
    figure = style.with_style(trend, runs)
    values = figure.axes[0].lines[0].get_ydata()
    assert values[0] == pytest.approx(2 * values[1])
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "gsm8k (embedded) · speedup.decode",
        "gsm8k (embedded) · al.pooled",
    ]


def test_a_trend_over_runs_of_other_prompts_names_both_sources(tmp_path: Path) -> None:
    runs = [
        Material(read_document(stored(tmp_path / name, answers(12), **asked("gsm8k", source=source))))
        for name, source in (("a", "embedded"), ("b", "hub openai/gsm8k@c0ffee"))
    ]
    title = style.with_style(trend, runs).axes[0].get_title(loc="left")
    assert "embedded" in title and "hub" in title


def test_a_panel_says_where_its_prompts_came_from_even_alone(tmp_path: Path) -> None:
    figure = style.with_style(acceptance.histogram, Material(read_document(stored(tmp_path / "run", answers(4)))))
    assert figure.axes[0].get_title(loc="left") == "gsm8k (embedded)"


def test_more_suites_than_fit_are_said_to_be_left_out(tmp_path: Path) -> None:
    rows = [row for at in range(style.MOST_PANELS + 2) for row in answers(2, suite=f"s{at}")]
    figure = acceptance.histogram(Material(read_document(stored(tmp_path / "run", rows))))
    assert "2 more panels not shown" in figure.legends[0].get_title().get_text()


def test_the_same_run_gives_the_same_bytes_and_colours_that_a_page_can_change(tmp_path: Path) -> None:
    made = material(tmp_path / "run")
    first, second = plots.svg(made, "speedup"), plots.svg(made, "speedup")
    assert first == second
    assert first.startswith("<svg")
    for colour in style.NAMES:
        assert first.count(colour) == first.count(f"var(--{style.NAMES[colour]}, {colour})")


SCOPED = re.compile(r'<g((?: data-(?:suite|method|settings)="[^"]*")+)>')


@pytest.fixture(scope="module")
def of_two_suites(tmp_path_factory: pytest.TempPathFactory) -> Material:
    rows = [*answers(12), *[replace(row, suite='a "b" <c>') for row in answers(12)]]
    rows += [replace(row, method="eagle3") for row in rows if row.method == "dflash"]
    return Material(read_document(stored(tmp_path_factory.mktemp("suites") / "run", rows)))


@each("name", ["acceptance", "positions", "output", "prompts"])
def test_a_drawing_says_which_suite_and_method_each_part_shows(
    tmp_path: Path, of_two_suites: Material, name: str
) -> None:
    made = of_two_suites
    shown = SCOPED.findall(plots.svg(made, name))
    panels = [
        f' data-suite="{suite}" data-settings="{NO_THINKING}"' for suite in ("gsm8k", "a &quot;b&quot; &lt;c&gt;")
    ]
    assert [part for part in shown if "suite" in part] == panels
    of_method = Counter(part for part in shown if "suite" not in part)
    # Both methods have equally many parts: the same answers, and the legend's entry.
    assert of_method[' data-method="dflash"'] == of_method[' data-method="eagle3"'] >= 4
    assert len(of_method) == 2
    figure = plots.drawn(made, name)
    parts = [part for axes in figure.axes for part in (*axes.lines, *axes.patches, *axes.collections)]
    unmarked = [part for part in parts if not style.scope_of(part)]
    assert all(part.get_color() == style.MUTED for part in unmarked)
    # A plot that is written has none of it.
    assert "data-" not in plots.write_plot(made, name, tmp_path, "svg").read_text()


# The command


def test_plot_writes_every_plot_and_names_it(tmp_path: Path, main: Main) -> None:
    stored(tmp_path / "run", answers(4))
    code, shown, told = main("plot", "run", "--format", "svg")
    assert (code, told) == (0, "")
    assert shown.splitlines() == [
        f"run/plots/{name}.svg"
        for name in plots.PLOTS
        if name not in ("sweep", "load", "frontier", "context", "headroom", "reliability")
    ]
    assert main("plot", "run", "run", "-o", "there") == (0, "there/trend.png\n", "")
    assert Path("there/trend.png").read_bytes().startswith(b"\x89PNG")


def test_a_trend_of_unlike_runs_is_refused_or_says_so(tmp_path: Path, main: Main) -> None:
    suites = {"math500": SUITES["gsm8k"]}
    stored(tmp_path / "a", answers(4))
    stored(tmp_path / "b", answers(4, suite="math500"), suites=suites)
    newer = {"math500": SUITES["gsm8k"] | {"version": 2}}
    stored(tmp_path / "c", answers(4, suite="math500"), suites=newer, dtype="bfloat16")
    words = ["plot", "a", "b", "c", "-o", "there", "--format", "svg", "--allow", "dtype"]
    assert_refused(main(*words), "b and c", "math500 1 and 2", "--allow suite")
    code, shown, told = main(*words, "--allow", "suite")
    assert (code, shown) == (0, "there/trend.svg\n")
    assert ["dtype" in line for line in told.splitlines()] == [True, False]
    assert "math500 1 and 2" in told and "dtype, suite; " in Path("there/trend.svg").read_text()


def test_what_a_server_hides_is_no_plot_but_a_line(tmp_path: Path, main: Main) -> None:
    rows = [row for row in answers(4) if row.method == "ar"]
    rows += [record("server", f"p{number:03}", generation(None), passed=True) for number in range(4)]
    stored(tmp_path / "run", rows, temperature=1.0)
    code, shown, told = main("plot", "run", "-o", "plots", "--format", "svg")
    assert code == 0
    assert shown.splitlines() == ["plots/speedup.svg", "plots/rounds.svg", "plots/prompts.svg"]
    assert [line.split("'")[1] for line in told.splitlines()] == ["acceptance", "positions", "output"]


def test_acceptance_over_a_training_is_drawn_from_its_history(tmp_path: Path) -> None:
    histories = {
        "dflash": [{"tokens": 500_000, "al_pooled": 1.5}, {"tokens": 1_000_000, "al_pooled": 2.0}],
        "eagle3": [{"tokens": 250_000, "al_pooled": 1.25}, {"step": 9}],
    }
    (axes,) = training(histories).axes
    assert [line.get_label() for line in axes.lines] == ["dflash", "eagle3"]
    assert axes.lines[0].get_xydata().tolist() == [[0.5, 1.5], [1.0, 2.0]]
    assert axes.lines[1].get_xydata().tolist() == [[0.25, 1.25]]
    path = plots.write_training(histories, tmp_path / "training.svg")
    assert path.read_bytes() == plots.write_training(histories, tmp_path / "again.svg").read_bytes()
    with pytest.raises(plots.NothingToPlotError, match="how many tokens"):
        plots.write_training({"medusa": [{"step": 9}]}, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


def test_an_interval_too_wide_to_tell_is_left_out_of_every_drawing_and_said(tmp_path: Path) -> None:
    rows = answers(8)
    stalled = next(row for row in rows if row.method == "ar").generation
    rows[0] = replace(rows[0], generation=in_time(stalled, 1000 * stalled.decode_s))
    document = read_document(stored(tmp_path / "run", rows))
    (cell,) = (cell for cell in document.cells if cell.method == "dflash")
    assert cell.figures["speedup.decode"].is_vague
    figure = plots.drawn(plots.Material(document), "speedup")
    (bars,) = [one for one in figure.axes[0].containers if type(one).__name__ == "ErrorbarContainer"]
    (lines,) = bars.lines[2]
    assert not lines.get_segments()[0].size
    assert "speedup.decode" in figure.legends[0].get_title().get_text()
    assert figure.axes[0].get_ylabel() == "speed-up"
    (row,) = charts.forest(document, document.means())
    assert row.low == row.value == row.high and "cannot tell" in row.text
    (entry, *_) = (e for e in json.loads(gate.benchmark({cell.key: [cell]})) if e["name"].endswith("speedup.decode"))
    assert entry["range"] == "cannot tell"
