"""Reads over plain TCP sockets, for machines where Mooncake cannot be installed. A thread of the owner answers; the reader's side is the same.

Request: 16 bytes that name the region (they are its key, and not guessable), offset and length as unsigned 64-bit numbers. Answer: one
byte, 1 for yes, then the bytes.
"""

import secrets
import socket
import struct
import threading

import torch

from gyre_lib.transfer.transport import Region, TransferFailed, TransportKind, check_region

READ_TIMEOUT_S = 10.0
_REQUEST = struct.Struct("!16sQQ")


class SocketTransport:
    """Listens on a free port of `host` as soon as something is exposed."""

    kind: TransportKind = "socket"

    def __init__(self, host: str) -> None:
        self._host = host
        self._listener: socket.socket | None = None
        self._exposed: dict[bytes, torch.Tensor] = {}

    def expose(self, memory: torch.Tensor) -> Region:
        if self._listener is None:
            self._listener = socket.create_server((self._host, 0))
            threading.Thread(target=self._accept, args=(self._listener,), name="weight-reads", daemon=True).start()
        key = secrets.token_bytes(16)
        self._exposed[key] = memory
        port = self._listener.getsockname()[1]
        return {"kind": self.kind, "host": self._host, "port": port, "key": key.hex(), "nbytes": memory.numel()}

    def prepare(self, memory: torch.Tensor) -> None:
        """Nothing to do: a socket writes anywhere."""

    def read(self, region: Region, offset: int, into: torch.Tensor) -> None:
        check_region(region, self.kind, offset, into.numel())
        where = f"{region['host']}:{region['port']}"
        try:
            with socket.create_connection((region["host"], region["port"]), timeout=READ_TIMEOUT_S) as connection:
                connection.sendall(_REQUEST.pack(bytes.fromhex(region["key"]), offset, into.numel()))
                if connection.recv(1) != b"\x01":
                    raise TransferFailed(f"socket: {where} does not expose these bytes")
                _receive(connection, into.numpy().data, where)
        except OSError as error:
            raise TransferFailed(f"socket: reading {into.numel()} bytes from {where} failed ({error})") from error

    def forget(self, memory: torch.Tensor) -> None:
        for key in [key for key, exposed in self._exposed.items() if exposed.data_ptr() == memory.data_ptr()]:
            del self._exposed[key]

    def close(self) -> None:
        self._exposed.clear()
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), name="weight-read", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(READ_TIMEOUT_S)
            try:
                key, offset, nbytes = _REQUEST.unpack(connection.recv(_REQUEST.size, socket.MSG_WAITALL))
                memory = self._exposed.get(key)
                if memory is None or offset + nbytes > memory.numel():
                    connection.sendall(b"\x00")
                else:
                    connection.sendall(b"\x01")
                    connection.sendall(memory.numpy().data[offset : offset + nbytes])
            except (OSError, struct.error):
                return  # the reader is gone, or was none; it sees a closed connection


def _receive(connection: socket.socket, view: memoryview, where: str) -> None:
    received = 0
    while received < len(view):
        count = connection.recv_into(view[received:])
        if count == 0:
            raise TransferFailed(f"socket: {where} closed the connection after {received} of {len(view)} bytes")
        received += count
