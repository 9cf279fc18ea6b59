"""Processes that hold a target together: each has a part of every layer, by transformers' plan for its architecture.

The embedding and the head are whole in every process, because drafts read them. This process leads; the others follow
its calls (`engine/parallel.py`), and end with it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from dflash_bench.core.errors import UserError, first_line
from dflash_bench.models.architecture import recurrent_layers

CPU = torch.device("cpu")
CODE = "from dflash_bench.engine.parallel import main; main()"


@dataclass(frozen=True, slots=True)
class Announcement:
    """A call that every follower makes on its own object of this name."""

    of: str
    method: str
    args: tuple[Any, ...]
    options: Mapping[str, Any]


class Followers:
    """The other processes, by their ranks from 1 on."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self.processes = processes
        self._is_announced = self._is_closed = False
        atexit.register(self.close)

    @property
    def size(self) -> int:
        """The number of processes, with this one."""
        return 1 + len(self.processes)

    @contextmanager
    def announced(self, of: str, method: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Iterator[None]:
        """Announce a call before it is made in the `with`; calls within it are the followers' own matter.

        Raises UserError, and ends all followers, if one has ended or the call fails.
        """
        # What ends the run tidies up after the followers have ended, too.
        if self._is_announced or self._is_closed:
            yield
            return
        self._is_announced = True
        try:
            shared = {name: on_cpu(value) for name, value in options.items()}
            call = Announcement(of, method, tuple(map(on_cpu, args)), shared)
            distributed.broadcast_object_list([call], src=0, device=CPU)
            yield
        except RuntimeError as error:
            # The others are in the middle of the call, or gone, so no later call could be theirs, too.
            status = self._ended()
            self.close()
            why = first_line(error) if status is None else f"a process ended with exit status {status}"
            raise UserError(
                f"--tensor-parallel: {why}; continue with --resume, and with more processes if memory was short"
            ) from error
        finally:
            self._is_announced = False

    def _ended(self) -> int | None:
        """Return the status of a follower that ended; a broken connection may be noticed before its end."""
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


_leading: list[Followers] = []


def on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def received() -> Announcement:
    """Return the next announcement. Raises RuntimeError when the leader has ended."""
    place: list[Any] = [None]
    distributed.broadcast_object_list(place, src=0, device=CPU)
    announcement: Announcement = place[0]
    return announcement


def start(size: int, share: object) -> Followers:
    """Start `size` - 1 followers, each with a copy of `share`, and connect all processes.

    A process leads one group at a time: earlier followers are ended.
    """
    for earlier in _leading:
        earlier.close()
    _leading.clear()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for rank in range(1, size):
        process = subprocess.Popen(
            [sys.executable, "-c", CODE],
            stdin=subprocess.PIPE,
            env=os.environ | _environment(rank, size, port) | _alike(),
            start_new_session=True,
        )
        assert process.stdin is not None
        pickle.dump(share, process.stdin)
        process.stdin.close()
        processes.append(process)
    os.environ.update(_environment(0, size, port))
    connect()
    _leading.append(Followers(processes))
    return _leading[0]


def connect() -> None:
    """Join the process group that the environment names."""
    distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def _alike() -> dict[str, str]:
    """Return the environment in which a follower imports and computes what this process does."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": str(torch.get_num_threads())}


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def options_of(config: Any, size: int) -> dict[str, Any]:
    """Return the options of `from_pretrained` that load this process's part of a target.

    Raises UserError for an architecture without a plan, and for heads that cannot be divided.
    """
    from transformers.distributed import DistributedConfig

    text = config.get_text_config()
    if recurrent_layers(text):
        raise UserError(f"--tensor-parallel: a {text.model_type} target has recurrent layers, which are not divided")
    if not getattr(text, "base_model_tp_plan", None):
        raise UserError(f"--tensor-parallel: transformers has no plan to divide a {text.model_type} target")
    for what in ("num_attention_heads", "num_key_value_heads"):
        if (number := getattr(text, what, size)) % size:
            raise UserError(f"--tensor-parallel {size} does not divide the target's {number} {what}")
    return {"distributed_config": DistributedConfig(tp_size=size, tp_plan="auto")}


def make_whole(model: Any) -> Any:
    """Return the model with its embedding and its head undivided, as drafts need them. Every process must call it."""
    whole: dict[int, nn.Parameter] = {}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = module.weight
        if id(weight) not in whole:
            gathered = weight.full_tensor() if hasattr(weight, "full_tensor") else weight.data
            whole[id(weight)] = nn.Parameter(gathered, requires_grad=False)
        module.weight = whole[id(weight)]
        # transformers set a forward that divides the work.
        vars(module).pop("forward", None)
    return model
