"""Continuous 1F1B in real processes: where it pauses, what it keeps, when it starts and drains."""

from training_cases import Case

from gyre_lib.training.local_cells import LocalCells
from gyre_lib.training.packing import PackingBuffer, PackingSettings


def test_pauses_keep_the_pipelines_state(untied: Case) -> None:
    """Groups arrive one by one. Where a rank stops, what it has in flight follows from the micro-steps begun alone: it is the same on all
    ranks of a stage, whenever they get there. One start-up and one drain however often the stream paused."""
    buffer = PackingBuffer(PackingSettings(row_tokens=400))
    with LocalCells(untied.model_dir, buffer, untied.settings, tp=2, pp=2) as cells:
        groups = list(untied.batches[0])
        buffer.open_batch(0, len(groups))
        cells.send(0, "train", 0)

        def tick() -> None:
            if groups and cells.waits >= 20:
                cells.waits = 0
                buffer.add_group(groups.pop(0))

        reports = cells.collect([0], tick)[0]
    assert len(reports[0].paused_at) >= 3 and reports[0].paused_at[0] == (0, 0)
    for rank, report in enumerate(reports):
        warm = 1 if rank < 2 else 0
        assert all(in_flight == min(begun, warm) for begun, in_flight in report.paused_at[:-1])
        assert (report.startups, report.drains, report.scored) == (1, 1, 0)
    assert len({(report.micro_steps, report.tokens) for report in reports}) == 1


def test_an_empty_stream_is_neither_started_nor_drained(untied: Case) -> None:
    buffer = PackingBuffer(PackingSettings(row_tokens=100))
    with LocalCells(untied.model_dir, buffer, untied.settings, pp=2) as cells:
        buffer.open_batch(0, 0)
        cells.send(0, "train", 0)
        reports = cells.collect([0])[0]
    assert all((report.startups, report.drains, report.micro_steps) == (0, 0, 0) for report in reports)


def test_work_that_comes_back_after_the_drain_is_done(untied: Case) -> None:
    """The first cell drains, then finds itself with the other's micro-step: a second start-up, the only cause there is for one."""
    buffer = PackingBuffer(PackingSettings(row_tokens=400))
    with LocalCells(untied.model_dir, buffer, untied.settings, cells=2, pp=2) as cells:
        buffer.open_batch(0, 3)
        for group in untied.batches[0]:
            buffer.add_group(group)
        held = buffer.claim(1, 0.0)
        cells.send(0, "train", 0)

        def tick() -> None:
            if cells.waits > 20 and 1 not in buffer._out:
                buffer.hand_back(1)

        first, second = cells.collect([0], tick)[0]
    assert buffer.finished and held.micro_step_id not in buffer._claimed
    assert first.startups == first.drains == second.startups == second.drains == 2
