"""Continuous one-forward-one-backward over a stream of unknown length (§7).

The order of operations on stage s of P, with w = P - 1 - s, is a pure function of the stream's state, the same on every rank:

1. a drain is asked for at this position → finish all backwards;
2. there is a next micro-step → its forward, then, if more than w trained micro-steps are in flight, the oldest one's backward
   (a scoring micro-step has a forward only and is never in flight);
3. the stream has ended → stop;
4. otherwise pause: post no communication, keep all state, ask again.

So every stage pauses at the same micro-step, and there is one start-up and one drain however often the stream paused.

Why sends cannot deadlock: gloo's send completes only once its peer has posted the receive. A stage waits for its own forward sends (its
peer reaches that receive without needing anything later from this stage), but for a backward send only when a later forward proves it
was received. Stages derive the shape of what they receive from the micro-step; nothing but tensors is exchanged.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from gyre_lib.training.micro_step_stream import MicroStepStream
from gyre_lib.training.micro_steps import MicroStep

POLL_S, LONGEST_POLL_S = 0.002, 0.02
"""Pause between two looks at a stream that has nothing: at first, and when it has had nothing for a while."""


class StageStalled(RuntimeError):
    """A stage waited longer than its limit for its neighbour."""


@dataclass
class StreamReport:
    """What one rank did in one stream; times in seconds."""

    micro_steps: int = 0
    scored: int = 0
    tokens: int = 0
    """Forward tokens of this rank's copy, scoring included."""
    compute_s: float = 0.0
    neighbour_s: float = 0.0
    """Waiting for another stage."""
    idle_s: float = 0.0
    """Waiting for input."""
    pauses: int = 0
    startups: int = 0
    drains: int = 0
    executions: int = 0
    """E, from the closed stream."""
    paused_at: list[tuple[int, int]] = field(default_factory=list)
    """(micro-steps begun, trained ones still in flight) at each pause; other ranks than the leader also stop briefly in between."""


class Stage(Protocol):
    """The model part that a pipeline drives."""

    def activation_shape(self, micro_step: MicroStep) -> tuple[int, ...]:
        """Shape of what goes between stages for it; a first size of 0 means this copy has no rows in it."""

    def forward(self, micro_step: MicroStep, activation: Tensor | None) -> Tensor | None:
        """The output to send on; on the last stage the loss. Nothing is kept of a scoring micro-step's graph."""

    def scores(self) -> dict[str, tuple[float, int]] | None:
        """Of the scoring micro-step just forwarded, on the last stage."""


def _posted(work: dist.Work | None) -> dist.Work:
    """torch answers None to a rank outside the group."""
    if work is None:
        raise RuntimeError("this rank is not in the group it sends over")
    return work


class Neighbours:
    """Tensor exchange with the previous and the next stage, one direction per group."""

    def __init__(self, forward: dist.ProcessGroup, backward: dist.ProcessGroup, limit_s: float, device: torch.device):
        self.stage, self.stages = forward.rank(), forward.size()
        self.forward, self.backward, self.limit_s, self.device = forward, backward, limit_s, device
        self.sent_on: deque[tuple[dist.Work, Tensor]] = deque()
        self.sent_back: deque[tuple[int, dist.Work, Tensor]] = deque()
        self.waited_s = 0.0

    def _peer(self, group: dist.ProcessGroup, offset: int) -> int:
        return dist.get_global_rank(group, self.stage + offset)

    def _finish(self, work: dist.Work, what: str) -> None:
        begun = time.monotonic()
        try:
            work.wait(timedelta(seconds=self.limit_s))
        except RuntimeError as error:
            waited_s = time.monotonic() - begun
            raise StageStalled(f"stage {self.stage} of {self.stages}: {what} failed after {waited_s:.1f} s: {error}") from error
        self.waited_s += time.monotonic() - begun

    def receive_activation(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        buffer = torch.empty(shape, dtype=dtype, device=self.device)
        self._finish(_posted(dist.irecv(buffer, self._peer(self.forward, -1), group=self.forward)), "receiving an activation")
        return buffer

    def receive_gradient(self, like: Tensor) -> Tensor:
        buffer = torch.empty_like(like)
        self._finish(_posted(dist.irecv(buffer, self._peer(self.backward, 1), group=self.backward)), "receiving a gradient")
        return buffer

    def send_activation(self, tensor: Tensor) -> None:
        tensor = tensor.detach().contiguous()
        self.sent_on.append((_posted(dist.isend(tensor, self._peer(self.forward, 1), group=self.forward)), tensor))
        while len(self.sent_on) > self.stages + 1:
            self._finish(self.sent_on.popleft()[0], "sending an activation")

    def send_gradient(self, number: int, tensor: Tensor) -> None:
        """`number` counts trained micro-steps of this stage."""
        tensor = tensor.contiguous()
        work = _posted(dist.isend(tensor, self._peer(self.backward, -1), group=self.backward))
        self.sent_back.append((number, work, tensor))

    def release_gradients(self, before: int) -> None:
        """Gradients of trained micro-steps numbered below `before` are known to be received."""
        while self.sent_back and self.sent_back[0][0] < before:
            self._finish(self.sent_back.popleft()[1], "sending a gradient")

    def finish_sends(self) -> None:
        while self.sent_on:
            self._finish(self.sent_on.popleft()[0], "sending an activation")
        while self.sent_back:
            self._finish(self.sent_back.popleft()[1], "sending a gradient")


class ContinuousPipeline:
    """One stage's part in a stream."""

    def __init__(self, stage: Stage, neighbours: Neighbours, stream: MicroStepStream, dtype: torch.dtype):
        self.stage, self.neighbours, self.stream, self.dtype = stage, neighbours, stream, dtype
        self.first, self.last = neighbours.stage == 0, neighbours.stage == neighbours.stages - 1
        self.warm = neighbours.stages - 1 - neighbours.stage
        self.position = 0
        self.begun = self.finished = 0
        self.filled = False
        self.in_flight: deque[tuple[int, Tensor | None, Tensor | None]] = deque()
        self.report = StreamReport()

    def run(self) -> StreamReport:
        """Process the stream to its end. Raises StageStalled, StreamFailed, or what a stage raises."""
        drained_at, paused_s = -1, 0.0
        started = time.monotonic()
        while True:
            state = self.stream.poll(self.position)
            if self.position in state.drains and drained_at != self.position:
                drained_at = self.position
                self._drain()
            elif self.position < state.count:
                paused_s = 0.0
                self._forward()
                if len(self.in_flight) > self.warm:
                    self._backward()
            elif state.ended:
                break
            else:
                if not paused_s:
                    self.report.pauses += 1
                    self.report.paused_at.append((self.position, len(self.in_flight)))
                begun = time.monotonic()
                time.sleep(min(LONGEST_POLL_S, POLL_S + 0.1 * paused_s))
                paused_s += time.monotonic() - begun
                self.report.idle_s += time.monotonic() - begun
        self._drain()
        report = self.report
        report.executions = state.executions
        report.neighbour_s = self.neighbours.waited_s
        report.compute_s = time.monotonic() - started - report.idle_s - report.neighbour_s
        return report

    def _forward(self) -> None:
        number = self.position
        micro_step = self.stream.get(number)
        shape = self.stage.activation_shape(micro_step)
        trains, here = micro_step.kind == "train", shape[0] > 0
        activation = None
        if here and not self.first:
            activation = self.neighbours.receive_activation(shape, self.dtype).requires_grad_(trains)
            self.neighbours.release_gradients(self.begun - self.warm - 1)
        with torch.set_grad_enabled(trains):
            output = self.stage.forward(micro_step, activation)
        if output is not None and not self.last:
            self.neighbours.send_activation(output)
        if trains:
            self.report.startups += not self.filled
            self.filled = True
            self.in_flight.append((number, activation, output))
            self.begun += 1
            self.report.micro_steps += 1
        else:
            self.stream.finished(number, self.stage.scores())
            self.report.scored += 1
        self.report.tokens += shape[0]
        self.position += 1

    def _backward(self) -> None:
        number, activation, output = self.in_flight.popleft()
        if output is not None:
            gradient = None if self.last else self.neighbours.receive_gradient(output)
            torch.autograd.backward(output, grad_tensors=gradient)
            if activation is not None:
                self.neighbours.send_gradient(self.finished, cast(Tensor, activation.grad))
        self.finished += 1
        self.stream.finished(number)

    def _drain(self) -> None:
        self.report.drains += self.filled
        self.filled = False
        while self.in_flight:
            self._backward()
        self.neighbours.finish_sends()
