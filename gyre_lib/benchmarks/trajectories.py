"""`gyre bench trajectories`: one long execution through store and admission, and SQL over 50 million recorded tokens.

Synthetic ids follow Zipf's law over 151,936 words (no repeated phrases: real text compresses better), by rank as in vocabularies that
were built by frequency; the same with ranks shuffled is reported beside it. Log-probs are random, 60 % of them exponential with mean 0.6.
"""

import asyncio
import gc
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import orjson
import pyarrow as pa

from gyre_lib.benchmarks.rows import BenchRow
from gyre_lib.config.layout import RunLayout
from gyre_lib.trajectories.admission import admit
from gyre_lib.trajectories.materialisation import materialise
from gyre_lib.trajectories.schemas import SCHEMAS
from gyre_lib.trajectories.sealed_segments import SealedStore
from gyre_lib.trajectories.segments import GroupCommit, Row, SegmentWriter
from gyre_lib.trajectories.store import read_execution, record_to_row
from gyre_lib.trajectories.tito_record import RequestRecord, VersionSpan
from gyre_lib.trajectories.views import open_connection

VOCABULARY_SIZE = 151_936
CALLS_PER_EXECUTION = 20
EXECUTIONS = 2_000
OUTPUT_TOKENS = 10_000_000
INPUT_TOKENS = 40_000_000
SEGMENTS = 4

SCORE_BY_CLASS = "SELECT role_class, version, mean_score FROM score_by_class"
OUTPUT_BY_EXECUTION = "SELECT execution_id, output_tokens FROM output_tokens"


def run(quick: bool = False) -> list[BenchRow]:
    """Rows of both parts; `quick` takes a twentieth of the tokens (the targets are for the whole)."""
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as scratch:
        return [*_one_execution(RunLayout(Path(scratch) / "one")), *_many_executions(Path(scratch), 20 if quick else 1)]


def _one_execution(layout: RunLayout) -> list[BenchRow]:
    """300 calls, 200k tokens, 6 sub-agents, 3 compactions."""
    records = long_execution(np.random.default_rng(0))
    tokens = sum(len(item.input_ids) + len(item.output_ids) for item in records)
    raw = sum(4 * len(item.input_ids) + 8 * len(item.output_ids) for item in records)
    latencies, sealed = asyncio.run(_append_all(layout, records))
    layout.segments.joinpath("executions").mkdir(exist_ok=True)
    back = read_execution(layout, records[0].execution_id)
    if [item.output_ids for item in back] != [item.output_ids for item in records]:
        raise AssertionError("the execution did not come back as it was")

    def admit_and_materialise() -> int:
        admitted = admit(records, run_id="bench", execution_id="g00001-00", version=1, max_trajectories=5)
        return sum(len(row.token_ids) for row in materialise(records, admitted))

    seconds = _best(admit_and_materialise, 5)
    return [
        _row("execution stored / raw token bytes", sealed / raw, "ratio", 1.05, at_most=True),
        _row("append p50, group commit and fsync", statistics.median(latencies) * 1e3, "ms", 1.0, at_most=True),
        BenchRow("append p99, group commit and fsync", float(np.quantile(latencies, 0.99)) * 1e3, "ms"),
        _row("admission and materialisation", tokens / seconds, "tokens/s", 1e6, at_most=False),
    ]


async def _append_all(layout: RunLayout, records: list[RequestRecord]) -> tuple[list[float], int]:
    """Seconds of each append, and the bytes of the sealed segment."""
    commit = GroupCommit(SegmentWriter(layout, "requests", "proxy-0", url=""))
    latencies = []
    for record in records:
        started = time.perf_counter()
        await commit.append(record_to_row(record))
        latencies.append(time.perf_counter() - started)
    await commit.close()
    return latencies, sum(path.stat().st_size for path in (layout.segments / "requests").glob("*.parquet"))


def long_execution(rng: np.random.Generator) -> list[RequestRecord]:
    """Main agent with three compactions; six sub-agents of 20 calls beside it. 300 calls, about 200k tokens, 70k of them emitted."""
    records: list[RequestRecord] = []

    def call(parent: str, role_class: str, agent: str, reason: str, n_input: int, n_output: int) -> str:
        identity = f"{len(records):032x}"
        records.append(
            RequestRecord(
                run_id="bench",
                execution_id="g00001-00",
                request_id=identity,
                sequence=len(records),
                parent_id=parent,
                agent_id=agent,
                parent_agent_id="",
                role_class=role_class,
                branch_reason=reason,
                input_ids=_ids(rng, n_input).tolist(),
                output_ids=_ids(rng, n_output).tolist(),
                output_logprobs=_logprobs(rng, n_output).tolist(),
                version_spans=[VersionSpan(1, 0, n_output)],
                trainable=True,
                untrainable_reason="",
                request_digest=f"{rng.integers(2**62):032x}",
                history_key=f"{rng.integers(2**62):032x}",
                finish_reason="tool_calls",
                temperature=1.0,
                engine_ids=["cell-0"],
                started_s=1e9 + len(records),
                ended_s=1e9 + len(records) + 0.9,
            )
        )
        return identity

    for context in range(4):
        main = call("", "main_task", "", "root", 4000, 230)
        for turn in range(43 if context < 3 else 44):
            main = call(main, "main_task", "", "extension", 352, 230)
            if turn % 20 == 10 and context < 3:
                agent = f"agent-{context}-{turn}"
                sub = call("", "sub_task", agent, "root", 2000, 230)
                for _ in range(19):
                    sub = call(sub, "sub_task", agent, "extension", 352, 230)
        if context < 3:
            call(main, "main_summary", "", "compaction", 200, 800)
    return records


def _many_executions(scratch: Path, divisor: int) -> list[BenchRow]:
    data = _Recorded(np.random.default_rng(0), divisor)
    layout = RunLayout(scratch / "many")
    write_s, size = _write(layout, data, data.rank)
    _write_executions(layout, data)
    store = SealedStore(layout, "")
    lists = ["input_ids", "output_ids", "output_logprobs"]
    read_s = _best(lambda: store.dataset("requests", store.segments("requests")).to_table(columns=lists), 5)
    connection = open_connection(layout, vocabulary=False)
    questions = {
        "mean score per class per version": _seconds_of(connection, SCORE_BY_CLASS),
        "output tokens per execution": _seconds_of(connection, OUTPUT_BY_EXECUTION),
    }
    answers = [sorted(connection.sql(sql).fetchall()) for sql in (SCORE_BY_CLASS, OUTPUT_BY_EXECUTION)]
    connection.close()
    shuffled = RunLayout(scratch / "shuffled")
    _, shuffled_size = _write(shuffled, data, np.random.default_rng(1).permutation(VOCABULARY_SIZE).astype(np.int32))
    shutil.rmtree(shuffled.root)
    gc.collect()
    json_lines = _JsonLines(scratch / "requests.jsonl.zst", data)
    rows = []
    for (name, seconds), mine, theirs in zip(questions.items(), answers, json_lines.answers, strict=True):
        baseline_s, answer = theirs
        if [tuple(row) for row in mine] != answer:
            raise AssertionError(f"{name}: JSONL and segments do not agree")
        rows.append(_row(f"{name}, warm", seconds * 1e3, "ms", 20.0, at_most=True, baseline=baseline_s * 1e3))
        rows.append(_row(f"{name}, against JSONL+zstd", seconds / baseline_s, "ratio", 1 / 50, at_most=True))
    trained = data.output_tokens
    return [
        *rows,
        _row("bytes per trained token", size / trained, "bytes", 14.0, at_most=True, baseline=json_lines.size / trained),
        BenchRow("bytes per trained token, ids shuffled", shuffled_size / trained, "bytes"),
        _row(
            "writing segments, raw tokens",
            data.raw_bytes / write_s / 1e6,
            "MB/s",
            150.0,
            at_most=False,
            baseline=data.raw_bytes / json_lines.write_s / 1e6,
        ),
        _row("reading all tokens back", read_s, "s", 0.5, at_most=True),
    ]


class _Recorded:
    """Columns of many executions' requests."""

    def __init__(self, rng: np.random.Generator, divisor: int) -> None:
        self.n = EXECUTIONS * CALLS_PER_EXECUTION // divisor
        self.n_output = _lengths(rng, self.n, OUTPUT_TOKENS // divisor)
        self.n_input = _lengths(rng, self.n, INPUT_TOKENS // divisor)
        self.output_tokens, self.input_tokens = int(self.n_output.sum()), int(self.n_input.sum())
        self.raw_bytes = 4 * self.input_tokens + 8 * self.output_tokens
        self.input_ids, self.output_ids = _ids(rng, self.input_tokens), _ids(rng, self.output_tokens)
        self.logprobs = _logprobs(rng, self.output_tokens)
        self.rank = np.arange(VOCABULARY_SIZE, dtype=np.int32)
        self.execution = [f"g{index // CALLS_PER_EXECUTION // 8:05d}-{index // CALLS_PER_EXECUTION % 8:02d}" for index in range(self.n)]
        self.role_class = [("main_task", "main_summary", "sub_task", "sub_summary")[index % 4] for index in range(self.n)]
        self.version = (np.arange(self.n) * 20 // self.n).astype(np.int32)
        self.score = {name: float(rng.random() < 0.4) for name in dict.fromkeys(self.execution)}
        self.identity = [f"{high:016x}{low:016x}" for high, low in rng.integers(0, 2**63, (self.n, 2)).tolist()]
        self.digest = [f"{high:016x}{low:016x}" for high, low in rng.integers(0, 2**63, (self.n, 2)).tolist()]

    def table(self, first: int, end: int, rank: np.ndarray) -> pa.Table:
        """Requests [first, end) as rows of the table, ids renamed by `rank`."""
        n = end - first
        inputs, outputs = _starts(self.n_input), _starts(self.n_output)
        output_slice = slice(outputs[first], outputs[end])
        columns: dict[str, Any] = {
            "execution_id": self.execution[first:end],
            "request_id": self.identity[first:end],
            "sequence": [index % CALLS_PER_EXECUTION for index in range(first, end)],
            "parent_id": ["" if index % CALLS_PER_EXECUTION == 0 else self.identity[index - 1] for index in range(first, end)],
            "role_class": self.role_class[first:end],
            "input_ids": _lists(rank[self.input_ids[inputs[first] : inputs[end]]], inputs[first : end + 1], pa.int32()),
            "output_ids": _lists(rank[self.output_ids[output_slice]], outputs[first : end + 1], pa.int32()),
            "output_logprobs": _lists(self.logprobs[output_slice], outputs[first : end + 1], pa.float32()),
            "version_spans": [
                [{"version": version, "start": 0, "end": length}]
                for version, length in zip(self.version[first:end].tolist(), self.n_output[first:end].tolist(), strict=True)
            ],
            "request_digest": self.digest[first:end],
            "history_key": self.digest[first:end][::-1],
            "engine_ids": [["cell-0"]] * n,
            "started_s": 1.7e9 + 0.731 * np.arange(first, end),
            "ended_s": 1.7e9 + 0.731 * np.arange(first, end) + 3.3,
            "recorded_s": 1.7e9 + 0.731 * np.arange(first, end) + 3.4,
            "n_input": self.n_input[first:end].astype(np.int32),
            "n_output": self.n_output[first:end].astype(np.int32),
            "version_first": self.version[first:end],
            "version_last": self.version[first:end],
        }
        constants: Row = {
            "run_id": "many", "agent_id": "", "parent_agent_id": "", "branch_reason": "extension", "trainable": True, "untrainable_reason": "",
            "finish_reason": "tool_calls", "temperature": 1.0, "attempts": 1, "reroutes": 0, "cached_tokens": 0, "api": "anthropic",
            "model_requested": "policy", "stream": True, "metadata": "{}",
        }  # fmt: skip
        schema = SCHEMAS["requests"]
        arrays = [
            value
            if isinstance(value := columns.get(field.name), pa.ListArray)
            else pa.array(columns.get(field.name, [constants.get(field.name)] * n), field.type)
            for field in schema
        ]
        return pa.table(arrays, schema=schema)


def _seconds_of(connection: duckdb.DuckDBPyConnection, sql: str) -> float:
    return _best(lambda: connection.sql(sql).fetchall(), 15)


def _write(layout: RunLayout, data: _Recorded, rank: np.ndarray) -> tuple[float, int]:
    """Least seconds of three to seal all requests durably, and their bytes."""
    store = SealedStore(layout, "")
    bounds = [data.n * part // SEGMENTS for part in range(SEGMENTS + 1)]
    tables = [data.table(first, end, rank) for first, end in itertools.pairwise(bounds)]

    def seal() -> None:
        for part, table in enumerate(tables):
            store.seal("requests", "proxy-0", f"proxy-0-{part:06d}", table, sealed_s=0.0)

    seconds = _best(seal, 3)
    return seconds, sum(segment.bytes for segment in store.segments("requests"))


def _write_executions(layout: RunLayout, data: _Recorded) -> None:
    with SegmentWriter(layout, "executions", "coordinator", url="") as writer:
        writer.append([{"execution_id": name, "score": score, "validity": "valid"} for name, score in data.score.items()])


class _JsonLines:
    """The same records as JSON lines under zstd, and the same questions through DuckDB's JSON reader."""

    def __init__(self, path: Path, data: _Recorded) -> None:
        inputs, outputs = _starts(data.n_input), _starts(data.n_output)
        started = time.perf_counter()
        with pa.CompressedOutputStream(pa.OSFile(str(path), "wb"), "zstd") as file:
            for index in range(data.n):
                row = {
                    "request_id": data.identity[index],
                    "execution_id": data.execution[index],
                    "role_class": data.role_class[index],
                    "version": int(data.version[index]),
                    "score": data.score[data.execution[index]],
                    "n_output": int(data.n_output[index]),
                    "input_ids": data.input_ids[inputs[index] : inputs[index + 1]],
                    "output_ids": data.output_ids[outputs[index] : outputs[index + 1]],
                    "output_logprobs": data.logprobs[outputs[index] : outputs[index + 1]],
                }
                file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        self.write_s = time.perf_counter() - started
        self.size = path.stat().st_size
        connection = duckdb.connect()
        source = f"read_json('{path}', format = 'newline_delimited', maximum_object_size = 67108864)"
        self.answers = []
        for sql in (
            f"SELECT role_class, version, avg(score) FROM {source} GROUP BY ALL",
            f"SELECT execution_id, sum(n_output)::BIGINT FROM {source} GROUP BY ALL",
        ):
            started = time.perf_counter()
            answer = sorted(connection.sql(sql).fetchall())
            self.answers.append((time.perf_counter() - started, answer))


def _ids(rng: np.random.Generator, n: int) -> np.ndarray:
    """int32[n] by Zipf's law: rank r with probability proportional to 1/r."""
    ids = np.empty(n, np.int32)
    for first in range(0, n, 4_000_000):
        part = rng.random(min(4_000_000, n - first), dtype=np.float32)
        ids[first : first + len(part)] = np.minimum(VOCABULARY_SIZE - 1, (VOCABULARY_SIZE**part).astype(np.int64) - 1)
    return ids


def _logprobs(rng: np.random.Generator, n: int) -> np.ndarray:
    return (-rng.exponential(0.6, n) * (rng.random(n) < 0.6) - rng.exponential(1e-3, n)).astype(np.float32)


def _lengths(rng: np.random.Generator, n: int, total: int) -> np.ndarray:
    lengths = rng.lognormal(0.0, 0.8, n)
    return np.maximum(1, lengths * (total / lengths.sum())).astype(np.int64)


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _lists(values: np.ndarray, starts: np.ndarray, kind: pa.DataType) -> pa.ListArray:
    offsets = pa.array((starts - starts[0]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(values), type=pa.list_(pa.field("item", kind, nullable=False)))


def _best(action: Callable[[], Any], repeats: int) -> float:
    """Least seconds of several repeats."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _row(name: str, value: float, unit: str, target: float, *, at_most: bool, baseline: float | None = None) -> BenchRow:
    ok = value <= target if at_most else value >= target
    return BenchRow(name, value, unit, f"{'<=' if at_most else '>='} {target:g}", ok, baseline)
