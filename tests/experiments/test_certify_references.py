"""Two references by enumeration: the gradient, and the optimum between them."""

import functools
import json

import numpy as np
import pytest
from certificates import cases, certify_references
from certificates.penalty_claims import TABLE, TOLERANCE
from worlds import enumerable

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation")]
MODEL = enumerable.model(hidden_size=8)


@pytest.fixture(scope="module")
def world():
    return enumerable.draw(5, model=MODEL, distance=3.5)


@pytest.fixture(scope="module")
def other():
    return certify_references.second(5, hidden_size=4)


@pytest.mark.long
def test_the_optimum_is_the_best_of_the_objective_with_each_kl_apart(world, other):
    """J(π) = E[r] - β·KL_1 - β/2·KL_2, summed here term by term."""
    beta = 0.1
    log_second = enumerable.known(
        other.frozen.stored, model=other.frozen.model, temperature=1.0
    )

    def objective(log_policy):
        chances = np.exp(log_policy)
        return chances @ (
            world.rewards
            - beta * (log_policy - world.log_ref)
            - 0.5 * beta * (log_policy - log_second)
        )

    best = certify_references.between(world, other).optimum(1.5 * beta)
    assert objective(best.log_policy) == pytest.approx(best.value, abs=1e-9)
    rng = np.random.default_rng(0)
    for scale in (0.01, 0.3):
        near = best.log_policy + scale * rng.normal(size=256)
        near -= np.logaddexp.reduce(near)
        lost = best.value - objective(near)
        distance = enumerable.divergence(near, best.log_policy)
        assert lost == pytest.approx(1.5 * beta * distance, rel=1e-6)
    # The optimum of the first reference alone is another.
    alone = world.optimum(beta).log_policy
    assert enumerable.divergence(alone, best.log_policy) > 0.1


@pytest.mark.long
def test_the_gradient_is_that_of_the_sum():
    case = cases.draw(0, hidden_size=8, stop_ids=enumerable.STOPS)
    other = certify_references.second(0, hidden_size=4)
    count = len(enumerable.every_tokens(case.stop_ids))
    rewards = np.random.default_rng(0).normal(size=count)
    known = certify_references.expected(case, other=other, rewards=rewards)
    finding = certify_references.of_claim(
        TABLE[0], case, other=other, rewards=rewards, known=known
    )
    assert finding.error <= TOLERANCE
    assert finding.second > certify_references.LEAST_SHARE
    # At another weight it is not.
    wrong = certify_references.of_claim(
        TABLE[0], case, other=other.replace(weight=0.6), rewards=rewards, known=known
    )
    assert wrong.error > 1e-3


def test_betas_that_rise_are_refused(tmp_path):
    with pytest.raises(InputError, match="each below the last"):
        certify_references.Config(out=tmp_path, betas=(0.1, 1.0))


@pytest.mark.long
def test_the_experiment_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(certify_references, "TABLE", TABLE[:1])
    verdicts = certify_references.verdicts
    lenient = functools.partial(verdicts.show_optimum, nats=10.0)  # after so few steps
    monkeypatch.setattr(verdicts, "show_optimum", lenient)
    options = ("--num-worlds=1", "--iterations=25", "--betas", "1.0")
    words = ["--out", str(tmp_path), "--no-progress", *options, "--batch-size=32"]
    command_line.main(
        certify_references.main, certify_references.Config, description="", argv=words
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["gradients"][0]["error"] <= TOLERANCE
    assert len(summary["annealed"]) == 1
