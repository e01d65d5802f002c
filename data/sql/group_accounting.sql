-- Is every group accounted for exactly once?
-- One row per status; `consumed_twice` counts groups that were consumed in two different steps, which must never happen.
CREATE VIEW group_accounting AS
SELECT
    status,
    count(*) AS groups,
    sum(executions)::BIGINT AS executions,
    sum(valid_executions)::BIGINT AS valid_executions,
    count(*) FILTER (
        group_id IN (
            SELECT group_id FROM groups_log WHERE consumed_step IS NOT NULL GROUP BY group_id HAVING count(DISTINCT consumed_step) > 1
        )
    ) AS consumed_twice
FROM groups
GROUP BY status
ORDER BY status;
