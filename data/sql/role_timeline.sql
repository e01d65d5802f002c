-- Which role did each cell have, from when to when?
-- rollout, to_training, training, to_rollout; `recovering` after a transition that failed or came too late. Times are Unix seconds.
CREATE VIEW role_timeline AS
WITH bounds AS (
    SELECT
        least((SELECT min(at_s) FROM engines), (SELECT min(dispatched_s) FROM groups), (SELECT min(started_s) FROM transitions)) AS begin_s,
        greatest(
            (SELECT max(at_s) FROM engines),
            (SELECT max(recorded_s) FROM executions),
            (SELECT max(updated_s) FROM train_steps),
            (SELECT max(coalesce(ended_s, started_s)) FROM transitions)
        ) AS end_s
),
cells AS (SELECT cell FROM engines WHERE cell >= 0 UNION SELECT cell FROM transitions),
moves AS (SELECT *, lead(started_s) OVER (PARTITION BY cell ORDER BY started_s) AS next_s FROM transitions),
firsts AS (SELECT cell, min(started_s) AS first_s FROM transitions GROUP BY cell),
intervals AS (
    SELECT cell, 'rollout' AS role, begin_s AS started_s, coalesce(first_s, end_s) AS ended_s FROM cells LEFT JOIN firsts USING (cell), bounds
    UNION ALL
    SELECT cell, direction, started_s, coalesce(ended_s, next_s, end_s) FROM moves, bounds
    UNION ALL
    SELECT
        cell,
        CASE WHEN direction = 'to_rollout' THEN 'rollout' WHEN outcome = 'done' THEN 'training' ELSE 'recovering' END,
        ended_s,
        coalesce(next_s, end_s)
    FROM moves, bounds
    WHERE ended_s IS NOT NULL
)
SELECT cell, role, started_s, ended_s, ended_s - started_s AS duration_s
FROM intervals
WHERE ended_s > started_s
ORDER BY cell, started_s;
