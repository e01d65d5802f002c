-- How was each step's work shared between cells, and how full were its rows?
CREATE VIEW micro_steps_by_cell AS
SELECT
    step,
    cell,
    count(*) AS micro_steps,
    sum(tokens)::BIGINT AS tokens,
    sum(target_tokens)::BIGINT AS target_tokens,
    sum(tokens) / nullif(sum(tokens) + sum(coalesce(padding_tokens, 0)), 0) AS fill,
    sum(forward_backward_s) AS forward_backward_s,
    sum(tokens) / nullif(sum(forward_backward_s), 0) AS tokens_per_s
FROM micro_steps
WHERE status = 'done'
GROUP BY step, cell
ORDER BY step, cell;
