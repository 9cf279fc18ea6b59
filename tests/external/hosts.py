"""Two hosts on one machine: network namespaces, each with an address, and between them a link that drops packets.

The link is this process: packets that leave one host's tun device are written to the other's, or not. Linux only, as
root, with `ip` and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MOST_BYTES = 65536
NAMES = ("dflash-a", "dflash-b")
NET = "10.99.{number}.{host}"
"""Addresses that only these namespaces know."""


def why_not() -> str | None:
    """Why this machine cannot have two hosts; None if it can."""
    if not TUN.exists() or shutil.which("ip") is None or os.geteuid() != 0:
        return "two hosts need Linux, root, ip and /dev/net/tun"
    tried = subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    return None if tried.returncode == 0 else "two hosts need network namespaces"


class Link:
    """Carries packets between two tun devices. `loss` is the share that it drops; `cut` drops all of them."""

    def __init__(self, ends: Sequence[int], loss: float) -> None:
        self.ends, self.loss, self.is_cut = ends, loss, False
        self.num_carried, self.num_dropped = 0, 0
        self._chance, self._stopping = random.Random(0), threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def _carry(self) -> None:
        others = dict(zip(self.ends, reversed(self.ends), strict=True))
        while not self._stopping.is_set():
            for end in select.select(self.ends, [], [], 0.2)[0]:
                packet = os.read(end, MOST_BYTES)
                if self.is_cut or self._chance.random() < self.loss:
                    self.num_dropped += 1
                    continue
                self.num_carried += 1
                with suppress(OSError):
                    os.write(others[end], packet)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()


class Host:
    """A network namespace with one address, that of `device`."""

    def __init__(self, name: str, address: str, device: str) -> None:
        self.name, self.address, self.device = name, address, device
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, words: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command there, which ends with the host."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *words],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                cwd=log.parent,
                start_new_session=True,
            )
        self.processes.append(process)
        return process


@contextmanager
def two_hosts(loss: float = 0.0) -> Iterator[tuple[Host, Host, Link]]:
    """Two hosts and their link for a `with`; all that runs there is killed at the end."""
    number = os.getpid() % 250
    hosts = [
        Host(f"{name}-{number}", NET.format(number=number, host=at), f"dfl{number}{'ab'[at - 1]}")
        for at, name in enumerate(NAMES, 1)
    ]
    ends: list[int] = []
    link: Link | None = None
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            ends.append(_tun(host.device))
            _ip("link", "set", host.device, "netns", host.name)
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.device)
            for up in (host.device, "lo"):
                _ip("-n", host.name, "link", "set", up, "up")
        link = Link(ends, loss)
        yield hosts[0], hosts[1], link
    finally:
        for host in hosts:
            pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False)
            for pid in pids.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            for process in host.processes:
                process.wait()
        if link is not None:
            link.close()
        for end in ends:
            os.close(end)
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _tun(name: str) -> int:
    """Create a tun device. Return the file that carries its packets; the device ends with it."""
    end = os.open(TUN, os.O_RDWR)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return end
