-- What do executions score that have calls of a class, by the policy version that sampled them?
-- An execution weighs by its calls of that class and version.
CREATE VIEW score_by_class AS
SELECT role_class, version_last AS version, count(*) AS calls, avg(score) AS mean_score
FROM requests
JOIN (SELECT execution_id, score FROM executions WHERE validity = 'valid') USING (execution_id)
WHERE version_last IS NOT NULL
GROUP BY ALL
ORDER BY ALL;
