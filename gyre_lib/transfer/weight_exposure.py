"""The core exposes its weights, versioned and checksummed; satellites pull them by one-sided reads while the core trains on.

Layout of the exposed memory: one header of 8 int64 per slot, then the slots. A header is [version, nbytes, checksum, version again]; version
v goes to slot v mod N, so that a reader of v is disturbed only by v + N. Invariants:

- The owner marks a slot's header invalid before it touches the slot, and writes `version again` last.
- A reader accepts a slot only if its header is whole, names the wanted version before and after the data was read, and the data's checksum
  is the header's. Reads land in a staging buffer; the reader's own weights change only after all of this.
- A read that failed or was given up may still be written later (Mooncake's timed-out reads do that): its buffer is not used again before
  the read has returned and `QUARANTINE_S` have passed.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import xxhash

from gyre_lib.transfer.transport import TransferFailed, Transport

HEADER_WORDS = 8
HEADER_BYTES = HEADER_WORDS * 8
INVALID = -1
QUARANTINE_S = 60.0
FAILED_READS_PER_PULL = 3
SHORTEST_READ_LIMIT_S = 10.0
"""A read is given up when the pull's time is over, but not before it had this long."""
RETRY_S = 0.05

Manifest = dict[str, Any]


class WrongVersion(RuntimeError):
    """The owner is there, but did not show a whole copy of the wanted version within the time-out."""


class WeightExposure:
    """The owner's side. `slab` is the flat weight buffer, on any device; the slots are copies of it in CPU memory."""

    def __init__(self, slab: torch.Tensor, transport: Transport, slots: int = 2) -> None:
        self._bytes = as_bytes(slab)
        self._slots = slots
        self._nbytes = self._bytes.numel()
        self._transport = transport
        self._memory = torch.empty(slots * (HEADER_BYTES + self._nbytes), dtype=torch.uint8)
        self._headers = self._memory[: slots * HEADER_BYTES].view(torch.int64).view(slots, HEADER_WORDS)
        self._headers.fill_(INVALID)
        self._region = transport.expose(self._memory)

    def publish(self, version: int) -> None:
        """Show the slab's present contents as `version`. The slab must not change meanwhile."""
        slot = version % self._slots
        header = self._headers[slot]
        header[3] = INVALID
        start = _slot_offset(slot, self._slots, self._nbytes)
        data = self._memory[start : start + self._nbytes]
        data.copy_(self._bytes)
        header[0], header[1], header[2] = version, self._nbytes, checksum(data)
        header[3] = version

    def manifest(self) -> Manifest:
        """What a reader needs, as JSON: where the memory is and how it is laid out."""
        return {"region": self._region, "slots": self._slots, "nbytes": self._nbytes}

    def close(self) -> None:
        self._transport.forget(self._memory)


@dataclass
class PullReport:
    """What a pull took: seconds by phase (`wait`: until the version was there), bytes, and how often it had to read again."""

    nbytes: int
    attempts: int
    phases: dict[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class _Quarantined:
    memory: torch.Tensor
    read: threading.Thread
    until_s: float

    def over(self, now: float) -> bool:
        return now >= self.until_s and not self.read.is_alive()


class WeightPull:
    """The reader's side; one object serves all pulls of a process, and keeps its staging buffer."""

    def __init__(self, transport: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._clock = clock
        self._staging: torch.Tensor | None = None
        self._header: torch.Tensor | None = None
        self._deadline_s = 0.0
        self._quarantine: list[_Quarantined] = []

    def pull_into(self, slab: torch.Tensor, manifest: Manifest, version: int, timeout_s: float) -> PullReport:
        """Replace the slab's contents by the owner's weights of `version`; on any error the slab is as it was.

        Raises WrongVersion when the version was not shown whole within `timeout_s`, TransferFailed when the owner cannot be read from.
        """
        target = as_bytes(slab)
        nbytes = target.numel()
        if manifest["nbytes"] != nbytes:
            raise WrongVersion(f"the owner exposes {manifest['nbytes']} bytes of weights, but this rank holds {nbytes}")
        report = PullReport(nbytes, 0, {"wait": 0.0, "read": 0.0, "verify": 0.0, "copy": 0.0})
        deadline = self._deadline_s = self._clock() + timeout_s
        failures = 0
        reason = "nothing was published"
        while report.attempts == 0 or self._clock() < deadline:
            report.attempts += 1
            try:
                outcome = self._attempt(manifest, version, nbytes, report.phases)
            except TransferFailed:
                failures += 1
                if failures >= FAILED_READS_PER_PULL or self._clock() >= deadline:
                    raise
                outcome = "a read failed"
            if isinstance(outcome, torch.Tensor):
                self._timed(report.phases, "copy", partial(target.copy_, outcome))
                return report
            reason = outcome
            self._timed(report.phases, "wait", lambda: time.sleep(RETRY_S))
        raise WrongVersion(f"version {version} of the weights was not shown whole within {timeout_s:g} s ({reason})")

    def versions(self, manifest: Manifest) -> list[int]:
        """Versions that the owner shows whole at this moment, in order."""
        headers = [self._read_header(manifest, slot) for slot in range(manifest["slots"])]
        return sorted(header[0] for header in headers if _whole(header))

    def close(self) -> None:
        for memory in (self._staging, self._header):
            if memory is not None:
                self._transport.forget(memory)

    def _attempt(self, manifest: Manifest, version: int, nbytes: int, phases: dict[str, float]) -> torch.Tensor | str:
        """The verified data (in the staging buffer), or why it was not accepted."""
        slot = version % manifest["slots"]
        before = self._timed(phases, "read", lambda: self._read_header(manifest, slot))
        if not _whole(before) or before[0] != version:
            return f"its slot shows version {before[0]}" if _whole(before) else "its slot is being written"
        data = self._staging_buffer(nbytes)
        offset = _slot_offset(slot, manifest["slots"], nbytes)
        self._timed(phases, "read", lambda: self._read(manifest, offset, data))
        after = self._timed(phases, "read", lambda: self._read_header(manifest, slot))
        if after != before:
            return "it was overwritten while it was read"
        if self._timed(phases, "verify", lambda: checksum(data)) != before[2]:
            return "its checksum did not match"
        return data

    def _read_header(self, manifest: Manifest, slot: int) -> list[int]:
        if self._header is None:
            self._header = self._new_buffer(HEADER_BYTES)
        self._read(manifest, slot * HEADER_BYTES, self._header)
        return self._header.view(torch.int64).tolist()

    def _read(self, manifest: Manifest, offset: int, into: torch.Tensor) -> None:
        """Read in a thread of its own, because opening a connection to a process that hangs blocks for a minute."""
        failure: list[TransferFailed] = []

        def read() -> None:
            try:
                self._transport.read(manifest["region"], offset, into)
            except TransferFailed as error:
                failure.append(error)

        thread = threading.Thread(target=read, name="weight-pull", daemon=True)
        thread.start()
        thread.join(max(self._deadline_s - self._clock(), SHORTEST_READ_LIMIT_S))
        if thread.is_alive():
            failure = [TransferFailed(f"reading {into.numel()} bytes of weights took too long; the owner hangs or is gone")]
        if failure:
            self._quarantine.append(_Quarantined(into, thread, self._clock() + QUARANTINE_S))
            if into is self._staging:
                self._staging = None
            else:
                self._header = None
            raise failure[0]

    def _staging_buffer(self, nbytes: int) -> torch.Tensor:
        if self._staging is None:
            self._staging = self._new_buffer(nbytes)
        return self._staging

    def _new_buffer(self, nbytes: int) -> torch.Tensor:
        now = self._clock()
        for held in [held for held in self._quarantine if held.over(now)]:
            self._quarantine.remove(held)
            self._transport.forget(held.memory)
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._transport.prepare(buffer)
        return buffer

    def _timed(self, phases: dict[str, float], name: str, act: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        try:
            return act()
        finally:
            phases[name] += time.perf_counter() - started


def as_bytes(slab: torch.Tensor) -> torch.Tensor:
    """The slab's memory as a flat uint8 view. Raises ValueError for a slab that is not contiguous."""
    if not slab.is_contiguous():
        raise ValueError("a weight slab must be contiguous")
    return slab.detach().view(-1).view(torch.uint8)


def checksum(data: torch.Tensor) -> int:
    """XXH3-64 of CPU bytes, as a signed 64-bit number."""
    value = xxhash.xxh3_64_intdigest(data.numpy().data)
    return value - (1 << 64) if value >= 1 << 63 else value


def _slot_offset(slot: int, slots: int, nbytes: int) -> int:
    return slots * HEADER_BYTES + slot * nbytes


def _whole(header: list[int]) -> bool:
    return header[0] == header[3] != INVALID
