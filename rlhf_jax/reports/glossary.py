"""The meaning and unit of each metric, read from the glossary in runs/README.md."""

from __future__ import annotations

import re
from importlib import resources
from typing import NamedTuple

ROW = re.compile(r"^\| (`.*?`) \| ?(.*?) \| (.*?) \|$", re.MULTILINE)
RANGE = re.compile(r"`([^`]*_)(\d+)` to `_(\d+)`")


class Entry(NamedTuple):
    """One metric of the glossary."""

    unit: str  # "" if it has none
    text: str


def read() -> dict[str, Entry]:
    """Reads {metric: entry}; NAME in a name such as `reward/NAME` is any word."""
    readme = resources.files("rlhf_jax.runs").joinpath("README.md")
    _, _, section = readme.read_text(encoding="utf-8").partition("\n## Metrics\n")
    section = section.partition("\n## ")[0]
    entries: dict[str, Entry] = {}
    for named, units, text in ROW.findall(section):
        names = re.findall(r"`([^`]+)`", RANGE.sub(_written_out, named))
        unit_of = [unit.strip() for unit in units.split(", ")]
        if len(unit_of) != len(names):  # all names share one unit
            unit_of = [units.strip()] * len(names)
        for name, unit in zip(names, unit_of, strict=True):
            entries[name] = Entry(unit, text.replace("`", ""))
    return entries


def entry_of(metric: str, *, entries: dict[str, Entry]) -> Entry:
    """Returns the entry of a metric or of its pattern; an empty one if none fits.

    `reward/tests/failed`, a metric of the reward "tests", has the entry of
    `reward/failed`.
    """
    of_any = "/".join((metric.partition("/")[0], metric.rpartition("/")[2]))
    for name in (metric, of_any):
        if name in entries:
            return entries[name]
        # Longer patterns are more specific: reward/member_NAME before reward/NAME.
        for pattern in sorted(entries, key=len, reverse=True):
            regex = re.escape(pattern).replace("NAME", r"[\w.-]+")
            if "NAME" in pattern and re.fullmatch(regex, name):
                return entries[pattern]
    return Entry("", "")


def _written_out(numbered: re.Match[str]) -> str:
    """Expands `stem_1` to `_3` into all of its names."""
    stem, first, last = numbered.groups()
    numbers = range(int(first), int(last) + 1)
    return ", ".join(f"`{stem}{number}`" for number in numbers)
