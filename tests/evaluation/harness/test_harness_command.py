"""The command of the harness, `python -m rlhf_jax.evaluation.harness`."""

import sys

import pytest

from rlhf_jax.evaluation.harness import __main__ as command


def test_without_the_extra_a_line_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "rlhf_jax.evaluation.harness.model", raising=False)
    with pytest.raises(SystemExit) as stopped:
        command.main()
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: rlhf_jax.evaluation.harness needs the package")
    assert "pip install 'rlhf-jax[lm-eval]'" in lines[0]
