"""An assessment: one evaluation of one artifact. A valid zero is a reward; a missing score is not."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Assessment:
    score: float | None
    """0 to 1; None when unresolved."""
    validity: Literal["valid", "unresolved"]
    detail: str
    assessed_digest: str
    """Digest of the artifact content that was assessed."""
    started_s: float
    ended_s: float
    """Unix times."""

    def __post_init__(self) -> None:
        if (self.score is None) != (self.validity == "unresolved"):
            raise ValueError(f"an assessment is valid exactly when it has a score, got {self.score} and {self.validity}")
        if self.score is not None and not 0.0 <= self.score <= 1.0:
            raise ValueError(f"score: must be between 0 and 1, got {self.score}")
