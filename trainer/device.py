"""The device a run computes on, the precision it computes in, and the memory it may take."""

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
# Control groups, version 2: a container may have less memory than the machine.
CGROUP = "/sys/fs/cgroup/memory."


def is_here(kind: str) -> bool:
    """Return whether torch finds a device of this type on this machine."""
    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind != "cuda" or torch.cuda.is_available()


def choose_device(name: str) -> torch.device:
    """Return the device that --device names. Raises UsageError if the machine lacks it."""
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if is_here(kind))
    if not is_here(name):
        raise UsageError(f"--device {name}: torch {torch.__version__} finds none; try --device cpu")
    return torch.device(name)


def choose_precision(
    args: argparse.Namespace, device: torch.device, native: bool | None = None
) -> torch.dtype:
    """Return bfloat16 if the hardware has it, else float16 (CUDA only), else float32.

    bfloat16 has float32's range and needs no loss scaling. But a chip without bfloat16 emulates it:
    that is slower than float32, on some CPUs a hundred times.

    `native`: whether the GPU has bfloat16; None: ask the device. Raises UsageError for float16 on
    mps.
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
    """Raise UsageError if --gather-dtype bfloat16 cannot work: blocks compute in another precision,
    or they would add gradients up in bfloat16."""
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
    """Set how a GPU's matmuls round: float32 inputs to TF32's 10 bits if `tf32`, and nothing else.

    Nothing is set for the CPU: oneDNN would round there too, where the hardware can.
    """
    if device.type != "cuda":
        return
    # torch 2.9 recommends the newer fp32_precision, but torch.compile fails with it
    # (pytorch#166387).
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings")
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # The compiler advises TF32 in every run; here --tf32 decides.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores .* not enabled. Consider")
    # cuBLAS may split a long sum over several cores (the sum over the vocabulary in the head's
    # backward). By default it may add the parts up in the result's 8 or 11 bits: see "Numerical
    # accuracy" in PyTorch's notes.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU has instructions for bfloat16 matmuls (AVX512-BF16 or AMX)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # not public yet
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def compile_blocks(model: MiniGPT) -> None:
    """Compile each block with torch.compile. Only the first block of a policy costs compile time:
    the others reuse its code.

    With `full` the activation checkpoint stays outside of the compiled code and keeps only the
    block's input. (Compiled code cannot stop half-way, so the last matmul is replayed, too.) Finer
    policies are compiled with the block: the compiler must see them.
    """
    torch._dynamo.config.optimize_ddp = False  # DDP would split graphs, and checkpoints with them
    # Otherwise replayed dropout on CUDA draws from generators that manual_seed does not reach.
    torch._functorch.config.graphsafe_rng_functionalization = False
    for block in model.blocks:
        block.compile()
    model.head_loss = partial(cast(Any, model.head_loss), compiled=True)


def is_compiled(model: MiniGPT) -> bool:
    """Return whether any block is compiled."""
    return any(block._compiled_call_impl is not None for block in model.blocks)


# ---- memory


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that tensors can still take on the device; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free = in_kib("MemAvailable:") or built_in_memory()  # outside Linux: an upper limit
    limit, used = number_in(f"{CGROUP}max"), number_in(f"{CGROUP}current")
    if free and limit is not None and used is not None:
        # The kernel frees cached files when memory is needed: they count as free.
        free = min(free, limit - used + (number_in(f"{CGROUP}stat", "inactive_file") or 0))
    return free


def total_memory(device: torch.device) -> int | None:
    """Return the bytes that the device, or the container, has in total; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    # Swap counts: it is slow, but a run can use it.
    built_in = in_kib("MemTotal:", "SwapTotal:") or built_in_memory()
    return min(filter(None, (built_in, number_in(f"{CGROUP}max"))), default=None)


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of memory that one process may take: its tensors, and all else that it allocates.

    The total is --memory-budget, or a card's memory, or the memory that is free.
    """

    limit_bytes: int | None  # None: unknown
    device_type: str
    is_free: bool = False  # the total is the free memory
    # Bytes of CPU memory that offload may take in addition; None: unknown.
    host_usable_bytes: int | None = None

    @property
    def usable_bytes(self) -> int | None:
        """Bytes of the total that tensors may take; None if the total is unknown."""
        return None if self.limit_bytes is None else for_tensors(self.limit_bytes, self.device_type)

    def __str__(self) -> str:
        """Return "54.0 MiB (60.0 MiB less a margin of a tenth)"."""
        assert self.limit_bytes is not None and self.usable_bytes is not None
        _, words = memory_margin(self.limit_bytes, self.device_type)
        total = format_bytes(self.limit_bytes) + " free," * self.is_free
        return f"{format_bytes(self.usable_bytes)} ({total} less a margin of {words})"


def memory_margin(total: float, device_type: str) -> tuple[float, str]:
    """Return how many of `total` bytes stay free, and that share in words: a tenth, on a GPU at
    least 1 GiB (a quarter of less than 4 GiB).

    An allocator cannot use every gap. A GPU also holds the driver's context of some hundred MiB,
    the code of kernels, and NCCL's buffers.
    """
    if device_type == "cuda" and total < 10 * GIB:
        return (total / 4, "a quarter") if total < 4 * GIB else (GIB, "1 GiB")
    return 0.1 * total, "a tenth"


def for_tensors(total: float, device_type: str) -> int:
    """Return the bytes of `total` that tensors may take: all but the margin."""
    return int(total - memory_margin(total, device_type)[0])


def budget_on(
    device: torch.device,
    budget: int | None = None,
    processes: int = 1,
    held: int = 0,
    here: int = 1,
) -> MemoryBudget:
    """Return the memory of one process: `budget` bytes, else its share of the free memory. For a
    GPU also its share of the CPU memory.

    Args:
        processes: processes that share the device's free memory.
        held: bytes of CPU memory that this process holds and will free; they count as free.
        here: processes on this machine, which share the CPU memory.
    """
    host_bytes = None
    if device.type != "cpu":
        host_bytes = budget_on(torch.device("cpu"), None, here, held).usable_bytes
    free = free_memory(device) if budget is None else None
    if free is not None:
        budget = free // processes + held * (device.type == "cpu")
    return MemoryBudget(budget, device.type, is_free=free is not None, host_usable_bytes=host_bytes)


def built_in_memory() -> int | None:
    """Return the bytes of the machine's memory; None where the system does not tell (Windows)."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def in_kib(*names: str) -> int:
    """Return the sum of these lines of /proc/meminfo, in bytes; 0 if there are none."""
    return 1024 * sum(number_in("/proc/meminfo", name) or 0 for name in names)


def number_in(file: str, name: str = "") -> int | None:
    """Return the number after `name` in a file (without `name`, the first word); None if it is
    missing or reads "max"."""
    try:
        words = Path(file).read_text().split()
        return int(words[words.index(name) + 1 if name else 0])
    except (OSError, ValueError, IndexError):
        return None
