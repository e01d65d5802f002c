-- How do executions end, and how often in a timeout?
-- A harness timeout is scored and trained; an overall timeout ended without a valid score and is discarded.
CREATE VIEW timeouts AS
SELECT
    outcome,
    train,
    count(*) AS executions,
    count(*) / sum(count(*)) OVER (PARTITION BY train) AS share,
    count(*) FILTER (validity = 'valid') AS scored,
    avg(score) FILTER (validity = 'valid') AS mean_score
FROM executions
WHERE outcome IS NOT NULL
GROUP BY outcome, train
ORDER BY train DESC, executions DESC, outcome;
