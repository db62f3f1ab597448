"""Choose which cases of a law run in the fast suite."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def rest_slow(cases: Iterable[Any], is_fast: Callable[[Any], bool]) -> list[Any]:
    """Return the cases for pytest.mark.parametrize; all that are not fast get the mark `slow`."""
    return [case if is_fast(case) else as_slow(case) for case in cases]


def as_slow(case: Any) -> Any:
    marks: Any = (pytest.mark.slow,)
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=(*case.marks, *marks), id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
