"""The page itself: HTML, style, scripts and data in one file."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from rlhf_jax.extensions import entry_points

SCRIPTS = (
    *("state.js", "elements.js", "overview.js", "legend.js", "charts.js"),
    *("tokens.js", "samples.js", "tables.js", "timings.js", "page.js"),
)
# Nothing is fetched, whatever a text of a run says; a page that is served asks only the
# server it came from.
MARK = '<meta name="generator" content="rlhf-jax report">'  # of page.html
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src {connect}; base-uri 'none'; form-action 'none'"
)


def page(data: dict[str, Any], *, live: bool = False) -> str:
    """One HTML document, of `contents.contents`, without other files and a network.

    A live one asks its server for newer data.
    """
    parts = {
        "POLICY": POLICY.format(connect="'self'" if live else "'none'"),
        "TITLE": escaped(data["title"]),
        "STYLE": _file("page.css"),
        "DATA": as_script(data),
        "LIVE": "true" if live else "false",
        "SCRIPTS": "\n".join(_file(name) for name in SCRIPTS),
        "PLOTLY": plotly(),
    }
    document = _file("page.html")
    head, *rest = document.split("{{")
    filled = [head]
    for part in rest:  # one pass: what is filled in is not searched again
        name, _, after = part.partition("}}")
        filled += [parts[name], after]
    return "".join(filled)


def as_script(data: Any) -> str:
    """JSON that stands in a script element: no text of it can end the element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return _whole(text)


def is_page(path: Path) -> bool:
    """Whether a file is a page that was written here."""
    with path.open("rb") as file:
        return MARK.encode() in file.read(2000)


def written(data: Any) -> int:
    """Bytes that some data take in the page."""
    return len(as_script(data).encode())


def escaped(text: str) -> str:
    """Text between tags."""
    text = _whole(text).replace("&", "&amp;")
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _whole(text: str) -> str:
    """With "?" for lone surrogates, which JSON may hold and a file may not."""
    return text.encode(errors="replace").decode()


def plotly() -> str:
    """The source of plotly.js, from the Python package that bundles it."""
    entry_points.require_package("plotly", extra="report", needed_by="rlhf-jax report")
    source = resources.files("plotly").joinpath("package_data", "plotly.min.js")
    return source.read_text(encoding="utf-8")


def _file(name: str) -> str:
    place = resources.files("rlhf_jax.reports").joinpath("page", name)
    return place.read_text(encoding="utf-8")
