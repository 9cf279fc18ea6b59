"""The framework of all studies: their list, options, folders of runs, and the writing of pages.

A study is a file beside this one. Its docstring's first line is its line in the list; `TAKES` is its duration, `PAGES`
the files of `results/` that it makes (patterns, such as `gpu-*.md`, where a name depends on the machine), and `EXTRA`,
if present, the extra of the package that it needs. `options(parser)`, if present, adds its options, and
`make(work, options)` measures and returns a `Made`. This module imports only the standard library, and the list is read
from the files' text, so that listing needs no set-up.
"""

from __future__ import annotations

import ast
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS, RUNS = ROOT / "results", ROOT / "results" / "runs"
MARKER = "study.json"
"""The file in a study's folder with the study's name and options."""


class StudyError(Exception):
    """An error with its remedy: a line for the user, exit status 2."""


@dataclass(frozen=True, slots=True)
class Known:
    """A study's description in its file."""

    name: str
    title: str
    takes: str
    pages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """The result of a study: files for `results/` by name, as text or a file to copy; and problems.

    With problems the exit status is 1; files are written nevertheless.
    """

    files: Mapping[str, str | Path] = field(default_factory=dict)
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """A study's folder, which keeps finished work; `command` is the study's command line."""

    folder: Path
    command: str

    def run(self, name: str, *words: object, kind: str = "run", allowed: Sequence[int] = (0,)) -> Path:
        """Run `dflash-bench run` (or `sweep`) into the folder NAME, resuming if it was interrupted."""
        out = self.folder / name
        resumed = ["--resume"] * (out / "run.json").exists()
        bench(kind, *words, "--out", out, *resumed, allowed=allowed, shown=True)
        return out

    def plots(self, run: Path) -> Path:
        """Write all plots of a run as SVG; return their folder."""
        out = self.folder / "plots" / run.name
        bench("plot", run, "--format", "svg", "--out", out, shown=True)
        return out

    def once(self, name: str, make: Callable[[], str]) -> Path:
        """Return the file NAME, written with the text of `make` if it does not exist."""
        path = self.folder / name
        if not path.exists():
            write(path, make())
        return path


def bench(*words: object, allowed: Sequence[int] = (0,), shown: bool = False) -> str:
    """Return the output of a `dflash-bench` command; `shown` sends it to stderr instead.

    Raises StudyError if its exit status is not allowed.
    """
    texts = list(map(_word, words))
    done = subprocess.run(
        [sys.executable, "-m", "dflash_bench.cli", *texts],
        stdout=sys.stderr if shown else subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode not in allowed:
        said = "" if shown else f":\n{done.stdout[-3000:]}"
        raise StudyError(f"{shlex.join(['dflash-bench', *texts])} ended with exit status {done.returncode}{said}")
    return done.stdout or ""


def _word(word: object) -> str:
    """Make paths relative to the checkout: runs record their command, and pages show it."""
    return str(word.relative_to(ROOT) if isinstance(word, Path) and word.is_relative_to(ROOT) else word)


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def add_data(parser: ArgumentParser, files: str) -> None:
    """Add `--data`: rows of public suites, from a folder or from the hub."""
    parser.add_argument(
        "--data",
        type=_folder,
        default="hub",
        metavar="FOLDER",
        help=f"holds {files} as on the hub; without it the hub's are used, which needs a network",
    )


def _folder(word: str) -> str:
    return word if word == "hub" else str(Path(word).resolve())


# The list.


def names() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))


def known(name: str) -> Known:
    """Read a study's description from the file's text, without importing it."""
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    said = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if node.targets[0].id in ("TAKES", "PAGES")
    }
    title = (ast.get_docstring(tree) or "").partition("\n")[0]
    return Known(name, title, said["TAKES"], tuple(said["PAGES"]))


def listing() -> str:
    lines = ["scripts/study NAME [WORK] [OPTION]...    (--help after a name shows its options)", ""]
    for one in map(known, names()):
        lines += [f"{one.name:<16}{one.title}", f"{'':<16}takes {one.takes}; makes {', '.join(one.pages) or 'no page'}"]
    return "\n".join(lines)


# Running a study.


def main(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(listing())
        return 0
    name, *rest = words
    try:
        if name not in names():
            raise StudyError(f"there is no study {name!r}; scripts/study without a name lists them")
        return perform(name, rest)
    except StudyError as error:
        tell(f"scripts/study: {error}")
        return 2


def parser_of(name: str) -> ArgumentParser:
    """Return the parser of a study's own and the shared options."""
    module, about = import_module(f"studies.{name}"), known(name)
    parser = ArgumentParser(
        prog=f"scripts/study {name}", description=f"{module.__doc__} Takes {about.takes}.", allow_abbrev=False
    )
    parser.add_argument("work", nargs="?", type=Path, help=f"what is finished stays here (results/runs/{name})")
    parser.add_argument("--fresh", action="store_true", help="forget what is finished, and measure all of it again")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="FOLDER", help="for the page (results/)")
    if hasattr(module, "options"):
        module.options(parser)
    return parser


def perform(name: str, words: Sequence[str]) -> int:
    """Run a study. Return the exit status: 1 if it found problems."""
    parser = parser_of(name)
    options = parser.parse_args(words)
    own = {key: value for key, value in vars(options).items() if key not in ("work", "fresh", "output")}
    changed = {key: value for key, value in own.items() if value != parser.get_default(key)}
    folder = (options.work or RUNS / name).resolve()
    begin(folder, name, own, options.fresh)
    made = import_module(f"studies.{name}").make(Work(folder, command(name, changed)), options)
    deliver(known(name), made, options.output)
    for problem in made.problems:
        tell(f"wrong: {problem}")
    return int(bool(made.problems))


def begin(folder: Path, name: str, own: Mapping[str, object], fresh: bool) -> None:
    """Open a folder that is new, or holds this study with these options.

    Raises StudyError if it holds anything else, which is never deleted.
    """
    told, marker = json.loads(json.dumps({"study": name, "options": own}, default=str)), folder / MARKER
    found = json.loads(marker.read_text(encoding="utf-8")) if marker.exists() else None
    if found is None and folder.exists() and any(folder.iterdir()):
        raise StudyError(f"{folder} holds something else; name another folder for the work")
    if found is not None and found["study"] != name:
        raise StudyError(f"{folder} holds the study {found['study']}; name another folder for the work")
    if found is not None and fresh:
        shutil.rmtree(folder)
    elif found is not None and found != told:
        raise StudyError(f"{folder} was begun with other options; repeat those, or give --fresh to begin anew")
    folder.mkdir(parents=True, exist_ok=True)
    write(marker, json.dumps(told, indent=1) + "\n")


def command(name: str, changed: Mapping[str, object]) -> str:
    """Return the command line for pages, without the paths of this machine."""
    words = ["scripts/study", name]
    for key, value in changed.items():
        flag = f"--{key.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            words += [flag] if one is True else [flag, _without_path(str(one))]
    return shlex.join(words)


def _without_path(word: str) -> str:
    """Return a word with FOLDER for a folder, a file's name for a file, also after NAME=."""
    name, equals, path = word.rpartition("=")
    if os.sep not in path:
        return word
    return f"{name}{equals}{Path(path).name if Path(path).is_file() else 'FOLDER'}"


def deliver(about: Known, made: Made, output: Path) -> None:
    """Write the files. Raises StudyError for a file missing in the study's PAGES: its origin would be unknown."""
    for name, content in made.files.items():
        if not any(fnmatch(name, pattern) for pattern in about.pages):
            raise StudyError(f"{about.name} made {name}, which its PAGES do not name")
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copy(content, path)
        else:
            write(path, content)
        tell(f"wrote {path}")
