"""The objective over packed rows, with a bigram table as the policy: small enough for every invariant to be exact."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_lib.training.advantages import advantages
from gyre_lib.training.execution_ratio import execution_ratio, gate, log_ratio_sums
from gyre_lib.training.log_probs import _VocabularyLogProb
from gyre_lib.training.micro_steps import MicroStep, PlacedRow
from gyre_lib.training.objective import Bounds, NonFiniteLogProb, check_finite, unnormalised_loss
from gyre_lib.training.packed_batch import PackedBatch, pack
from gyre_lib.training.packing import PackingBuffer, PackingSettings, ReadyExecution, ReadyGroup
from gyre_lib.training.step_metrics import StepMetrics
from gyre_lib.trajectories.materialisation import TrajectoryRow

VOCAB = 7
CPU = torch.device("cpu")
BOUNDS = Bounds(0.995, 1.005, 5.0)
WIDE = Bounds(0.5, 2.0, 5.0)


def table(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_(True)


def log_probs(policy: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    ids = batch.token_ids
    distribution = torch.log_softmax(policy[ids[batch.positions - 1]] / batch.temperature[:, None], dim=-1)
    chosen = distribution.gather(1, ids[batch.positions][:, None]).squeeze(1)
    return chosen, -(distribution.exp() * distribution).sum(1)


def make_row(execution: str, group: str, trajectory: int, ids: list[int], targets: list[int], mu: list[float], temperature: float = 1.0):
    mask = np.isin(np.arange(len(ids)), targets)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[mask] = mu
    versions = np.where(mask, 0, -1).astype(np.int32)
    return TrajectoryRow(execution, group, trajectory, "main_task", np.array(ids, np.int32), mask, logprobs, versions, temperature)


def random_execution(rng: np.random.Generator, execution: str, group: str, reward: float, policy: torch.Tensor, noise: float = 0.1):
    rows = []
    for trajectory in range(int(rng.integers(1, 4))):
        ids = rng.integers(0, VOCAB, int(rng.integers(3, 30))).tolist()
        targets = sorted(rng.choice(np.arange(1, len(ids)), size=int(rng.integers(1, len(ids))), replace=False).tolist())
        with torch.no_grad():
            exact = torch.log_softmax(policy, dim=-1)[[ids[t - 1] for t in targets], [ids[t] for t in targets]]
        mu = np.minimum(exact.numpy() + rng.normal(0, noise, len(targets)), -1e-3).tolist()
        rows.append(make_row(execution, group, trajectory, ids, targets, mu))
    return ReadyExecution(execution, reward, rows)


def random_batch(seed: int, policy: torch.Tensor, groups: int = 2, executions: int = 3) -> list[ReadyGroup]:
    rng = np.random.default_rng(seed)
    return [
        ReadyGroup(f"g{g}", 0, [random_execution(rng, f"g{g}-{e}", f"g{g}", float(rng.integers(0, 3)), policy) for e in range(executions)])
        for g in range(groups)
    ]


def run(
    policy: torch.Tensor, groups: list[ReadyGroup], row_tokens: int = 64, bounds: Bounds = WIDE
) -> tuple[torch.Tensor, StepMetrics, int]:
    """Gradient of the whole batch through the packing buffer, as a cell would make it, divided by E."""
    buffer = PackingBuffer(PackingSettings(row_tokens=row_tokens, row_limit_tokens=1000))
    buffer.open_batch(0, len(groups))
    for group in groups:
        buffer.add_group(group)
    metrics = StepMetrics(CPU)
    policy.grad = torch.zeros_like(policy)
    while not buffer.finished:
        micro_step = buffer.claim(0, 0.0)
        assert isinstance(micro_step, MicroStep)
        batch = pack(micro_step, 0, CPU)
        chosen, entropy = log_probs(policy, batch)
        sums = log_ratio_sums(chosen.detach() - batch.logprobs, batch)
        if micro_step.kind == "score":
            counts = torch.bincount(batch.execution).tolist()
            stats = {"scores": dict(zip(batch.execution_ids, zip(sums.tolist(), counts, strict=True), strict=True))}
        else:
            stats = {}
            unnormalised_loss(chosen, entropy, sums, batch, bounds, 0, metrics).backward()
        buffer.done(micro_step.micro_step_id, 0, 0.0, stats)
    return policy.grad / max(buffer.executions, 1), metrics, buffer.executions


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-6, atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), row_tokens=st.sampled_from([1, 20, 33, 60, 500]))
def test_packing_and_scoring_change_nothing(seed: int, row_tokens: int) -> None:
    policy = table(seed)
    groups = random_batch(seed, policy)
    whole, metrics, _ = run(policy, groups, row_tokens=10_000)
    packed, packed_metrics, _ = run(policy, groups, row_tokens=row_tokens)
    assert same(whole, packed)
    a, b = metrics.report(1), packed_metrics.report(1)
    for name in (
        "loss",
        "gate_fraction_executions",
        "gate_fraction_tokens",
        "kl",
        "entropy",
        "ratio_mean",
        "trained_executions",
        "target_tokens",
    ):
        assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-9), name


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_splitting_an_execution_into_more_rows_changes_nothing(seed: int) -> None:
    """A bigram's prediction needs one token of context, so a row cut anywhere, with that token repeated, says the same."""
    policy, rng = table(seed), np.random.default_rng(seed)
    groups = random_batch(seed, policy)

    def cut(row: TrajectoryRow) -> list[TrajectoryRow]:
        at = int(rng.integers(1, len(row.token_ids)))
        parts = [(0, at), (at - 1, len(row.token_ids))]
        rows = []
        for number, (a, b) in enumerate(parts):
            arrays = {name: getattr(row, name)[a:b].copy() for name in ("token_ids", "targets", "logprobs", "versions")}
            arrays["targets"][0] = arrays["targets"][0] and number == 0
            rows.append(replace(row, trajectory=2 * row.trajectory + number, **arrays))
        return rows

    split = [
        replace(group, executions=[replace(e, rows=[part for row in e.rows for part in cut(row)]) for e in group.executions])
        for group in groups
    ]
    assert same(run(policy, groups)[0], run(policy, split, row_tokens=40)[0])


def test_permutation_and_extra_context_change_nothing() -> None:
    policy, rng = table(), np.random.default_rng(1)
    groups = random_batch(1, policy)

    def longer(row: TrajectoryRow) -> TrajectoryRow:
        extra = int(rng.integers(1, 9))
        return replace(
            row,
            token_ids=np.concatenate([rng.integers(0, VOCAB, extra).astype(np.int32), row.token_ids]),
            targets=np.concatenate([np.zeros(extra, bool), row.targets]),
            logprobs=np.concatenate([np.full(extra, -3.0, np.float32), row.logprobs]),
            versions=np.concatenate([np.full(extra, -1, np.int32), row.versions]),
        )

    other = [
        replace(group, executions=[replace(e, rows=[longer(row) for row in reversed(e.rows)]) for e in reversed(group.executions)])
        for group in reversed(groups)
    ]
    assert same(run(policy, groups)[0], run(policy, other)[0])


@pytest.mark.parametrize("offset", [-0.02, -0.004, 0.0, 0.004, 0.02])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_one_trajectory_is_gspo_token(offset: float, reward: float) -> None:
    """Where all tokens have the same log-ratio, token weights are the sequence ratio and the update is GSPO-token's."""
    policy = table(3)
    ids, targets = [1, 4, 2, 6, 0, 3], [2, 3, 5]
    with torch.no_grad():
        exact = torch.log_softmax(policy, dim=-1)[[ids[t - 1] for t in targets], [ids[t] for t in targets]]
    row = make_row("g0-0", "g0", 0, ids, targets, (exact - offset).tolist())
    other = ReadyExecution("g0-1", 1.0 - reward, [])
    gradient, _, executions = run(policy, [ReadyGroup("g0", 0, [ReadyExecution("g0-0", reward, [row]), other])], bounds=BOUNDS)
    plain = policy.detach().clone().requires_grad_(True)
    chosen = torch.log_softmax(plain, dim=-1)[[ids[t - 1] for t in targets], [ids[t] for t in targets]]
    mu = torch.tensor(row.logprobs[row.targets])
    advantage = advantages([reward, 1.0 - reward], True)[0]
    ratio = (chosen - mu).mean().exp()
    (-torch.minimum(ratio * advantage, ratio.clamp(BOUNDS.low, BOUNDS.high) * advantage) / executions).backward()
    assert torch.allclose(gradient, plain.grad, rtol=1e-5, atol=1e-8)


def test_gate_is_sign_aware() -> None:
    ratio = torch.tensor([0.9, 1.0, 1.1, 0.9, 1.0, 1.1], dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    assert gate(ratio, advantage, 0.995, 1.005).tolist() == [True, True, False, False, True, True]


def test_ratio_is_the_executions_not_the_rows() -> None:
    rows = [make_row("e", "g", n, [0, 1, 2], [1, 2], mu) for n, mu in enumerate([[-1.0, -1.0], [-3.0, -3.0]])]
    batch = pack(MicroStep("0", 0, "train", (tuple(PlacedRow(row, 1.0, 4) for row in rows),)), 0, CPU)
    log_ratio = torch.full((4,), -2.0) - batch.logprobs
    assert execution_ratio(log_ratio_sums(log_ratio, batch), batch).tolist() == pytest.approx([1.0])


def test_token_weight_is_capped_and_reported_raw() -> None:
    policy = table(5)
    ids = [0, 1, 2]
    with torch.no_grad():
        exact = torch.log_softmax(policy, dim=-1)[[0, 1], [1, 2]]
    low = make_row("g0-0", "g0", 0, ids, [1, 2], [float(exact[0]) - math.log(20.0), float(exact[1])])
    gradient, metrics, _ = run(
        policy,
        [ReadyGroup("g0", 0, [ReadyExecution("g0-0", 0.0, [low]), ReadyExecution("g0-1", 1.0, [])])],
        bounds=Bounds(0.01, 100.0, 5.0),
    )
    plain = policy.detach().clone().requires_grad_(True)
    chosen = torch.log_softmax(plain, dim=-1)[[0, 1], [1, 2]]
    advantage = advantages([0.0, 1.0], True)[0]
    (-(advantage / 2) * (torch.tensor([5.0, 1.0]) * chosen).sum() / 2).backward()
    assert torch.allclose(gradient, plain.grad, rtol=1e-5)
    report = metrics.report(2)
    assert report["token_weight_raw"] == pytest.approx(10.5, rel=1e-5)
    assert report["token_weight"] == pytest.approx(3.0, rel=1e-5)
    assert report["capped_token_fraction"] == 0.5


def test_c24_an_execution_without_targets_gives_only_its_reward() -> None:
    """Baseline by execution, whatever the number of its trajectories: 0.5, not 0.75."""
    policy, rng = table(), np.random.default_rng(2)
    one = random_execution(rng, "g0-0", "g0", 1.0, policy)
    masked = ReadyExecution("g0-1", 0.0, [replace(row, execution_id="g0-1", targets=np.zeros_like(row.targets)) for row in one.rows])
    with_rows = run(policy, [ReadyGroup("g0", 0, [one, masked])])
    without = run(policy, [ReadyGroup("g0", 0, [one, ReadyExecution("g0-1", 0.0, [])])])
    assert same(with_rows[0], without[0]) and with_rows[2] == without[2] == 2
    assert advantages([1.0, 0.0], False) == [0.5, -0.5]


def test_c24_a_single_valid_execution_trains_nothing() -> None:
    policy, rng = table(), np.random.default_rng(2)
    gradient, _, executions = run(policy, [ReadyGroup("g0", 0, [random_execution(rng, "g0-0", "g0", 1.0, policy)])])
    assert executions == 1 and not gradient.any()


def test_c23_advantages_by_group_id() -> None:
    """Groups of 4, 3 and 4 executions, one of them all 5.0: each group's own baseline, zeros for that one."""
    policy, rng = table(), np.random.default_rng(4)
    rewards = {"g0": [1.0, 0.0, 0.0, 1.0], "g1": [5.0, 5.0, 5.0], "g2": [0.0, 0.0, 0.0, 8.0]}
    groups = [
        ReadyGroup(g, 0, [random_execution(rng, f"{g}-{n}", g, reward, policy) for n, reward in enumerate(values)])
        for g, values in rewards.items()
    ]
    whole, _, executions = run(policy, groups)
    parts = [run(policy, [group]) for group in groups]
    assert executions == 11 and not parts[1][0].any()
    assert same(whole * 11, sum(gradient * count for gradient, _, count in parts))


@given(st.lists(st.floats(-10, 10), min_size=0, max_size=9))
def test_advantages_are_centred_and_scaled(rewards: list[float]) -> None:
    values = advantages(rewards, True)
    assert len(values) == len(rewards)
    assert sum(values) == pytest.approx(0.0, abs=1e-6)
    assert all(abs(value) <= math.sqrt(max(len(rewards), 1)) for value in values)


def test_finite_differences() -> None:
    """With token weights and gates held at their values here (they carry no gradient), the loss's slope is the gradient."""
    policy = table(8)
    groups = random_batch(8, policy)
    gradient, _, executions = run(policy, groups)
    start = policy.detach().numpy().copy()

    def chosen(values: np.ndarray, row: TrajectoryRow) -> np.ndarray:
        positions = np.flatnonzero(row.targets)
        logits = values[row.token_ids[positions - 1]] / row.temperature
        logits = logits - logits.max(1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        return logits[np.arange(len(positions)), row.token_ids[positions]]

    terms = []
    for group in groups:
        values = advantages([e.reward for e in group.executions], True)
        for execution, advantage in zip(group.executions, values, strict=True):
            ratios = [chosen(start, row) - row.logprobs[row.targets] for row in execution.rows]
            mean = float(np.concatenate(ratios).mean())
            if (advantage > 0 and math.exp(mean) > WIDE.high) or (advantage < 0 and math.exp(mean) < WIDE.low):
                continue
            count = sum(len(ratio) for ratio in ratios)
            terms += [(row, advantage / count, np.minimum(np.exp(r), 5.0)) for row, r in zip(execution.rows, ratios, strict=True)]

    def loss(values: np.ndarray) -> float:
        return -sum(scale * float((weight * chosen(values, row)).sum()) for row, scale, weight in terms) / executions

    step = 1e-6
    for a in range(VOCAB):
        for b in range(VOCAB):
            up, down = start.copy(), start.copy()
            up[a, b] += step
            down[a, b] -= step
            assert (loss(up) - loss(down)) / (2 * step) == pytest.approx(float(gradient[a, b]), abs=2e-6)


class OneRank:
    def size(self) -> int:
        return 1


def test_log_prob_gradient_by_finite_differences() -> None:
    logits = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    targets = torch.tensor([0, 3, 8, 8, 2])
    assert torch.autograd.gradcheck(lambda x: _VocabularyLogProb.apply(x, targets, 0, OneRank())[0], (logits,))
    log_prob, entropy = _VocabularyLogProb.apply(logits, targets, 0, OneRank())
    distribution = torch.log_softmax(logits, dim=-1)
    assert torch.allclose(log_prob, distribution.gather(1, targets[:, None]).squeeze(1))
    assert torch.allclose(entropy, -(distribution.exp() * distribution).sum(1))


def test_nan_from_the_policy_stops_the_step_by_name() -> None:
    rows = tuple(PlacedRow(make_row(e, "g", 0, [0, 1, 2], [1, 2], [-1.0, -1.0]), 1.0, 2) for e in ("good", "bad"))
    batch = pack(MicroStep("0", 0, "train", (rows,)), 0, CPU)
    values = torch.tensor([-1.0, -1.0, -1.0, float("nan")])
    with pytest.raises(NonFiniteLogProb, match="execution bad: the trainer's log-prob of target 3 is nan"):
        check_finite(values, batch)


def test_mismatch_is_over_targets_of_this_version() -> None:
    policy, rng = table(), np.random.default_rng(0)
    execution = random_execution(rng, "g0-0", "g0", 1.0, policy, noise=0.0)
    old = [replace(row, versions=np.where(row.targets, 0, -1).astype(np.int32), logprobs=row.logprobs - 0.5) for row in execution.rows]
    groups = [ReadyGroup("g0", 0, [replace(execution, rows=old), ReadyExecution("g0-1", 0.0, [])])]
    report = run(policy, groups)[1].report(2)
    assert report["logprob_mismatch_mean"] == pytest.approx(0.5, abs=1e-2)
    stale = [replace(row, versions=np.where(row.targets, 7, -1).astype(np.int32)) for row in old]
    report = run(policy, [ReadyGroup("g0", 0, [replace(execution, rows=stale), ReadyExecution("g0-1", 0.0, [])])])[1].report(2)
    assert report["logprob_mismatch_mean"] is None and report["logprob_mismatch_max"] is None
