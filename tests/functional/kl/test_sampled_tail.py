"""The top k of a KL with a sampled tail: unbiased, value and gradient, for every k."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys

from rlhf_jax import kl
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import Penalty, with_sampled_tail

pytestmark = pytest.mark.usefixtures("strict_dtypes", "quick_compilation")

V, D, K = 7, 4, 3
RNG = np.random.default_rng(3)
PUBLISHED = Path(__file__).parents[2] / "fixtures" / "ema_pg.npz"


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(0, 1.2, shape).astype(np.float32)


# One position for each token that may come: row v draws token v from one distribution.
HIDDEN, REF_HIDDEN = (np.tile(normal(1, 1, D), (V, 2, 1)) for _ in range(2))
HEAD, REF_HEAD = normal(V, D), normal(V, D)
TOKENS = np.stack([np.zeros(V, np.int32), np.arange(V, dtype=np.int32)], axis=1)
MODELS = (HIDDEN, HEAD, REF_HIDDEN, REF_HEAD)


def logprobs_of(hidden, head, temperature):
    every = jax.nn.log_softmax(jnp.einsum("btd,vd->btv", hidden, head) / temperature)
    drawn = jnp.take_along_axis(every[:, :-1], TOKENS[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(drawn, ((0, 0), (1, 0)))


def estimates(models, *, k, temperature, log_weights=None, max_logits=2**24):
    """f32[V]: the estimate of each token, the only response token of its row."""
    hidden, head, ref_hidden, ref_head = models
    output = with_sampled_tail(
        *kl.head_from_hidden(
            *models,
            tokens=TOKENS,
            k=k,
            temperature=temperature,
            max_logits=max_logits,
        ),
        logprobs=logprobs_of(hidden, head, temperature),
        ref_logprobs=logprobs_of(ref_hidden, ref_head, temperature),
        mask=np.ones(TOKENS.shape, bool),
        log_weights=log_weights,
    )
    return output[:, 1]


TEMPERATURE = 0.7


@functools.cache
def exact_with_slopes():
    def exact(models):
        return kl.exact_from_hidden(*models, temperature=TEMPERATURE)[0, 1]

    return jax.jit(jax.value_and_grad(exact))(MODELS)


@pytest.mark.parametrize(("k", "max_logits"), [(1, 1), (K, 100), (V, 2**24)])
def test_value_and_gradient_are_those_of_the_kl_in_the_mean(k, max_logits):
    """Over all tokens, drawn by the policy or, with weights, by an older policy."""
    now = np.asarray(logprobs_of(HIDDEN, HEAD, TEMPERATURE))
    older = np.log(np.linspace(1.0, 2.0, V) / np.linspace(1.0, 2.0, V).sum())
    older = np.stack([np.zeros(V), older], axis=1).astype(np.float32)

    @jax.jit
    @jax.value_and_grad
    def mean(models, drawn_by):
        output = estimates(
            models,
            k=k,
            temperature=TEMPERATURE,
            log_weights=now - drawn_by,
            max_logits=max_logits,
        )
        return jnp.sum(jnp.exp(drawn_by[:, 1]) * output)

    expected, slopes = exact_with_slopes()
    for drawn_by in (now, older):
        value, gradients = mean(MODELS, drawn_by)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        # The hidden states of all rows are those of the first.
        of_hidden = np.asarray(gradients[0]).sum(axis=0)
        np.testing.assert_allclose(of_hidden, slopes[0][0], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(gradients[1], slopes[1], rtol=1e-4, atol=1e-6)
        assert not any(np.any(gradient) for gradient in gradients[2:])


def test_every_estimate_is_head_and_tail():
    policy = np.array(oracles.log_softmax(HEAD @ HIDDEN[0, 0], 1.3))
    reference = np.array(oracles.log_softmax(REF_HEAD @ REF_HIDDEN[0, 0], 1.3))
    top = np.argsort(-policy)[:K]
    head = (np.exp(policy[top]) * (policy - reference)[top]).sum()
    output = toys.jit(functools.partial(estimates, k=K, temperature=1.3))(MODELS)
    for token in range(V):
        tail = 0.0 if token in top else policy[token] - reference[token]
        np.testing.assert_allclose(output[token], head + tail, rtol=1e-5, atol=1e-6)


def test_a_level_that_all_logits_share_costs_no_digits():
    """A log-sum near 4096 is rounded to 2^-11, differently for the two models."""
    steps = np.arange(V, dtype=np.float32)
    policy, reference = 4096 + steps / 8, 4096 + np.cos(steps).round(2) // 0.125 / 8
    logs = [np.array(oracles.log_softmax(x - 4096, 1.0)) for x in (policy, reference)]
    expected = (np.exp(logs[0]) * (logs[0] - logs[1])).sum()
    head, _ = toys.jit(functools.partial(kl.head_from_hidden, k=V))(
        np.ones((1, 2, 1), np.float32),
        policy[:, None].astype(np.float32),
        np.ones((1, 2, 1), np.float32),
        reference[:, None].astype(np.float32),
        tokens=np.zeros((1, 2), np.int32),
    )
    np.testing.assert_allclose(head[0, 1], expected, rtol=1e-5)


def test_what_a_mask_hides_and_what_no_model_draws_is_finite():
    """-inf is replaced by -10000, as in `kl_loss`; NaN under the mask is ignored."""
    mask = np.array([[False, True, True, True]])
    inside = np.array([[False, False, False, True]])
    rest = {"mask": mask, "log_weights": toys.array([[np.nan, 0.0, 0.5, np.inf]])}
    rest["ref_logprobs"] = toys.array([[np.nan, -np.inf, -1.0, -np.inf]])

    def total(head, logprobs):
        return with_sampled_tail(head, inside, logprobs=logprobs, **rest).sum()

    head = toys.array([[np.nan, 0.2, 0.3, 0.4]])
    logprobs = toys.array([[-np.inf, -2.0, -3.0, -np.inf]])
    value, slopes = toys.jit(jax.value_and_grad(total, (0, 1)))(head, logprobs)
    tails = [9998.0, np.exp(0.5) * -2.0]
    np.testing.assert_allclose(value, 0.9 + sum(tails), rtol=1e-6)
    np.testing.assert_allclose(slopes[0], mask, rtol=1e-6)
    np.testing.assert_allclose(slopes[1], [[0.0, *tails, 0.0]], rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"value_estimator": "k1", "placement": "loss"},
        {"value_estimator": "exact", "placement": "loss"},
        {"value_estimator": "exact", "top_k": 3, "placement": "reward"},
        {"value_estimator": "exact", "top_k": 3, "placement": "both"},
        {
            "value_estimator": "exact",
            "top_k": 3,
            "placement": "loss",
            "direction": "forward",
        },
    ],
)
def test_where_a_tail_cannot_be_sampled(options):
    with pytest.raises(InputError, match="tail: expected bucket"):
        Penalty(**options, tail="sampled")


def test_its_gradient_has_the_name_of_the_whole_kl():
    options = {"value_estimator": "exact", "placement": "loss", "top_k": 3}
    assert Penalty(**options).gradient == "top-k fixed-state reverse"
    penalty = Penalty(**options, tail="sampled", importance_weights="token")
    assert (penalty.gradient, penalty.warning) == ("fixed-state reverse", None)


def test_values_are_the_published_ones_and_gradients_lack_its_bias():
    """The authors' code differentiates all of Σ_K P log(P/Q), which adds Σ_K ∇P."""
    with np.load(PUBLISHED) as file:
        arrays = {name: file[name] for name in file.files}
    logits, ref_logits = arrays["logits"], arrays["ref_logits"]
    size = logits.shape[-1]
    tokens, mask = arrays["tokens"].astype(np.int32), arrays["mask"]
    one = np.eye(size, dtype=np.float32)
    # Column t is about the distribution that stands before it.
    before = ((0, 0), (0, 1), (0, 0))

    def values(logits):
        def of_tokens(table):
            every = jax.nn.log_softmax(table)
            return jnp.take_along_axis(every, tokens[..., None], axis=-1)[..., 0]

        padded = np.pad(tokens, ((0, 0), (1, 0)))
        part, inside = kl.head_from_hidden(
            jnp.pad(logits, before),
            one,
            jnp.pad(ref_logits, before),
            one,
            tokens=padded,
            k=int(arrays["k"]),
        )
        return with_sampled_tail(
            part[:, 1:],
            inside[:, 1:],
            logprobs=of_tokens(logits),
            ref_logprobs=of_tokens(ref_logits),
            mask=mask,
        )

    def loss(logits):
        return jnp.sum(jnp.where(mask, values(logits), 0.0))

    def mass(logits):
        """Σ_K P with a fixed set K."""
        top = jnp.argsort(-logits, axis=-1)[..., : int(arrays["k"])]
        shares = jnp.take_along_axis(jax.nn.softmax(logits), top, axis=-1)
        return jnp.sum(jnp.where(mask, shares.sum(-1), 0.0))

    @toys.jit
    def all_three(logits):
        return values(logits), jax.grad(loss)(logits), jax.grad(mass)(logits)

    output, ours, bias = all_three(logits)
    np.testing.assert_allclose(np.where(mask, output, 0.0), arrays["kl"], atol=1e-6)
    assert np.abs(bias).max() > 0.01
    np.testing.assert_allclose(ours + bias, arrays["gradient"], atol=1e-6)
