"""Choose which cases of a law run in the fast suite, and which can run on this CPU."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention


def rest_slow(cases: Iterable[Any], is_fast: Callable[[Any], bool]) -> list[Any]:
    """Return the cases for pytest.mark.parametrize; all that are not fast get the mark `slow`."""
    return [case if is_fast(case) else as_slow(case) for case in cases]


def as_slow(case: Any) -> Any:
    marks: Any = (pytest.mark.slow,)
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=(*case.marks, *marks), id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)


def has_float16_attention() -> bool:
    """Return whether torch's float16 attention works. On a CPU with instructions for float16 it
    raises an error if ATEN_CPU_CAPABILITY hides them, as .ci/run does (torch 2.13)."""
    q = torch.zeros(1, 1, 16, 16, dtype=torch.float16)
    try:
        return scaled_dot_product_attention(q, q, q).isfinite().all().item()
    except RuntimeError:
        return False
