"""Losses with known expected gradients, and 20 planted faults."""

import jax
import jax.numpy as jnp


def own(batch, values):
    """Values at the policy's tokens, else 0."""
    return jnp.where(batch.mask, values, 0.0)


def log_ratio(batch):
    return own(batch, batch.logprobs - batch.ref_logprobs)


def k1(batch):
    return jnp.sum(log_ratio(batch))


def k2(batch):
    return jnp.sum(log_ratio(batch) ** 2) / 2


def k3(batch):
    x = -log_ratio(batch)
    return jnp.sum(jnp.exp(x) - x - 1)


def k2_of_responses(batch):
    return jnp.sum(log_ratio(batch).sum(axis=1) ** 2) / 2


def exact(batch):
    now, ref = (jax.nn.log_softmax(one) for one in (batch.logits, batch.ref_logits))
    return jnp.sum(own(batch, jnp.sum(jnp.exp(now) * (now - ref), axis=-1)))


def k1_in_reward(batch):
    kl = jax.lax.stop_gradient(log_ratio(batch))
    to_go = jnp.cumsum(kl[:, ::-1], axis=1)[:, ::-1]
    return jnp.sum(own(batch, batch.logprobs) * to_go)


def objective(batch, *, beta=0.3):
    """REINFORCE with the KL in the reward, at this β."""
    logprobs = own(batch, batch.logprobs).sum(axis=1)
    return beta * k1_in_reward(batch) - jnp.sum(logprobs * batch.rewards)


def weighted_k2_of_responses(batch):
    """k2 of responses on an older policy's samples, weighted to the policy."""
    weights = jnp.exp(own(batch, batch.logprobs - batch.old_logprobs).sum(axis=1))
    squares = log_ratio(batch).sum(axis=1) ** 2
    return jnp.sum(jax.lax.stop_gradient(weights) * squares) / 2


def shifted(mask):
    return jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))


def per_response(batch, values):
    return jnp.sum(values.sum(axis=1) / batch.mask.sum(axis=1))


def _faulty_squares(batch, logprobs, ref_logprobs, mask):
    return jnp.sum(jnp.where(mask, (logprobs - ref_logprobs) ** 2, 0.0)) / 2


def _expm1(batch, sign):
    x = sign * log_ratio(batch)
    return jnp.sum(jnp.exp(x) - x - 1)


FAULTS = {
    # what it is: (the right loss, the faulty one)
    "the sign of k2": (k2, lambda b: -k2(b)),
    "the sign of k3": (k3, lambda b: -k3(b)),
    "the sign of the KL in the reward": (k1_in_reward, lambda b: -k1_in_reward(b)),
    "the sign of the log ratio in k3": (k3, lambda b: _expm1(b, 1)),
    "k1 in the loss, for k2": (k2, k1),
    "the wrong direction of an exact KL": (
        exact,
        lambda b: exact(b._replace(logits=b.ref_logits, ref_logits=b.logits)),
    ),
    "k2 without its square": (k2, lambda b: jnp.sum(jnp.abs(log_ratio(b)))),
    "k2 clamped": (k2, lambda b: jnp.sum(jnp.minimum(log_ratio(b) ** 2, 0.5)) / 2),
    "k3 per response, for tokens": (
        k3,
        lambda b: jnp.sum(
            jnp.exp(-log_ratio(b).sum(axis=1)) + log_ratio(b).sum(axis=1)
        ),
    ),
    "a missing stop-gradient in the reward": (
        k1_in_reward,
        lambda b: jnp.sum(
            own(b, b.logprobs) * jnp.cumsum(log_ratio(b)[:, ::-1], axis=1)[:, ::-1]
        ),
    ),
    "the KL of the token alone, for what is to come": (
        k1_in_reward,
        lambda b: jnp.sum(own(b, b.logprobs) * jax.lax.stop_gradient(log_ratio(b))),
    ),
    "the KL so far, for what is to come": (
        k1_in_reward,
        lambda b: jnp.sum(
            own(b, b.logprobs)
            * jax.lax.stop_gradient(jnp.cumsum(log_ratio(b), axis=1) - log_ratio(b))
        ),
    ),
    "the mean over a response": (k2, lambda b: per_response(b, log_ratio(b) ** 2)),
    "the mean over the group's tokens": (k2, lambda b: k2(b) / b.mask.sum()),
    "the mask one column early": (
        k2,
        lambda b: _faulty_squares(b, b.logprobs, b.ref_logprobs, shifted(b.mask)),
    ),
    "no mask": (
        k2,
        lambda b: _faulty_squares(b, b.logprobs, b.ref_logprobs, jnp.ones_like(b.mask)),
    ),
    "the sampler for the reference": (
        weighted_k2_of_responses,
        lambda b: weighted_k2_of_responses(b._replace(ref_logprobs=b.old_logprobs)),
    ),
    "the policy for the sampler": (
        weighted_k2_of_responses,
        lambda b: weighted_k2_of_responses(
            b._replace(old_logprobs=jax.lax.stop_gradient(b.logprobs))
        ),
    ),
    "weights turned round": (
        weighted_k2_of_responses,
        lambda b: weighted_k2_of_responses(
            b._replace(old_logprobs=2 * b.logprobs - b.old_logprobs)
        ),
    ),
    "the reference has the gradient": (
        k2,
        lambda b: k2(b._replace(logprobs=jax.lax.stop_gradient(b.logprobs))),
    ),
}
