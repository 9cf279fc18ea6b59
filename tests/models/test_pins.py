"""Commits of hub ids: presets may name them, a run records them and says which were not named, others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from dflash_bench.core.errors import UserError
from dflash_bench.models import hub, presets
from helpers.each import each
from helpers.fake_hub import NEW, OLD, FakeHub

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def served(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    folders = {"org/target": model / "target", "org/draft": model / "dflash"}
    return FakeHub(folders, tmp_path / "cache").applied(monkeypatch)


def words(out: str, target: str = "org/target", draft: str = "org/draft") -> list[str]:
    Path("p.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": "1 + 1?"}\n')
    return [
        "run",
        "--prompts",
        "p.jsonl",
        "--target",
        target,
        "--draft",
        f"dflash={draft}",
        "--max-new-tokens",
        "4",
        "--out",
        out,
    ]


def info(folder: str) -> Any:
    return json.loads((Path(folder) / "run.json").read_text())


def test_a_run_records_what_a_name_meant_and_says_that_it_can_move(main: Main, served: FakeHub) -> None:
    code, _, err = main(*words("run"))
    assert code == 0, err
    assert f"note: target is not pinned: it is org/target@{OLD} now" in err
    assert f"note: dflash is not pinned: it is org/draft@{OLD} now" in err
    identity = info("run")["identity"]
    assert identity["unpinned"] == ["target", "dflash"]
    assert identity["revisions"] == {"target": f"org/target@{OLD}", "dflash": f"org/draft@{OLD}"}
    out = main("report", "run")[1]
    assert f"target and dflash came from the hub by names that can change; here they were org/target@{OLD}" in " ".join(
        out.split()
    )


def test_what_names_its_commits_is_pinned(main: Main, served: FakeHub) -> None:
    code, out, err = main(*words("run", f"org/target@{NEW}", f"org/draft@{OLD}"))
    assert code == 0, err
    assert "pinned" not in err and "can move" not in out
    assert "unpinned" not in info("run")["identity"]
    assert info("run")["identity"]["revisions"] == {"target": f"org/target@{NEW}", "dflash": f"org/draft@{OLD}"}


def test_a_branch_is_not_pinned(main: Main, served: FakeHub) -> None:
    assert main(*words("run", "org/target@main", f"org/draft@{OLD}"))[0] == 0
    assert info("run")["identity"]["unpinned"] == ["target"]


def test_resume_and_compare_refuse_another_commit(main: Main, served: FakeHub) -> None:
    assert main(*words("old"))[0] == 0
    finished = info("old")
    (Path("old") / "run.json").write_text(json.dumps(finished | {"state": "unfinished", "finished": None}))
    next(Path("old").glob("part-*.parquet")).unlink()
    served.heads["org/draft"] = NEW
    code, _, err = main(*words("old"), "--resume")
    assert code == 2 and err.count("\n") == err.count("note: ") + 1
    assert f'revisions.dflash was "org/draft@{OLD}", now "org/draft@{NEW}"' in err
    served.heads["org/draft"] = OLD
    assert main(*words("old"), "--resume")[0] == 0
    for part in ("org/draft", "org/target"):
        served.heads = dict.fromkeys(served.heads, OLD) | {part: NEW}
        assert main(*words(part[4:]))[0] == 0
        code, _, err = main("compare", "old", part[4:])
        assert code == 2 and f"{part}@{OLD}" in err and f"{part}@{NEW}" in err, err


def test_what_is_loaded_is_what_was_looked_at(main: Main, served: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter([OLD, NEW, NEW, NEW, NEW, NEW])
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "model_info",
        lambda _self, name, revision, timeout: SimpleNamespace(
            sha=revision if hub.COMMIT.fullmatch(revision) else next(asked)
        ),
    )
    assert main(*words("run"))[0] == 0
    assert info("run")["identity"]["revisions"] == {"target": f"org/target@{NEW}", "dflash": f"org/draft@{OLD}"}


def test_folders_are_known_by_their_weights(tmp_path: Path) -> None:
    assert hub.is_pinned(str(tmp_path))
    assert hub.is_pinned(f"org/name@{OLD}")
    assert not any(map(hub.is_pinned, ["org/name", "org/name@main", "org/name@v1", f"org/name@{OLD[:-1]}"]))


TABLE = """
[one]
target = "org/target"
drafts = {{ dflash = "org/draft", eagle3 = "./nano/eagle3" }}
source = "here"
revision = {{ {} }}
"""


def preset(folder: Path, revision: str) -> presets.Preset:
    path = folder / "table.toml"
    path.write_text(TABLE.format(revision))
    presets.table.cache_clear()
    try:
        return presets.table(path)["one"]
    finally:
        presets.table.cache_clear()


def test_a_preset_names_the_commits_that_are_known(tmp_path: Path) -> None:
    known = preset(tmp_path, f'target = "{OLD}"')
    assert (known.target, known.drafts["dflash"]) == (f"org/target@{OLD}", "org/draft")
    assert presets.name(known.target) == "org/target"
    assert preset(tmp_path, f'dflash = "{NEW}"').drafts["dflash"] == f"org/draft@{NEW}"


@each(
    ("revision", "said"),
    [
        ('target = "main"', "revision of target is 'main', not a commit of 40 digits"),
        ("target = 7", "revision cannot be {'target': 7}"),
        (f'medusa = "{OLD}"', "unknown part in revision of table.toml, one: 'medusa'"),
        (f'eagle3 = "{OLD}"', "eagle3 is ./nano/eagle3, which takes no revision"),
    ],
)
def test_a_revision_that_pins_nothing_is_refused(revision: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as told:
        preset(tmp_path, revision)
    assert said in str(told.value)


def test_the_table_pins_by_commits_alone() -> None:
    for name, known in presets.table().items():
        assert all(hub.COMMIT.fullmatch(commit) for commit in known.revision.values()), name
