"""Prepares docstrings for griffe, which reads them in Google's style."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^>>> .*\n(?:.+\n?)*)+", re.MULTILINE)
# A field of a record, with its comment above it or on its line.
FIELD = re.compile(r"((?:^    # .*\n)*)^    (\w+): .*?(?:  # (.*))?$", re.MULTILINE)
# Markdown would read this as a quotation.
ABOVE = re.compile(r"^( +[\w, ]+: )>", re.MULTILINE)
RAISES = re.compile(r"^Raises:\n((?: +.*\n?)+)", re.MULTILINE)
# The first line of a result: griffe would read the text before a colon as its type.
RESULT = re.compile(r"^(Returns|Yields):\n( +)", re.MULTILINE)


def one_a_line(match: re.Match[str]) -> str:
    """Puts each exception of a section on its own line."""
    words = " ".join(match[1].split())
    items = re.split(r"(?<=[.;]) (?=[A-Z]\w*Error: )", words)
    return "Raises:\n" + "".join(f"  {item}\n" for item in items)


def prepared(text: str) -> str:
    """Converts a docstring to Google's style, with fenced doctests."""
    text = ABOVE.sub(r"\1\\>", RAISES.sub(one_a_line, text))
    text = DOCTEST.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", text)
    return RESULT.sub(r"\1:\n\2: ", text)


class Docstrings(griffe.Extension):
    """Prepares the docstring of every object of the package."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for each object, before its docstring is read."""
        if obj.docstring is not None:
            obj.docstring.value = prepared(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Adds the fields of a record, with their comments (dtype, shape and unit)."""
        comments = {
            name: beside or " ".join(above.replace("    # ", "").split())
            for above, name, beside in FIELD.findall(cls.source)
        }
        fields = [
            f"  {name}: {comments.get(name, '')}"
            for name, one in cls.attributes.items()
            if one.annotation and not one.docstring and not one.is_private
        ]
        if fields and cls.docstring is not None:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(fields)
