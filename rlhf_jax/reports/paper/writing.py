"""Writes the folder that a paper includes, after checking that it may."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports.paper import citations, figures, methods, provenance, tables
from rlhf_jax.runs import folder, write_errors
from rlhf_jax.sweeps.declaration import Sweep
from rlhf_jax.sweeps.planned import Planned
from rlhf_jax.sweeps.results import Results

MARK = "<!-- written by rlhf-jax paper -->"


def check(out: Path) -> None:
    """Checks that a folder is missing, empty, or that of an earlier paper.

    Raises:
      InputError: it has other contents, or cannot be read.
    """
    try:
        names = sorted(path.name for path in out.iterdir())
        got = ", ".join(names[:4])
        readme = out / "README.md"
        if readme.is_file() and readme.read_text("utf-8").startswith(MARK):
            return
    except FileNotFoundError:
        return
    except NotADirectoryError:
        got = "a file"
    except (OSError, UnicodeError) as error:
        got = f"{error}"
    if got:
        raise InputError(
            f"--out {str(out)!r:.200}: expected no folder, an empty one or that of an "
            f"earlier paper, got {got}; give another"
        )


def write(
    out: Path, sweep: Sweep, runs: Sequence[Planned], of: Results, *, width: float
) -> list[str]:
    """Writes all files, over those of an earlier paper; needs one finished run.

    Returns:
      Files in tables/ and figures/ that this sweep did not write, from an earlier one.
    """
    records = [provenance.read(run) for run in runs if run.done]
    note, left = methods.missing(runs)
    all_tables = tables.all_tables(sweep, of)
    drawn = figures.of_measures(sweep, of, width=width)
    drawn += figures.of_frontiers(sweep, of, width=width)
    all_tables = [one._replace(caption=one.caption + note) for one in all_tables]
    drawn = [one._replace(caption=one.caption + note) for one in drawn]
    cited = citations.cited(records)
    text = methods.paragraph(sweep, runs, records, of, cited=cited)
    files = {
        "tables/values.csv": tables.values(sweep, of),
        "tables/runs.csv": tables.as_csv(*provenance.table(records)),
        "methods.md": tables.as_markdown(text) + "\n",
        "methods.tex": methods.as_latex(text) + "\n",
        "references.bib": "\n\n".join(one.bibtex for one in cited) + "\n",
    }
    for table in all_tables:
        files |= {
            f"tables/{table.name}.csv": table.csv(),
            f"tables/{table.name}.md": table.markdown(),
            f"tables/{table.name}.tex": table.latex(),
        }
    files |= {f"figures/{one.name}.tex": one.latex() for one in drawn}
    files["example.tex"] = _example([one for one in files if one.endswith(".tex")])
    files = {"README.md": _readme(note + left)} | files  # first, to mark the folder
    with write_errors.writing(out):
        for place in (out / "tables", out / "figures"):
            place.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        folder.write_text(out / name, content)
    for one in drawn:
        one.save(out / "figures")
    files |= {
        f"figures/{one.name}.{kind}": "" for one in drawn for kind in figures.METADATA
    }
    present = [*(out / "tables").iterdir(), *(out / "figures").iterdir()]
    return sorted({str(path.relative_to(out)) for path in present} - {*files})


def _example(inputs: Sequence[str]) -> str:
    lines = "\n".join(f"\\input{{{name.removesuffix('.tex')}}}" for name in inputs)
    return (
        "% pdflatex example && bibtex example && pdflatex example && pdflatex example\n"
        "\\documentclass[twocolumn]{article}\n"
        "\\usepackage[T1]{fontenc}\n\\usepackage{booktabs,graphicx,url}\n"
        f"\\begin{{document}}\n\\section*{{Methods}}\n{lines}\n"
        "\\bibliographystyle{plain}\n\\bibliography{references}\n\\end{document}\n"
    )


def _readme(note: str) -> str:
    return f"""{MARK}
# Tables, figures and methods of a sweep

- `tables/NAME.tex`, `.md`: tables, rounded by their intervals; `.csv` has every digit
- `tables/values.csv`, `tables/runs.csv`: every number by seed; where runs come from
- `figures/NAME.pdf`, `.svg`, `.tex`: figures of a column's width; floats with captions
- `methods.tex`, `.md`: how the numbers were produced, as read from the run folders
- `references.bib`: the methods of these runs, and the software
- `example.tex`: a document with all of it

Compile the example in this folder:

    pdflatex example && bibtex example && pdflatex example && pdflatex example

Or take parts into a paper, with this folder as `paper/` beside it:

    \\usepackage{{booktabs,graphicx,url}}
    \\graphicspath{{{{paper/}}}}
    \\input{{paper/tables/results}}
    \\input{{paper/methods}}
    \\bibliography{{paper/references}}

The command again replaces these files, once more seeds are done.{note}
"""
