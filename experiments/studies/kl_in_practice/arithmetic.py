"""The sweep of `kl_in_practice` on sums of three digits, with a verifier.

Advantages are not whitened, losses are sums over responses, GRPO's baseline is RLOO's
(the mean of the others in a group), and each batch has one update. So every choice has
its named gradient at the given β.
"""

from choices import grid as choices_at
from published import claims_at

kl_coefs = (0.01, 0.05, 0.2)
algorithms = ("ppo", "grpo")

question = "What does the choice of the KL do with a verifier?"
program = ["experiments", "studies.policies.arithmetic"]
seeds = [0, 1, 2, 3, 4]
options = {
    "prepared": "runs/prepared",
    "hidden_size": 64,
    "num_steps": 120,
    "batch_size": 128,
    "num_minibatches": 1,
    "learning_rate": 1e-3,
    "critic_learning_rate": 2e-3,
    "sample_every": 15,
    "snapshot_every": 120,
    "keep_snapshots": 1,
    "aggregation": "constant",
    "lam": 1.0,
}
grid = {
    "algorithm": [
        "ppo",
        {"label": "grpo", "algorithm": "grpo", "baseline": "leave_one_out"},
    ],
    "kl": choices_at(kl_coefs),
}
measures = {
    "gold": {"summary": "policy.gold"},
    "greedy": {"summary": "policy.greedy"},
    "kl": {"summary": "policy.kl"},
    "entropy": {"metric": "objective/entropy", "last": 5},
}
claims = claims_at(kl_coefs, algorithms=algorithms, world="arithmetic")
