"""Reads through Mooncake's Transfer Engine (TCP; peer to peer, no metadata service)."""

import os
import threading
from typing import Any

import torch

from gyre_lib.config.errors import InputError
from gyre_lib.transfer.transport import Region, TransferFailed, TransportKind, check_region

READ_TIMEOUT_S = 10
"""A read that makes no progress fails after about this long (Mooncake's own default is 30)."""


def import_transfer_engine() -> Any:
    """The TransferEngine class. Raises InputError saying what is missing and how to get it."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(READ_TIMEOUT_S))
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        if "ibverbs" in str(error):
            hint = "it needs the Debian package libibverbs1 (apt-get install libibverbs1)"
        else:
            hint = "install the package mooncake-transfer-engine-non-cuda, or mooncake-transfer-engine on a GPU machine"
        raise InputError(f"cells.weight_transport: mooncake cannot be imported here ({error}); {hint}, or set it to socket") from error
    return TransferEngine


class MooncakeTransport:
    """One transfer engine; its calls release the interpreter lock. Registration pins nothing over TCP and costs microseconds."""

    kind: TransportKind = "mooncake"

    def __init__(self, host: str) -> None:
        self._engine = import_transfer_engine()()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise TransferFailed(f"mooncake: no transfer engine could be started on {host}")
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._registered: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def expose(self, memory: torch.Tensor) -> Region:
        self.prepare(memory)
        return {"kind": self.kind, "session": self._session, "address": memory.data_ptr(), "nbytes": memory.numel()}

    def prepare(self, memory: torch.Tensor) -> None:
        with self._lock:
            if self._engine.register_memory(memory.data_ptr(), memory.numel()) != 0:
                raise TransferFailed(f"mooncake: {memory.numel()} bytes could not be registered")
            self._registered[memory.data_ptr()] = memory

    def read(self, region: Region, offset: int, into: torch.Tensor) -> None:
        check_region(region, self.kind, offset, into.numel())
        answer = self._engine.transfer_sync_read(region["session"], into.data_ptr(), region["address"] + offset, into.numel())
        if answer != 0:
            raise TransferFailed(f"mooncake: reading {into.numel()} bytes from {region['session']} failed ({answer})")

    def forget(self, memory: torch.Tensor) -> None:
        with self._lock:
            if self._registered.pop(memory.data_ptr(), None) is not None:
                self._engine.unregister_memory(memory.data_ptr())

    def close(self) -> None:
        for memory in list(self._registered.values()):
            self.forget(memory)
