-- How stale was each consumed group, in policy versions (version before the step minus version at dispatch)?
CREATE VIEW staleness AS
SELECT
    group_id,
    task_id,
    consumed_step AS step,
    consumed_version AS version_before_step,
    dispatch_version,
    consumed_version - dispatch_version AS staleness,
    consumed_s - ready_s AS waited_s
FROM groups
WHERE consumed_step IS NOT NULL
ORDER BY step, group_id;
