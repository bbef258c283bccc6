"""The build backend: setuptools, with a README that needs no checkout."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import setuptools
from setuptools import build_meta

RELATIVE = re.compile(r"!?\[([^\]]*)\]\((?![a-z]+:)([^)\s]+)\)")


def description(readme: str, *, source: str | None) -> str:
    """The README for a package index, without relative links.

    Args:
      source: address of the repository to which links lead; None replaces each link by
        its text and each image by its description.
    """

    def replaced(match: re.Match[str]) -> str:
        words, target = match.groups()
        if source is None:
            return words
        kind = "raw" if match[0].startswith("!") else "blob"
        path = f"README.md{target}" if target.startswith("#") else target
        return match[0].replace(f"({target})", f"({source}/{kind}/HEAD/{path})")

    return RELATIVE.sub(replaced, readme)


class Backend(build_meta._BuildMetaBackend):
    """The backend of setuptools with another long description."""

    def run_setup(self, setup_script: str = "setup.py") -> None:
        """Runs the command in sys.argv, as every hook does."""
        project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
        setuptools.setup(
            long_description=description(
                Path("README.md").read_text("utf-8"),
                source=project.get("urls", {}).get("Source"),
            ),
            long_description_content_type="text/markdown",
        )


_BACKEND = Backend()
prepare_metadata_for_build_wheel = _BACKEND.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _BACKEND.prepare_metadata_for_build_editable
build_wheel = _BACKEND.build_wheel
build_editable = _BACKEND.build_editable
build_sdist = _BACKEND.build_sdist
