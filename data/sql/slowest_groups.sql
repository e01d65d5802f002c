-- Which groups took longest, and which execution held each of them up?
CREATE VIEW slowest_groups AS
SELECT
    group_id,
    groups.task_id,
    status,
    ready_s - groups.dispatched_s AS seconds,
    arg_max(execution_id, settled_s) AS last_execution,
    arg_max(outcome, settled_s) AS last_outcome,
    max(settled_s) - median(settled_s) AS straggled_s,
    mean_reward
FROM groups
LEFT JOIN executions USING (group_id)
GROUP BY group_id, groups.task_id, status, ready_s, groups.dispatched_s, mean_reward
ORDER BY seconds DESC NULLS LAST, group_id;
