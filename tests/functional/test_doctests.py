"""Every public function of functional/ has an example, and the examples hold.

The numbers of an example are compared to the digits given in it.
"""

import doctest
import importlib
import inspect
import math
import pkgutil
import re

import pytest

from rlhf_jax import functional

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.?\d*(?:e[-+]?\d+)?(?!\w)")
# The public functions of these are in `logprobs` and `kl.hidden_states`.
INTERNAL = {"logprob_chunks", "chunks", "passes"}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Checker(doctest.OutputChecker):
    """Accepts 0.6931472 for 0.693, and [1.0000001 2.] for [1. 2.]."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        if super().check_output(want, got, optionflags):
            return True
        wanted_numbers, numbers = NUMBER.findall(want), NUMBER.findall(got)
        texts = ["".join(NUMBER.sub("#", text).split()) for text in (want, got)]
        return (
            bool(wanted_numbers)
            and texts[0] == texts[1]
            and all(close(a, b) for a, b in zip(wanted_numbers, numbers, strict=True))
        )


def close(expected: str, got: str) -> bool:
    digits = len(expected.partition("e")[0].partition(".")[2])
    if "." not in expected:
        return expected == got
    return math.isclose(
        float(expected), float(got), rel_tol=0, abs_tol=0.51 / 10**digits
    )


def modules() -> list:
    names = [
        module.name
        for module in pkgutil.walk_packages(functional.__path__, "rlhf_jax.functional.")
    ]
    return [importlib.import_module(name) for name in names]


EXAMPLES = {
    test.name.removeprefix("rlhf_jax.functional."): test
    for module in modules()
    for test in doctest.DocTestFinder(exclude_empty=False).find(module)
}


def own(place: object, module: str) -> dict:
    """The public functions and classes of a module, or the methods of a class."""
    return {
        name: value
        for name, value in vars(place).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module
    }


def public_functions() -> list[str]:
    """Dotted names below functional/, the methods of public classes too."""
    names = []
    for module in modules():
        place = module.__name__.removeprefix("rlhf_jax.functional.")
        if place.rpartition(".")[2] in INTERNAL:
            continue
        for name, value in own(module, module.__name__).items():
            if inspect.isfunction(value):
                names.append(f"{place}.{name}")
            if inspect.isclass(value):
                methods = own(value, module.__name__)
                names += [f"{place}.{name}.{method}" for method in methods]
    return names


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, test in EXAMPLES.items() if test.examples]
)
def test_the_examples_hold(name):
    test = EXAMPLES[name]
    # The names as they are now: shapes are checked (conftest.py).
    test.globs = dict(vars(importlib.import_module(test.globs["__name__"])))
    runner = doctest.DocTestRunner(Checker(), verbose=False, optionflags=FLAGS)
    report: list[str] = []
    runner.run(test, out=report.append, clear_globs=False)
    assert not runner.summarize(verbose=False).failed, "".join(report)


@pytest.mark.parametrize("name", public_functions())
def test_a_public_function_has_two_examples_or_more(name):
    assert sum(bool(example.want) for example in EXAMPLES[name].examples) >= 2


@pytest.mark.parametrize(
    ("want", "got", "same"),
    [
        ("0.693", "0.6931472", True),
        ("0.693", "0.6936", False),
        ("[ 1.  -0.5]", "[ 1.0000001 -0.49999997]", True),
        ("[1. 2.]", "[1. 3.]", False),
        ("[1. 2.]", "[[1. 2.]]", False),
        ("[1. 2.]", "[1. nan]", False),
        ("3", "4", False),
        ("True", "False", False),
    ],
)
def test_numbers_are_compared_to_the_digits_that_are_written(want, got, same):
    assert Checker().check_output(want + "\n", got + "\n", FLAGS) is same
