"""The options of `rlhf-jax report`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro

from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports import document


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The options of `rlhf-jax report`."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or of sweeps for all of their runs."""
    html: Path | None = None
    """File to write the page to."""
    watch: bool = False
    """Whether the page is served for runs under way, on 127.0.0.1 alone, and follows
    them."""
    port: int = 8321
    """With --watch: port to serve at; 0 is any that is free."""
    metrics: tuple[str, ...] = ()
    """Metrics whose curves are open first; without, reward, judge, KL and others."""
    title: str | None = None
    """Title of the page; None is the name of the runs."""

    def check(self) -> None:
        """What does not fit together, in one line and not in the parser's box.

        Raises:
          InputError: nothing is asked for, or the file cannot be one.
        """
        if not self.runs:
            raise InputError(
                "expected the folder of a run, got none; rlhf-jax report RUN --html "
                "FILE"
            )
        if self.html is None and not self.watch:
            raise InputError(
                "expected --html FILE, to write the page, or --watch, to serve it; got "
                "neither"
            )
        if self.html is not None:
            try:
                _check_file(self.html)
            except OSError as error:
                raise InputError(
                    f"--html {self.html}: expected a file to write, got: "
                    f"{error.strerror}; choose another"
                ) from error
        if not 0 <= self.port < 2**16:
            raise InputError(
                f"--port: expected 0 to 65535, got {self.port}; choose another"
            )


def _check_file(html: Path) -> None:
    """InputError where a page cannot be written; OSError where it cannot be told."""
    if not html.parent.is_dir():
        raise InputError(
            f"--html {html}: expected a file in a folder that exists, got no "
            f"{html.parent}; make it first"
        )
    try:
        html.lstat()
    except FileNotFoundError:
        return
    if html.is_dir():
        raise InputError(
            f"--html {html}: expected a file, got a folder; name a file in it"
        )
    if not html.is_file():
        raise InputError(
            f"--html {html}: expected a new file or an earlier report, got no regular "
            f"file; choose another"
        )
    if not document.is_page(html):
        raise InputError(
            f"--html {html}: expected a new file or an earlier report, got another "
            f"file, which would be lost; choose another name or remove it"
        )
