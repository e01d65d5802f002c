-- How long was each cell in each role, and what share of the run is that?
CREATE VIEW role_time AS
SELECT cell, role, count(*) AS intervals, sum(duration_s) AS seconds, sum(duration_s) / sum(sum(duration_s)) OVER (PARTITION BY cell) AS share
FROM role_timeline
GROUP BY cell, role
ORDER BY cell, role;
