"""A methods paragraph in which every fact is read from the run folders."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhf_jax.reports.paper import tables
from rlhf_jax.reports.paper.citations import Entry
from rlhf_jax.reports.paper.latex import escaped
from rlhf_jax.reports.paper.provenance import DIGEST, Record, Values, as_text
from rlhf_jax.runs.run_config import word
from rlhf_jax.sweeps.declaration import Sweep
from rlhf_jax.sweeps.planned import SEED, Planned
from rlhf_jax.sweeps.results import Results

CITED = re.compile(r" ?\[@(\w+)\]")
BREAKS = re.compile(r"(/|\\_)(?=\w)")
NAMED = 6  # missing runs that are named
MINUTE, HOUR = 60.0, 3600.0  # seconds


def missing(runs: Sequence[Planned]) -> tuple[str, str]:
    """Returns the captions' note on a partial sweep, and the runs left; else "", ""."""
    left = [run.name for run in runs if not run.done]
    if not left:
        return "", ""
    more = f"; and {len(left) - NAMED} more" if len(left) > NAMED else ""
    return (
        f" Partial: {len(runs) - len(left)} of {len(runs)} runs are done.",
        f" Not done: {'; '.join(left[:NAMED])}{more}.",
    )


def paragraph(
    sweep: Sweep,
    runs: Sequence[Planned],
    records: Sequence[Record],
    of: Results,
    *,
    cited: Sequence[Entry],
) -> str:
    """Returns the paragraph as Markdown, with citations as [@key]."""
    sentences = [
        _design(sweep, records),
        "".join(missing(runs)).strip(),
        *_origin(sweep, records),
        *_versions(records),
        _time(records),
        "Means over seeds have 95% Student's t intervals; differences and claims are "
        "paired by seed.",
        _answers(of),
        _methods(cited),
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def as_latex(text: str) -> str:
    """Returns the paragraph as LaTeX, with \\cite and line breaks allowed in paths."""
    parts = CITED.split(text)  # texts at even places, keys at odd ones
    return "".join(
        f"~\\cite{{{part}}}"
        if number % 2
        else BREAKS.sub(r"\1\\allowbreak{}", escaped(part))
        for number, part in enumerate(parts)
    )


def _design(sweep: Sweep, records: Sequence[Record]) -> str:
    programs = dict.fromkeys(
        f"rlhf-jax {record.run.program[0]}"
        if record.run.module
        else " ".join(record.run.shown)
        for record in records
    )
    values: dict[str, dict[str, None]] = {name: {} for name in tables.axes(sweep)}
    for cell in sweep.cells:
        for name, value in zip(values, tables.labels(cell), strict=True):
            values[name].setdefault(value)
    grid = "; ".join(f"{name} ∈ {{{', '.join(of)}}}" for name, of in values.items())
    seeds = ", ".join(map(str, sweep.seeds))
    cells = f"{len(sweep.cells)} cells ({grid})" if sweep.cells[0].values else "1 cell"
    shared = _options(sweep, records)
    asked = f" Every run has {shared}." if shared else ""
    return (
        f"The sweep runs {' and '.join(programs)} in {cells}, from seeds {seeds}."
        f"{_labels(sweep)}{asked} Other options are those of each run's config.json."
    )


def _labels(sweep: Sweep) -> str:
    """The meaning of each label of the grid: the options that only its cells share."""
    axes = {name for name, _ in sweep.cells[0].values}
    everywhere = set.intersection(*(set(cell.options) for cell in sweep.cells))
    sets: dict[str, str] = {}
    for label in (one for cell in sweep.cells for one in cell.values):
        own = [set(cell.options) for cell in sweep.cells if label in cell.values]
        shared = set.intersection(*own) - everywhere
        shown = [
            f"{name} = {word(value)}"
            for name, value in sorted(shared, key=str)
            if name not in axes
        ]
        if shown:
            sets[word(label[1])] = f" {word(label[1])} has {', '.join(shown)}."
    return "".join(sets.values())


def _options(sweep: Sweep, records: Sequence[Record]) -> str:
    """The options that the sweep gives to every run, without model and data."""
    sources = {one["source"] for record in records for one in record.sources}
    shown = []
    for name in sweep.options:
        values = [(one.run, one.option(name)) for one in records]
        if name != "model" and not {value for _, value in values} <= sources:
            shown.append(f"{name} = {_option(sweep, name, values)}")
    return ", ".join(shown)


def _option(sweep: Sweep, name: str, values: Values) -> str | None:
    """An option of all runs; the sweep's text if values differ only by {seed}."""
    asked = str(sweep.options.get(name))
    if SEED in asked and all(
        value == asked.replace(SEED, str(run.seed)) for run, value in values
    ):
        return asked
    return as_text(values, all_in="each run's config.json")


def _origin(sweep: Sweep, records: Sequence[Record]) -> list[str]:
    model = _option(sweep, "model", [(one.run, one.model) for one in records])
    data = as_text([(record.run, record.data) for record in records])
    digests = []
    for name in dict.fromkeys(name for one in records for name in one.digests):
        shown = as_text([(one.run, _short(one.digests.get(name))) for one in records])
        digests.append(f"{name} {shown}")
    reference = as_text([(one.run, _short(one.fingerprint)) for one in records])
    return [
        f"Model: {model}." if model else "No config names a model.",
        f"Data: {data}." if data else "There is no receipt of the data (data.json).",
        f"SHA-256 of the data as read: {', '.join(digests)}."
        if digests
        else "There is no snapshot with a digest of the data.",
        f"Fingerprint of the reference: {reference}." if reference else "",
    ]


def _short(digest: str | None) -> str | None:
    return None if digest is None else digest[:DIGEST]


def _versions(records: Sequence[Record]) -> list[str]:
    names = dict.fromkeys(name for record in records for name in record.versions)
    shown = {
        name: as_text([(one.run, one.versions.get(name)) for one in records])
        for name in names
    }
    devices = shown.pop("devices", None)
    if not shown:
        return ["No versions are recorded.", "The hardware is not recorded."]
    own = shown.pop("rlhf_jax", None) or "of an unknown version"
    known = {one.versions.get("rlhf_jax", "") for one in records}
    commit = ""
    if not all("(" in version for version in known):
        commit = " Not every run records a commit."
    if any("changed" in version for version in known):
        commit += " Where a commit is “changed”, files differed from it."
    others = ", ".join(f"{name} {version}" for name, version in shown.items())
    return [
        f"Software: rlhf_jax {own} [@rlhf_jax]{f', with {others}' * bool(others)}."
        f"{commit}",
        f"Hardware: {devices}." if devices else "The hardware is not recorded.",
    ]


def _time(records: Sequence[Record]) -> str:
    timed = [record.seconds for record in records if record.seconds is not None]
    if not timed:
        return "No run has timings."
    without = len(records) - len(timed)
    note = f" ({without} have no timings)" if without else ""
    return (
        f"Steps took {_duration(sum(timed))} over all runs{note}, at most "
        f"{_duration(max(timed))} per run; time outside of steps is not counted."
    )


def _duration(seconds: float) -> str:
    if seconds < 2 * MINUTE:
        return f"{seconds:.3g} seconds"
    if seconds < 2 * HOUR:
        return f"{seconds / MINUTE:.3g} minutes"
    return f"{seconds / HOUR:.3g} hours"


def _answers(of: Results) -> str:
    answers = [answered.answer for _, answered in of.answers.values()]
    if not answers:
        return ""
    yes, no, open_ = (answers.count(one) for one in ("yes", "no", tables.OPEN))
    return (
        f"Of {len(answers)} {'claim' if len(answers) == 1 else 'claims'} "
        f"{yes} {'is' if yes == 1 else 'are'} answered yes, "
        f"{no} no, and {open_} {'stays' if open_ == 1 else 'stay'} open."
    )


def _methods(cited: Sequence[Entry]) -> str:
    shown = [f"{one.name} [@{one.key}]" for one in cited if one.name]
    return f"By their options, the runs use {', '.join(shown)}." if shown else ""
