"""Chooses what to cite by the configs of the runs; references.bib has the rules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from rlhf_jax.reports.paper.provenance import Record

Options = Mapping[str, Any]
TRAINER = "trainer"
SOFTWARE = "rlhf_jax"
BLOCK = re.compile(r"^%([^\n]*)\n(@\w+\{(\w+),\n.*?^\})", re.MULTILINE | re.DOTALL)


class Entry(NamedTuple):
    """An entry of the bibliography, and the rules by which it is cited."""

    key: str
    name: str  # of the method in the paragraph; "" if the entry is cited elsewhere
    rules: tuple[str, ...]  # any one suffices
    bibtex: str


def entries() -> list[Entry]:
    """Reads all entries of references.bib, in the order of the file."""
    text = (
        resources.files("rlhf_jax.reports.paper")
        .joinpath("references.bib")
        .read_text("utf-8")
    )
    entries = []
    for comment, bibtex, key in BLOCK.findall(text):
        name, *rules = (part.strip() for part in comment.split("|"))
        entries.append(Entry(key, name, tuple(rules), bibtex))
    return entries


def cited(records: Sequence[Record]) -> list[Entry]:
    """Returns the entries that some run uses, and that of the software's version."""
    chosen = [one for one in entries() if any(due(one, record) for record in records)]
    recorded = {
        record.versions.get(SOFTWARE, "").partition(" ")[0] for record in records
    }
    version = ", ".join(sorted(recorded - {""})) or "not recorded"
    return [
        one._replace(bibtex=one.bibtex.replace("VERSION", version)) for one in chosen
    ]


def due(entry: Entry, record: Record) -> bool:
    """Returns whether a rule of an entry holds for a run; one without rules always."""
    options = dict(record.options)
    if record.run.module is not None:
        options[TRAINER] = record.run.program[0]
    return not entry.rules or any(_holds(rule, options) for rule in entry.rules)


def _holds(rule: str, options: Options) -> bool:
    """Whether all parts of a rule hold: `name` (is on), or `name=this,or,that`."""
    for part in rule.split():
        name, _, wanted = part.partition("=")
        values = [
            value for one, value in options.items() if f".{one}".endswith(f".{name}")
        ]
        if name.endswith("."):  # a group is on if it has options
            values = [True for one in options if f".{name}" in f".{one}"]
        if wanted:
            if not any(str(value) in wanted.split(",") for value in values):
                return False
        elif not any(values):
            return False
    return True
