"""How every process of a run logs: time, level, where, what."""

import logging


def configure_logging() -> None:
    """To standard error, which is the process's log file. One line per HTTP request would drown what matters."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
