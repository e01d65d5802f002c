"""One-sided reads of another process's memory, over Mooncake or over plain sockets. Which one is a setting; there is no silent fall-back.

A transport gives bytes and nothing more: no snapshot, no version, no checksum, no authentication. `weight_exposure` adds what readers need;
the ports belong in a network that sandboxes cannot reach.
"""

from typing import Any, Literal, Protocol

import torch

TransportKind = Literal["mooncake", "socket"]
Region = dict[str, Any]
"""Where exposed memory lies, as JSON: the transport's kind, what it needs to connect, and `nbytes`."""


class TransferFailed(RuntimeError):
    """A read did not complete. The buffer may hold anything, and may still be written to for a while."""


class Transport(Protocol):
    """Memory is a contiguous one-dimensional uint8 tensor on the CPU; a transport keeps every tensor it was given alive until `forget`."""

    kind: TransportKind

    def expose(self, memory: torch.Tensor) -> Region:
        """Let others read this memory from now on."""

    def prepare(self, memory: torch.Tensor) -> None:
        """Make this memory usable as the destination of reads."""

    def read(self, region: Region, offset: int, into: torch.Tensor) -> None:
        """Copy `into.numel()` bytes at `offset` of the region. Raises TransferFailed; it blocks for at most some seconds."""

    def forget(self, memory: torch.Tensor) -> None:
        """Undo `expose` or `prepare`."""

    def close(self) -> None: ...


def open_transport(kind: TransportKind, host: str = "127.0.0.1") -> Transport:
    """The transport of that kind; `host` is the address others reach this process at. Raises InputError when it cannot be had here."""
    if kind == "mooncake":
        from gyre_lib.transfer.mooncake_transport import MooncakeTransport

        return MooncakeTransport(host)
    from gyre_lib.transfer.socket_transport import SocketTransport

    return SocketTransport(host)


def check_region(region: Region, kind: TransportKind, offset: int, nbytes: int) -> None:
    """Raises TransferFailed for a region of another transport, or a read past its end."""
    if region["kind"] != kind:
        raise TransferFailed(f"the region is exposed over {region['kind']}, but this process reads over {kind}")
    if offset < 0 or offset + nbytes > region["nbytes"]:
        raise TransferFailed(f"bytes {offset}..{offset + nbytes} lie outside a region of {region['nbytes']}")
