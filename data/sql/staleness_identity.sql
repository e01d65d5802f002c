-- Does the exact staleness identity hold?
-- Over the S steps of complete bursts: sum of staleness = B S (phi + (mu - 1)/2) - U, with U the outstanding staleness of groups that
-- were dispatched before step S and not consumed before it. A group that is lost and replaced under a new id counts under that id.
CREATE VIEW staleness_identity AS
WITH settings AS (
    SELECT
        max(value::INTEGER) FILTER (field = 'scheduling.groups_per_batch') AS b,
        max(value::INTEGER) FILTER (field = 'scheduling.steps_per_burst') AS mu,
        max(value::DOUBLE) FILTER (field = 'scheduling.extra_dispatch') AS phi
    FROM config
    WHERE field IN ('scheduling.groups_per_batch', 'scheduling.steps_per_burst', 'scheduling.extra_dispatch')
),
bounds AS (SELECT b, mu, phi, mu * (coalesce((SELECT max(step) + 1 FROM train_steps), 0) // mu) AS s FROM settings),
counted AS (SELECT * FROM groups WHERE status <> 'requeued'),
sums AS (
    SELECT
        count(*) FILTER (consumed_step < s) AS consumed_groups,
        coalesce(sum(consumed_version - dispatch_version) FILTER (consumed_step < s), 0)::BIGINT AS staleness_sum,
        coalesce(sum(s - dispatch_version) FILTER (dispatch_version < s AND coalesce(consumed_step >= s, true)), 0)::BIGINT AS outstanding
    FROM bounds LEFT JOIN counted ON true
)
SELECT
    s AS steps,
    consumed_groups,
    staleness_sum,
    b * s * (phi + (mu - 1) / 2) - outstanding AS expected_sum,
    outstanding,
    staleness_sum / nullif(consumed_groups, 0) AS mean_staleness,
    phi + (mu - 1) / 2 AS steady_state_mean,
    abs(staleness_sum - (b * s * (phi + (mu - 1) / 2) - outstanding)) < 1e-9 AS holds
FROM bounds, sums;
