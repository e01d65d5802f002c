"""The figures of one run, from its own tables and journal: what the report, the burst's artifacts and the demo's closing lines say."""

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_lib.config.errors import InputError
from gyre_lib.config.layout import RunLayout
from gyre_lib.coordination.journal import read_entries
from gyre_lib.scheduling.replay import replay
from gyre_lib.trajectories.store import connect

SCORES = """
    SELECT t.burst, count(*) AS steps, avg(t.mean_reward) AS score, avg(t.staleness_mean) AS staleness, sum(t.executions) AS executions,
           sum(t.target_tokens) AS target_tokens, avg(t.grad_norm) AS grad_norm, avg(t.gate_fraction_executions) AS gated, max(t.cells) AS cells
    FROM train_steps t GROUP BY t.burst ORDER BY t.burst"""
TRANSITIONS = """
    SELECT cell, direction, burst, step, outcome, started_s, ended_s, duration_s, rerouted_executions, rerouted_requests, weight_bytes, phases
    FROM transitions ORDER BY started_s"""
STEPS = """
    SELECT step, burst, cells, mean_reward, loss, grad_norm, staleness_mean, duration_s, opened_s, updated_s, seconds
    FROM train_steps ORDER BY step"""
ROLLOUT_SECONDS = """
    SELECT avg(ended_s - launched_s) AS execution_s, avg(settled_s - ended_s) AS evaluation_s, count(*) AS executions,
           count(*) FILTER (outcome = 'HarnessTimeout') AS harness_timeouts, count(*) FILTER (outcome = 'OverallTimeout') AS overall_timeouts
    FROM executions WHERE train AND outcome <> 'Cancelled'"""
REROUTES = "SELECT coalesce(sum(reroutes), 0) AS rerouted_requests, count(*) AS requests, sum(n_output) AS output_tokens FROM requests"
HELD_OUT = """
    SELECT group_id AS label, count(*) AS executions, avg(score) AS mean_score, stddev_samp(score) / sqrt(count(*)) AS standard_error,
           max(dispatch_version) AS version
    FROM executions WHERE NOT train AND validity = 'valid' GROUP BY group_id ORDER BY version"""


@dataclass
class RunFigures:
    """Rows are plain dictionaries, ready for JSON, tables and plots."""

    run_id: str
    scores: list[dict[str, Any]]
    """One row per burst."""
    steps: list[dict[str, Any]]
    transitions: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    rollout: dict[str, Any]
    requests: dict[str, Any]
    scheduler: dict[str, Any]
    """The scheduler's snapshot, rebuilt from the journal."""
    water_level: list[tuple[float, int]]
    """(Unix time, executions not yet terminated)."""
    started_s: float
    ended_s: float
    proxy: dict[str, Any] = field(default_factory=dict)

    @property
    def wall_by_phase(self) -> list[dict[str, Any]]:
        """Seconds of the run by what went on: rollout alone, or with training, or a step's own phases."""
        wall = self.ended_s - self.started_s
        trained = sum(step["seconds"].get("stream", 0.0) for step in self.steps)
        phases: dict[str, float] = {}
        for step in self.steps:
            for name, seconds in step["seconds"].items():
                if name != "stream":
                    phases[name] = phases.get(name, 0.0) + seconds
        switching = sum(row["duration_s"] for row in self.transitions)
        rows = [
            {"phase": "batch open (rollout and streaming training overlap)", "seconds": trained},
            *({"phase": f"step: {name}", "seconds": seconds} for name, seconds in sorted(phases.items(), key=lambda item: -item[1])),
            {"phase": "cell transitions (one cell at a time, others go on)", "seconds": switching},
            {"phase": "whole run", "seconds": wall},
        ]
        return [{**row, "share": row["seconds"] / wall if wall else 0.0} for row in rows]

    def role_spans(self, cells: int) -> list[tuple[int, str, float, float]]:
        """(cell, role, start, end) in Unix time; roles: rollout, to_training, training, to_rollout."""
        spans = []
        for cell in range(cells):
            role, since = "rollout", self.started_s
            for row in (row for row in self.transitions if row["cell"] == cell):
                spans += [(cell, role, since, row["started_s"]), (cell, row["direction"], row["started_s"], row["ended_s"])]
                joined = row["direction"] == "to_training" and row["outcome"] == "done"
                role, since = "training" if joined else "rollout", row["ended_s"]
            spans.append((cell, role, since, self.ended_s))
        return [span for span in spans if span[3] > span[2]]


def run_figures(layout: RunLayout) -> RunFigures:
    """Read a run, live or finished. Raises InputError when there is none."""
    if not layout.config.exists():
        raise InputError(f"{layout.run_id}: no run in {layout.root.parent}")
    entries = list(itertools.chain.from_iterable(read_entries(path) for path in sorted(layout.journal.glob("burst-*.jsonl"))))
    events = [entry for entry in entries if "event" in entry]
    if not events:
        raise InputError(f"{layout.run_id}: the run has not started, its journal is empty")
    with connect(layout.root) as database:

        def rows(sql: str) -> list[dict[str, Any]]:
            cursor = database.execute(sql)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

        figures = RunFigures(
            run_id=layout.run_id,
            scores=rows(SCORES),
            steps=rows(STEPS),
            transitions=rows(TRANSITIONS),
            held_out=rows(HELD_OUT),
            rollout=rows(ROLLOUT_SECONDS)[0],
            requests=rows(REROUTES)[0],
            scheduler=replay(json.dumps(entry) for entry in entries).snapshot(),
            water_level=list(_water_level(events)),
            started_s=next((entry["now"] for entry in events if entry["event"]["kind"] == "RunStarted"), events[0]["now"]),
            ended_s=events[-1]["now"],
        )
    if proxy_stats_path(layout).exists():
        figures.proxy = json.loads(proxy_stats_path(layout).read_text())
    return figures


def proxy_stats_path(layout: RunLayout) -> Path:
    """The proxies' counters as they were at the run's end (JSON)."""
    return layout.root / "proxy-stats.json"


def _water_level(events: list[dict[str, Any]]) -> Any:
    level, ended = 0, set()
    for entry in events:
        if entry["event"]["kind"] == "ExecutionEnded" and entry["event"]["execution"] not in ended:
            ended.add(entry["event"]["execution"])
            level -= 1
        level += sum(len(group) for action in entry["actions"] if action["kind"] == "Dispatch" for group in action["executions"])
        yield entry["now"], level
