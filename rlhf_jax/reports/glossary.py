"""What a metric means and its unit, read from the glossary of runs/README.md."""

from __future__ import annotations

import re
from importlib import resources
from typing import NamedTuple

ROW = re.compile(r"^\| (`.*?`) \| ?(.*?) \| (.*?) \|$", re.MULTILINE)
RANGE = re.compile(r"`([^`]*_)(\d+)` to `_(\d+)`")


class Entry(NamedTuple):
    """One metric of the glossary."""

    unit: str  # "" where it has none
    text: str


def read() -> dict[str, Entry]:
    """{metric: entry}; in a name such as `reward/NAME` NAME stands for any word."""
    readme = resources.files("rlhf_jax.runs").joinpath("README.md")
    _, _, section = readme.read_text(encoding="utf-8").partition("\n## Metrics\n")
    section = section.partition("\n## ")[0]
    entries: dict[str, Entry] = {}
    for named, units, text in ROW.findall(section):
        names = re.findall(r"`([^`]+)`", RANGE.sub(_written_out, named))
        unit_of = [unit.strip() for unit in units.split(", ")]
        if len(unit_of) != len(names):  # one for all of them
            unit_of = [units.strip()] * len(names)
        for name, unit in zip(names, unit_of, strict=True):
            entries[name] = Entry(unit, text.replace("`", ""))
    return entries


def entry_of(metric: str, *, entries: dict[str, Entry]) -> Entry:
    """The entry of a metric, its own or that of its pattern; empty where none fits.

    `reward/tests/failed`, of one reward of several, has the entry of `reward/failed`.
    """
    of_any = "/".join((metric.partition("/")[0], metric.rpartition("/")[2]))
    for name in (metric, of_any):
        if name in entries:
            return entries[name]
        # The longest says most: of reward/NAME and reward/member_NAME the second.
        for pattern in sorted(entries, key=len, reverse=True):
            regex = re.escape(pattern).replace("NAME", r"[\w.-]+")
            if "NAME" in pattern and re.fullmatch(regex, name):
                return entries[pattern]
    return Entry("", "")


def _written_out(numbered: re.Match[str]) -> str:
    """`stem_1` to `_3` as the names that this stands for."""
    stem, first, last = numbered.groups()
    numbers = range(int(first), int(last) + 1)
    return ", ".join(f"`{stem}{number}`" for number in numbers)
