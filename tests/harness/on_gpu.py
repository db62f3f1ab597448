"""Sizes of the tests of a GPU, and a shortage of its memory. On a machine without a GPU, the same
tests run on the CPU with small sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import train_minimal
from scripts import benchmark
from trainer.run import Run

REAL = "--model gpt2 --device cuda --dropout 0"  # 1,024 tokens per sequence
DRY = (
    "--n-layers 2 --n-heads 2 --d-model 16 --seq-len 16 --batch-size 2 --use-toy-data "
    "--vocab-size 64 --device cpu --amp-dtype bfloat16"
)


@dataclass(frozen=True)
class Bench:
    """Device and sizes: a GPU and GPT-2 small, or (`dry`) the CPU and a tiny model."""

    dry: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    def pick(self, real: Any, dry: Any) -> Any:
        return dry if self.dry else real

    def settings(self, flags: str = "", policy: str = "none") -> benchmark.BenchmarkSettings:
        """Return the benchmark's settings, with `flags` added."""
        settings = benchmark.parse(f"{self.pick(REAL, DRY)} {flags}".split())
        return settings.replace(use_activation_checkpoint=policy)


@contextmanager
def shortage(bench: Bench, step: int, free_bytes: int, in_holes: bool) -> Iterator[list[int]]:
    """Hold 1 GiB from step number `step` on, and leave `free_bytes` of the GPU to everything else.

    With `in_holes`, half of that GiB is freed again, in holes of 2 MiB. (On a CPU nothing is held;
    the first attempt of the step fails after its backward.) Yields a list. Each attempt of the step
    adds to it the bytes in use when the attempt begins (0 on a CPU).
    """
    real, begun, held = train_minimal.accumulate, list[int](), list[torch.Tensor]()

    def attempt(run: Run, **how: Any) -> list[torch.Tensor]:
        if run.step != step:
            return real(run, **how)
        if not bench.dry and not held:
            torch.cuda.empty_cache()
            n = 512 if in_holes else 1
            held.extend(torch.empty(2**30 // n, dtype=torch.uint8, device="cuda") for _ in range(n))
            del held[1::2]
            in_all = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction((free_bytes + 2**30) / in_all)
        begun.append(torch.cuda.memory_allocated())
        losses = real(run, **how)
        if bench.dry and len(begun) == 1:
            raise torch.OutOfMemoryError("played")
        return losses

    try:
        with mock.patch.object(train_minimal, "accumulate", attempt):
            yield begun
    finally:
        if not bench.dry:
            torch.cuda.set_per_process_memory_fraction(1.0)
