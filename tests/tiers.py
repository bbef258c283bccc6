"""Which cases of a long list are quick."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, all slow but the first, the one `count` after it, and so on."""
    return [
        case
        if number % count == 0
        else pytest.param(
            *(case if type(case) is tuple else (case,)), marks=pytest.mark.slow
        )
        for number, case in enumerate(cases)
    ]
