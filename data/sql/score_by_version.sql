-- How does the score change with the policy version?
-- One row per version at dispatch; executions of evaluate-policy (train = false) apart. The mean is over valid scores only.
CREATE VIEW score_by_version AS
SELECT
    dispatch_version AS version,
    train,
    count(*) AS executions,
    count(*) FILTER (validity = 'valid') AS scored,
    avg(score) FILTER (validity = 'valid') AS mean_score,
    stddev_samp(score) FILTER (validity = 'valid') AS sd_score,
    avg(output_tokens) AS mean_output_tokens
FROM executions
WHERE outcome IS NOT NULL
GROUP BY ALL
ORDER BY train DESC, version;
