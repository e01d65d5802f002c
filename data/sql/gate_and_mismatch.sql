-- How far is training off policy: share gated by the execution ratio, KL, engine against trainer log-probs, by step?
CREATE VIEW gate_and_mismatch AS
SELECT
    step,
    gate_fraction_executions,
    gate_fraction_tokens,
    ratio_mean,
    kl,
    logprob_mismatch_mean,
    logprob_mismatch_max,
    staleness_mean
FROM train_steps
ORDER BY step;
