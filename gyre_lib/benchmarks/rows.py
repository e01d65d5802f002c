"""The rows that every benchmark prints."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class BenchRow:
    """One measured figure. `ok` is None where there is no target; `baseline` was measured beside it in the same run."""

    name: str
    value: float
    unit: str
    target: str = ""
    ok: bool | None = None
    baseline: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if not (key == "baseline" and value is None)}
