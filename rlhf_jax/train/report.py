"""Show runs on one page: which hacked its reward, and on which tokens.

    rlhf-jax report RUN... --html report.html
    rlhf-jax report RUN --watch

RUN is the folder of a run, or of a sweep for all of its runs. Runs whose configs differ
only in the seed are one group, drawn as one line with a band.

The page is one file that needs no network. It shows curves of any metric, the reward
beside the judge, differences between the configs, alarms, drift, and sampled responses
token by token, shaded by their KL. --watch serves it while a run is under way.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro

from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import refuse
from rlhf_jax.reports import document, reading, watching
from rlhf_jax.reports.contents import contents
from rlhf_jax.runs import command_line, folder, write_errors
from rlhf_jax.runs.object_storage import urls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of `rlhf-jax report`."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or of sweeps for all of their runs; or their gs:// or s3://
    addresses."""
    html: Path | None = None
    """File to write the page to; None writes none."""
    watch: bool = False
    """Whether to serve the page on 127.0.0.1 and update it while the runs go on."""
    port: int = 8321
    """Port of --watch; 0 takes any free one."""
    metrics: tuple[str, ...] = ()
    """Metrics whose curves are shown at first; by default reward, judge, KL and
    others."""
    title: str | None = None
    """Title of the page; None takes the question of the runs' sweep, or their names."""

    def check(self) -> None:
        """Raises InputError for options that do not fit together."""
        refuse(self._faults())
        if self.html is not None:
            own = document.is_page
            write_errors.check_place(
                self.html, option="--html", called="report", is_own=own
            )
        checks.within(
            least=0, most=2**16 - 1, advice="choose another", **{"--port": self.port}
        )

    def _faults(self) -> Iterator[str]:
        if not self.runs:
            yield (
                "expected the folder of a run, got none; rlhf-jax report RUN --html "
                "FILE"
            )
        if self.html is None and not self.watch:
            yield (
                "expected --html FILE, to write the page, or --watch, to serve it; got "
                "neither"
            )


def main(options: Config) -> None:
    """Runs `rlhf-jax report` with its options."""
    options.check()
    document.plotly()  # before anything is read or served
    if options.watch:
        for run in options.runs:
            urls.refuse(run, option="--watch")
    # The page needs no arrays of snapshots, which are large.
    copies = (urls.fetched(run, but=("*snapshots/*/arrays/*",)) for run in options.runs)
    options = dataclasses.replace(options, runs=tuple(copies))
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
    """Returns the data of the page, from all that the runs have written so far."""
    runs, waiting = reading.read_all(options.runs)
    title = options.title
    if title is None:
        title = reading.title(options.runs)
    return contents(runs, title=title, metrics=options.metrics, waiting=waiting).data


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax report`: makes a page from a command line."""
    options = command_line.cli(
        Config, prog="rlhf-jax report", description=__doc__, args=argv
    )
    jax.config.update("jax_platforms", "cpu")  # leave the devices to the runs
    try:
        main(options)
    except KeyboardInterrupt:  # ends --watch
        print(file=sys.stderr)
