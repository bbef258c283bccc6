"""Converts the documents of the checkout to pages with links within the site."""

from __future__ import annotations

import html
import io
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote

import reference
from nbconvert import MarkdownExporter
from PIL import Image  # a dependency of matplotlib
from reference import PACKAGE, ROOT

EXPERIMENTS = ROOT / "experiments"
FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
# An image on another site, which its description replaces.
ELSEWHERE = re.compile(r"!\[([^\]]*)\]\(https?:[^)]*\)")
MAX_BYTES = 100_000  # largest data file that is copied
FILES = Path("files.md")
HEAD = "---\nsearch:\n  boost: {boost}\n---\n\n"  # rank in search results
SOURCE = """<!doctype html>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>{name}</title>
<pre>{text}</pre>
"""


def documents() -> list[Path]:
    """The documents that are read from top to bottom."""
    return [
        ROOT / "README.md",
        *(
            file
            for file in sorted(PACKAGE.rglob("README.md"))
            if "templates" not in file.parts
        ),
        *sorted(EXPERIMENTS.glob("notebooks/*.ipynb")),
        EXPERIMENTS / "README.md",
        ROOT / "tests" / "README.md",
        PACKAGE / "CHANGELOG.md",
    ]


def document_of(target: Path) -> Path:
    """The README or the package of a folder; other targets are returned unchanged."""
    if (target / "README.md").is_file():
        return target / "README.md"
    module = target / "__init__.py"
    return module if reference.is_public(module) else target


def address_of(target: Path) -> tuple[Path, str]:
    """The page of a file or folder of the checkout, and the anchor on it.

    Folders without a README, large files and files of folders such as `.ci`, which
    MkDocs ignores, are listed on one page.
    """
    target = document_of(target)
    if reference.is_public(target):
        return reference.page_of(target), ""
    within = target.relative_to(ROOT)
    if target.name == "README.md":
        return within.with_name("index.md"), ""
    if target.suffix == ".py":
        return within.with_name(f"{target.name}.html"), ""
    if target.suffix == ".ipynb":
        return within.with_suffix(".md"), ""
    large = target.suffix != ".png" and target.stat().st_size > MAX_BYTES
    if target.is_dir() or large or within.parts[0].startswith("."):
        return FILES, place_of(target if target.is_dir() else target.parent)
    return within, ""


def place_of(folder: Path) -> str:
    """The anchor of a folder on the page that lists folders."""
    return "-".join(folder.relative_to(ROOT).parts).lstrip(".")


def linked(text: str, document: Path) -> tuple[str, list[Path]]:
    """Returns a document with its links converted, and their targets.

    Raises:
      ValueError: a link is broken.
    """
    targets: list[Path] = []
    here, _ = address_of(document)

    def to_page(match: re.Match[str]) -> str:
        path, _, anchor = unquote(match[0]).partition("#")
        if re.match(r"[a-z]+:", path) or path.startswith(outputs_of(document)):
            return match[0]
        if not path:
            return f"#{anchor}"
        target = document_of((document.parent / path).resolve())
        if not target.exists():
            raise ValueError(
                f"{document.relative_to(ROOT)}: the link {match[0]} leads to nothing; "
                "it must name a file or folder, relative to this document"
            )
        targets.append(target)
        page, place = address_of(target)
        place = place or anchor
        return quote(os.path.relpath(page, here.parent)) + (place and f"#{place}")

    parts = FENCED.split(text)
    # A second word after the language of a code block is for tests only.
    parts[1::2] = [re.sub(r"^```(\w+) .*", r"```\1", code) for code in parts[1::2]]
    parts[::2] = [
        LINK.sub(to_page, ELSEWHERE.sub(r"\1", prose)) for prose in parts[::2]
    ]
    return "".join(parts), targets


def listing(folders: Iterable[Path]) -> str:
    """The page of folders without a README: their files, with summaries of programs."""
    lines = ["# Files", "", "Folders of the checkout that the guides lead to."]
    for folder in sorted(folders):
        name = folder.relative_to(ROOT)
        lines += ["", f"## {name}/ {{ #{place_of(folder)} }}", ""]
        for path in sorted(folder.iterdir()):
            if path.name.startswith((".", "__")):
                continue
            if path.suffix == ".py":
                lines.append(f"- `{path.name}`: {reference.summary_of(path)}")
            elif path.is_dir():
                lines.append(f"- `{path.name}/`")
            else:
                lines.append(f"- `{path.name}`, {path.stat().st_size:,} bytes")
    return "\n".join(lines) + "\n"


def write(folder: Path) -> None:
    """Writes the documents, and all files that they link to, below `folder`.

    Raises:
      ValueError: a link is broken.
    """
    waiting, done, listed = documents(), set[Path](), set[Path]()
    while waiting:
        target = waiting.pop()
        if target in done or reference.is_public(target):
            continue
        done.add(target)
        page, _ = address_of(target)
        out = folder / page
        out.parent.mkdir(parents=True, exist_ok=True)
        if page == FILES:
            listed.add(target if target.is_dir() else target.parent)
        elif target.suffix == ".py":
            text = html.escape(target.read_text(encoding="utf-8"), quote=False)
            name = target.relative_to(ROOT)
            out.write_text(SOURCE.format(name=name, text=text), encoding="utf-8")
        elif target.suffix in (".md", ".ipynb"):
            text, links = linked(text_of(target, out), target)
            guide = target in documents() and target.name != "CHANGELOG.md"
            out.write_text(HEAD.format(boost=3 if guide else 0.3) + text, "utf-8")
            waiting += links
        elif target.suffix == ".png":
            write_picture(target, out)
        else:
            shutil.copyfile(target, out)
    (folder / FILES).write_text(HEAD.format(boost=0.3) + listing(listed), "utf-8")


def write_picture(source: Path, out: Path) -> None:
    """Writes a picture with 256 colours, enough for a figure, if that is smaller."""
    shutil.copyfile(source, out)
    small = io.BytesIO()
    with Image.open(source) as picture:
        picture.convert("RGB").quantize(256).save(small, "png", optimize=True)
    if len(small.getvalue()) < out.stat().st_size:
        out.write_bytes(small.getvalue())


def outputs_of(notebook: Path) -> str:
    """The folder of a notebook's images, next to its page."""
    return f"{notebook.stem}_files"


def text_of(file: Path, out: Path) -> str:
    """A document in Markdown; images of a notebook are written next to `out`."""
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    text, resources = MarkdownExporter().from_filename(
        str(file), resources={"output_files_dir": outputs_of(file)}
    )
    for name, content in resources["outputs"].items():
        image = out.parent / name
        image.parent.mkdir(exist_ok=True)
        image.write_bytes(content)
    return text
