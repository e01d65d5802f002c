-- What does the trajectory limit cost: forward-backward tokens and time at J_max 1, 5 and unlimited?
-- Read off the recorded draws, which go on beyond the limit. Seconds assume the measured tokens per second of this run's micro-steps.
CREATE VIEW tokens_by_limit AS
WITH limits(position, max_trajectories) AS (VALUES (1, 1), (2, 5), (3, NULL)),
speed AS (SELECT sum(tokens) / nullif(sum(forward_backward_s), 0) AS tokens_per_s FROM micro_steps WHERE status = 'done')
SELECT
    coalesce(limits.max_trajectories::VARCHAR, 'unlimited') AS max_trajectories,
    count(*) AS trajectories,
    coalesce(sum(path_tokens), 0)::BIGINT AS tokens,
    coalesce(sum(target_tokens), 0)::BIGINT AS targets,
    coalesce(sum(path_tokens), 0) / any_value(tokens_per_s) AS forward_backward_s
FROM limits, speed, admissions
WHERE trajectory IS NOT NULL AND (limits.max_trajectories IS NULL OR trajectory < limits.max_trajectories)
GROUP BY position, limits.max_trajectories
ORDER BY position;
