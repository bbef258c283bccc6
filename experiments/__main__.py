"""Runs an experiment: `python experiments studies.distillation --out runs/distill`.

Modules of experiments import each other relative to this folder, as in
`from worlds import reviews`.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def experiments() -> dict[str, str]:
    """Returns {name: first line of the docstring} of every script in this folder."""
    lines = {}
    for file in sorted(HERE.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        name = ".".join(file.relative_to(HERE).with_suffix("").parts)
        if file.parent.name == "peers" or file.name == "__main__.py":
            continue
        if '__name__ == "__main__"' in text:
            docstring = ast.get_docstring(ast.parse(text)) or ""
            lines[name] = docstring.partition("\n")[0]
    return lines


def main() -> None:
    """Runs the experiment that the first argument names, with the other arguments."""
    known = experiments()
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name not in known:
        width = max(map(len, known))
        print("usage: python experiments NAME [OPTIONS]\n")
        print("\n".join(f"  {name:{width}}  {line}" for name, line in known.items()))
        if name in (None, "-h", "--help"):
            return
        sys.exit(f"\nexpected one of these names, got {name!r}")
    del sys.argv[0]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
