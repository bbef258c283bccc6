"""The study of samplers outside the trainer, at toy size and without a server."""

import json

import pytest
from studies import outside_sampler
from studies.outside_sampler import Config

from rlhf_jax.functional.checks import InputError


def test_no_steps_are_refused(tmp_path):
    with pytest.raises(InputError, match="num_steps"):
        Config(out=tmp_path, num_steps=0)


@pytest.mark.long
def test_a_process_gives_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(outside_sampler, "LAST", 2)
    outside_sampler.main(
        Config(
            out=tmp_path / "run",
            num_seeds=1,
            num_steps=3,
            batch_size=16,
            sft_steps=10,
            progress=False,
        )
    )
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["heads"] == []
    by_sampler = {(row["sampler"], row["behind"]): row for row in summary["rows"]}
    assert by_sampler.keys() == {
        (way, k) for way in ("here", "process") for k in (0, 1)
    }
    for behind in (0, 1):
        assert by_sampler["process", behind]["equal_bits"]
    assert by_sampler["process", 0]["largest_distance"] == 0
