"""A bound on asking a sandbox service that is down: after so many failures in a row the run stops asking and says why."""

import threading


class SandboxServiceDown(RuntimeError):
    """Too many infrastructure failures in a row; its text holds the last reason."""


class SandboxCircuit:
    """Counts infrastructure failures in a row, over all executions of one run. Thread-safe."""

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self._failures = 0
        self._reason = ""
        self._lock = threading.Lock()

    def check(self) -> None:
        """Call before each launch; raises SandboxServiceDown once the limit is reached."""
        with self._lock:
            if self._failures >= self._limit:
                raise SandboxServiceDown(
                    f"{self._failures} executions in a row failed for infrastructure reasons; the last one: {self._reason}"
                )

    def succeeded(self) -> None:
        """A sandbox worked: the count starts again."""
        with self._lock:
            self._failures = 0

    def failed(self, reason: str) -> None:
        with self._lock:
            self._failures += 1
            self._reason = reason

    def reset(self) -> None:
        """A person has repaired the service."""
        self.succeeded()
