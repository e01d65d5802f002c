-- What exactly was one admitted trajectory trained on?
-- Takes an execution id and the number of its draw, from 0.
-- One row per token: text, where it came from, whether it is a target, behaviour log-prob and version.
CREATE MACRO rendered_trajectory(execution, draw) AS TABLE
WITH chosen AS (SELECT path_request_ids, targets FROM admissions WHERE execution_id = execution AND trajectory = draw::INTEGER),
path AS (SELECT unnest(path_request_ids) AS request_id, generate_subscripts(path_request_ids, 1) - 1 AS node FROM chosen),
runs AS (SELECT unnest(targets, recursive := true) FROM chosen),
calls AS (SELECT * FROM path JOIN requests USING (request_id) WHERE execution_id = execution),
tokens AS (
    SELECT node, sequence, 0 AS part, unnest(input_ids) AS token_id, generate_subscripts(input_ids, 1) - 1 AS place, NULL AS logprob, NULL AS version
    FROM calls
    UNION ALL
    SELECT node, sequence, 1, token_id, place, logprob, list_filter(version_spans, lambda span: span.start <= place AND place < span."end")[1].version
    FROM (
        SELECT
            node, sequence, version_spans,
            unnest(output_ids) AS token_id,
            unnest(output_logprobs) AS logprob,
            generate_subscripts(output_ids, 1) - 1 AS place
        FROM calls
    )
)
SELECT
    row_number() OVER (ORDER BY node, part, place) - 1 AS position,
    sequence,
    token_id,
    text,
    CASE part WHEN 0 THEN 'supplied' ELSE 'emitted' END AS provenance,
    part = 1 AND EXISTS (FROM runs WHERE runs.node = tokens.node AND place >= runs.start AND place < runs."end") AS target,
    logprob,
    version
FROM tokens LEFT JOIN vocabulary USING (token_id)
ORDER BY position;
