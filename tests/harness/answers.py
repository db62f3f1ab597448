"""Run scripts.plan_memory for one small model, and parse its answers. Each answer is
cached, so a process runs each request only once."""

import json
import re
import tempfile
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.runs import parse

from scripts import plan_memory
from trainer.device import MemoryBudget
from trainer.plan import StepPlan
from trainer.settings import Settings

SHAPE = "--use-toy-data --vocab-size 61 --n-layers 2 --n-heads 2 --d-model 16 --seq-len 32"
BATCH = 64


class Answer(NamedTuple):
    json: dict[str, Any]
    out: str

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.json["rows"]}

    @property
    def peaks(self) -> dict[str, int]:
        return {name: row["peak_bytes"] for name, row in self.rows.items()}

    @property
    def table(self) -> list[str]:
        """Lines of the printed table. The first line is the header."""
        (table,) = (part for part in self.out.split("\n\n") if " policy " in part)
        return table.splitlines()

    @property
    def command(self) -> list[str]:
        """Words of the recommended command."""
        (line,) = re.findall("^(?:python|torchrun) .*$", self.out, re.M)
        return line.split()


@cache
def ask(flags: str = "--device cuda --memory-budget 1GiB") -> Answer:
    """Run plan_memory with `flags` for SHAPE and BATCH sequences, as on a machine without a GPU.
    Offload moves every tensor, however small, as with the fixture `everything_travels`."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setattr("memory.offload.MIN_OFFLOAD_BYTES", 1)
        path, out = Path(folder, "plan.json"), StringIO()
        with redirect_stdout(out):
            assert plan_memory.main([*words(flags), "--json", str(path)]) == 0
        return Answer(json.loads(path.read_text()), out.getvalue())


def words(flags: str) -> list[str]:
    return f"{SHAPE} --batch-size {BATCH} {flags}".split()


def question(flags: str) -> StepPlan:
    """Return the plan of plan_memory for these flags."""
    return plan_memory.make_plan(plan_memory.parse(words(flags)))


def budget_for(tensors: float) -> str:
    """Return flags for a GPU on which tensors may take `tensors` bytes. `tensors` must be less than
    3 GiB, because the function assumes a GPU with less than 4 GiB, of which a quarter stays free.
    """
    return f"--device cuda --memory-budget {int(tensors / 0.75) + 2}b"


def room_for(tensors: float) -> MemoryBudget:
    """Return the smallest memory budget on a CPU that lets tensors take `tensors` bytes."""
    about = (MemoryBudget(n, "cpu") for n in count(int(tensors / 0.9) - 1))
    return next(budget for budget in about if budget.bytes_within_margin >= tensors)


def run(words: list[str]) -> Settings:
    """Parse a recommended command, and return the flags that it passes to train_minimal.py."""
    assert words[:2] == ["python", "train_minimal.py"]
    return parse(" ".join(words[2:]))
