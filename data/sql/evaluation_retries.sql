-- Which evaluations had to be tried again, and did it help?
CREATE VIEW evaluation_retries AS
SELECT
    execution_id,
    artifact_ref,
    count(*) AS tries,
    count(*) FILTER (validity = 'unresolved') AS unresolved,
    bool_or(validity = 'valid') AS resolved,
    max(score) FILTER (designated) AS score,
    sum(ended_s - started_s) AS seconds,
    arg_max(detail, attempt) AS last_detail
FROM assessments
GROUP BY execution_id, artifact_ref
HAVING count(*) > 1 OR count(*) FILTER (validity = 'unresolved') > 0
ORDER BY tries DESC, execution_id;
