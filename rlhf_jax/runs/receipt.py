"""The receipt of a run's data: what was read and is trained on, printed and kept."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder, parsing, report

NAME = "data.json"
SHAPE: parsing.Shape = {
    "sources?": [{"source": str, "name": str, "used": int, "read": int, "called": str}]
}
LEARNED, NOT_LEARNED = "bold green", "dim"
FIELDS = 12  # names of unread fields to print; data.json has all
MARKS = {"\t": "⇥", "\n": "⏎\n"}


def write(run: Path, data: Mapping[str, Any]) -> None:
    """Writes data.json; the file of a resumed run is kept.

    A warning on stderr names the sources that are now read differently.
    """
    path = run / NAME
    if not processes.is_first():
        return
    if not path.exists():
        folder.write_json(path, dict(data))
        return
    began: dict[str, Any] = {}
    with contextlib.suppress(InputError):  # not a receipt
        began = parsing.read_object(path, expected="", advice="", shape=SHAPE)
    now = json.loads(json.dumps(data))
    if began == now:
        return
    before = {source["name"]: source for source in began.get("sources", [])}
    names = [
        source["name"]
        for source in now["sources"]
        if before.get(source["name"]) != source
    ]
    print(
        f"warning: {path} records how this run began, and "
        f"{', '.join(names) or 'its data'} is now read differently",
        file=sys.stderr,
    )


def tell(data: Mapping[str, Any]) -> None:
    """Prints a receipt, the result of `Receipts.to_json`."""
    console = Console()
    uses = {
        f"{source['name']}, {use}": of
        for source in data["sources"]
        for use, of in source["uses"].items()
    }
    counts = ("rows", "turns_learned", "tokens_learned", "tokens")
    rows = [
        (name.replace("_", " "), *(of[name] for of in uses.values())) for name in counts
    ]
    rows += [
        (f"{name}, median / longest", *(_lengths(of, name) for of in uses.values()))
        for name in ("prompt", "response", "text")
    ]
    report.table("Data [tokens]", ("", *uses), rows)
    for source in data["sources"]:
        for line in _lines(source):
            console.print(Text(line), soft_wrap=True)
    for name, shared in data["prompts_shared_with_training"].items():
        line = f"{name}: {shared['shared']:,} of {shared['rows']:,} rows have a prompt"
        console.print(Text(f"{line} that is trained on"), soft_wrap=True)
    for number, source in enumerate(data["sources"]):
        if number == 0 or "training" in source["uses"]:
            for text in source["example"]:
                _tell_example(text, source=source["name"], console=console)


def visible(text: str) -> str:
    """Marks line breaks and tabs, and shows unprintable characters as \\xHH."""
    return "".join(
        MARKS.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in text
    )


def _lengths(of: Mapping[str, Any], name: str) -> str | None:
    lengths = of["lengths"].get(name)
    if lengths is None or not lengths["longest"]:
        return None
    return f"{lengths['median']:,g} / {lengths['longest']:,}"


def _lines(source: Mapping[str, Any]) -> list[str]:
    called, fields = source["called"], source["fields"]
    lines = [
        f"{source['name']} {source['source']}: {source['read']:,} {called} read, "
        f"{source['used']:,} used, {source['read'] - source['used']:,} left out"
    ]
    for title in ("left_out", "cut", "notes"):
        lines += [
            f"  {title.replace('_', ' ')}: {of['count']:,} × {reason}{_first(of)}"
            for reason, of in source[title].items()
        ]
    if fields["read"]:
        lines.append(f"  fields read: {', '.join(fields['read'])}")
    if readers := fields["whole_rows_given_to"]:
        lines.append(f"  every field is given to {', '.join(readers)}")
    if fields["unread"]:
        names = [
            f"{field} ({of['count']:,} rows{_first(of)})"
            for field, of in fields["unread"].items()
        ]
        more = [f"and {len(names) - FIELDS} more"] if len(names) > FIELDS else []
        lines.append(f"  fields that nobody reads: {', '.join(names[:FIELDS] + more)}")
    return [visible(line) for line in lines]


def _first(of: Mapping[str, Any]) -> str:
    return "" if of["first"] is None else f", first {of['first']}"


def _tell_example(text: Mapping[str, Any], *, source: str, console: Console) -> None:
    """Prints an example; trained text is coloured, or in ⟪ ⟫ without colours."""
    pieces: Sequence[Mapping[str, Any]] = text["pieces"]
    coloured = console.is_terminal and not console.no_color
    shown = Text(f"A row of {source}, {text['title']}; ")
    if not any(piece["learned"] for piece in pieces):
        shown.append("nothing of it is learned")
    elif coloured:
        shown.append("green is learned", style=LEARNED)
    else:
        shown.append("what is learned is in ⟪ ⟫")
    shown.append("\n")
    before, after = (text["not_shown"][side] for side in ("before", "after"))
    if before:
        shown.append(f"[{before:,} tokens before] ")
    for piece in pieces:
        style = LEARNED if piece["learned"] else NOT_LEARNED
        marks = ("⟪", "⟫") if piece["learned"] and not coloured else ("", "")
        shown.append(f"{marks[0]}{visible(piece['text'])}{marks[1]}", style=style)
    if after:
        shown.append(f" [{after:,} tokens after]")
    console.print(shown, soft_wrap=True)
