"""Rank processes of one machine, forked from this one: imports are paid once, which is what makes small real runs cheap.

A cluster starts ranks with torchrun instead; both give a rank MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE.
"""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


class RankDied(RuntimeError):
    """A rank raised or ended without a result."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class LocalRanks:
    """`world` forked processes that each run `work(rank, *arguments)` inside an initialised gloo process group."""

    def __init__(self, world: int, work: Callable[..., Any], *arguments: Any, group_timeout_s: float = 120.0):
        port = free_port()
        context = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
            process = context.Process(target=_rank_main, args=(theirs, environment, group_timeout_s, work, arguments), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def results(self, timeout_s: float = 120.0, may_die: frozenset[int] = frozenset()) -> list[Any]:
        """Each rank's return value, None for ranks in `may_die`. Raises RankDied with the traceback of the first rank that failed."""
        results: list[Any] = [None] * len(self.pipes)
        open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in may_die}
        try:
            while open_pipes:
                answered = wait(list(open_pipes), timeout_s)
                if not answered:
                    raise RankDied(f"ranks {sorted(open_pipes.values())} gave no result in {timeout_s:g} s")
                for pipe in [pipe for pipe in open_pipes if pipe in answered]:
                    rank = open_pipes.pop(pipe)
                    try:
                        ok, value = pipe.recv()
                    except EOFError:
                        ok, value = False, "ended without a result"
                    if not ok:
                        raise RankDied(f"rank {rank}: {value}")
                    results[rank] = value
            return results
        finally:
            self.stop()

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def stop(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _rank_main(pipe: Connection, environment: dict[str, str], group_timeout_s: float, work: Callable[..., Any], arguments: tuple) -> None:
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=group_timeout_s))
        pipe.send((True, work(int(environment["RANK"]), *arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise
    finally:
        pipe.close()
        os._exit(0)
