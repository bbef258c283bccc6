"""The sweep of `regularisers` on the quickstart's language, against a reward model.

GRPO in groups of eight with RLOO's baseline (the mean of the others), without the std,
and with sums over responses. A batch has four updates, because trust regions act from
the second.
"""

from held import cells

question = "What do the regularisers do against a reward model?"
program = ["experiments", "studies.policies.reviews"]
seeds = [0, 1, 2, 3, 4]
options = {
    "prepared": "runs/prepared",
    "algorithm": "rloo",
    "hidden_size": 64,
    "sft_steps": 300,
    "num_steps": 30,
    "batch_size": 64,
    "num_epochs": 2,
    "num_minibatches": 2,
    "policy_learning_rate": 1e-3,
    "num_evaluated": 256,
    "sample_every": 2,
    "snapshot_every": 30,
    "keep_snapshots": 1,
    "aggregation": "constant",
}
grid = {"held": cells(kl_coef=0.2, strength=0.01, top_k=8, share=0.02)}
measures = {
    "gold": {"summary": "policy.gold"},
    "score": {"summary": "policy.score"},
    "kl": {"summary": "policy.kl"},
    "entropy": {"metric": "objective/entropy", "last": 5},
    "distinct": {"metric": "response/distinct_fraction", "last": 5},
}
over_optimised = "gold(held='kl') > gold(held='none')"
claims = {"a KL in the reward prevents over-optimisation": over_optimised}
