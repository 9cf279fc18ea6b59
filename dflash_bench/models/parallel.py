"""Tensor parallel: process groups, and targets sharded across them by transformers' plan for the architecture.

Embedding and head are replicated, because drafts use them. This process is the leader; followers repeat its calls
(`engine/parallel.py`) and exit with it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dflash_bench.core.errors import UserError, first_line
from dflash_bench.models.architecture import recurrent_layers

CPU = torch.device("cpu")
CODE = "from dflash_bench.engine.parallel import main; main()"
IDLE = timedelta(days=7)
"""How long a follower waits for the next call. That the leader has exited, it notices at once."""
POLL_S, COME_S = 0.01, 300.0
"""How often processes look for the others, and for how long."""
STORE = "DFLASH_BENCH_STORE"
"""The environment variable with the path of the file by which followers find the group."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A method call for every follower to make on its object named `of`."""

    of: str
    method: str
    args: tuple[Any, ...]
    options: Mapping[str, Any]


class Followers:
    """The follower processes, ranks 1 and up, and the folder of the file by which they found the leader."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], folder: Path | None = None) -> None:
        self.processes, self.folder = processes, folder
        self._is_announced = self._is_closed = False
        atexit.register(self.close)

    @contextmanager
    def announced(self, of: str, method: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Iterator[None]:
        """Announce a call, which the `with` then makes. Calls nested in it are not announced.

        Raises UserError, and ends all followers, if one has exited or the call fails.
        """
        # Cleanup after a failure still calls the target.
        if self._is_announced or self._is_closed:
            yield
            return
        self._is_announced = True
        try:
            shared = {name: on_cpu(value) for name, value in options.items()}
            call = Announcement(of, method, tuple(map(on_cpu, args)), shared)
            distributed.broadcast_object_list([call], src=0, device=CPU)
            yield
        except BaseException as error:
            # Followers have exited, or wait in the middle of this call, so no further call can be announced.
            status = self._ended() if isinstance(error, RuntimeError) else None
            self.close()
            if not isinstance(error, RuntimeError):
                raise
            why = first_line(error) if status is None else f"a process exited with status {status}"
            raise UserError(
                f"--tensor-parallel: {why}; continue with --resume, and with more processes if memory was short"
            ) from error
        finally:
            self._is_announced = False

    def _ended(self) -> int | None:
        """Return the exit status of a follower, waiting briefly: its connection breaks before it has exited."""
        for process in self.processes:
            try:
                return process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                continue
        return None

    def close(self) -> None:
        """End all followers."""
        self._is_closed = True
        for process in self.processes:
            process.kill()
            process.wait()
        if distributed.is_initialized():
            distributed.destroy_process_group()
        # Otherwise a training in this process would wait for the others.
        for name in _environment(0, 1):
            os.environ.pop(name, None)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


_leading: list[Followers] = []


def on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def received() -> Announcement:
    """Return the next announcement. Raises RuntimeError when the leader has exited."""
    place: list[Any] = [None]
    distributed.broadcast_object_list(place, src=0, device=CPU)
    announcement: Announcement = place[0]
    return announcement


def start(size: int, source: object) -> Followers:
    """Start `size` - 1 followers, which load the target from `source`, and connect them.

    A process leads one group at a time: the followers of an earlier group are ended. Raises UserError if a follower
    ends before it has connected.
    """
    for earlier in _leading:
        earlier.close()
    _leading.clear()
    folder, processes = Path(tempfile.mkdtemp(prefix="dflash-bench-")), list[subprocess.Popen[bytes]]()
    followers = Followers(processes, folder)
    _leading.append(followers)
    for rank in range(1, size):
        process = subprocess.Popen(
            [sys.executable, "-c", CODE],
            stdin=subprocess.PIPE,
            env=os.environ | _environment(rank, size) | {STORE: str(folder / "store")} | _alike(),
            start_new_session=True,
        )
        assert process.stdin is not None
        pickle.dump(source, process.stdin)
        process.stdin.close()
        processes.append(process)
    os.environ.update(_environment(0, size))
    try:
        _connect_here(folder / "store", 0, size, followers)
    except (RuntimeError, UserError):
        followers.close()
        raise
    return followers


def follow() -> None:
    """Join the leader's group, as a follower."""
    _connect_here(Path(os.environ[STORE]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def _connect_here(file: Path, rank: int, size: int, followers: Followers | None = None) -> None:
    """Join a process group of this machine, whose processes listen on its loopback interface only.

    Raises UserError if one does not come within `COME_S`, or has exited.
    """
    store: Store = distributed.FileStore(str(file), size)  # type: ignore[attr-defined]
    end = time.monotonic() + COME_S
    store.add("joined", 1)
    while (joined := store.add("joined", 0)) < size:
        ended = [code for one in (followers.processes if followers else ()) if (code := one.poll()) is not None]
        if ended or time.monotonic() > end:
            why = f"a process exited with status {ended[0]}" if ended else f"of {size} processes {joined} came"
            raise UserError(f"--tensor-parallel: {why}; give fewer processes if memory was short")
        time.sleep(POLL_S)
    distributed.init_process_group(_backend(), timeout=IDLE, store=store, rank=rank, world_size=size)


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def connect(limit: timedelta) -> Store:
    """Join the process group defined by the environment, and return the store that its processes share.

    A process that waits longer than `limit` for another raises RuntimeError.
    """
    shared, rank, size = next(rendezvous("env://"))
    store: Store = PrefixStore(agreed_name(shared, rank, size), shared)
    distributed.init_process_group(_backend(), timeout=limit, store=store, rank=rank, world_size=size)
    return store


def agreed_name(store: Store, rank: int, size: int) -> str:
    """Return a name that all `size` processes agree on, and no earlier ones with this store.

    torchrun keeps its store when it restarts processes, with the addresses of those that died; and how often it has
    restarted them differs between machines.

    Raises RuntimeError if a process does not come within `COME_S`.
    """
    own = uuid4().hex
    if rank:
        store.set(f"process {rank}", own)
        name = store.get(f"name for {own}").decode()
        store.add(f"joined {name}", 1)
        return name
    end = time.monotonic() + COME_S
    while store.add(f"joined {own}", 0) < size - 1:
        for other in range(1, size):
            # The id may be that of a process that died; then its successor overwrites it, and is answered next time.
            if store.check([f"process {other}"]):
                store.set(f"name for {store.get(f'process {other}').decode()}", own)
        if time.monotonic() > end:
            raise RuntimeError(f"of {size} processes {store.add(f'joined {own}', 0) + 1} came")
        time.sleep(POLL_S)
    return own


def _alike() -> dict[str, str]:
    """Return environment variables that give a follower the same import path and threads."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(torch.get_num_threads())}


def _environment(rank: int, size: int) -> dict[str, str]:
    """Return environment variables by which transformers knows its part, and all groups listen on the loopback."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    part = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return part if loopback is None else part | {"GLOO_SOCKET_IFNAME": loopback}


def options_of(config: Any, size: int) -> dict[str, Any]:
    """Return the options of `from_pretrained` that load this process's shard of a target.

    Raises UserError for an architecture without a plan, or a number of heads that `size` does not divide.
    """
    from transformers.distributed import DistributedConfig

    text = config.get_text_config()
    if recurrent_layers(text):
        raise UserError(f"--tensor-parallel: a {text.model_type} target has recurrent layers, which are not sharded")
    if not getattr(text, "base_model_tp_plan", None):
        raise UserError(f"--tensor-parallel: transformers has no tensor parallel plan for a {text.model_type} target")
    for what in ("num_attention_heads", "num_key_value_heads"):
        if (number := getattr(text, what, size)) % size:
            raise UserError(f"--tensor-parallel {size} does not divide the target's {number} {what}")
    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}


def make_whole(model: Any) -> Any:
    """Replicate the embedding and the head, which drafts use. All processes must call it together."""
    whole: dict[int, nn.Parameter] = {}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = module.weight
        if id(weight) not in whole:
            gathered = weight.full_tensor() if hasattr(weight, "full_tensor") else weight.data
            whole[id(weight)] = nn.Parameter(gathered, requires_grad=False)
        module.weight = whole[id(weight)]
        # transformers replaced it with a sharded forward.
        vars(module).pop("forward", None)
    return model
