"""The sweep of `regularisers` on sums of three digits, with a verifier.

As `language`, with a smaller KL coefficient, because there are fewer tokens.
"""

from held import cells

question = "What do the regularisers do with a verifier?"
program = ["experiments", "studies.policies.arithmetic"]
seeds = [0, 1, 2, 3, 4]
options = {
    "prepared": "runs/prepared",
    "hidden_size": 64,
    "num_steps": 100,
    "batch_size": 128,
    "num_epochs": 2,
    "num_minibatches": 2,
    "learning_rate": 1e-3,
    "sample_every": 5,
    "snapshot_every": 100,
    "keep_snapshots": 1,
    "baseline": "leave_one_out",
    "aggregation": "constant",
}
grid = {"held": cells(kl_coef=0.05, strength=0.01, top_k=8, share=0.02)}
measures = {
    "gold": {"summary": "policy.gold"},
    "score": {"metric": "objective/scores", "last": 5},
    "kl": {"summary": "policy.kl"},
    "entropy": {"metric": "objective/entropy", "last": 5},
    "distinct": {"metric": "response/distinct_fraction", "last": 5},
}
claims = {
    "a KL in the reward costs no gold": "gold(held='kl') > gold(held='none') - 0.02"
}
