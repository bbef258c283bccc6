"""Runs the notebooks in fresh kernels and stores their outputs.

    pip install -e '.[notebooks]'
    python tests/programs/record_notebooks.py

Clocks, versions and the places where streams happened to be flushed are left out, so
that equal runs are equal files. `code` in a notebook's metadata is the digest of the
code that ran; `tests/experiments/test_notebooks.py` compares it with the cells.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path

NOTEBOOKS = Path(__file__).resolve().parents[2] / "experiments" / "notebooks"
SECONDS = re.compile(r"^\d+ s; ", re.MULTILINE)  # that a command took
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def digest(sources: list[str]) -> str:
    """The digest of the code cells in their order."""
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]


def record(file: Path) -> None:
    """Runs a notebook and writes it back."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(file, as_version=4)
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(file.parent)}},
    ).execute()
    sources = []
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02d}", {}
        sources += [cell.source] if cell.cell_type == "code" else []
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = SECONDS.sub("", output.text)
    notebook.metadata = METADATA | {"code": digest(sources)}
    nbformat.write(notebook, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="files; all by default")
    for file in parser.parse_args().notebooks or sorted(NOTEBOOKS.glob("*.ipynb")):
        record(file)
        print(f"recorded {file.name}")


if __name__ == "__main__":
    main()
