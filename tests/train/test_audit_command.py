"""`rlhf-jax audit`: early refusals and output."""

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


def k3(batch):
    x = batch.ref_logprobs - batch.logprobs
    return jnp.sum(jnp.where(batch.mask, jnp.exp(x) - x - 1, 0.0))


def k1(batch):
    return jnp.sum(batch.logprobs - batch.ref_logprobs)


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
    out = tmp_path / "audit.json"
    audit.main(losses("undefined", json=out))
    figures = json.loads(out.read_text())
    assert [world["verdict"] for world in figures["worlds"]] == ["none of these"] * 4
    assert {world["norm"] for world in figures["worlds"]} == {"nan"}
    assert {*figures["by_length"].values()} == {"nan"}
    with pytest.raises(InputError, match="expected a file that is not there"):
        audit.main(losses("undefined", json=out))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "infinite"), [("k3", True), ("k1", False)])
def test_what_is_printed_fits_80_columns_and_explains_inf(
    losses, name, infinite, capsys, monkeypatch
):
    """At a log ratio x the slope of k3 is 1 - exp(-x), and that of k1 is 1."""
    monkeypatch.setenv("COLUMNS", "80")
    audit.main(losses(name))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for cells in (line.split("│") for line in printed.splitlines())
        if len(cells) == 9
    }
    far = ["inf", "inf", "4.85e+08"] if infinite else ["1", "1", "1"]
    assert rows["to the reference"] == [*far, "1", "1", "1"]
    assert ("inf, nan: beyond float32" in printed) == infinite
