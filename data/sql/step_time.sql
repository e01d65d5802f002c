-- Where does the time of a training step go?
CREATE VIEW step_time AS
SELECT step, cells, phase, seconds, duration_s AS step_s
FROM (SELECT step, cells, duration_s, unnest(map_keys(seconds)) AS phase, unnest(map_values(seconds)) AS seconds FROM train_steps)
ORDER BY step, seconds DESC;
