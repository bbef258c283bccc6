"""Pages of the API, one per public module, below the page of its package."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import rlhf_jax

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rlhf_jax"
# Optional, because a type without a docstring has no entry.
REFERENCE = '<autoref identifier="{0}.{1}" optional><code>{1}</code></autoref>'
# Modules of `from rlhf_jax import losses`, which rank first in the search.
EXPORTED = {f"rlhf_jax.{module}" for module in rlhf_jax._MODULES.values()}
Nav = list[dict[str, "str | Nav"]]


def is_public(file: Path) -> bool:
    """Whether a file is a module that a program may import."""
    folders = [file.parent, *file.parent.parents]
    inside = folders[: folders.index(PACKAGE) + 1] if PACKAGE in folders else []
    return (
        file.suffix == ".py"
        and file.is_file()
        and file.name != "__main__.py"
        and bool(inside)
        and all((folder / "__init__.py").is_file() for folder in inside)
    )


def modules() -> list[Path]:
    """The files of all public modules; a package is its __init__.py."""
    return [file for file in sorted(PACKAGE.rglob("*.py")) if is_public(file)]


def name_of(file: Path) -> str:
    """The module's name, as in "rlhf_jax.functional.losses"."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def page_of(file: Path) -> Path:
    """The page of a module, relative to the site."""
    within = file.relative_to(PACKAGE)
    name = "index" if file.name == "__init__.py" else file.stem
    return Path("reference") / within.with_name(f"{name}.md")


def summary_of(file: Path) -> str:
    """The first line of a program's docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    return (docstring or "").partition("\n")[0]


def docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """Full names and docstrings of a module and its definitions."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    yield from _docstrings(tree, name_of(file))


def _docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef, name: str
) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name, text
    for one, following in zip(node.body, [*node.body[1:], ast.Pass()], strict=True):
        match one, following:
            case ast.ClassDef() | ast.FunctionDef(), _:
                # Private objects have no entry; the module or class gets their text.
                below = "" if one.name.startswith("_") else f".{one.name}"
                yield from _docstrings(one, name + below)
            case (
                ast.Assign(targets=[ast.Name(id=attribute)])
                | ast.AnnAssign(target=ast.Name(id=attribute)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield f"{name}.{attribute}", text


def exports(file: Path) -> list[str]:
    """The names in a module's __all__ that it imports from other modules."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return [name for name in ast.literal_eval(value) if name in names]
    return []


def parts_of(file: Path) -> list[Path]:
    """The packages and then the modules directly below a package."""
    folder = file.parent
    packages = [one for one in sorted(folder.glob("*/__init__.py")) if is_public(one)]
    return packages + [
        one
        for one in sorted(folder.glob("*.py"))
        if is_public(one) and one.name != "__init__.py"
    ]


def text_of(file: Path) -> str:
    """The Markdown page of a module; a package lists its parts."""
    name = name_of(file)
    known = [one.removeprefix(f"{name}.").split(".")[0] for one, _ in docstrings(file)]
    members = json.dumps([*dict.fromkeys(known[1:])])  # "on" is true in YAML
    boost = 2 if name in EXPORTED else 1
    lines = ["---", f"title: {name}", "search:", f"  boost: {boost}", "---", ""]
    lines += [f"::: {name}", "    options:"]
    lines += [f"      members: {members}"]
    if exported := exports(file):
        links = ", ".join(REFERENCE.format(name, one) for one in exported)
        lines += ["", "## From other modules", "", links]
    if file.name == "__init__.py":
        page = page_of(file)
        lines += ["", "## Modules", ""]
        for part in parts_of(file):
            link = page_of(part).relative_to(page.parent)
            lines.append(f"- [{name_of(part)}]({link}): {summary_of(part)}")
    return "\n".join(lines) + "\n"


def navigation(file: Path = PACKAGE / "__init__.py") -> Nav:
    """The tree of pages of a package, whose own page comes first."""
    entries: Nav = [{file.parent.name: str(page_of(file))}]
    for part in parts_of(file):
        below = part.name == "__init__.py"
        name = part.parent.name if below else part.stem
        entries.append({name: navigation(part) if below else str(page_of(part))})
    return entries
