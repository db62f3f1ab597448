"""On which device a run computes, in which precision, and what memory is there."""

import argparse
import os
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from model import MiniGPT

from .flags import UsageError
from .metrics import format_bytes

GIB = 2**30
CGROUP = "/sys/fs/cgroup/memory."  # version 2: a container may have less than the machine


def is_here(kind: str) -> bool:
    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind != "cuda" or torch.cuda.is_available()


def choose_device(name: str) -> torch.device:
    """The device that --device names. Raises UsageError if it is not there."""
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if is_here(kind))
    if not is_here(name):
        raise UsageError(f"--device {name}: torch {torch.__version__} finds none; try --device cpu")
    return torch.device(name)


def choose_precision(
    args: argparse.Namespace, device: torch.device, native: bool | None = None
) -> torch.dtype:
    """bfloat16 where the hardware has it, else float16 (CUDA only), else float32.

    `native`: whether a GPU has bfloat16, if it is not there to be asked.

    bfloat16 has float32's range and needs no loss scaling; but a chip without it emulates it,
    which is slower than float32, on some CPUs a hundred times.
    """
    if args.no_amp:
        return torch.float32
    if args.amp_dtype == "bfloat16":
        return torch.bfloat16
    if args.amp_dtype == "float16":
        if device.type == "mps":
            raise UsageError("--amp-dtype float16 needs a GradScaler, which mps lacks: --no-amp")
        return torch.float16
    if device.type == "cuda":
        if native is None:
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    if device.type == "cpu" and cpu_has_bfloat16():
        return torch.bfloat16
    return torch.float32


def check_gather_dtype(args: argparse.Namespace, precision: torch.dtype) -> None:
    """Raise UsageError if blocks do not compute in the precision in which they are gathered, or if
    they add gradients up in it."""
    if args.gather_dtype == "bfloat16" and precision != torch.bfloat16:
        raise UsageError(
            f"--gather-dtype bfloat16: blocks compute in {precision} here; --amp-dtype bfloat16 "
            "goes with it, or --gather-dtype float32"
        )
    if args.gather_dtype == "bfloat16" and args.mlp_chunks != 1:
        raise UsageError(
            f"--mlp-chunks {args.mlp_chunks}: --gather-dtype bfloat16 would add the chunks' "
            "gradients up in bfloat16; --gather-dtype float32 or --mlp-chunks 1"
        )


def set_matmul_precision(device: torch.device, tf32: bool) -> None:
    """How a GPU's matmuls round: float32 to TF32's 10 bits, if `tf32`, and nothing else.

    For the CPU nothing is set: oneDNN would round there as well where the hardware can.
    """
    if device.type != "cuda":
        return
    # Not the newer fp32_precision, which torch 2.9 asks for: torch.compile ends in an error with it
    # (pytorch#166387).
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings")
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # The compiler advises TF32 in every run; here --tf32 decides.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores .* not enabled. Consider")
    # A long sum (one over the vocabulary, in the head's backward) may be cut in parts for several
    # cores. cuBLAS may add those up in the result's 8 or 11 bits, unless it is told not to: see
    # "Numerical accuracy" in PyTorch's notes.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def cpu_has_bfloat16() -> bool:
    """Has this CPU instructions for bfloat16 matmuls (AVX512-BF16 or AMX)?"""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # no public names yet
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def compile_blocks(model: MiniGPT) -> None:
    """torch.compile each block: the first one of a policy pays, the others reuse its code.

    Around `full` the activation checkpoint stays outside of the compiled code, where it keeps the
    block's input alone. (Such code cannot stop half-way: the last matmul is replayed, too.) The
    finer policies are inside: the compiler has to see what they are about.
    """
    torch._dynamo.config.optimize_ddp = False  # DDP would cut graphs, checkpoints as well
    # On CUDA replayed dropout would draw from generators that manual_seed does not reach.
    torch._functorch.config.graphsafe_rng_functionalization = False
    for block in model.blocks:
        block.compile()
    model.head_loss = partial(cast(Any, model.head_loss), compiled=True)


def is_compiled(model: MiniGPT) -> bool:
    return any(block._compiled_call_impl is not None for block in model.blocks)


# ---- memory


def free_memory(device: torch.device) -> int | None:
    """Bytes that tensors can still take on the device; None if nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free = in_kib("MemAvailable:") or built_in_memory()  # (not Linux: an upper limit)
    limit, used = number_in(f"{CGROUP}max"), number_in(f"{CGROUP}current")
    if free and limit is not None and used is not None:  # cached files give way
        free = min(free, limit - used + (number_in(f"{CGROUP}stat", "inactive_file") or 0))
    return free


def total_memory(device: torch.device) -> int | None:
    """Bytes that the device, or the container, has in all; None if nobody knows."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    # (Swap is slow, but no reason to refuse a run.)
    built_in = in_kib("MemTotal:", "SwapTotal:") or built_in_memory()
    return min(filter(None, (built_in, number_in(f"{CGROUP}max"))), default=None)


@dataclass(frozen=True)
class MemoryBudget:
    """The memory that there is for a process, in bytes: its tensors, and all that is beside them.

    --memory-budget says it, or it is a card's, or what is free.
    """

    total_bytes: int | None  # None: nobody knows
    device_type: str
    is_free: bool = False
    host_usable_bytes: int | None = (
        None  # bytes of CPU memory that offload may have beside it; None: who knows
    )

    @property
    def usable_bytes(self) -> int | None:
        """What tensors may take of it."""
        return None if self.total_bytes is None else for_tensors(self.total_bytes, self.device_type)

    def __str__(self) -> str:
        """ "54.0 MiB (60.0 MiB less a margin of a tenth)" """
        assert self.total_bytes is not None and self.usable_bytes is not None
        _, words = margin(self.total_bytes, self.device_type)
        whole = format_bytes(self.total_bytes) + " free," * self.is_free
        return f"{format_bytes(self.usable_bytes)} ({whole} less a margin of {words})"


def margin(room: float, device_type: str) -> tuple[float, str]:
    """Of `room` bytes, those that stay free: a tenth, on a GPU at least 1 GiB (of less than 4 GiB a
    quarter); and in words.

    An allocator cannot use every gap, and on a GPU there are, beside the tensors, the driver's
    context with some hundred MiB, the code of kernels, NCCL's buffers.
    """
    if device_type == "cuda" and room < 10 * GIB:
        return (room / 4, "a quarter") if room < 4 * GIB else (GIB, "1 GiB")
    return 0.1 * room, "a tenth"


def for_tensors(room: float, device_type: str) -> int:
    return int(room - margin(room, device_type)[0])


def budget_on(
    device: torch.device,
    budget: int | None = None,
    processes: int = 1,
    held: int = 0,
    here: int = 1,
) -> MemoryBudget:
    """Memory of one process: `budget` bytes, else free memory / `processes`, plus the `held` bytes
    of CPU memory that it will free. For a GPU also its part of the CPU memory, which the processes
    `here` share."""
    host = None
    if device.type != "cpu":
        host = budget_on(torch.device("cpu"), None, here, held).usable_bytes
    free = free_memory(device) if budget is None else None
    if free is not None:
        budget = free // processes + held * (device.type == "cpu")
    return MemoryBudget(budget, device.type, is_free=free is not None, host_usable_bytes=host)


def built_in_memory() -> int | None:
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def in_kib(*names: str) -> int:
    """Bytes: the sum of these lines of /proc/meminfo; 0 where there are none."""
    return 1024 * sum(number_in("/proc/meminfo", name) or 0 for name in names)


def number_in(file: str, name: str = "") -> int | None:
    """The number after `name` in a file; None if it is not there, or says "max"."""
    try:
        words = Path(file).read_text().split()
        return int(words[words.index(name) + 1 if name else 0])
    except (OSError, ValueError, IndexError):
        return None
