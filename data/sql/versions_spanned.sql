-- Which executions were sampled from more than one policy version?
CREATE VIEW versions_spanned AS
SELECT execution_id, min(version_first) AS first_version, max(version_last) AS last_version, count(*) AS calls
FROM requests
WHERE version_first IS NOT NULL
GROUP BY execution_id
HAVING min(version_first) < max(version_last)
ORDER BY last_version - first_version DESC, execution_id;
