"""The two pipes between an answer's program and the tests: one plain value at a time, its length before it."""

from __future__ import annotations

import os
import struct
from typing import Any

from dflash_bench.tasks.cage import plain

_LENGTH = struct.Struct("<I")


class ClosedError(Exception):
    """There is nobody at the other end."""


class Link:
    def __init__(self, receiving: int, sending: int) -> None:
        self.receiving, self.sending = receiving, sending

    def send(self, message: bytes) -> None:
        """Bytes that `plain.to_bytes` made. Raises ClosedError."""
        rest = memoryview(_LENGTH.pack(len(message)) + message)
        while rest:
            try:
                rest = rest[os.write(self.sending, rest) :]
            except BrokenPipeError as error:
                raise ClosedError from error

    def receive(self) -> Any:
        """Raises ClosedError, or plain.MalformedError."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > plain.MOST_BYTES:
            raise plain.MalformedError(f"{length} bytes announced")
        return plain.from_bytes(self._read(length))

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            piece = os.read(self.receiving, length - len(data))
            if not piece:
                raise ClosedError
            data += piece
        return bytes(data)
