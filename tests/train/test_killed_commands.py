"""Every command, killed at random moments, leaves the bits of an unbroken run.

`test_ahead_runs.py` kills runs with stale rollouts; `programs/kill_runs.py` has all
kinds and any number of kills.
"""

import random

import kill_kinds
import kill_runs
import pytest

KINDS = (
    *("ppo", "ppo with adapters", "grpo", "grpo, packed", "grpo in an environment"),
    *("dpo", "sft", "sft, packed", "reward model", "evaluate", "sweep"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    kill_kinds.write_files(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_killed_command_goes_on_to_the_last_bit(files, tmp_path, name):
    kind, rng = kill_kinds.KINDS[name], random.Random(name)
    kill_runs.play(kind, files, tmp_path / "whole", kills=0, rng=rng)
    assert kill_runs.play(kind, files, tmp_path / "killed", kills=3, rng=rng) == 3
    whole, killed = (
        kill_runs.contents(tmp_path / folder) for folder in ("whole", "killed")
    )
    assert whole == killed
