-- How long does publishing a version take, by engine?
CREATE VIEW publication_times AS
SELECT version, engine_id, ok, duration_s, bytes, bytes / nullif(duration_s, 0) / 1e6 AS mb_per_s, detail
FROM publications
ORDER BY version, engine_id;
