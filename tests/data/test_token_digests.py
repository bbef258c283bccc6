"""Tokens of recorded runs and real files have not changed."""

import json

import pytest
import token_digests
from places import FIXTURES

BEFORE = json.loads((FIXTURES / "token_digests.json").read_text())


def differing(digests: dict[str, str]) -> list[str]:
    return [name for name, digest in digests.items() if digest != BEFORE[name]]


@pytest.mark.slow
def test_recorded_runs():
    digests = token_digests.recorded()
    assert digests.keys() == {
        name for name in BEFORE if name.startswith(("turns/", "outside_sampler/"))
    }
    assert differing(digests) == []


@pytest.mark.slow
def test_real_inputs(shared_data):
    digests = token_digests.real_inputs(shared_data)
    assert BEFORE.keys() == digests.keys() | token_digests.recorded().keys()
    assert differing(digests) == []
