"""How long the parts of a transition took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases(dict[str, float]):
    """Seconds by phase, in the order in which phases began."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's duration to the phase, also when it raises."""
        started = time.monotonic()
        try:
            yield
        finally:
            self[name] = self.get(name, 0.0) + time.monotonic() - started
