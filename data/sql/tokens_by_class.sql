-- How many tokens does each class of call have, by where they came from?
-- supplied: prompts, tool results, injected text (context only). emitted: by our engines. withheld: emitted, but may not be a target.
CREATE VIEW tokens_by_class AS
SELECT
    role_class,
    count(*) AS calls,
    sum(n_input)::BIGINT AS supplied,
    sum(n_output)::BIGINT AS emitted,
    coalesce(sum(n_output) FILTER (NOT trainable), 0)::BIGINT AS withheld,
    count(DISTINCT execution_id) AS executions
FROM requests
GROUP BY role_class
ORDER BY role_class;
