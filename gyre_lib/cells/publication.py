"""Publication: the core's weights to every rollout engine, each of which serves one version at any time.

The weights are written once as a Hugging Face folder that appears in one rename; then all engines are paused together, load it, and go on.
Requests in flight return to the engine's queue and continue under the new weights with the tokens they have; what was cached under the
old weights is dropped. An engine that restarts later loads the same folder, so the run's folder must lie where every engine sees it. The
tensors could be sent to the engines instead, but a load from the page cache took a tenth of SGLang's update over HTTP.
"""

import json
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from gyre_lib.cells.phases import Phases
from gyre_lib.engines.control import EngineControl, EngineError
from gyre_lib.training import checkpoint

Engine = dict[str, str]
"""{"engine_id", "url"}"""

log = logging.getLogger("gyre.rank")


def is_exported(folder: Path, version: int) -> bool:
    """Whether `folder` holds this version, whole."""
    try:
        return json.loads((folder / "state.json").read_text())["step"] == version
    except FileNotFoundError:
        return False


def export_weights(weights: Iterable[tuple[str, Tensor]], model_dir: Path, folder: Path, version: int) -> None:
    """Write a model folder that an engine can load: the weights, and everything else of `model_dir`. It appears in one rename."""
    partial = folder.with_name(folder.name + ".partial")
    checkpoint.remove(partial)
    checkpoint.write_tensors(partial, iter(weights))
    checkpoint.copy_model_files(model_dir, partial)
    checkpoint.commit(partial, folder, {"step": version})


def publish(folder: Path, version: int, engines: list[Engine], phases: Phases) -> dict[str, Any]:
    """Bring the weights in `folder` to the engines, all at once, and prove that each serves `version`.

    An engine that fails on the way is left paused, for nobody knows what it would serve, and the others go on without it. Returns
    {"versions": {engine_id: version}, "failed": {engine_id: reason}}.
    """
    failed: dict[str, str] = {}
    controls = {engine["engine_id"]: EngineControl(engine["url"]) for engine in engines}
    with ThreadPoolExecutor(max_workers=max(len(engines), 1), thread_name_prefix="publish") as pool:

        def on_all(act: Callable[[EngineControl], Any]) -> dict[str, Any]:
            """Do something on every engine that has not failed, at the same time."""
            alive = {engine_id: control for engine_id, control in controls.items() if engine_id not in failed}
            pending = {engine_id: pool.submit(act, control) for engine_id, control in alive.items()}
            results = {}
            for engine_id, future in pending.items():
                try:
                    results[engine_id] = future.result()
                except EngineError as error:
                    log.error("publication of version %d: engine %s: %s", version, engine_id, error)
                    failed[engine_id] = str(error)
            return results

        with phases.timed("pause"):
            on_all(lambda engine: engine.pause("retract"))
        with phases.timed("load"):
            on_all(lambda engine: engine.load_folder(folder, version))
        with phases.timed("resume"):
            on_all(lambda engine: engine.resume())
        with phases.timed("verify"):
            versions = on_all(lambda engine: engine.weight_version())
    for engine_id, served in versions.items():
        if served != version:
            failed[engine_id] = f"serves version {served} after version {version} was published to it"
    for control in controls.values():
        control.close()
    return {"versions": versions, "failed": failed}
