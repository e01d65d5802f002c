"""Continuous 1F1B in real processes: where it pauses, what it keeps, when it starts and drains."""

from training_cases import Case

from gyre_lib.training.local_cells import LocalCells
from gyre_lib.training.packing import PackingBuffer, PackingSettings


def test_all_stages_pause_at_the_same_micro_step_and_keep_their_state(untied: Case) -> None:
    """Groups arrive one by one with a pause between: every stage and tensor rank stops at the same points, starts and drains once."""
    buffer = PackingBuffer(PackingSettings(row_tokens=100))
    with LocalCells(untied.model_dir, buffer, untied.settings, tp=2, pp=2) as cells:
        groups = list(untied.batches[0])
        buffer.open_batch(0, len(groups))
        cells.send(0, "train", 0)

        def tick() -> None:
            if groups and cells.waits >= 20:
                cells.waits = 0
                buffer.add_group(groups.pop(0))

        reports = cells.collect([0], tick)[0]
    positions = [position for position, _ in reports[0].paused_at]
    assert len(positions) >= 3 and positions[0] == 0
    for rank, report in enumerate(reports):
        in_flight = dict(report.paused_at)
        assert set(positions) <= set(in_flight), "every rank stops where the leader stops"
        assert in_flight[positions[1]] == (1 if rank < 2 else 0), "stage 0 of 2 keeps one micro-step in flight, the last stage none"
    assert all((report.startups, report.drains) == (1, 1) for report in reports)
    assert len({(report.micro_steps, report.scored, report.tokens) for report in reports}) == 1


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
