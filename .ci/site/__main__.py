"""Builds the site of guides, papers and API: `python .ci/site [FOLDER]`.

The pages come from the documents and docstrings of the checkout. A broken link, or any
other warning of MkDocs, ends the command with status 1. It needs the extra `docs`.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from pathlib import Path

import guides
import mkdocs.commands.build
import papers
import reference
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from reference import PACKAGE, Nav

import rlhf_jax

HERE = Path(__file__).resolve().parent


def navigation() -> Nav:
    """The menu, with guides in the order of a reader: the trainers come first."""
    order = [*reversed(rlhf_jax.PACKAGES)]
    documents = sorted(
        (one for one in guides.documents() if PACKAGE in one.parents[1:]),
        key=lambda one: (order.index(one.relative_to(PACKAGE).parts[0]), one.parent),
    )
    notebooks = [one for one in guides.documents() if one.suffix == ".ipynb"]
    shown = [*documents, *notebooks]
    pages = {one: guides.address_of(one)[0].as_posix() for one in shown}
    menu: Nav = [{"Start": "index.md"}]
    menu.append({"Guides": [pages[one] for one in documents]})
    if notebooks:
        menu.append({"Notebooks": [pages[one] for one in notebooks]})
    menu.append({"Studies": "experiments/index.md"})
    menu.append({"Papers": "papers.md"})
    menu.append({"API": reference.navigation()})
    menu.append({"Tests": "tests/index.md"})
    menu.append({"Changelog": "rlhf_jax/CHANGELOG.md"})
    return menu


def write_pages(folder: Path) -> None:
    """Writes all pages in Markdown, and the files that they show."""
    guides.write(folder)
    for file in reference.modules():
        out = folder / reference.page_of(file)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(reference.text_of(file), encoding="utf-8")
    (folder / "papers.md").write_text(papers.text(), encoding="utf-8")
    for name in ("style.css", "search.js"):
        shutil.copyfile(HERE / name, folder / name)


def build(pages: Path, folder: Path) -> None:
    """Builds the site from pages in Markdown.

    Raises:
      Abort: MkDocs or a plugin printed a warning.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    config = load_config(
        str(HERE / "mkdocs.yml"),
        docs_dir=str(pages),
        site_dir=str(folder),
        nav=navigation(),
        strict=True,
    )
    config.plugins.on_startup(command="build", dirty=False)
    mkdocs.commands.build.build(config)
    config.plugins.on_shutdown()


def main(folder: Path) -> None:
    """Builds the whole site, replacing an existing one."""
    built = folder / "search" / "search_index.json"
    if folder.is_dir() and any(folder.iterdir()) and not built.is_file():
        print(
            f"{folder} has files, and no site whose place a new one could take; name "
            "another folder",
            file=sys.stderr,
        )
        sys.exit(2)
    with tempfile.TemporaryDirectory() as pages:
        try:
            write_pages(Path(pages))
            build(Path(pages), folder)
        except (ValueError, Abort) as error:
            sys.exit(str(error))
    print(f"{folder}/index.html; its search: python -m http.server -d {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "site").resolve())
