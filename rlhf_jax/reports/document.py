"""The page itself: HTML, style, scripts and data in one file."""

from __future__ import annotations

import html
import json
import string
from importlib import resources
from pathlib import Path
from typing import Any

from rlhf_jax.extensions import entry_points

SCRIPTS = (
    *("state.js", "elements.js", "overview.js", "legend.js", "charts.js"),
    *("tokens.js", "samples.js", "tables.js", "timings.js", "page.js"),
)
MARK = '<meta name="generator" content="rlhf-jax report">'  # in page.html
# The page fetches nothing, whatever texts it shows; a served one asks only its server.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
)


def page(data: dict[str, Any], *, live: bool = False) -> str:
    """Returns one HTML document that needs neither other files nor a network.

    Args:
      data: the data, from `contents.contents`.
      live: whether the page asks its server for newer data.
    """
    # Inserted text is not searched for further marks.
    return string.Template(_file("page.html")).substitute(
        POLICY=POLICY.format(connect="'self'" if live else "'none'"),
        TITLE=escaped(data["title"]),
        STYLE=_file("page.css"),
        DATA=as_script(data),
        LIVE="true" if live else "false",
        SCRIPTS="\n".join(map(_file, SCRIPTS)),
        PLOTLY=plotly(),
    )


def as_script(data: Any) -> str:
    """Returns JSON for a script element, which no text in it can end."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return _whole(text)


def is_page(path: Path) -> bool:
    """Returns whether a file is a page written by `rlhf-jax report`."""
    with path.open("rb") as file:
        return MARK.encode() in file.read(2000)


def written(data: Any) -> int:
    """Returns the number of bytes that data take in the page."""
    return len(as_script(data).encode())


def escaped(text: str) -> str:
    """Returns text escaped for HTML."""
    return html.escape(_whole(text), quote=False)


def _whole(text: str) -> str:
    """Replaces lone surrogates by "?": JSON may have them, UTF-8 files may not."""
    return text.encode(errors="replace").decode()


def plotly() -> str:
    """Returns the source of plotly.js, from the Python package that bundles it."""
    entry_points.require_package("plotly", extra="report", needed_by="rlhf-jax report")
    source = resources.files("plotly").joinpath("package_data", "plotly.min.js")
    return source.read_text(encoding="utf-8")


def _file(name: str) -> str:
    place = resources.files("rlhf_jax.reports").joinpath("page", name)
    return place.read_text(encoding="utf-8")
