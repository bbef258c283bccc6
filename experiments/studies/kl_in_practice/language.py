"""The sweep of `kl_in_practice` on the quickstart's language, against a reward model.

Advantages are not whitened, losses are sums over responses, and GRPO's baseline is
RLOO's (the mean of the others in a group), so the first update on a batch has the named
gradient of the choice at the given β. As is usual, each batch has more updates: four,
three of them after the policy has moved.
"""

from choices import grid as choices_at
from published import claims_at

kl_coefs = (0.05, 0.2, 0.8)
algorithms = ("ppo", "grpo")

question = "What does the choice of the KL do against a reward model?"
program = ["experiments", "studies.policies.reviews"]
seeds = [0, 1, 2, 3, 4]
options = {
    "prepared": "runs/prepared",
    "hidden_size": 64,
    "sft_steps": 300,
    "num_steps": 30,
    "batch_size": 64,
    "num_epochs": 2,
    "num_minibatches": 2,
    "policy_learning_rate": 1e-3,
    "critic_learning_rate": 2e-3,
    "num_evaluated": 256,
    "look": "training",
    "sample_every": 3,
    "snapshot_every": 30,
    "keep_snapshots": 1,
    "aggregation": "constant",
    "whiten_advantages": None,
    "lam": 1.0,
}
grid = {
    "algorithm": ["ppo", {"label": "grpo", "algorithm": "rloo"}],
    "kl": choices_at(kl_coefs),
}
measures = {
    "gold": {"summary": "policy.gold"},
    "score": {"summary": "policy.score"},
    "kl": {"summary": "policy.kl"},
    "fluency": {"summary": "policy.fluency"},
    "distinct": {"summary": "policy.distinct"},
    "entropy": {"metric": "objective/entropy", "last": 5},
}
claims = claims_at(kl_coefs, algorithms=algorithms, world="language")
