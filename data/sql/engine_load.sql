-- What did each engine do: calls, tokens, moves, and the version it serves now?
CREATE VIEW engine_load AS
WITH served AS (SELECT unnest(engine_ids) AS engine_id, n_output, len(engine_ids) > 1 AS moved FROM requests),
now AS (SELECT engine_id, arg_max(state, at_s) AS state, arg_max(weight_version, at_s) AS weight_version FROM engines GROUP BY engine_id)
SELECT
    engine_id,
    any_value(state) AS state,
    any_value(weight_version) AS weight_version,
    count(n_output) AS calls,
    coalesce(sum(n_output), 0)::BIGINT AS output_tokens,
    count(*) FILTER (moved) AS moved_calls
FROM now FULL JOIN served USING (engine_id)
GROUP BY engine_id
ORDER BY engine_id;
