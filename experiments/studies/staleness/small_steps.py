r"""`sweep` at 0.3 of its learning rates and twice its steps: is staleness less harmful?

    rlhf-jax sweep experiments/studies/staleness/small_steps.py --out runs/small_steps \
        --map
    python experiments studies.staleness.figures runs/small_steps

An update changes the policy less, so that older samples are closer to it.
"""

import sweep as large_steps  # beside this file
from sweep import claims, grid, measures, program, question, seeds

__all__ = ["claims", "grid", "measures", "program", "question", "seeds"]

options = large_steps.options | {
    "num_steps": 80,
    "policy_learning_rate": 3e-4,
    "critic_learning_rate": 6e-4,
    "sample_every": 8,
    "snapshot_every": 80,
}
