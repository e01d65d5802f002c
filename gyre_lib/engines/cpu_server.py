"""Main program of one SGLang engine on a machine without a GPU: `python -m gyre_lib.engines.cpu_server <SGLang server arguments>`.

SGLang starts its scheduler and detokenizer as spawned processes that import everything again; without CUDA nothing forbids a fork, which
halves an engine's start-up (about 14 instead of 28 CPU seconds) and lets the three processes share pages. SGLang itself is not changed.
"""

import multiprocessing
import os
import sys


def import_engine() -> None:
    """Import what the engine's three processes need. Starts no thread and touches no device, so that forks are safe afterwards."""
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.layers.attention.torch_native_backend
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.model_executor.model_runner
    import sglang.srt.model_loader.loader
    import sglang.srt.models.registry  # noqa: F401


def serve(arguments: list[str]) -> None:
    """Run the server until it is told to stop; takes its process tree down with it."""
    import_engine()
    from sglang.launch_server import run_server
    from sglang.srt.entrypoints import engine
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    prepare_environment = engine._set_envs_and_config

    def prepare_environment_then_fork(*args: object, **kwargs: object) -> None:
        prepare_environment(*args, **kwargs)
        multiprocessing.set_start_method("fork", force=True)

    engine._set_envs_and_config = prepare_environment_then_fork
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    serve(sys.argv[1:])
