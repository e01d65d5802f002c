"""A cell's GPUs hold either its engines' memory or its trainer's. The first rank of the cell moves the engines' part.

On CPU the calls are made and change nothing. Which engines have given their memory away is remembered here, together with the engine's
life: SGLang's scheduler dies when it is told to resume what it has not released, as a restarted engine has not.
"""

import time

from gyre_lib.engines.control import EngineControl, EngineError

IDLE_TIMEOUT_S = 30.0
POLL_S = 0.05


class EngineMemory:
    def __init__(self) -> None:
        self._released: dict[str, str] = {}

    def release(self, urls: list[str]) -> None:
        """Have the engines give their memory away; without effect for one that has. Raises EngineError for one that stays busy."""
        for url in urls:
            with EngineControl(url) as engine:
                if self._released.get(url) == engine.life():
                    continue
                _wait_idle(engine)
                engine.release_memory()
                self._released[url] = engine.life()

    def resume(self, urls: list[str]) -> None:
        """Have the engines take their memory back; without effect for one that has not released it in its present life."""
        for url in urls:
            with EngineControl(url) as engine:
                if self._released.pop(url, None) == engine.life():
                    engine.resume_memory()


def _wait_idle(engine: EngineControl) -> None:
    """The prefix cache can be dropped exactly when nothing runs or waits; the answer is the scheduler's own, not a snapshot."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        try:
            return engine.flush()
        except EngineError:
            if time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)
