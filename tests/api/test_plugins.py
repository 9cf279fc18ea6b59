"""Plug-ins of other packages by entry points: a drafter, a scorer and a dialect; errors of broken plug-ins.

Each is a package in a folder on the path: its module, and the metadata that an installed one has.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from dflash_bench import api as db
from dflash_bench.core import plugins
from dflash_bench.core.dialects import DIALECTS, UNKNOWN_RULE
from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import METHODS, parse
from dflash_bench.results import parts
from dflash_bench.tasks.scorers import SCORERS
from helpers import tiny
from helpers.runs import listed
from helpers.servers.fake_server import FakeServer

Main = Callable[..., tuple[int, str, str]]
Install = Callable[[str, str, dict[str, str]], None]
DRAFTER = """
from dflash_bench.core.methods import MethodSpec, Option

echo = MethodSpec("echo", "the last token again and again", None, "chain", True,
            (Option("n", "tokens drafted per round", 3, 1, 63, "tokens"),), count="n", module="my_echo.drafting")
"""
DRAFTING = """
from dflash_bench.engine.drafters.base import HostDrafter


class EchoDrafter(HostDrafter):
    def start(self, row, prompt):
        pass

    def continuation(self, row):
        return [self.texts[row][-1]] * self.num_drafts


def build(models, target, method):
    return EchoDrafter(method.number("n"), target.device)
"""
SCORER = """
from dflash_bench.tasks.scorers.base import Score


def shouting(prompt, text):
    return Score(text[:20] or None, text.isupper())
"""
DIALECT = """
from dataclasses import replace

from dflash_bench.core.dialects import CountingRule, ServerInfo
from dflash_bench.servers.dialects import openai
from dflash_bench.servers.dialects.vllm import DIALECT


def identify(pages):
    return ServerInfo("9.9") if openai.owner(pages) == "vllm" else None


mine = replace(
    DIALECT, name="mine", identify=identify, rules=(CountingRule("mine.counters", "mine's own counters", beyond=None),),
    remedies={"uncounted": "start mine with --count-rounds"},
)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a module like pip: its files, and the entry points that its metadata names."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(site)
    before = set(sys.modules)

    def add(package: str, points: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = site / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        metadata = site / f"{package}-1.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
        (metadata / "entry_points.txt").write_text(points)
        forget()

    yield add
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]
    monkeypatch.undo()
    forget()


def forget() -> None:
    plugins.found.cache_clear()
    plugins._used.clear()
    for table in (METHODS, DIALECTS, SCORERS):
        table._loaded.clear()  # type: ignore[attr-defined]


def add_echo(install: Install) -> None:
    files = {"__init__.py": DRAFTER, "drafting.py": DRAFTING}
    install("my_echo", "[dflash_bench.drafters]\necho = my_echo:echo\n", files)


def test_a_drafter_of_another_package_is_a_method(install: Install, tmp_path: Path, main: Main) -> None:
    add_echo(install)
    model = tiny.build(tmp_path / "model")
    with db.Engine(model) as engine:
        said = engine.generate([5, 9, 200, 7], method="echo:2", max_new_tokens=12)
        assert said.token_ids == engine.generate([5, 9, 200, 7], max_new_tokens=12).token_ids
        assert all(len(one.drafted) == 2 and len(set(one.drafted)) == 1 for one in said.rounds)
    assert parse("echo:2").label == "echo:2"
    assert "the last token again and again" in main("methods")[1]
    assert "my_echo" not in (Path(plugins.__file__).parent / "methods.py").read_text()
    assert plugins.used() == {"my_echo": "1.5"}


def test_a_run_says_whose_drafter_it_measured(install: Install, tmp_path: Path) -> None:
    add_echo(install)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "What is 2+2?"}) + "\n")
    run = db.run(
        model=tiny.build(tmp_path / "model"), prompts=prompts, methods="echo:2", max_new_tokens=8, out=tmp_path / "run"
    )
    assert run.methods == ["echo:2"]
    assert set(run.answers["exactness"].dropna()) <= {"exact"}
    assert run.document.results.info.to_json()["environment"]["packages"]["my_echo"] == "1.5"


def test_a_scorer_of_another_package_scores(install: Install, tmp_path: Path) -> None:
    install("my_scorer", "[dflash_bench.scorers]\nshouting = my_scorer:shouting\n", {"__init__.py": SCORER})
    from dflash_bench.core.option import check_options
    from dflash_bench.core.types import Prompt
    from dflash_bench.tasks import scorers

    check_options(db_request(tmp_path, score="shouting"))
    prompt = Prompt("own", "0", ("Say it.",))
    assert [scorers.score("shouting", prompt, text).passed for text in ("NO", "no")] == [True, False]
    with pytest.raises(UserError, match=r"unknown scorer 'shoutin' \(did you mean 'shouting'\?\); known: .*shouting"):
        check_options(db_request(tmp_path, score="shoutin"))


def db_request(folder: Path, **options: object) -> object:
    from dflash_bench.api.measuring import request_of

    return request_of(prompts=folder / "p.jsonl", **options)


def test_a_dialect_of_another_package_is_recognised_first(install: Install, tmp_path: Path) -> None:
    install("my_dialect", "[dflash_bench.dialects]\nmine = my_dialect:mine\n", {"__init__.py": DIALECT})
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "What is 3 times 7?"}) + "\n")
    options = {"prompts": prompts, "max_new_tokens": 8}
    with FakeServer(dialect="vllm", round_s=0.002) as plain:
        for number, more in enumerate(({}, {"dialect": "mine"})):
            run = db.run(servers={"plain": plain.url}, out=tmp_path / f"run{number}", **options, **more)  # type: ignore[arg-type]
            (server,) = run.document.results.info.identity.to_json()["servers"].values()
            assert (server["dialect"], server["version"]) == ("mine", "9.9")
        with pytest.raises(db.UserError, match=r"unknown dialect 'mime' \(did you mean 'mine'\?\); known: .*mine"):
            db.run(servers={"plain": plain.url}, dialect="mime", out=tmp_path / "run", **options)  # type: ignore[arg-type]


def test_a_dialect_of_another_package_has_its_own_rule_words_and_remedies(
    install: Install, tmp_path: Path, main: Main
) -> None:
    install("my_dialect", "[dflash_bench.dialects]\nmine = my_dialect:mine\n", {"__init__.py": DIALECT})
    prompts, out = tmp_path / "p.jsonl", tmp_path / "counted"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {n} times 7?"}) + "\n" for n in range(3)))
    does = {"dialect": "vllm", "block": 5, "accepts": (2, 5, 0)}
    with (
        FakeServer(dialect="vllm") as plain,
        FakeServer(**does) as drafts,
        FakeServer(**does, has_metrics=False) as mute,
    ):
        urls = {"plain": plain.url, "dflash": drafts.url}
        run = db.run(servers=urls, out=out, prompts=prompts, max_new_tokens=24)
        hidden = db.run(servers=urls | {"dflash": mute.url}, out=tmp_path / "mute", prompts=prompts, max_new_tokens=24)
    assert {*run.document.results.rows["counted_by"]} == {"mine.counters"}
    assert "rounds of dflash by mine.counters: mine's own counters" in " ".join(str(run).split())
    (finding,) = (one for one in hidden.findings if one.kind == "uncounted")
    assert (finding.remedy, finding.remedy_code) == ("start mine with --count-rounds", "mine")
    assert main("check", out)[0] == 0
    # Counts that break the rule, or have no known rule, are refused when the run is read.
    totals = "its totals of rounds are not those"
    for forged, why in (({"total_rounds": 99}, totals), ({"counted_by": "mine.guess"}, UNKNOWN_RULE)):
        copy = shutil.copytree(out, tmp_path / "-".join(forged))
        for part in parts.of(copy):
            rows = parquet.read_table(part)
            changed = [row | (forged if row["method"] == "dflash" else {}) for row in rows.to_pylist()]
            parquet.write_table(pa.Table.from_pylist(changed, rows.schema), part)
        listed(copy)
        code, text, _ = main("check", copy)
        assert code == 1 and why in " ".join(text.split())


@pytest.mark.parametrize(
    "change, reason",
    [
        ("name='yours'", "it must be a dflash_bench.core.dialects.Dialect named 'mine'"),
        ("name='mine'", "the id of its counting rule 'vllm.request' must begin with 'mine.'"),
        ("name='mine', rules=()", "it has counters, and must declare the rule 'mine.counters' for them"),
    ],
)
def test_a_dialect_that_declares_another_ones_facts_is_refused(install: Install, change: str, reason: str) -> None:
    text = (
        "from dataclasses import replace\nfrom dflash_bench.servers.dialects.vllm import DIALECT\n"
        f"mine = replace(DIALECT, {change})"
    )
    install("my_dialect", "[dflash_bench.dialects]\nmine = my_dialect:mine\n", {"__init__.py": text})
    with pytest.raises(UserError, match=reason):
        DIALECTS["mine"]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("raise RuntimeError('boom\\nand more')", "RuntimeError: boom and more"),
        ("echo = 7", "TypeError: it must be a dflash_bench.core.methods.MethodSpec named 'echo'"),
        ("", "AttributeError: module 'my_broken' has no attribute 'echo'"),
    ],
)
def test_a_broken_plugin_is_one_line_that_names_it(install: Install, main: Main, text: str, reason: str) -> None:
    install("my_broken", "[dflash_bench.drafters]\necho = my_broken:echo\n", {"__init__.py": text})
    status, out, err = main("run", "--suite", "gsm8k", "--method", "echo")
    assert (status, out) == (2, "")
    assert err.startswith("dflash-bench: the plug-in 'echo' (dflash_bench.drafters) of my_broken 1.5 cannot be used: ")
    assert reason in err and err.count("\n") == 1


def test_a_broken_plugin_stands_in_nobodys_way(install: Install) -> None:
    install("my_broken", "[dflash_bench.drafters]\necho = my_broken:echo\n", {"__init__.py": "raise RuntimeError"})
    assert parse("dflash:3").name == "dflash"
    with pytest.raises(UserError, match=r"unknown method 'dflsh' \(did you mean 'dflash'\?\); known: .*echo"):
        parse("dflsh")


def test_a_plugin_takes_no_name_that_is_taken(install: Install) -> None:
    add_echo(install)
    install("my_other", "[dflash_bench.drafters]\necho = my_other:echo\n", {"__init__.py": DRAFTER})
    with pytest.raises(UserError, match="adds one of that name, too"):
        parse("echo")
    install("my_ar", "[dflash_bench.scorers]\nmath = my_ar:math\n", {"__init__.py": ""})
    with pytest.raises(UserError, match="dflash-bench has one of that name itself"):
        list(SCORERS)
