-- How much of what could be trained is admitted, by class?
-- A candidate is a leaf of an execution's tree; `candidate_targets` counts each token once, in the draw that would take it.
CREATE VIEW admitted_by_class AS
SELECT
    role_class,
    count(*) AS candidates,
    count(*) FILTER (admitted) AS admitted,
    sum(target_tokens)::BIGINT AS candidate_targets,
    coalesce(sum(target_tokens) FILTER (admitted), 0)::BIGINT AS admitted_targets,
    coalesce(sum(path_tokens) FILTER (admitted), 0)::BIGINT AS admitted_tokens
FROM admissions
GROUP BY role_class
ORDER BY role_class;
