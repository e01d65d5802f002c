-- Where do two executions differ, token by token?
-- Takes two execution ids.
-- Calls are matched by their number; only tokens that differ are shown (a missing token is null).
CREATE MACRO execution_diff(one, other) AS TABLE
WITH parts AS (
    SELECT execution_id, sequence, 'input' AS part, input_ids AS ids FROM requests WHERE execution_id IN (one, other)
    UNION ALL
    SELECT execution_id, sequence, 'output', output_ids FROM requests WHERE execution_id IN (one, other)
),
tokens AS (SELECT execution_id, sequence, part, generate_subscripts(ids, 1) - 1 AS place, unnest(ids) AS token_id FROM parts),
first AS (SELECT sequence, part, place, token_id FROM tokens WHERE execution_id = one),
second AS (SELECT sequence, part, place, token_id FROM tokens WHERE execution_id = other)
SELECT
    sequence, part, place,
    first.token_id AS token_one, v1.text AS text_one,
    second.token_id AS token_other, v2.text AS text_other
FROM first
FULL JOIN second USING (sequence, part, place)
LEFT JOIN vocabulary AS v1 ON v1.token_id = first.token_id
LEFT JOIN vocabulary AS v2 ON v2.token_id = second.token_id
WHERE first.token_id IS DISTINCT FROM second.token_id
ORDER BY sequence, part, place;
