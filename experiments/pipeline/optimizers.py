"""Adam for PPO and AdamW for the supervised stages, both with clipped gradients."""

from __future__ import annotations

import optax


def adamw(learning_rate: optax.Schedule) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.01)
    )


def adam(learning_rate: float, updates: int) -> optax.GradientTransformation:
    schedule = optax.linear_schedule(learning_rate, 0.0, updates)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule, eps=1e-5))
