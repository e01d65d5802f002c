"""Where everything of one run lies on disk. No other module builds these paths."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunLayout:
    """The folder of one run."""

    root: Path

    @property
    def run_id(self) -> str:
        return self.root.name

    @property
    def config(self) -> Path:
        """The run's configuration as it was started (YAML)."""
        return self.root / "config.yaml"

    @property
    def services(self) -> Path:
        """Processes of this run: name, pid, address (JSON), while they are up."""
        return self.root / "services.json"

    @property
    def logs(self) -> Path:
        """One log file per process."""
        return self.root / "logs"

    @property
    def journal(self) -> Path:
        """Scheduler events, one file per burst."""
        return self.root / "journal"

    @property
    def segments(self) -> Path:
        """Trajectory segments: one folder per table."""
        return self.root / "segments"

    @property
    def artifacts(self) -> Path:
        """Preserved work of executions, one folder per execution."""
        return self.root / "artifacts"

    @property
    def checkpoints(self) -> Path:
        """Weights, optimizer state and journal position, one folder per step."""
        return self.root / "checkpoints"

    @property
    def published(self) -> Path:
        """Published policies in Hugging Face format, one folder per version."""
        return self.root / "published"

    @property
    def sockets(self) -> Path:
        """Unix sockets that sandboxes may reach (the proxy's)."""
        return self.root / "sockets"

    @property
    def report(self) -> Path:
        return self.root / "report.html"
