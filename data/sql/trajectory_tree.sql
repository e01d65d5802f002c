-- What does one execution's trajectory tree look like?
-- Takes an execution id.
-- Rows in commit order; `depth` counts calls from the root, `trajectories` the draws whose path has the node.
CREATE MACRO trajectory_tree(execution) AS TABLE
WITH RECURSIVE nodes AS (SELECT * FROM requests WHERE execution_id = execution),
depths AS (
    SELECT request_id, 0 AS depth FROM nodes WHERE parent_id = ''
    UNION ALL
    SELECT nodes.request_id, depth + 1 FROM nodes JOIN depths ON nodes.parent_id = depths.request_id
),
drawn AS (
    SELECT unnest(path_request_ids) AS request_id, trajectory FROM admissions WHERE execution_id = execution AND admitted
)
SELECT
    sequence, depth, agent_id, role_class, branch_reason, n_input, n_output, version_first, version_last, trainable, finish_reason,
    (SELECT list(trajectory ORDER BY trajectory) FROM drawn WHERE drawn.request_id = nodes.request_id) AS trajectories,
    request_id, parent_id
FROM nodes JOIN depths USING (request_id)
ORDER BY sequence;
