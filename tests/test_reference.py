"""The HTML reference: one command builds it, and pdoc has nothing to warn of."""

import subprocess
import sys

import pytest
from places import ROOT

import rlhf_jax


@pytest.mark.slow
def test_the_reference_builds_without_a_warning(tmp_path):
    pytest.importorskip("pdoc", reason="the extra docs")
    command = [sys.executable, ".ci/reference.py"]
    done = subprocess.run(
        [*command, str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Warn" not in done.stderr
    front = (tmp_path / "site" / "rlhf_jax.html").read_text(encoding="utf-8")
    for name in rlhf_jax.__all__:
        page = f"{getattr(rlhf_jax, name).__name__.replace('.', '/')}.html"
        assert (tmp_path / "site" / page).is_file()
        assert f'href="{page}"' in front, name
    losses = tmp_path / "site" / "rlhf_jax" / "functional" / "losses.html"
    assert 'id="policy_loss"' in losses.read_text(encoding="utf-8")
