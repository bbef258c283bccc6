"""One-line errors of a command line: expected, got, what to do."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import io
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import tyro

from rlhf_jax.functional.errors import InputError
from rlhf_jax.runs import choices

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FRAMED = re.compile(r"│|  ")  # tyro draws no │ where the output is not UTF-8
RULE = re.compile(r"^[─-]{9,}$")
ARGPARSE = (  # (message of argparse, message of this package)
    (r"argument (\S+): expected one argument", r"\1: expected a value, got none"),
    (r"argument (\S+): invalid int value:", r"\1: expected a whole number, got"),
    (r"unrecognized arguments: (.*)", r"expected other options, got '\1'"),
    (r"the following arguments are required: (.*)", r"expected \1, got none"),
)
# A field at the beginning of a message, perhaps after its group.
FIELD = re.compile(
    r"(?:(?P<group>[a-z_]+)(?:: |\.))?(?P<field>[a-z]\w*): (?=expected )"
)
OF_SEVERAL = re.compile(r"expected (?:one of )?([a-z]+_\w+) (?:and|to) ")
OF_WORDS = re.compile(r"(?<![\w.'-])[a-z]+(?:_[a-z]+)+\b(?!=)")  # batch_size
RECORD = re.compile(r"(?<=got )[A-Z]\w*\(.*\)(?=;)")  # how Python shows a choice


class Arguments(argparse.ArgumentParser):
    """An argparse parser that raises InputError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raises `message` as an InputError in the style of this package."""
        for theirs, ours in ARGPARSE:
            message = re.sub(theirs, ours, message)
        see = f"{self.prog} --help explains it" if self.add_help else "correct it"
        raise InputError(f"{message}; {see}")


def cli(
    wanted: Any,
    *,
    prog: str,
    args: Sequence[str] | None,
    description: str | None = None,
    add_help: bool = True,
    return_unknown_args: bool = False,
) -> Any:
    """Calls `tyro.cli(wanted, ...)`, and turns its boxed errors into InputError.

    Args:
      description: a docstring; each of its paragraphs becomes one line, which the
        terminal breaks.
      add_help, return_unknown_args: arguments of `tyro.cli`.

    Raises:
      InputError: tyro refuses the arguments, or the config refuses its values.
    """
    args = sys.argv[1:] if args is None else args
    printed = io.StringIO()
    with naming(wanted, args):
        try:
            with contextlib.redirect_stderr(printed):
                parsed = tyro.cli(
                    wanted,
                    prog=prog,
                    args=args,
                    description=_joined(description or "") or None,
                    registry=choices.REGISTRY,
                    add_help=add_help,
                    return_unknown_args=return_unknown_args,
                )
        except SystemExit as stop:
            if stop.code != 2:  # --help
                raise
            see = "--help" if add_help else "--help-all"
            box = COLOURS.sub("", printed.getvalue())
            why = _message(
                box, wanted=wanted, args=args, prog=prog, see=f"{prog} {see}"
            )
            raise InputError(_own(stop, box) or why) from None
    print(printed.getvalue(), end="", file=sys.stderr)  # warnings
    return parsed


def call(
    function: Callable[..., None], *, prog: str, args: Sequence[str] | None
) -> None:
    """Calls a function with arguments parsed from a command line.

    Raises:
      InputError: as `cli`, or raised by the function.
    """

    @functools.wraps(function)
    def bound(*values: Any, **named: Any) -> Callable[[], None]:
        return functools.partial(function, *values, **named)

    bound.__annotations__ = function.__annotations__ | {"return": Callable[[], None]}
    bound.__doc__ = _joined(inspect.getdoc(function) or "")
    with naming(function, args):
        cli(bound, prog=prog, args=args)()


@contextlib.contextmanager
def naming(wanted: Any, args: Sequence[str] | None) -> Iterator[None]:
    """Rewrites the messages of errors inside by `in_options`.

    Args:
      wanted: the config or function of the command.
      args: None is the command line.
    """
    try:
        yield
    except InputError as error:
        args = sys.argv[1:] if args is None else args
        options = dict(choices.options(wanted))
        error.args = (in_options(str(error), options=options, args=args),)
        raise


def in_options(message: str, *, options: Iterable[str], args: Sequence[str]) -> str:
    """Names the options of a command where an error names the fields of its config.

        batch_size: expected ..., got 0; choose batch_size > 0
        --batch-size: expected ..., got 0; choose --batch-size > 0

    The key of a choice follows its option, and a choice is shown as it was given.

    Args:
      options: all options of the command; `args` are those that were given.
    """
    named: dict[str, list[str]] = {}
    for option in sorted(options):
        field = option.removeprefix("--").rpartition(".")[2].replace("-", "_")
        named.setdefault(field, []).append(option)
    given = [word.partition("=")[0].replace("_", "-") for word in args]

    def option_of(field: str, group: str | None) -> str:
        several = named[field]
        alike = [option for option in several if option.rpartition(".")[0] == group]
        chosen = [option for option in several if option in given]
        return " or ".join(alike or chosen or several)

    def rewritten(line: str) -> str:
        match, several = FIELD.match(line), OF_SEVERAL.match(line)
        first, group = "", None
        if match is not None:
            field, group = match["field"], match["group"] and f"--{match['group']}"
            if field not in named:
                return f"{_given_key(field, args)}{line}"
            first = option_of(field, group)
            group = first.rpartition(".")[0]
            line = RECORD.sub(lambda x: _written(first, args)[1:-1] or x[0], line)
            text, choose, advice = line[match.end() :].rpartition("; choose ")
            line = text + choose + re.sub(rf"\b{field}\b(?!=)", first, advice)
        elif several is None or several[1] not in named:
            return line
        line = OF_WORDS.sub(
            lambda word: option_of(word[0], group) if word[0] in named else word[0],
            line,
        )
        return f"{first}: {line}" if first else line

    return "\n".join(map(rewritten, message.split("\n")))


def _given_key(key: str, args: Sequence[str]) -> str:
    """The option whose choice was given a key, as "--kl-control: "; "" if none."""
    for name in reversed([word for word in args if word.startswith("--")]):
        option = name.partition("=")[0].replace("_", "-")
        if re.search(rf"[,'\"]{key}=", _written(option, args)):
            return f"{option}: "
    return ""


def _joined(docstring: str) -> str:
    """Joins the lines of each paragraph and of each argument; tyro keeps some breaks.

    Indented lines, such as commands, stay.
    """
    text, section, arguments = docstring.partition("\nArgs:\n")
    text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
    return text + section + re.sub(r"\n {4,}", " ", arguments)


def _own(stop: SystemExit, box: str) -> str | None:
    """The message of an InputError of this package that tyro drew a box around."""
    error: BaseException | None = stop
    while error is not None and not isinstance(error, InputError):
        error = error.__context__
    if error is None:
        return None
    option = next(iter(re.findall(r"Error parsing (--[\w.-]+)", box)), "")
    return str(error) if option in str(error) else f"{option}: {error}"


def _message(box: str, *, wanted: Any, args: Sequence[str], prog: str, see: str) -> str:
    """Rewrites tyro's box in one line; an unknown kind of box keeps its first words."""
    rows = [row for row in box.splitlines() if FRAMED.match(row)]
    rows = [row.removesuffix("│")[2:].rstrip() for row in rows]
    above = list(itertools.takewhile(_is_text, rows))
    first = " ".join(" ".join(above).split())
    below = list(itertools.takewhile(_is_text, rows[len(above) + 1 :]))
    if match := re.match(r"Error parsing (--[\w.-]+):", first):
        kind = choices.described(dict(choices.options(wanted))[match[1]])
        got = _written(match[1], args)
        return f"{match[1]}: expected {kind}, got {got}; {see} explains it"
    if match := re.match(r"invalid choice .* for argument '(--[\w.-]+)'", first):
        known = first.rpartition("Expected one of (")[2].rstrip(".,) ").replace("'", "")
        got = _written(match[1], args)
        return f"{match[1]}: expected one of {known}, got {got}; choose one"
    if match := re.match(r"Missing value for argument '(--[\w.-]+)'", first):
        return f"{match[1]}: expected a value, got none; write it after the option"
    if first.startswith("Missing from"):
        missing = " and ".join(name.partition(" ")[0] for name in _named(above))
        got = "none"
        if below and below[0].strip() == "Unrecognized options:":
            got = f"{' '.join(_named(below))!r}, which is not an option"
        return f"expected {missing}, got {got}; {see} explains more"
    if match := re.match(r"Unrecognized options: (.*)", first):
        words = match[1].replace(", ", " ")
        shown = [row.split()[0] for row in below if row.strip().startswith("--")]
        near = [option.rstrip(",") for option in shown]  # a flag and its --no-flag
        ask = f"did you mean {' or '.join(near[:3])}? " if near else ""
        return f"expected options of {prog}, got {words!r}; {ask}{see} lists them"
    return f"expected options of {prog}, got {first}; {see} lists them"


def _is_text(row: str) -> bool:
    return RULE.match(row.strip()) is None


def _named(rows: Sequence[str]) -> Iterator[str]:
    """The arguments in a list; their help texts are indented further."""
    return (row.strip() for row in rows if re.match(r" {4}\S", row))


def _written(option: str, args: Sequence[str]) -> str:
    """The text after the last use of an option."""
    words: list[str] = []
    for i, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:
            words = [value] if equals else []
            if not equals:
                for other in args[i + 1 :]:
                    if other.startswith("--"):
                        break
                    words.append(other)
    return f"{' '.join(words)!r:.200}"
