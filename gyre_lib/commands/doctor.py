"""`gyre doctor`: what this machine can run, what is missing, and how to get it."""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from gyre_lib.commands.output import print_rows
from gyre_lib.rollout.harnesses.mini_swe_agent import INSTALL as MINI_SWE_AGENT

GIB = 2**30
DEMO_MEMORY_GIB = 12
DEMO_DISK_GIB = 2


def doctor(json: Annotated[bool, typer.Option("--json", help="Print one JSON object with `rows`.")] = False) -> None:
    """Say what this machine can run. Exit code 1 when the demo cannot run here."""
    rows = [check() for check in CHECKS]
    print_rows(rows, json)
    if any(row["needed"] == "demo" and not row["ok"] for row in rows):
        raise typer.Exit(1)


def _row(what: str, ok: bool, found: str, needed: str, how: str) -> dict[str, Any]:
    return {"check": what, "ok": ok, "found": found, "needed": needed, "how_to_get_it": "" if ok else how}


def _python() -> dict[str, Any]:
    found = ".".join(map(str, sys.version_info[:3]))
    return _row("Python 3.11", sys.version_info[:2] == (3, 11), found, "demo", "install python3.11 and run make again")


def _package(name: str, module: str, needed: str, how: str) -> Callable[[], dict[str, Any]]:
    def check() -> dict[str, Any]:
        if importlib.util.find_spec(module) is None:
            return _row(name, False, "not installed", needed, how)
        return _row(name, True, importlib.metadata.version(name), needed, how)

    return check


def _mooncake() -> dict[str, Any]:
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        how = "apt-get install libibverbs1 libnuma1 libcurl4 (make does it); pip install mooncake-transfer-engine-non-cuda"
        return _row("Mooncake Transfer Engine", False, str(error), "demo", how)
    return _row("Mooncake Transfer Engine", True, "imports", "demo", "")


def _bubblewrap() -> dict[str, Any]:
    how = "apt-get install bubblewrap (make does it); unprivileged user namespaces must be allowed (sysctl kernel.unprivileged_userns_clone=1)"
    if shutil.which("bwrap") is None:
        return _row("bubblewrap sandbox", False, "bwrap not on PATH", "demo", how)
    probe = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "true"]
    done = subprocess.run(probe, capture_output=True, text=True)
    return _row("bubblewrap sandbox", done.returncode == 0, "works" if done.returncode == 0 else done.stderr.strip()[:120], "demo", how)


def _memory() -> dict[str, Any]:
    import psutil

    available = psutil.virtual_memory().available / GIB
    how = f"the demo's processes take up to {DEMO_MEMORY_GIB} GiB; lower cells.count"
    return _row("memory", available >= DEMO_MEMORY_GIB, f"{available:.1f} GiB free", "demo", how)


def _disk() -> dict[str, Any]:
    free = shutil.disk_usage(".").free / GIB
    return _row("disk", free >= DEMO_DISK_GIB, f"{free:.1f} GiB free", "demo", "free some space, or set GYRE_RUNS to another disk")


def _cores() -> dict[str, Any]:
    import os

    cores = os.cpu_count() or 1
    return _row("cores", cores >= 2, str(cores), "demo", "the demo was measured on 2 cores; on fewer it takes longer")


def _cuda() -> dict[str, Any]:
    import torch

    found = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else f"torch {torch.__version__} sees no GPU"
    how = "on a GPU machine: pip install '.[gpu]' with a CUDA build of torch, then cells.device=cuda"
    return _row("CUDA", torch.cuda.is_available(), found, "cells.device=cuda", how)


def _program(name: str, needed: str, how: str) -> Callable[[], dict[str, Any]]:
    def check() -> dict[str, Any]:
        path = shutil.which(name)
        return _row(name, path is not None, path or "not on PATH", needed, how)

    return check


CHECKS: tuple[Callable[[], dict[str, Any]], ...] = (
    _python,
    _cores,
    _memory,
    _disk,
    _package("prefect", "prefect", "demo", "make setup"),
    _package("sglang", "sglang", "demo", "make setup"),
    _package("megatron-core", "megatron.core", "demo", "make setup"),
    _mooncake,
    _bubblewrap,
    _cuda,
    _program("docker", "rollout.sandbox=docker", "install Docker and let this user use it"),
    _program("claude", "rollout.harness=claude-code", "npm install -g @anthropic-ai/claude-code@2.1.220"),
    _program("mini", "rollout.harness=mini-swe-agent", f"{MINI_SWE_AGENT} in an environment of its own, on PATH"),
)
