-- Which model calls were tried more than once or moved between engines?
CREATE VIEW request_retries AS
SELECT execution_id, sequence, request_id, role_class, attempts, reroutes, engine_ids, finish_reason, ended_s - started_s AS seconds
FROM requests
WHERE attempts > 1 OR reroutes > 0
ORDER BY execution_id, sequence;
