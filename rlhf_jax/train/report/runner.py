"""`rlhf-jax report`, from its options to the page."""

from __future__ import annotations

from typing import Any

from rlhf_jax.reports import document, reading, watching
from rlhf_jax.reports.contents import contents
from rlhf_jax.runs import folder
from rlhf_jax.train.report.options import Config


def main(options: Config) -> None:
    """Runs `rlhf-jax report` with its options.

    Raises:
      InputError: a folder is no run's, runs share no metric, none has one of
        --metrics, the port is taken, or Plotly is not installed.
      WriteError: the file cannot be written.
    """
    options.check()
    document.plotly()  # before anything is read or served
    source = watching.Source(options.runs, load=lambda: load(options))
    _, data = source.latest()
    count = len(data["runs"])
    runs = f"{count} run{'' if count == 1 else 's'}"
    if options.html is not None:
        page = document.page(data)
        folder.write_text(options.html, page)
        print(f"{runs}, {len(page.encode()) / 1e6:.1f} MB, in {options.html}")
        for note in data["notes"]:
            print(note)
    if options.watch:
        with watching.Server(source, port=options.port) as server:
            print(f"{server.address} follows {runs}; Ctrl-C ends it")
            server.serve_forever()


def load(options: Config) -> dict[str, Any]:
    """The data of the page, of all that the runs have written so far."""
    runs, waiting = reading.read_all(options.runs)
    title = options.title
    if title is None:
        title = ", ".join(path.resolve().name for path in options.runs[:4])
        title += ", ..." if len(options.runs) > 4 else ""
    return contents(runs, title=title, metrics=options.metrics, waiting=waiting).data
