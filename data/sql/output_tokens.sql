-- How many tokens did each execution cost: emitted, supplied, model calls?
CREATE VIEW output_tokens AS
SELECT execution_id, count(*) AS calls, sum(n_output)::BIGINT AS output_tokens, sum(n_input)::BIGINT AS input_tokens
FROM requests
GROUP BY execution_id
ORDER BY execution_id;
