"""Random executions for the property tests of this folder."""

from hypothesis import strategies as st

from gyre_lib.trajectories.classes import CLASSES, SIDE
from gyre_lib.trajectories.tito_record import RequestRecord, VersionSpan


def record(
    sequence: int,
    parent: int | None = None,
    *,
    execution: str = "g00001-00",
    role_class: str = "main_task",
    n_input: int = 3,
    n_output: int = 2,
    trainable: bool = True,
    spans: list[VersionSpan] | None = None,
    **fields: object,
) -> RequestRecord:
    """A record whose every token is unique in its execution: input ids are odd, output ids even."""
    base = sequence * 10_000
    values: dict = dict(
        run_id="run",
        execution_id=execution,
        request_id=f"{execution}-{sequence:06d}",
        sequence=sequence,
        parent_id="" if parent is None else f"{execution}-{parent:06d}",
        agent_id="",
        parent_agent_id="",
        role_class=role_class,
        branch_reason="root" if parent is None else "extension",
        input_ids=[base + 2 * i + 1 for i in range(n_input)],
        output_ids=[base + 2 * i for i in range(n_output)],
        output_logprobs=[-(i + 1) / 64 for i in range(n_output)],
        version_spans=([VersionSpan(0, 0, n_output)] if n_output else []) if spans is None else spans,
        trainable=trainable,
        untrainable_reason="" if trainable else "test",
        request_digest=f"digest-{sequence}",
        history_key=f"key-{sequence}",
        finish_reason="stop",
        temperature=1.0,
        engine_ids=["cell-0"],
        started_s=1000.0 + sequence,
        ended_s=1000.5 + sequence,
    )
    return RequestRecord(**(values | fields))


@st.composite
def executions(draw: st.DrawFn, max_nodes: int = 24) -> list[RequestRecord]:
    """A forest in sequence order: any shape, any mixture of classes, some nodes untrainable, some without output."""
    nodes = draw(st.integers(1, max_nodes))
    records = []
    for sequence in range(nodes):
        parent = draw(st.none() | st.integers(0, sequence - 1)) if sequence else None
        records.append(
            record(
                sequence,
                parent,
                role_class=draw(st.sampled_from((*CLASSES, CLASSES[0], SIDE))),
                n_input=draw(st.integers(1, 4)),
                n_output=draw(st.integers(0, 5)),
                trainable=draw(st.integers(0, 5)) > 0,
            )
        )
    return records
