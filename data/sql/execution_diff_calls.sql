-- At which model call do two executions part?
-- Takes two execution ids.
-- One row per call number: whether inputs and outputs are the same, and how many tokens each has.
CREATE MACRO execution_diff_calls(one, other) AS TABLE
WITH first AS (SELECT * FROM requests WHERE execution_id = one),
second AS (SELECT * FROM requests WHERE execution_id = other)
SELECT
    sequence,
    first.role_class AS class_one,
    second.role_class AS class_other,
    coalesce(first.input_ids = second.input_ids, false) AS same_input,
    coalesce(first.output_ids = second.output_ids, false) AS same_output,
    first.n_input AS input_one,
    second.n_input AS input_other,
    first.n_output AS output_one,
    second.n_output AS output_other
FROM first FULL JOIN second USING (sequence)
ORDER BY sequence;
