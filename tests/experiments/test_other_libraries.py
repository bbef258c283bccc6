"""certificates.audits: formulas, adapters of installed libraries, and the table."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import places
import pytest
from certificates.audits import other_libraries
from certificates.audits.peers import cases, published

from rlhf_jax import audit
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl import gradients

README = (places.EXPERIMENTS / "README.md").read_text(encoding="utf-8")
RECORD = json.loads(
    places.RECORDED.joinpath("audit_peers", "record.json").read_text(encoding="utf-8")
)
STOP = next(world for world in audit.every() if world.name == "stop token")
ENVIRONMENTS = Path("~/.cache/rlhf_jax/benchmark").expanduser()


def test_nemo_rls_default_is_the_fixed_state_reverse_kl():
    gradient = audit.expected_gradient(published.nemo_rl, STOP)
    found = audit.of_gradient(gradient, world=STOP)
    assert found.verdict == gradients.FIXED_REVERSE
    assert found.fits[found.verdict].scale == pytest.approx(1 / 3, abs=1e-4)


def test_the_clamp_of_nemo_rl_leaves_no_slope():
    """k3 exceeds 10 just above 2.6 nats: exp(2.6) - 3.6 = 9.9."""
    for nats, pulled in ((2.5, True), (2.7, False), (-10.9, True), (-11.1, False)):
        batch = audit.example(reference=-1 + nats)
        slope = jax.grad(lambda x, b=batch: published.nemo_rl(b._replace(logprobs=x)))
        assert bool(jnp.any(slope(batch.logprobs))) == pulled, nats


def test_k1_per_response_in_the_loss_asks_for_longer_responses():
    """Tunix's default: its gradient is ∇ E[1 / length] if responses end themselves."""

    def loss(batch):
        k1 = jnp.where(batch.mask, batch.logprobs - batch.ref_logprobs, 0.0)
        return jnp.mean(k1.sum(axis=1) / batch.mask.sum(axis=1))

    def of_length(policy):
        logprobs = jax.nn.log_softmax(policy)[STOP.states, STOP.tokens]
        of_responses = jnp.where(STOP.mask, logprobs, 0.0).sum(axis=1)
        return jnp.sum(jnp.exp(of_responses) / STOP.mask.sum(axis=1))

    measured = audit.expected_gradient(loss, STOP)
    expected = jax.grad(of_length)(jnp.asarray(STOP.policy))
    assert jnp.max(jnp.abs(expected)) > 0.01
    np.testing.assert_allclose(measured, expected, atol=1e-6)


def test_lines_are_those_of_the_installed_version():
    where = cases.lines(("rlhf_jax/audit/worlds.py", "SPREAD = 0.7"))
    name, _, number = where.rpartition(":")
    line = (places.ROOT / name).read_text().splitlines()[int(number) - 1]
    assert line.startswith("SPREAD")
    with pytest.raises(ValueError, match=r"expected one line with 'SPREAD = 0\.8'"):
        cases.lines(("rlhf_jax/audit/worlds.py", "SPREAD = 0.8"))


def test_what_is_refused(tmp_path):
    out = tmp_path / "audits.json"
    with pytest.raises(InputError, match=r"--only: expected some of tunix_losses"):
        other_libraries.Config(output=out, only=("slime",))
    out.touch()
    with pytest.raises(InputError, match="expected a file that is not there"):
        other_libraries.Config(output=out)


def test_the_readme_has_the_recorded_table():
    assert other_libraries.defaults(RECORD["rows"]) in README
    full = (places.EXPERIMENTS / "recorded/audit_peers/table.md").read_text("utf-8")
    assert other_libraries.table(RECORD["rows"]) in full
    assert RECORD["failed"] == {}
    libraries = {row["library"] for row in RECORD["rows"]}
    assert libraries == {"Tunix", "TRL", "verl", "OpenRLHF", "NeMo-RL", "MaxText"}
    by_formula = {row["library"] for row in RECORD["rows"] if row["by"] != "their code"}
    assert by_formula == {"NeMo-RL", "MaxText"}


@pytest.mark.long
@pytest.mark.parametrize("name", other_libraries.PEERS)
def test_a_library_is_as_it_was_recorded(name):
    environment = other_libraries.PEERS[name]
    if environment is not None:
        python = ENVIRONMENTS / environment / "bin" / "python"
        if not python.exists():
            pytest.skip(f"{environment} is not installed in {ENVIRONMENTS}")
    rows = other_libraries.audit_of(name, environments=ENVIRONMENTS)
    recorded = {(row["library"], row["option"]): row for row in RECORD["rows"]}
    for row in rows:
        before = recorded[row["library"], row["option"]]
        for world, finding in row["worlds"].items():
            told = other_libraries.told(before["worlds"][world])
            assert other_libraries.told(finding) == told
