"""Several processes train one draft: gradients are averaged, one of them writes, and none waits for ever."""

from __future__ import annotations

import json
import os
import runpy
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch.distributed import HashStore

from dflash_bench.core.errors import UserError
from dflash_bench.models import parallel
from dflash_bench.training import distributed, trainer
from dflash_bench.training.distributed import ProcessGroup
from helpers import tiny

Launch = Callable[[str, Sequence[str], int], list[tuple[int, str]]]
TOY = """
import sys
from pathlib import Path
import torch
from dflash_bench.training import trainer as loop
from dflash_bench.training.distributed import init_distributed

class Rows:
    ids = torch.arange(18)[:, None]
    answer = torch.ones(18, 1, dtype=torch.bool)
    num_held_out = 2

class Objective:
    def __init__(self):
        torch.manual_seed(0)
        self.draft = torch.nn.Linear(3, 3)
        self.x = torch.randn(18, 3)
    def heads(self): return []
    def loss(self, index, step):
        return self.draft(self.x[index]).square().sum(dim=1).mean()
    def accepted(self, index): return self.draft(self.x[index]).sum(dim=1)

class Broken(Objective):  # in the first process alone
    def loss(self, index, step):
        return super().loss(index, step) * (float("nan") if step == 3 and made.is_first else 1.0)

folder, rows = Path(sys.argv[1]), int(sys.argv[2])
made, _ = init_distributed("cpu")
recipe = loop.DraftRecipe(steps=6, matrix_lr=0.05, other_lr=0.01, rows=rows, warmup=2)
def learn(objective, name):
    history = loop.train(objective, Rows(), recipe, folder / name, lambda text: None, lambda: 2.0 + made.rank, made)
    torch.save([objective.draft.state_dict(), history], folder / f"end-{made.rank}-of-{made.size}.pt")
learn(Objective(), "toy.pt")
try:
    learn(Broken(), "broken.pt")
except Exception as error:
    print(type(error).__name__, error)
    sys.exit(3)
"""


STARTER = """
import gc, json, os, runpy, sys
import matplotlib.pyplot, torch._dynamo, torch.distributed
import transformers.generation, transformers.models.qwen3.modeling_qwen3
import dflash_bench.cli, dflash_bench.report, dflash_bench.training.session

def started(environment, said):
    if pid := os.fork():
        return pid
    os.environ.update(environment)
    for fd in (1, 2): os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)

gc.freeze()
for line in sys.stdin:
    script, words, each = json.loads(line)
    pids = []
    while len(pids) < len(each) and (pid := started(*each[len(pids)])): pids.append(pid)
    if len(pids) < len(each): break
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
else:
    sys.exit()
sys.argv[1:] = words
if script: exec(script)
else: runpy.run_module("dflash_bench.cli", run_name="__main__")
"""


@pytest.fixture(scope="module")
def launch() -> Iterator[Launch]:
    """Start processes through the environment like torchrun and accelerate, forked from one that has loaded torch.

    Each ends as any other, with its interpreter: threads that outlive that abort it.
    """
    common = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER],
        env=os.environ | common,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert starter.stdin and starter.stdout
    places = iter(range(100))
    with TemporaryDirectory() as folder:

        def launched(script: str, words: Sequence[str], size: int) -> list[tuple[int, str]]:
            """Output and exit status of each process; without a script, of the command line."""
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                place = {"WORLD_SIZE": str(size), "MASTER_PORT": str(free.getsockname()[1])}
            said = [Path(folder) / f"{next(places)}" for _ in range(size)]
            each = [(place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, str(path)) for rank, path in enumerate(said)]
            print(json.dumps([script, words, each]), file=starter.stdin, flush=True)
            ended, _, _ = select.select([starter.stdout], [], [], 180)
            texts = [path.read_text() if path.exists() else "" for path in said]
            assert ended, texts
            return list(zip(json.loads(starter.stdout.readline()), texts, strict=True))

        yield launched
        starter.stdin.close()
        assert starter.wait(30) == 0


def test_two_processes_learn_what_one_learns_from_the_same_rows_until_a_loss_is_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    ended = launch(TOY, [str(tmp_path / "two"), "2"], 2)
    # The loss of one process stops both.
    assert [code for code, _ in ended] == [3, 3], ended
    assert all("UserError" in said and "the loss is nan at step 3" in said for _, said in ended)
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setattr(sys, "argv", ["toy", str(tmp_path / "one"), "4"])
    with pytest.raises(SystemExit, match="3"):
        runpy.run_path(str(tmp_path / "toy.py"))
    first, second = (torch.load(tmp_path / "two" / f"end-{rank}-of-2.pt") for rank in (0, 1))
    alone = torch.load(tmp_path / "one" / "end-0-of-1.pt")
    for name, weight in alone[0].items():
        assert torch.equal(first[0][name], second[0][name])
        assert torch.allclose(first[0][name], weight, atol=1e-6)
    # All processes have the first one's measurement.
    assert first[1] == second[1] and {entry["al_pooled"] for entry in first[1]} == {2.0}
    assert [entry["step"] for entry in first[1]] == [entry["step"] for entry in alone[1]]


SHARED = """
import json, sys, time
from datetime import timedelta
from pathlib import Path
from dflash_bench.training import distributed

distributed.LIMIT = timedelta(seconds=1)
group, _ = distributed.init_distributed("cpu")
told = group.from_first("slow", lambda: (time.sleep(1.5), group.rank)[1])
taken, numbers = group.counter("numbers"), []
while (number := taken(1) - 1) < 20:
    numbers.append(number)
    time.sleep(0.01 + 0.1 * group.is_first)
print(json.dumps({"told": told, "numbers": numbers}))
folder = Path(sys.argv[1])
group.require_same(folder)
group.require_same(folder / f"{group.rank}")
"""


def test_processes_wait_for_the_first_divide_work_and_need_one_folder(tmp_path: Path, launch: Launch) -> None:
    ended = launch(SHARED, [str(tmp_path / "out")], 2)
    said = [text.splitlines() for _, text in ended]
    first, second = (json.loads(lines[0]) for lines in said)
    # The wait for the first one's work was longer than the limit of a step.
    assert first["told"] == second["told"] == 0
    assert sorted(first["numbers"] + second["numbers"]) == list(range(20))
    assert len(first["numbers"]) < len(second["numbers"])
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == []
    for code, text in ended:
        assert code == 1 and "UserError: 1 of 2 processes do not see" in text, text


@pytest.mark.in_full
def test_a_draft_is_trained_by_two_processes(tmp_path: Path, launch: Launch) -> None:
    target = tiny.build(tmp_path / "model") / "target"
    words = [
        "train",
        "--target",
        str(target),
        "--out",
        str(tmp_path / "out"),
        *"""
            --written 12 --batch-size 8 --max-new-tokens 10 --block-size 4 --steps 4 --device cpu --threads 1
            """.split(),
    ]
    ended = launch("", words, 2)
    assert [code for code, _ in ended] == [0, 0], ended
    assert ["loading the target" in said for _, said in ended] == [True, False]
    assert "al_pooled" in json.loads((tmp_path / "out" / "dflash" / "acceptance.json").read_text())
    assert (tmp_path / "out" / "dflash" / "training.svg").read_bytes().startswith(b"<?xml")
    parts = list((tmp_path / "out" / "work" / "answers").glob("answers-*.safetensors"))
    assert len(parts) > 1
    assert [said.count("saved in") for _, said in ended] == [1, 0]


TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1".split()
DIES_ONCE = """
import os, runpy, sys
from pathlib import Path
from dflash_bench.training import trainer

died, whole = Path(sys.argv.pop(1)), trainer._step

def step(objective, made, index, number, path, group):
    if number == 3 and not group.is_first and not died.exists():
        died.touch()
        os.kill(os.getpid(), 9)
    return whole(objective, made, index, number, path, group)

trainer._step = step
runpy.run_module("dflash_bench.cli", run_name="__main__")
"""


@pytest.mark.in_full
def test_torchrun_starts_a_training_again_whose_process_died(tmp_path: Path) -> None:
    target = tiny.build(tmp_path / "model") / "target"
    (tmp_path / "dies_once.py").write_text(DIES_ONCE)

    def trained(name: str, *marker: str) -> bytes:
        words = ["--target", str(target), "--out", str(tmp_path / name), "--rate", "0.02"]
        words += "--written 12 --batch-size 8 --max-new-tokens 10 --block-size 4 --steps 6 --device cpu".split()
        program = [str(tmp_path / "dies_once.py"), *marker] if marker else ["-m", "dflash_bench.cli"]
        done = subprocess.run(
            [sys.executable, *TORCHRUN, *program, "train", *words, "--threads", "1"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return (tmp_path / name / "dflash" / "model.safetensors").read_bytes()

    died = tmp_path / "died"
    assert trained("killed", str(died)) == trained("whole")
    assert died.exists()


def test_processes_agree_on_a_name_that_none_before_them_had(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    store.set("process 1", "one that died before it joined")
    with ThreadPoolExecutor(3) as pool:
        named = [list(pool.map(lambda rank: parallel.agreed_name(store, rank, 3), range(3))) for _ in range(3)]
    assert [len({*names}) for names in named] == [1, 1, 1]
    assert len({names[0] for names in named}) == 3
    monkeypatch.setattr(parallel, "COME_S", 0.1)
    with pytest.raises(RuntimeError, match="of 4 processes 1 came"):
        parallel.agreed_name(store, 0, 4)


def test_shares_are_all_there_is_and_none_twice() -> None:
    items = list(range(11))
    shares = [ProcessGroup(rank, 3).share(items) for rank in range(3)]
    assert (
        sorted(item for share in shares for item in share) == items
        and max(map(len, shares)) - min(map(len, shares)) <= 1
    )


def test_fewer_rows_than_processes_are_refused(tmp_path: Path) -> None:
    class Rows:
        ids, answer, num_held_out = torch.zeros(3, 1), torch.ones(3, 1), 1

    class Objective:
        draft = torch.nn.Linear(2, 2)

        def heads(self) -> list[torch.nn.Parameter]:
            return []

    recipe = trainer.DraftRecipe(steps=1, matrix_lr=0.1, other_lr=0.1)
    with pytest.raises(UserError, match=r"2 rows .* 4 processes"):
        trainer.train(Objective(), Rows(), recipe, tmp_path / "x.pt", print, group=ProcessGroup(0, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "said"), [("cpu", "2 processes .* torchrun"), ("cuda", "has no GPU: there are 0; .* --device cpu")]
)
def test_processes_that_cannot_work_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, device: str, said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=said):
        distributed.init_distributed(device)
