"""The page in headless Chromium: it opens from a file, sorts, filters, opens an answer, and logs nothing.

Needs the extra "browser", Chromium and its driver; skipped where one of them is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dflash_bench as db
from dflash_bench.report import html, read_document, write_page
from dflash_bench.report.answers import page_answers
from dflash_bench.report.site import write_site
from helpers.each import each
from helpers.pages import HOSTILE, SAID, TEXT, told
from helpers.runs import answers, stored

webdriver = pytest.importorskip("selenium.webdriver", reason="needs pip install 'dflash-bench[browser]'")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver")
FLAGS = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-quic",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """A driver, and the address of a page of 5 prompts of two suites; the fourth wrong, the last hostile."""
    folder = tmp_path_factory.mktemp("page")
    rows = [
        row
        for number in range(4)
        for row in told(f"p{number}", order=number, passed=number < 3, text=TEXT * (number + 1))
    ]
    rows += [replace(row, passed=True, answer=HOSTILE) for row in told(HOSTILE, HOSTILE, suite="humaneval", order=9)]
    write_page(read_document(stored(folder / "run", rows)), folder / "page.html")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"user-data-dir={folder / 'profile'}", "window-size=1200,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver, (folder / "page.html").as_uri()
    driver.quit()


@pytest.fixture
def opened(browser: tuple[Any, str]) -> Any:
    """The driver with that page just opened, whatever was chosen there before."""
    driver, address = browser
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    visit(driver, address)
    return driver


def visit(driver: Any, address: str) -> None:
    """Open a page of a run, and wait until its answers are unpacked."""
    driver.get(address)
    driver.execute_async_script(
        "const done = arguments[0], wait = () => document.querySelector('[aria-busy]') ? setTimeout(wait, 5) : done();"
        "wait()"
    )


def column(driver: Any, place: int) -> list[str]:
    script = "return [...document.querySelectorAll('#list tr.row')].map(tr => tr.children[arguments[0]].textContent)"
    found: list[str] = driver.execute_script(script, place)
    return found


def press(driver: Any, selector: str, number: int = 0) -> None:
    driver.execute_script("document.querySelectorAll(arguments[0])[arguments[1]].click()", selector, number)


def choose(driver: Any, control: str, value: str) -> None:
    script = (
        "const it = document.getElementById(arguments[0]); it.value = arguments[1];"
        "it.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    driver.execute_script(script, control, value)


def test_the_page_in_a_browser(opened: Any) -> None:
    """One test, because a browser takes seconds to start and a step leaves the page as the next one needs it."""
    assert column(opened, 0) == [name for name in ("p0", "p1", "p2", "p3", HOSTILE) for _ in range(2)]
    # Sorted by tokens, up and down.
    press(opened, "#list thead button", 3)
    rising = [int(text) for text in column(opened, 3)]
    assert rising == sorted(rising)
    press(opened, "#list thead button", 3)
    assert [int(text) for text in column(opened, 3)] == rising[::-1]
    # Plain answers have no speed-up, and come last both ways.
    for _ in range(2):
        press(opened, "#list thead button", 7)
        assert column(opened, 7)[5:] == ["–"] * 5
    # Filtered, and all of it taken back.
    choose(opened, "method", "dflash")
    choose(opened, "outcome", "wrong")
    assert (column(opened, 0), column(opened, 2)) == (["p3"], ["dflash"])
    choose(opened, "outcome", "")
    choose(opened, "find", "onerror")
    assert column(opened, 0) == [HOSTILE]
    assert opened.find_element("id", "count").text == "1 of 10"
    # Opened: hostile text is text.
    press(opened, "#list tr.row button")
    text = opened.execute_script(
        "return [...document.querySelectorAll('.told:first-child pre.text .t')].map(t => t.textContent).join('')"
    )
    assert text == HOSTILE
    assert opened.execute_script("return document.images.length") == 0
    kinds = opened.execute_script("return [...document.querySelectorAll('pre.text .t')].map(t => t.className)")
    assert kinds[:6] == ["t start", "t kept", "t kept", "t bonus", "t kept", "t kept"]
    assert opened.execute_script("return document.querySelector('pre.text .cut').firstChild.textContent") == "−2"
    press(opened, "#list tr.row button")
    assert not opened.find_elements("css selector", "pre.text")
    # Light and dark.
    ground = "return getComputedStyle(document.body).backgroundColor"
    press(opened, "#theme")
    light = opened.execute_script(ground)
    press(opened, "#theme")
    assert opened.execute_script(ground) != light
    assert opened.get_log("browser") == []


def keys(driver: Any, key: str) -> None:
    driver.execute_script("document.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0]}))", key)


def opened_answers(driver: Any) -> list[str]:
    """The prompt and method of each answer that is open."""
    script = (
        "return [...document.querySelectorAll('#list button[aria-expanded=true]')]"
        ".map(b => b.closest('tr')).map(tr => `${tr.children[0].textContent} ${tr.children[2].textContent}`)"
    )
    found: list[str] = driver.execute_script(script)
    return found


def test_one_answer_has_a_link_and_keys_lead_to_the_next(opened: Any) -> None:
    page = opened.current_url.partition("#")[0]
    opened.get("about:blank")
    visit(opened, f"{page}#a=gsm8k/p2/dflash")
    assert opened_answers(opened) == ["p2 dflash"]
    keys(opened, "j")
    assert opened_answers(opened) == ["p3 plain"]
    assert opened.execute_script("return location.hash") == "#a=gsm8k/p3/ar"
    keys(opened, "k")
    assert opened_answers(opened) == ["p2 dflash"]
    # A link leads there even if a filter hides it.
    choose(opened, "method", "ar")
    opened.execute_script("location.hash = '#a=gsm8k/p1/dflash'")
    opened.execute_script("window.dispatchEvent(new HashChangeEvent('hashchange'))")
    assert "p1 dflash" in opened_answers(opened)
    # Draft tokens are shown on demand.
    hidden = "return getComputedStyle(document.querySelector('pre.text .cut s')).display"
    assert opened.execute_script(hidden) == "none"
    press(opened, ".key .said-button")
    assert opened.execute_script(hidden) == "inline"
    said = opened.execute_script("return document.querySelector('pre.text .cut s').textContent")
    assert said == SAID
    opened.get(page)
    assert opened.get_log("browser") == []


def visible_rows(driver: Any, selector: str) -> list[list[str]]:
    """The suite and method of each row of a table or chart that is shown."""
    script = (
        "return [...document.querySelectorAll(`${arguments[0]} [data-method]`)].filter(row => row.offsetParent)"
        ".map(row => [row.dataset.suite, row.dataset.method])"
    )
    found: list[list[str]] = driver.execute_script(script, selector)
    return found


def drawn(driver: Any, name: str) -> dict[str, set[str]]:
    """The methods that a drawing shows, by suite."""
    script = (
        "return [...document.querySelectorAll(`#plots [data-name=${arguments[0]}] g[data-suite] [data-method]`)]"
        ".filter(part => part.getBoundingClientRect().width)"
        ".map(part => [part.closest('[data-suite]').dataset.suite, part.dataset.method])"
    )
    found: dict[str, set[str]] = {}
    for suite, method in driver.execute_script(script, name):
        found.setdefault(suite, set()).add(method)
    return found


def test_filters_move_tables_charts_and_answers_together(opened: Any) -> None:
    def suites() -> list[set[str]]:
        shown = [visible_rows(opened, place) for place in ("#results .chart", "#results .figures", "#stops .shares")]
        return [{suite for suite, _ in rows} for rows in shown]

    place = (
        "const svg = document.querySelector('[data-name=acceptance] svg');"
        "const panel = svg.querySelector(`[data-suite=${arguments[0]}] path`);"
        "const [box, own] = [svg, panel].map(element => element.getBoundingClientRect());"
        "return [own.x - box.x, own.y - box.y]"
    )
    painted = "const c = document.querySelector('#map canvas'); return [c.height, c.offsetHeight]"
    assert suites() == [{"", "gsm8k", "humaneval"}, {"gsm8k", "humaneval"}, {"gsm8k", "humaneval"}]
    before = opened.execute_script(painted)
    choose(opened, "suite", "gsm8k")
    assert suites() == [{"gsm8k"}] * 3 and set(column(opened, 0)) == {"p0", "p1", "p2", "p3"}
    assert not opened.find_element("css selector", "[data-name=speedup]").is_displayed()
    assert opened.find_element("id", "away").text.endswith("with the rest: speedup, rounds.")
    caption = "return document.querySelector(`[data-name=${arguments[0]}] figcaption`).textContent"
    assert opened.execute_script(caption, "speedup").endswith("the charts under Results show the same.")
    assert "under Results" not in opened.execute_script(caption, "acceptance")
    assert drawn(opened, "acceptance") == {"gsm8k": {"dflash"}}
    first = opened.execute_script(place, "gsm8k")
    assert all(now < then for now, then in zip(opened.execute_script(painted), before, strict=True))
    choose(opened, "method", "dflash")
    assert {method for _, method in visible_rows(opened, "#results .figures")} == {"dflash"}
    assert set(column(opened, 2)) == {"dflash"}
    # No heading stands over nothing.
    empty = "return [...document.querySelectorAll('tr.suite')].filter(tr => tr.offsetParent && tr.closest('#results'))"
    headings = opened.execute_script(f"{empty}.map(tr => tr.textContent)")
    assert headings and set(headings) == {"gsm8k (embedded)"}
    # The panel that is left stands where the first one stood.
    choose(opened, "suite", "humaneval")
    assert opened.execute_script(place, "humaneval") == pytest.approx(first, abs=0.1)
    choose(opened, "suite", "")
    choose(opened, "method", "ar")
    assert drawn(opened, "acceptance") == {}
    assert "acceptance" in opened.find_element("id", "away").text
    choose(opened, "method", "")
    assert suites()[0] == {"", "gsm8k", "humaneval"}
    assert drawn(opened, "acceptance") == drawn(opened, "output") == {"gsm8k": {"dflash"}, "humaneval": {"dflash"}}
    assert opened.find_element("css selector", "[data-name=speedup]").is_displayed()
    assert not opened.find_element("id", "away").is_displayed()


def test_the_answers_to_a_prompt_stand_side_by_side_and_are_typed_again(opened: Any) -> None:
    press(opened, "#list tr.row button", 1)
    assert opened.execute_script("return [...document.querySelectorAll('.told h4')].map(h => h.firstChild.data)") == [
        "dflash",
        "plain",
    ]
    left = "return document.querySelectorAll('pre.text .later').length"
    assert opened.execute_script(left) == 0
    press(opened, ".key .play")
    hidden = opened.execute_script(left)
    assert hidden > 10
    # The clock of a page that nobody looks at may stand still; its end is what matters.
    opened.execute_async_script(
        "const done = arguments[arguments.length - 1], button = document.querySelector('.key .play');"
        "const wait = () => button.textContent.startsWith('play again') ? done() : setTimeout(wait, 50); wait()"
    )
    assert opened.execute_script(left) == 0
    assert "times slower" in opened.execute_script("return document.querySelector('.key .play').textContent")
    press(opened, "#list tr.row button", 1)
    assert opened.get_log("browser") == []


def test_a_click_on_the_map_opens_the_answer(opened: Any) -> None:
    script = (
        "const c = document.querySelector('#map canvas');"
        "c.dispatchEvent(new MouseEvent('click', {clientX: c.getBoundingClientRect().x + 5,"
        " clientY: c.getBoundingClientRect().y + c.offsetHeight * 1.5 / 5}))"
    )
    opened.execute_script(script)
    assert opened_answers(opened) == ["p1 dflash"]
    press(opened, "#list button[aria-expanded=true]")


def test_answers_that_are_looked_for_come_first(opened: Any) -> None:
    choose(opened, "sort", "wrong first")
    assert column(opened, 0)[:2] == ["p3", "p3"]
    choose(opened, "sort", "fewest accepted first")
    shown = [float(al) for al, method in zip(column(opened, 5), column(opened, 2), strict=True) if method == "dflash"]
    assert shown == sorted(shown) and set(column(opened, 2)[:5]) == {"dflash"}
    choose(opened, "sort", "")


def test_ten_thousand_answers_are_listed_by_a_few_hundred_rows(opened: Any, tmp_path: Path) -> None:
    page, folder = opened.current_url.partition("#")[0], tmp_path
    document = read_document(stored(folder / "run", told()))
    read = html.read_page(document)
    few = page_answers(document, read.answers, None)
    # Storing as many takes longer than all the rest; each answer has a text of its own, as in a run.
    rows = [
        row | {"prompt": f"p{number}", "text": 2 * number + at}
        for number in range(5000)
        for at, row in enumerate(few.rows)
    ]
    own = [row["text"] for _ in range(5000) for row in few.rows]
    texts, lengths = ([several[text] for text in own] for several in (few.texts, few.lengths))
    listed = replace(few, rows=rows, texts=texts, lengths=lengths, num_all=len(rows))
    (folder / "page.html").write_text(html.page(document, {}, listed, read), encoding="utf-8")
    assert (folder / "page.html").stat().st_size < 1e6
    visit(opened, (folder / "page.html").as_uri())
    assert opened.find_element("id", "count").text == "10000 of 10000"
    nodes = "return document.querySelectorAll('*').length"
    assert opened.execute_script(nodes) < 5000
    assert opened.execute_script("return performance.memory.usedJSHeapSize") < 60e6
    opened.execute_script("location.hash = '#a=gsm8k/p4999/dflash'")
    opened.execute_script("window.dispatchEvent(new HashChangeEvent('hashchange'))")
    assert opened_answers(opened) == ["p4999 dflash"]
    keys(opened, "k")
    assert opened_answers(opened) == ["p4999 plain"]
    press(opened, "#list button[aria-expanded=true]")
    # Wherever it is scrolled to, there are the rows that are seen, and few others.
    scrolled = (
        "const done = arguments[arguments.length - 1], list = document.getElementById('list');"
        "document.activeElement.blur();"
        "const box = list.getBoundingClientRect(), target = box.top + scrollY + arguments[0] * box.height;"
        "scrollTo({top: target - innerHeight / 2, behavior: 'instant'});"
        "const look = () => { const row = document.elementFromPoint(box.x + 20, innerHeight / 2).closest('tr.row');"
        "  row ? setTimeout(() => done([row.textContent, document.querySelectorAll('*').length]), 50)"
        "      : setTimeout(look, 20) };"
        "look()"
    )
    seen = []
    for share in (0.1, 0.5, 0.98):
        row, number = opened.execute_async_script(scrolled, share)
        seen.append(int(row.removeprefix("p").partition("gsm8k")[0]))
        assert number < 8000
    assert seen == pytest.approx([500, 2500, 4900], abs=100)
    choose(opened, "find", "p4998")
    assert column(opened, 0) == ["p4998", "p4998"]
    opened.get(page)


WIDTHS = (400, 1000, 1400, 2000)
CUT_OFF = "return [...document.querySelectorAll('.wide')].map(box => box.scrollWidth - box.clientWidth)"
BROKEN = r"""
const broken = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; node = walker.nextNode();) {
  const place = node.parentElement.closest('th, td, h1, h2, h3, dt, button, .tile');
  if (!place || place.closest('.open') || !place.checkVisibility()) continue;
  for (const word of node.data.matchAll(/[\p{L}\p{N}]{2,14}(?![\p{L}\p{N}])/gu)) {
    const range = document.createRange();
    range.setStart(node, word.index);
    range.setEnd(node, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) broken.push(word[0]);
  }
}
return broken;
"""
"""The words of heads and cells that are broken over lines."""
PALE = r"""
const paint = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const seen = (css) => {
  paint.clearRect(0, 0, 1, 1); paint.fillStyle = css; paint.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
const behind = (element) => {
  const layers = [];
  for (let e = element; e; e = e.parentElement) {
    layers.push(seen(getComputedStyle(e).backgroundColor));
    if (layers.at(-1)[3] === 1) break;
  }
  return layers.reduceRight((under, layer) => over(layer, under), [255, 255, 255, 1]);
};
const light = (colour) => colour.slice(0, 3).map(v => v / 255)
  .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const pale = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; node = walker.nextNode();) {
  const element = node.parentElement;
  if (!node.data.trim() || !element.checkVisibility() || element.closest('script, style, option')) continue;
  const style = getComputedStyle(element), under = behind(element);
  const own = over(seen(element.closest('svg') ? style.fill : style.color), under);
  const [high, low] = [light(own), light(under)].sort((a, b) => b - a);
  const size = parseFloat(style.fontSize), isLarge = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
  if ((high + 0.05) / (low + 0.05) < (isLarge ? 3 : 4.5)) pale.push(`${element.tagName} ${node.data.trim()}`);
}
return pale;
"""
"""The texts whose contrast with what is behind them is below what WCAG asks of AA."""


def resize(driver: Any, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def assert_fits(driver: Any, width: int) -> None:
    """Nothing is to be scrolled to sideways, and no word is broken."""
    resize(driver, width)
    assert set(driver.execute_script(CUT_OFF)) == {0}, width
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    assert driver.execute_script(BROKEN) == [], width


def assert_readable(driver: Any) -> None:
    for theme in ("light", "dark"):
        driver.execute_script("document.documentElement.dataset.theme = arguments[0]", theme)
        assert driver.execute_script(PALE) == [], theme


def test_every_text_stands_out_in_both_themes(opened: Any) -> None:
    opened.execute_script("document.querySelectorAll('details').forEach(one => { one.open = true })")
    press(opened, "#list tr.row button", 1)
    for number in range(7):
        tile = "document.querySelector('.tile').style.setProperty('--own', `var(--series-${arguments[0]})`)"
        opened.execute_script(tile, number)
        assert_readable(opened)
    press(opened, ".key .said-button")
    assert_readable(opened)
    opened.execute_script("document.body.style.cssText = 'color: gray; width: 1em; overflow-wrap: anywhere'")
    assert opened.execute_script(PALE) and opened.execute_script(BROKEN)


def test_a_comparison_in_a_browser(opened: Any, tmp_path: Path) -> None:
    page = opened.current_url.partition("#")[0]
    for name in ("before", "after"):
        stored(tmp_path / name, [*answers(8), *answers(8, suite="humaneval")])
    db.compare(tmp_path / "before", tmp_path / "after").report(tmp_path / "changes.html")
    opened.get((tmp_path / "changes.html").as_uri())
    assert {suite for suite, _ in visible_rows(opened, "#changes .chart")} == {"gsm8k", "humaneval"}
    choose(opened, "suite", "gsm8k")
    assert {suite for suite, _ in visible_rows(opened, "#changes .chart")} == {"gsm8k"}
    assert {suite for suite, _ in visible_rows(opened, "#results table")} == {"gsm8k"}
    for width in WIDTHS:
        assert_fits(opened, width)
    assert_readable(opened)
    opened.get(page)
    assert opened.get_log("browser") == []


def test_an_index_in_a_browser(opened: Any, tmp_path: Path) -> None:
    page = opened.current_url.partition("#")[0]
    stored(tmp_path / "runs" / "now", answers(8))
    write_site([tmp_path / "runs" / "now"], tmp_path / "site", print)
    opened.get((tmp_path / "site" / "index.html").as_uri())
    for width in WIDTHS:
        assert_fits(opened, width)
    assert_readable(opened)
    lines = "return [...document.querySelectorAll('.runs tbody tr')].filter(line => line.checkVisibility()).length"
    assert opened.execute_script(lines) == 1
    opened.find_element("id", "find").send_keys("no such run")
    assert opened.execute_script(lines) == 0
    opened.get(page)
    assert opened.get_log("browser") == []


def test_a_phone_does_not_scroll_sideways(opened: Any) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= 390


@each("width", [400, 800, 1000, 1200, 1400, 2000])
def test_nothing_is_cut_off_and_no_word_is_broken(opened: Any, width: int) -> None:
    """Names wrap, however long; at no width is a part of a table, or of the page, to be scrolled to sideways."""
    assert_fits(opened, width)
    last = "[...document.querySelectorAll('#list tr.row')].map(tr => tr.lastChild.getBoundingClientRect().right)"
    assert max(opened.execute_script(f"return {last}")) <= width


def test_a_browser_that_cannot_unpack_says_so_and_shows_the_rest(opened: Any) -> None:
    script = {"source": "delete window.DecompressionStream"}
    added = opened.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)
    opened.refresh()
    opened.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    assert "cannot unpack" in opened.find_element("id", "packed").text
    assert not opened.find_element("id", "list").is_displayed()
    assert visible_rows(opened, "#results .figures") and opened.get_log("browser") == []
