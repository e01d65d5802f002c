"""Main program of one training rank: `python -m gyre_lib.cells.rank --run-dir DIR --coordinator URL --cell C --shard S`.

Its environment is that of a distributed launch (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE) plus GYRE_CONTROL_SECRET. The process lives
for the whole run: it joins and leaves batches as the coordinator commands, and executes the commands of its cell in order. A command is
executed once: repeated under its id, its report is sent again. A coordinator that goes away is waited for; SIGTERM ends the process.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gyre_lib.cells.coordinator_link import CoordinatorLink
from gyre_lib.cells.phases import Phases
from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from gyre_lib.config.run_config import RunConfig, load_config

log = logging.getLogger("gyre.rank")

Execute = Callable[[dict[str, Any], Phases], dict[str, Any]]


def follow_commands(link: CoordinatorLink, execute: Execute) -> None:
    """Execute the cell's commands, one after another, until `stop`."""
    reports: dict[str, dict[str, Any]] = {}
    last = 0
    while True:
        for command in link.commands(last):
            last = command["seq"]
            report = reports.get(command["id"]) or _executed(command, execute)
            if report["ok"]:
                # A command that failed is tried again when it is given again.
                reports[command["id"]] = report
            link.report(report)
            if command["kind"] == "stop":
                return


def _executed(command: dict[str, Any], execute: Execute) -> dict[str, Any]:
    """The command's report. An error is the report's, not this process's: the cell lives on and is told what to do next."""
    phases = Phases()
    report: dict[str, Any] = {"command_id": command["id"], "ok": True, "error": "", "phases": phases, "result": {}}
    log.info("%s %s", command["kind"], command["id"])
    try:
        if command["kind"] != "stop":
            report["result"] = execute(command, phases)
    except Exception as error:
        log.exception("%s %s failed", command["kind"], command["id"])
        report |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return report


def join_process_group(config: RunConfig, shard: int) -> str:
    """Meet all ranks of the run; returns this rank's device."""
    torch.set_num_threads(config.cells.threads_per_process)
    timeout = timedelta(seconds=config.training.stall_limit_s)
    if config.cells.device == "cpu":
        if os.environ.get("MASTER_ADDR") == "127.0.0.1":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", timeout=timeout)
        return "cpu"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", shard)))
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
    return f"cuda:{torch.cuda.current_device()}"


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Megatron has functions compiled when it is imported. On CPU they run as they are written, and a rank starts with half the CPU time
    and 75 MB less, because the compiler's machinery is not loaded."""
    real = torch.compile
    torch.compile = lambda function=None, **options: function or (lambda decorated: decorated)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = real  # type: ignore[assignment]


def run_rank(run_dir: Path, coordinator: str, cell: int, shard: int) -> None:
    run = RunLayout(run_dir)
    config = load_config(run.config)
    c = config.cells
    with nothing_compiled() if c.device == "cpu" else nullcontext():
        from gyre_lib.cells.transitions import CellRank
        from gyre_lib.training.cell_trainer import CellTrainer
        from gyre_lib.training.rank_layout import RankLayout
        from gyre_lib.transfer.transport import open_transport
    layout = RankLayout(cell, c.count, shard, c.tensor_parallel, c.pipeline_parallel, c.data_parallel, c.expert_parallel)
    device = join_process_group(config, shard)
    trainer = CellTrainer(config.model.path, config.model, config.training, layout, device)
    link = CoordinatorLink(coordinator, cell, shard, os.environ.get("GYRE_CONTROL_SECRET", ""))
    host = os.environ.get("GYRE_HOST", "127.0.0.1")
    rank = CellRank(trainer, run, link, lambda: open_transport(c.weight_transport, host))
    link.say_ready(os.getpid())
    log.info("rank %d of %d is ready: cell %d, shard %d, %s", layout.rank, layout.world, cell, shard, device)
    follow_commands(link, rank.execute)


def main() -> None:
    parser = argparse.ArgumentParser(description="One training rank of a run.")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--coordinator", required=True, help="address of the coordinator's control API")
    parser.add_argument("--cell", type=int, required=True)
    parser.add_argument("--shard", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    status = 1
    try:
        run_rank(arguments.run_dir, arguments.coordinator, arguments.cell, arguments.shard)
        status = 0
    except SystemExit:
        status = 0
    except InputError as error:
        log.error("%s", error)
        status = 2
    except Exception:
        log.exception("the rank cannot go on")
    finally:
        # Not through the interpreter's end: groups with ranks that are gone already would keep it waiting.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
