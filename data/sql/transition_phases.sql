-- Where does the time of role changes go?
-- One row per direction and phase; `total` is the whole transition.
CREATE VIEW transition_phases AS
WITH parts AS (
    SELECT direction, unnest(map_entries(phases), recursive := true) FROM transitions WHERE outcome = 'done'
    UNION ALL
    SELECT direction, 'total', duration_s FROM transitions WHERE outcome = 'done'
)
SELECT direction, "key" AS phase, count(*) AS transitions, avg("value") AS mean_s, median("value") AS median_s, max("value") AS max_s
FROM parts
GROUP BY ALL
ORDER BY direction, mean_s DESC, phase;
