-- How did cells move in each burst: joins, failures, requests that moved, water level at each start?
CREATE VIEW transitions_by_burst AS
SELECT burst, cell, direction, outcome, started_s, duration_s, rerouted_executions, rerouted_requests, water_level, weight_version, detail
FROM transitions
ORDER BY started_s;
