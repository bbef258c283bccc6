"""`rlhf-jax audit`: what it refuses before any work, and what it writes."""

import json
import sys
import textwrap

import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.train.queries import audit

LOSSES = """\
import jax.numpy as jnp


def branch(batch):
    total = jnp.sum(batch.logprobs)
    return total if total > 0 else -total


def whole(batch):
    return jnp.sum(batch.mask)


def per_token(batch):
    return batch.logprobs


def undefined(batch):
    return jnp.sum(batch.logprobs) * jnp.nan


def item(batch):
    return (batch.logprobs.sum()).item()


def torch_per_token(batch):
    return batch.logprobs
"""


@pytest.fixture
def losses(tmp_path, monkeypatch):
    tmp_path.joinpath("audited_here.py").write_text(textwrap.dedent(LOSSES))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "audited_here", raising=False)
    return lambda name, **options: audit.Config(loss=f"audited_here:{name}", **options)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("branch", "TracerBoolConversionError"),
        ("whole", "expected one float"),
        ("per_token", r"float32\[3, 3\]; add up the tokens"),
        ("absent", "absent"),
    ],
)
def test_a_loss_that_cannot_be_audited_is_refused_first(losses, name, problem):
    with pytest.raises(InputError, match=problem):
        audit.main(losses(name))


@pytest.mark.parametrize(
    ("name", "problem"),
    [("item", r"TypeError.*`item\(\)`"), ("torch_per_token", "add up the tokens")],
)
def test_so_is_one_of_torch(losses, name, problem):
    pytest.importorskip("torch")
    with pytest.raises(InputError, match=problem):
        audit.main(losses(name, torch=True))


@pytest.mark.slow
def test_figures_that_are_no_numbers_are_written_all_the_same(losses, tmp_path):
    out = tmp_path / "found.json"
    audit.main(losses("undefined", json=out))
    figures = json.loads(out.read_text())
    assert [world["verdict"] for world in figures["worlds"]] == ["none of these"] * 4
    assert {world["norm"] for world in figures["worlds"]} == {"nan"}
    assert {*figures["by_length"].values()} == {"nan"}
    with pytest.raises(InputError, match="expected a file that is not there"):
        audit.main(losses("undefined", json=out))
