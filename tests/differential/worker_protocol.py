"""Values over a socket, between the runner and its ranks."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any


def receive(connection: socket.socket) -> Any:
    """Raises EOFError where the other side has closed."""
    size = struct.unpack("<Q", exactly(connection, 8))[0]
    return pickle.loads(exactly(connection, size))


def exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(min(1 << 20, count - len(data)))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def send(connection: socket.socket, value: Any) -> None:
    data = pickle.dumps(value, protocol=5)
    connection.sendall(struct.pack("<Q", len(data)) + data)
