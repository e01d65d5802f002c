-- What do executions score that have calls of a class, by the policy version that sampled them?
-- An execution weighs by its calls of that class and version.
CREATE VIEW score_by_class AS
WITH calls_of AS (SELECT execution_id, role_class, version_last AS version, count(*) AS calls FROM requests GROUP BY ALL)
SELECT role_class, version, sum(calls)::BIGINT AS calls, sum(calls * score) / sum(calls) AS mean_score
FROM calls_of
JOIN (SELECT execution_id, score FROM executions WHERE validity = 'valid') USING (execution_id)
WHERE version IS NOT NULL
GROUP BY ALL
ORDER BY ALL;
