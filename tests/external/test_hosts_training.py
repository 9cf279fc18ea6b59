"""A draft trained by torchrun on two hosts, over a link that drops packets or is cut, and with a process that dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import Host, Link, two_hosts, why_not

from dflash_bench.core.environment import describe, one_line
from dflash_bench.report.tables import ABSENT, markdown
from helpers import tiny

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
TRAIN = "--written 12 --batch-size 8 --max-new-tokens 10 --block-size 4 --steps 6 --device cpu --threads 1".split()
PORT, LOSS = 29400, 0.05
LIMIT_S, JOIN_S = 30, 60
"""For the test of a cut link; usually half an hour, and torchrun's ten minutes."""
ENDS_S = 600.0
AT, DIES, GOES_ON = "at-step-3", "dies", "goes-on"
PROGRAM = f"""
import os, runpy, sys, time
from datetime import timedelta
from pathlib import Path
from dflash_bench.training import distributed, trainer

distributed.LIMIT = timedelta(seconds={LIMIT_S})
folder, whole = Path(sys.argv.pop(1)), trainer._step

def step(objective, made, index, number, path, group):
    if number == 3 and not group.is_first:
        (folder / "{AT}").touch()
        if (folder / "{DIES}").exists():
            (folder / "{DIES}").unlink()
            os.kill(os.getpid(), 9)
        while not (folder / "{GOES_ON}").exists():
            time.sleep(0.1)
    return whole(objective, made, index, number, path, group)

trainer._step = step
runpy.run_module("dflash_bench.cli", run_name="__main__")
"""
"""The command line, whose second process stops at the third step until the test has done what it does there."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True)
class Trained:
    """A draft's weights, how long the training took, and the packets between the hosts."""

    draft: bytes
    seconds: float
    num_carried: int = 0
    num_dropped: int = 0


class Training:
    """The training of a small draft, once per scenario."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target = folder, tiny.build(folder / "model") / "target"

    def words(self, name: str) -> list[str]:
        """Return the command for an own folder, where the program does not stop."""
        place = self.folder / name
        place.mkdir(exist_ok=True)
        (place / GOES_ON).touch()
        (place / "program.py").write_text(PROGRAM)
        made = ["--target", str(self.target), "--out", str(place / "out"), "--rate", "0.02"]
        return [str(place / "program.py"), str(place), "train", *made, *TRAIN]

    def draft(self, name: str) -> bytes:
        return (self.folder / name / "out" / "dflash" / "model.safetensors").read_bytes()

    def alone(self) -> Trained:
        """Train with two processes of this host."""
        began = time.monotonic()
        launcher = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]
        subprocess.run([*launcher, *self.words("one")], check=True, capture_output=True, env=os.environ | ENVIRONMENT)
        return Trained(self.draft("one"), time.monotonic() - began)

    def on_two_hosts(
        self, name: str, loss: float = 0.0, dies: bool = False, meanwhile: Callable[[Link], object] = lambda link: None
    ) -> tuple[list[int], Trained]:
        """Return how the commands on both hosts ended, and what was trained."""
        words, place = self.words(name), self.folder / name
        if dies:
            (place / DIES).touch()
        with two_hosts(loss) as (first, second, link):
            began = time.monotonic()
            commands = [start(host, words, place / f"{host.name}.log", first) for host in (first, second)]
            meanwhile(link)
            # The second host's torchrun waits for the store of the first one; with the link cut it is killed.
            codes = [command.wait(ENDS_S) for command in commands[: 1 if link.is_cut else 2]]
            seconds = time.monotonic() - began
        draft = self.draft(name) if codes == [0, 0] else b""
        return codes, Trained(draft, seconds, link.num_carried, link.num_dropped)

    def cut(self) -> tuple[Trained, float]:
        """Cut the link in a step; then start the same commands again. Return that, and how long the first ones took."""
        place, cut_at = self.folder / "cut", [0.0]

        def cut(link: Link) -> None:
            (place / GOES_ON).unlink()
            wait_for((place / AT).exists)
            link.is_cut, cut_at[0] = True, time.monotonic()
            (place / GOES_ON).touch()

        codes, _ = self.on_two_hosts("cut", meanwhile=cut)
        ended_s = time.monotonic() - cut_at[0]
        assert codes == [1], logs(place)
        assert not (place / "out" / "dflash" / "README.md").exists()
        codes, again = self.on_two_hosts("cut")
        assert codes == [0, 0], logs(place)
        return again, ended_s


def start(host: Host, words: Sequence[str], log: Path, first: Host) -> subprocess.Popen[bytes]:
    rendezvous = f"join_timeout={JOIN_S},is_host={int(host is first)}"
    launcher = f"""
        -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts 1 --local-addr {host.address}
        --rdzv-backend c10d --rdzv-endpoint {first.address}:{PORT} --rdzv-conf {rendezvous}
        """.split()
    return host.start([sys.executable, *launcher, *words], log, **ENVIRONMENT, GLOO_SOCKET_IFNAME=host.device)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + ENDS_S
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.1)


def logs(place: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in place.glob("*.log"))


def test_two_hosts_train_the_draft_of_one(
    tmp_path: Path, write_page: Callable[[str, Sequence[str]], None], command: Callable[[str], str]
) -> None:
    training = Training(tmp_path)
    found: dict[str, Trained] = {"one host": training.alone()}
    scenarios: Mapping[str, Mapping[str, object]] = {
        "two hosts": {},
        f"the link drops {LOSS:.0%}": {"loss": LOSS},
        "a process dies in a step": {"dies": True},
    }
    for number, (name, how) in enumerate(scenarios.items()):
        codes, found[name] = training.on_two_hosts(f"{number}", **how)  # type: ignore[arg-type]
        assert codes == [0, 0], (name, logs(tmp_path / f"{number}"))
    found["the link is cut in a step; started again"], ended_s = training.cut()
    draft = found["one host"].draft
    assert {name: one.draft == draft for name, one in found.items()} == dict.fromkeys(found, True)
    assert not (tmp_path / "2" / DIES).exists()
    rows = [
        [
            name,
            "yes" if one.draft == draft else "no",
            f"{one.seconds:.0f}",
            f"{one.num_carried:,}" if one.num_carried else ABSENT,
            f"{one.num_dropped:,}" if one.num_carried else ABSENT,
        ]
        for name, one in found.items()
    ]
    write_page(
        "exactness/hosts-training-cpu.md",
        [
            f"# A training on two hosts\n\n`{command('hosts')}` makes this page.",
            f"{one_line(describe())}.",
            """\
Two network namespaces of one machine, each with an address; torchrun starts one process on each. They train a DFlash
draft of a small target of random weights, six steps, with one folder for both.""",
            markdown(["training by two processes", "same draft", "seconds", "packets", "dropped"], rows, left=1),
            f"""\
`same draft`: its file is byte for byte that of two processes on one host. The process that dies is killed in the third
step; torchrun starts both again, and they continue from the last checkpoint. With the link cut in the third step, the
first host's command ends with an error after {ended_s:.0f} seconds, here with a limit of {LIMIT_S} seconds for a step
and {JOIN_S} for a restart (usually half an hour, and torchrun's ten minutes); the second host's, whose torchrun still
waits for the first one's store, is killed. The same commands, started again over a mended link, continue.""",
        ],
    )
