-- How does training go: score, loss, gradient norm, tokens and time by step?
CREATE VIEW training_curve AS
SELECT step, burst, cells, executions, trajectories, mean_reward, loss, grad_norm, entropy, tokens, target_tokens, staleness_mean, duration_s
FROM train_steps
ORDER BY step;
