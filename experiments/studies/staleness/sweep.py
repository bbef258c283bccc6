"""Does a policy lose by learning from stale samples, and which correction helps?

    rlhf-jax sweep experiments/studies/staleness/sweep.py --out runs/staleness --map
    python experiments studies.staleness.figures runs/staleness

PPO on the language of the quickstart, against its reward model. The sampler is 0, 1 or
4 iterations behind (`rlhf-jax ppo --max-staleness`). The corrections are

    truncate    recomputed log-probs, and importance weights over the sampler of at
                most 2: the default of --max-staleness
    ratio       the clipped ratio to the sampler's log-probs (--sampler-correction
                ratio)
    none        none: the responses are treated as on-policy, which the trainers
                reject

at three β, which give a frontier of gold against KL. The 105 runs are recorded in
recorded/staleness/large_steps. `small_steps` is the same at smaller learning rates.
"""

KL_COEFS = (0.05, 0.2, 0.8)
SAMPLERS = {"on_policy": (0, "truncate")} | {
    f"{staleness}_{correction}": (staleness, correction)
    for staleness in (1, 4)
    for correction in ("truncate", "ratio", "none")
}

question = "What does learning from samples of an older policy cost?"
program = ["experiments", "studies.policies.reviews"]
seeds = [0, 1, 2, 3, 4]
options = {
    "prepared": "runs/prepared",
    "hidden_size": 64,
    "sft_steps": 300,
    "num_steps": 40,
    "batch_size": 64,
    "num_epochs": 2,
    "num_minibatches": 2,
    "policy_learning_rate": 1e-3,
    "critic_learning_rate": 2e-3,
    "num_evaluated": 256,
    "look": "training",
    "sample_every": 4,
    "snapshot_every": 40,
    "keep_snapshots": 1,
}
grid = {
    "sampler": [
        {"label": label, "staleness": staleness, "correction": correction}
        for label, (staleness, correction) in SAMPLERS.items()
    ],
    "kl_coef": list(KL_COEFS),
}
measures = {
    "gold": {"summary": "policy.gold"},
    "score": {"summary": "policy.score"},
    "kl": {"summary": "policy.kl"},
    "fluency": {"summary": "policy.fluency"},
    "distinct": {"summary": "policy.distinct"},
}
claims = {}
for kl_coef in KL_COEFS:
    for staleness in (1, 4):
        stale = f"sampler='{staleness}_{{}}', kl_coef={kl_coef}"
        fresh = f"gold(sampler='on_policy', kl_coef={kl_coef})"
        corrected = f"gold({stale.format('truncate')})"
        claims |= {
            f"{staleness} behind without a correction is worse, β = {kl_coef}": (
                f"gold({stale.format('none')}) < {fresh}"
            ),
            f"{staleness} behind, corrected, is within 0.1, β = {kl_coef}": (
                f"{corrected} > {fresh} - 0.1"
            ),
            f"{staleness} behind, truncation beats no correction, β = {kl_coef}": (
                f"{corrected} > gold({stale.format('none')})"
            ),
            f"{staleness} behind, truncation beats the ratio, β = {kl_coef}": (
                f"{corrected} > gold({stale.format('ratio')})"
            ),
        }
    stale = f"sampler='4_none', kl_coef={kl_coef}"
    claims[f"4 behind without a correction is further from home, β = {kl_coef}"] = (
        f"kl({stale}) > kl(sampler='on_policy', kl_coef={kl_coef})"
    )
