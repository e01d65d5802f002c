-- Which advantage does each execution get within its group?
-- (reward - mean) / (sd + 1e-6) over the group's valid executions; a single valid one gets none. The sd follows training.advantage_std.
CREATE VIEW advantages AS
WITH valid AS (SELECT execution_id, group_id, score FROM executions WHERE validity = 'valid' AND score IS NOT NULL AND coalesce(train, true)),
groups_of_valid AS (SELECT group_id, count(*) AS n, avg(score) AS mean, stddev_pop(score) AS sd FROM valid GROUP BY group_id),
divide AS (SELECT coalesce(bool_or(value = 'True'), true) AS by_sd FROM config WHERE field = 'training.advantage_std')
SELECT
    execution_id,
    group_id,
    score AS reward,
    mean AS group_mean,
    sd AS group_sd,
    n AS group_valid,
    CASE WHEN n > 1 THEN (score - mean) / CASE WHEN by_sd THEN sd + 1e-6 ELSE 1 END END AS advantage
FROM valid JOIN groups_of_valid USING (group_id), divide
ORDER BY group_id, execution_id;
