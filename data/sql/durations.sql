-- How long do executions and queries take, and how many of them time out?
-- An execution lasts from launch to settled reward, a query (group) from its first launch to its last settled reward.
CREATE VIEW durations AS
WITH spans AS (
    SELECT 'execution' AS of, execution_id, settled_s - launched_s AS seconds, outcome FROM executions WHERE settled_s IS NOT NULL
    UNION ALL
    SELECT 'query', group_id, max(settled_s) - min(launched_s), arg_max(outcome, settled_s - launched_s)
    FROM executions
    WHERE settled_s IS NOT NULL
    GROUP BY group_id
)
SELECT
    of,
    count(*) AS n,
    avg(seconds) AS mean_s,
    median(seconds) AS median_s,
    quantile_cont(seconds, 0.9) AS p90_s,
    max(seconds) AS max_s,
    avg((outcome = 'HarnessTimeout')::INTEGER) AS harness_timeout_share,
    avg((outcome = 'OverallTimeout')::INTEGER) AS overall_timeout_share
FROM spans
GROUP BY of
ORDER BY of;
