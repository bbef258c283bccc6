"""The enumerable world: identities, gradients by enumeration, and PPO's optimum."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from certificates import annealing, cases, certify
from certificates.measured import gradients
from certificates.penalty_claims import KLS, NONE, OTHERS, TABLE, ZERO, Claim
from worlds import enumerable

from rlhf_jax import policy
from rlhf_jax.algorithms.flow import rollout
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.gradients import FULL_REVERSE
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.runs import command_line, metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
MODEL = enumerable.model(hidden_size=8)
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def world():
    return enumerable.draw(5, model=MODEL, distance=3.5)


@pytest.fixture(scope="module")
def case():
    return cases.draw(0, hidden_size=8)


@pytest.fixture(scope="module")
def stopping():
    return cases.draw(0, hidden_size=8, stop_ids=enumerable.STOPS)


@pytest.fixture
def other():
    """log π of a policy that is not the optimum."""
    logits = np.random.default_rng(1).normal(size=enumerable.NUM_RESPONSES)
    return logits - np.logaddexp.reduce(logits)


def play(out, *argv):
    """Runs the experiment as its command line does; returns its summary."""
    words = ["--out", str(out), "--no-progress", *argv]
    command_line.main(certify.main, certify.Config, description="", argv=words)
    return json.loads((out / "summary.json").read_text())


# The world


def test_responses_are_all_there_and_each_has_its_index():
    tokens = enumerable.every_tokens()
    assert len({tuple(row) for row in tokens.tolist()}) == len(tokens) == 4**4
    assert (tokens[:, 0] == 0).all()
    np.testing.assert_array_equal(enumerable.index_of(tokens), np.arange(256))
    assert enumerable.index_of(jnp.array([[0, 1, 2, 3, 0]])) == 64 + 32 + 12


def test_a_stop_token_ends_each_response_once(stopping):
    tokens = np.asarray(enumerable.every_tokens(enumerable.STOPS))
    mask = np.asarray(enumerable.every_mask(enumerable.STOPS))
    responses = {
        tuple(row[within][1:].tolist())
        for row, within in zip(tokens, mask, strict=True)
    }
    expected = {
        response
        for length in range(1, 5)
        for response in itertools.product(range(4), repeat=length)
        if 3 not in response[:-1] and (length == 4 or response[-1] == 3)
    }
    assert responses == expected
    assert len(tokens) == len(expected) == 1 + 3 + 9 + 108
    chances = jax.jit(
        enumerable.log_probabilities,
        static_argnames=("model", "temperature", "stop_ids"),
    )(stopping.policy, temperature=TEMPERATURE, **stopping.options)
    assert np.exp(np.asarray(chances, np.float64)).sum() == pytest.approx(1, abs=1e-6)


def test_probabilities_are_those_of_single_words_multiplied(world):
    tokens = enumerable.every_tokens()
    mask = np.ones(tokens.shape, bool)
    logits = jax.jit(policy.logits, static_argnames="model")(
        world.start, model=MODEL, tokens=tokens, mask=mask
    )
    words = np.asarray(jax.nn.log_softmax(logits / TEMPERATURE), np.float64)
    product = np.zeros(256)
    for row, response in enumerate(enumerable.RESPONSES):
        for column, word in enumerate(response):
            product[row] += words[row, column, word]
    probabilities = enumerable.known(world.start, model=MODEL, temperature=TEMPERATURE)
    np.testing.assert_allclose(probabilities, product, atol=2e-6)
    assert np.exp(probabilities).sum() == pytest.approx(1.0, abs=1e-6)


def test_the_sampler_draws_from_these_probabilities(world):
    rows = 4096
    drawn = jax.jit(
        rollout.rollout,
        static_argnames=("model", "max_new_tokens", "stop_ids", "temperature"),
    )(
        world.start,
        model=MODEL,
        prompts=enumerable.prompts(rows),
        key=jax.random.key(0),
        max_new_tokens=enumerable.LENGTH,
        stop_ids=(),
        temperature=1.0,
    )
    index = np.asarray(enumerable.index_of(drawn.tokens))
    expected = rows * np.exp(world.log_ref)
    counts = np.bincount(index, minlength=256)
    # χ² of 255 degrees of freedom, five standard deviations from its mean.
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(2 * 255)
    np.testing.assert_allclose(
        drawn.old_logprobs.sum(axis=1), world.log_ref[index], atol=1e-4
    )
    reward = enumerable.reward_of(jnp.asarray(world.rewards, jnp.float32))
    np.testing.assert_array_equal(jax.jit(reward)(drawn), world.rewards[index])


def test_rewards_are_as_far_from_the_reference_as_they_were_asked_to_be(world):
    best = world.optimum(enumerable.SMALLEST_BETA)
    assert enumerable.divergence(world.log_ref, best.log_policy) == pytest.approx(3.5)
    with pytest.raises(InputError, match=r"distance: expected .* above 0"):
        enumerable.draw(0, model=MODEL, distance=-1.0)


@pytest.mark.parametrize("beta", [0.1, 0.3, 1.0])
def test_what_a_policy_lacks_is_its_distance_from_the_optimum(world, other, beta):
    best = world.optimum(beta)
    assert np.exp(best.log_policy).sum() == pytest.approx(1.0)
    assert world.objective(best.log_policy, beta) == pytest.approx(best.value)
    expected = np.log(np.exp(world.log_ref) @ np.exp(world.rewards / beta))
    # log_ref is of float32, and so sums to 1 within its precision.
    assert best.value == pytest.approx(beta * expected)
    for log_policy in (other, world.log_ref):
        lacks = best.value - world.objective(log_policy, beta)
        distance = enumerable.divergence(log_policy, best.log_policy)
        assert lacks == pytest.approx(beta * distance, abs=1e-6)
        assert lacks > 0


def test_the_frontier_is_above_every_policy_and_holds_the_optima(world, other):
    kl, reward = world.frontier
    slopes = np.diff(reward) / np.diff(kl)
    assert (np.diff(kl) > 0).all()
    assert (np.diff(slopes) < 1e-3).all()  # concave, as far as rounding shows
    for beta in (0.1, 0.25, 1.0):
        best = world.optimum(beta).log_policy
        assert world.below_frontier(best) == pytest.approx(0, abs=1e-6)
        mixed = np.logaddexp(best, other) - np.log(2)
        distance = enumerable.divergence(mixed, best)
        assert 0 < world.below_frontier(mixed) <= beta * distance
    # Best of all is the likeliest β: the slope of the frontier is β itself.
    middle = np.searchsorted(kl, enumerable.divergence(best, world.log_ref))
    assert slopes[middle] == pytest.approx(1.0, rel=0.02)


# Gradients


def certified(case, *claims):
    findings = gradients.certify(case, claims, temperature=TEMPERATURE)
    return list(findings)


def claims_of(*names):
    """The table's claims about (estimator, placement, per)."""
    chosen = {
        (
            claim.penalty.value_estimator,
            claim.penalty.placement,
            claim.penalty.per,
        ): claim
        for claim in TABLE
    }
    return [chosen[name] for name in names]


def test_the_table_has_every_choice_once():
    choices = {
        (claim.penalty.value_estimator, claim.penalty.placement, claim.penalty.per)
        for claim in TABLE
    }
    assert len(TABLE) == len(choices) == 4 * 3 * 2
    assert len({claim.penalty for claim in OTHERS} | choices) == len(OTHERS) + 24


@pytest.mark.long  # test_every_gradient_is_what_it_is_said_to_be has these too
def test_gradients_are_those_of_the_table(case):
    claims = claims_of(
        ("k1", "reward", "token"),
        ("k1", "loss", "token"),
        ("k2", "loss", "response"),
        ("k3", "loss", "token"),
    )
    for finding in certified(case, *claims):
        assert finding.holds, finding
        assert (finding.bias == pytest.approx(0, abs=1e-5)) == (
            finding.claim.penalty.value_estimator != "k2"
        )


@pytest.mark.long
def test_gradients_are_those_of_the_table_where_lengths_differ(stopping):
    """Includes the estimator divided by the response's length, no KL's gradient."""
    (divided, *_) = (claim for claim in OTHERS if claim.penalty.per == "length")
    claims = claims_of(("k1", "reward", "response"), ("k3", "loss", "token"))
    for finding in certified(stopping, *claims, divided):
        assert finding.holds, finding
        assert finding.lengths == "1 to 4"
        assert (finding.nearest > 0.1) == (finding.claim is divided)


@pytest.mark.long
def test_every_gradient_is_what_it_is_said_to_be_where_lengths_differ(stopping):
    for finding in certified(stopping, *TABLE, *OTHERS):
        assert finding.holds, finding


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_every_gradient_is_what_it_is_said_to_be(case, temperature):
    claims = TABLE + OTHERS
    for finding in gradients.certify(case, claims, temperature=temperature):
        assert finding.holds, finding


def test_a_wrong_claim_fails(case):
    k1 = Penalty(placement="loss")
    right, *wrong = certified(
        case, Claim(k1, ZERO), Claim(k1, FULL_REVERSE), Claim(k1, NONE)
    )
    assert right.holds
    assert not any(finding.holds for finding in wrong)
    assert wrong[0].error > 0.1


# PPO


def test_a_policy_that_does_not_learn_fails_by_name(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    monkeypatch.setattr(annealing, "advance", lambda train, **_: (train, {}))
    with pytest.raises(SystemExit) as stopped:
        play(
            out,
            *("--gradients", "none", "--num-worlds", "1", "--iterations", "25"),
            *("--hidden-size", "8", "--betas", "0.3", "0.1"),
        )
    assert stopped.value.code == 1
    printed = capsys.readouterr()
    assert "certificates fail" in printed.err
    assert "optimum: PPO, seed 0, beta 0.1" in printed.err
    assert "FAILS" in printed.out
    summary = json.loads((out / "summary.json").read_text())
    # The reference is on the frontier too, at its very start.
    optima = [f"optimum: PPO, seed 0, beta {beta}" for beta in (0.3, 0.1)]
    assert summary["failed"] == optima
    (reached,) = (figure for figure in summary["annealed"] if figure["beta"] == 0.1)
    assert reached["distance"] == pytest.approx(3.5, rel=1e-3)
    assert len(summary["fixed"]) == 2
    assert (out / "plots" / "frontier.png").stat().st_size > 0


def test_what_a_run_of_certificates_logs(tmp_path, monkeypatch):
    """A policy that stays at the reference, and a gradient with noise added."""
    rng = np.random.default_rng(0)
    names = [(name, per) for name in KLS for per in ("token", "response")]
    known = {name: {"w": rng.normal(size=(3, 4))} for name in names}
    claim = Claim(Penalty(), FULL_REVERSE)
    expected = gradients.BETA * known[FULL_REVERSE, "token"]["w"]
    noise = rng.normal(scale=1e-3, size=expected.shape)
    finding = gradients._finding(
        claim,
        measured=(expected + noise).ravel(),
        value=0.5,
        temperature=1.0,
        stops=False,
        known=known,
        to_older={},
        values={"kl": 0.5},
    )
    monkeypatch.setattr(
        certify, "certify", lambda case, claims, **_: [finding] * len(TABLE)
    )
    monkeypatch.setattr(annealing, "advance", lambda train, **_: (train, {}))
    betas, iterations = (0.3, 0.1), 25
    with pytest.raises(SystemExit):
        play(
            tmp_path / "run",
            *("--gradients", "table", "--num-worlds", "1", "--hidden-size", "8"),
            *("--iterations", str(iterations), "--betas", *map(str, betas)),
        )
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    errors = [
        row["exact/gradient_error"] for row in rows if row["stage"] == "gradients"
    ]
    expected_error = np.abs(noise).max() / np.abs(expected).max()
    assert errors == pytest.approx([expected_error] * len(TABLE))
    reference = enumerable.draw(0, model=MODEL, distance=3.5)
    log_ref, rewards = reference.log_ref, reference.rewards
    distances = []
    for beta in betas:
        best = log_ref + rewards / beta
        best -= np.log(np.exp(best - best.max()).sum()) + best.max()
        distances.append((np.exp(log_ref) * (log_ref - best)).sum())
    logged = [
        row["exact/kl_to_optimum"] for row in rows if row["stage"] == "annealed-0"
    ]
    assert logged == pytest.approx(distances, rel=1e-3)


@pytest.mark.long
def test_ppo_reaches_the_optimum_at_beta_1(tmp_path):
    summary = play(
        tmp_path / "run",
        *("--gradients", "none", "--num-worlds", "1", "--betas", "1.0"),
        *("--iterations", "300"),
    )
    assert summary["failed"] == []
    (reached,) = summary["annealed"]
    assert reached["start"] > 0.03  # it had somewhere to go
    assert reached["distance"] <= 0.01
    assert reached["identity"] <= 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (0.1, 0.3)}, "each below the last"),
        ({"betas": ()}, "expected one or more"),
        ({"betas": (1.0, -0.1)}, r"betas\[1\]: expected .* above 0"),
        ({"iterations": 30}, "a multiple of 25"),
    ],
)
def test_what_cannot_be_annealed_is_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        certify.Config(out=tmp_path, **options)


def test_beta_slides_down_and_stays():
    controller = annealing.annealing((1.0, 0.1), iterations=100)
    betas = [float(controller.kl_coef)]
    update = jax.jit(lambda controller: controller.update(kl=None, num_episodes=1))
    for _ in range(199):
        controller = update(controller)
        betas.append(float(controller.kl_coef))
    np.testing.assert_allclose(betas[:101], 1.0)
    assert betas[120] == pytest.approx(0.1**0.5)
    np.testing.assert_allclose(betas[140:], 0.1, rtol=1e-6)
