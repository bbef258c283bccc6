"""Selects the quick cases of a long list."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Marks all cases slow except every `count`-th, beginning with the first."""
    return [
        case
        if number % count == 0
        else pytest.param(
            *(case if type(case) is tuple else (case,)), marks=pytest.mark.slow
        )
        for number, case in enumerate(cases)
    ]
