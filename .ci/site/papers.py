"""The index of papers: each cited paper, and the functions that follow it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import reference

from rlhf_jax.reports.paper import citations

NAME = r"(?:van )?[A-Z][\w'-]+"
# "Schulman et al. 2017, arXiv:1707.06347": the name of the method may stand in brackets
# before or after the year, and the number may be missing.
PAPER = re.compile(
    rf"(?P<authors>{NAME}(?:, {NAME})*(?:,? (?:and|&) {NAME}| et al\.| [Tt]eam)?)"
    r"(?: \([^)]+\))?,? \(?(?P<year>(?:19|20)\d\d)\)?(?: \([^)]+\))?"
    r"(?:,? arXiv:(?P<arxiv>[\d.]+\d|[a-z-]+/\d+))?"
)
ARXIV = re.compile(r"arXiv:([\d.]+\d|[a-z-]+/\d+)")
SOURCE = re.compile(r"^Sources?\b.*?:(.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)


@dataclass
class Paper:
    """A paper and its citations."""

    labels: Counter[str] = field(default_factory=Counter)  # authors and year
    title: str = ""
    methods: list[str] = field(default_factory=list)  # names in references.bib
    followers: set[str] = field(default_factory=set)  # full names of functions


def docstrings() -> Iterator[tuple[str, str]]:
    """Names and docstrings of all objects of the package."""
    for file in reference.modules():
        yield from reference.docstrings(file)


def index() -> dict[str, Paper]:
    """{arXiv number, or else authors and year: paper}."""
    papers: dict[str, Paper] = defaultdict(Paper)
    unnumbered = []
    for name, text in docstrings():
        flat = " ".join(text.split())
        for number in ARXIV.findall(flat):
            papers[number].followers.add(name)
        named = {match["arxiv"]: label_of(match) for match in PAPER.finditer(flat)}
        for number, label in named.items():
            if number:
                papers[number].labels[label] += 1
        for source in SOURCE.findall(text):
            matches = PAPER.finditer(" ".join(source.split()))
            unnumbered += [(label_of(one), name) for one in matches if not one["arxiv"]]
    numbers = {label: key for key, paper in papers.items() for label in paper.labels}
    for label, name in unnumbered:
        papers[numbers.get(label, label)].followers.add(name)
    for entry in citations.entries():
        if entry.rules:  # skips the entry of this software
            _add_entry(papers, entry)
    return papers


def label_of(match: re.Match[str]) -> str:
    """The label of a match of PAPER, as in "Schulman et al. 2017"."""
    return f"{match['authors']} {match['year']}"


def others() -> list[tuple[str, str]]:
    """(source, name) of sources that are not papers, such as programs and books."""
    return [
        (flat, name)
        for name, text in docstrings()
        for flat in (" ".join(source.split()) for source in SOURCE.findall(text))
        if not PAPER.search(flat) and not ARXIV.search(flat)
    ]


def _add_entry(papers: dict[str, Paper], entry: citations.Entry) -> None:
    """Adds the title and the method of an entry of references.bib."""
    fields = dict(re.findall(r"^  (\w+) = \{(.*)\},?$", entry.bibtex, re.MULTILINE))
    authors = [one.partition(",")[0] for one in fields["author"].split(" and ")]
    label = authors[0] if len(authors) == 1 else f"{authors[0]} et al."
    label = f"{label} {fields['year']}"
    number = ARXIV.search(entry.bibtex)
    paper = papers[number[1] if number else label]
    paper.labels[label] += 1
    paper.title = re.sub(r"[{}]", "", fields["title"])
    if entry.name:
        paper.methods.append(entry.name)


def text() -> str:
    """The Markdown of the page."""
    lines = [
        "# Papers",
        "",
        "What the docstrings name under *Source*, with the functions that follow it, "
        "and what [`rlhf-jax paper`](rlhf_jax/reports/index.md) cites for a run.",
    ]
    papers = index()
    for key in sorted(papers, key=lambda key: (heading(key, papers[key]), key)):
        paper = papers[key]
        lines += ["", f"## {heading(key, paper)}", ""]
        about = [f"*{paper.title}*"] if paper.title else []
        about += [numbered(key)] if numbered(key) and paper.labels else []
        about += [f"for {', '.join(paper.methods)}"] if paper.methods else []
        lines += [", ".join(about), ""] if about else []
        lines += [f"- {linked(name)}" for name in sorted(paper.followers)]
    lines += ["", "## Books and programs", ""]
    lines += [f"- {linked(name)}: {source}" for source, name in sorted(others())]
    return "\n".join(lines) + "\n"


def numbered(key: str) -> str:
    """Returns "arXiv:1707.06347" for an arXiv number, else ""."""
    return f"arXiv:{key}" if ARXIV.match(f"arXiv:{key}") else ""


def heading(key: str, paper: Paper) -> str:
    """The most common label of a paper, or else its number."""
    if paper.labels:
        return paper.labels.most_common(1)[0][0]
    return numbered(key) or key


def linked(name: str) -> str:
    """A link to the entry of a function in the reference."""
    return f"[`{name.removeprefix('rlhf_jax.')}`][{name}]"
