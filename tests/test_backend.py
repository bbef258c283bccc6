"""The wheel's long description needs nothing of the checkout."""

import email
import re
import shutil
import subprocess
import sys

import pytest
from markdown_it import MarkdownIt
from places import ROOT

URLS = '[project.urls]\nSource = "https://example.org/rlhf_jax"\n\n'


def links_and_images(text: str) -> list[str]:
    """The addresses in some Markdown."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    inline = [child for token in tokens for child in token.children or ()]
    found = [child.attrGet("href") or child.attrGet("src") for child in inline]
    return [str(address) for address in found if address]


def described(folder, urls=""):
    """The description in the backend's metadata, made from the README."""
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    before, scripts, after = project.partition("[project.scripts]")
    (folder / "pyproject.toml").write_text(before + urls + scripts + after, "utf-8")
    (folder / "rlhf_jax").mkdir()
    (folder / "rlhf_jax" / "__init__.py").touch()
    hook = "import backend; print(backend.prepare_metadata_for_build_wheel('.'))"
    path = {"PYTHONPATH": ".ci"}
    command = [sys.executable, "-W", "ignore", "-c", hook]
    done = subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (metadata,) = folder.glob("*.dist-info/METADATA")
    message = email.message_from_string(metadata.read_text(encoding="utf-8"))
    assert message["Description-Content-Type"] == "text/markdown"
    return message.get_payload()


@pytest.fixture(autouse=True)
def _setuptools():
    pytest.importorskip("setuptools", minversion="77", reason="of the extra test")


def test_the_description_leads_nowhere_without_an_address(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(links_and_images(readme)) > 50
    text = described(tmp_path)
    assert [address for address in links_and_images(text) if "://" not in address] == []
    # Words and code stay.
    assert "what a user runs: `rlhf-jax`" in text
    fences = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    assert fences.findall(text) == fences.findall(readme)


def test_the_description_leads_to_an_address_that_the_project_has(tmp_path):
    links = links_and_images(described(tmp_path, URLS))
    assert all(link.startswith("https://") for link in links)
    address = "https://example.org/rlhf_jax"
    assert f"{address}/blob/HEAD/rlhf_jax/train/README.md" in links
    assert f"{address}/raw/HEAD/experiments/recorded/quickstart/curves.png" in links
