"""Sizes of the tests of a GPU, and a shortage of its memory. On a machine without a GPU, the same
tests run on the CPU with small sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import train_minimal
from scripts import benchmark
from trainer.run import Run

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def pick(on_gpu: Any, on_cpu: Any) -> Any:
    return on_gpu if ON_GPU else on_cpu


# A GPU and GPT-2 small, with 1,024 tokens per sequence; or the CPU and a tiny model
SHAPE = pick(
    "--model gpt2 --device cuda --dropout 0",
    "--n-layers 2 --n-heads 2 --d-model 16 --seq-len 16 --batch-size 2 --use-toy-data "
    "--vocab-size 64 --device cpu --amp-dtype bfloat16",
)


def bench_settings(flags: str = "", policy: str = "none") -> benchmark.BenchmarkSettings:
    """Return the benchmark's settings, with `flags` added."""
    settings = benchmark.parse(f"{SHAPE} {flags}".split())
    return settings.replace(use_activation_checkpoint=policy)


@contextmanager
def shortage(step: int, free_bytes: int, in_holes: bool) -> Iterator[list[int]]:
    """Hold 1 GiB from step number `step` on, and leave `free_bytes` of the GPU to everything else.

    With `in_holes`, half of that GiB is freed again, in holes of 2 MiB. (On a CPU nothing is held;
    the first attempt of the step fails after its backward.) Yields a list. Each attempt of the step
    adds to it the bytes in use when the attempt begins (0 on a CPU).
    """
    real, begun, held = train_minimal.accumulate_gradients, list[int](), list[torch.Tensor]()

    def attempt(run: Run, **how: Any) -> list[torch.Tensor]:
        if run.step != step:
            return real(run, **how)
        if ON_GPU and not held:
            torch.cuda.empty_cache()
            n = 512 if in_holes else 1
            held.extend(torch.empty(2**30 // n, dtype=torch.uint8, device="cuda") for _ in range(n))
            del held[1::2]
            in_all = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction((free_bytes + 2**30) / in_all)
        begun.append(torch.cuda.memory_allocated())
        losses = real(run, **how)
        if not ON_GPU and len(begun) == 1:
            raise torch.OutOfMemoryError("played")
        return losses

    try:
        with mock.patch.object(train_minimal, "accumulate_gradients", attempt):
            yield begun
    finally:
        if ON_GPU:
            torch.cuda.set_per_process_memory_fraction(1.0)
