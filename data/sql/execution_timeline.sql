-- What happened in one execution, in order?
-- Takes an execution id.
-- Model calls, what the harness did between them (tools, waiting), its end, evaluations. Seconds count from launch.
CREATE MACRO execution_timeline(execution) AS TABLE
WITH calls AS (SELECT *, lag(ended_s) OVER (ORDER BY started_s) AS previous_s FROM requests WHERE execution_id = execution),
happened AS (
    SELECT 'launched' AS what, launched_s AS started_s, launched_s AS ended_s, harness || ' on ' || coalesce(worker, '?') AS detail
    FROM executions WHERE execution_id = execution
    UNION ALL
    SELECT
        'model call', started_s, ended_s,
        format('#{} {} {}: {} in, {} out, {}', sequence, role_class, branch_reason, n_input, n_output, finish_reason)
    FROM calls
    UNION ALL
    SELECT 'between calls', previous_s, started_s, '' FROM calls WHERE started_s > previous_s
    UNION ALL
    SELECT 'ended', ended_s, ended_s, outcome || coalesce(' ' || outcome_detail, '') FROM executions WHERE execution_id = execution
    UNION ALL
    SELECT 'evaluation', started_s, ended_s, format('try {}: {} {}', attempt, validity, coalesce(score::VARCHAR, '')) || coalesce(' ' || detail, '')
    FROM assessments WHERE execution_id = execution
    UNION ALL
    SELECT 'settled', settled_s, settled_s, 'score ' || coalesce(score::VARCHAR, 'none') FROM executions WHERE execution_id = execution
)
SELECT
    started_s - (SELECT launched_s FROM executions WHERE execution_id = execution) AS at_s,
    ended_s - started_s AS seconds,
    what,
    detail
FROM happened
WHERE started_s IS NOT NULL
ORDER BY started_s, ended_s;
