"""Choose the device and the precision of a run; find out how much memory a process may use."""

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch.nn.attention import SDPBackend

from data.errors import MiniGPTError
from memory import MemorySavingGPT
from planner.units import format_sizes

from .settings import Settings

GIB = 2**30
# Bytes that a CUDA context and the code of kernels take at least. (docs/evidence.md, "Not counted":
# 0.5 to 0.9 GiB)
CUDA_CONTEXT = GIB // 2
# Kernels for attention while text is generated: all but cuDNN's, which makes a new graph (estimate:
# 20 to 40 ms) for each number of keys, and this number grows by one with each token.
GENERATION_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def is_available(kind: str) -> bool:
    """Return True if torch finds a device of type `kind` ("auto", "cpu", "cuda" or "mps") on this
    machine."""
    return kind in ("auto", "cpu") or torch.get_device_module(kind).is_available()


def choose_device(name: str) -> torch.device:
    """Return the device that --device `name` means; for "auto": cuda, else mps, else cpu. Raises
    MiniGPTError if the machine has no such device."""
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if is_available(kind))
    if not is_available(name):
        raise MiniGPTError(
            f"--device {name}: torch {torch.__version__} finds none; try --device cpu"
        )
    return torch.device(name)


def choose_precision(
    settings: Settings, device: torch.device, native: bool | None = None
) -> torch.dtype:
    """Return the dtype of autocast, where float32 means no autocast.

    Without --no-amp and --amp-dtype, the dtype is bfloat16 if the CPU or the CUDA GPU supports it
    in hardware, else float16 on CUDA, else float32. bfloat16 has the range of float32, so it needs
    no loss scaling, but a chip that has to emulate it is slower than in float32, some CPUs a
    hundred times.

    `native`: whether the GPU supports bfloat16 in hardware; None: ask the GPU. Raises MiniGPTError
    for float16 on mps.
    """
    if settings.no_amp:
        return torch.float32
    if settings.amp_dtype == "float16" and device.type == "mps":
        raise MiniGPTError("--amp-dtype float16 needs a GradScaler, which mps lacks: --no-amp")
    if settings.amp_dtype != "auto":
        return getattr(torch, settings.amp_dtype)
    if device.type == "cuda":
        if native is None:
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    return torch.bfloat16 if device.type == "cpu" and cpu_has_bfloat16() else torch.float32


def check_gather_dtype_flag(settings: Settings, precision: torch.dtype) -> None:
    """Raise MiniGPTError if --gather-dtype bfloat16 cannot be used, because the blocks compute in
    another precision, or because the gradients of MLP chunks would be added up in bfloat16."""
    if settings.gather_dtype == "bfloat16" and precision != torch.bfloat16:
        raise MiniGPTError(
            f"--gather-dtype bfloat16: blocks compute in {precision} here; --amp-dtype bfloat16 "
            "goes with it, or --gather-dtype float32"
        )
    if settings.gather_dtype == "bfloat16" and settings.mlp_chunks != 1:
        raise MiniGPTError(
            f"--mlp-chunks {settings.mlp_chunks}: --gather-dtype bfloat16 would add the chunks' "
            "gradients up in bfloat16; --gather-dtype float32 or --mlp-chunks 1"
        )


def set_matmul_precision(device: torch.device, tf32: bool) -> None:
    """Set how a GPU's matmuls round: if `tf32`, float32 inputs are rounded to TF32, which has 10
    mantissa bits, while sums keep float32 precision.

    For a CPU nothing is set, because with this setting oneDNN would round the inputs there, too, if
    the hardware supports it.
    """
    if device.type != "cuda":
        return
    # torch recommends the newer setting fp32_precision, with which torch.compile fails
    # (pytorch#166387). The compiler's advice to enable TF32 is hidden, because --tf32 decides.
    warnings.filterwarnings("ignore", "Please use the new API settings|TensorFloat32 tensor cores")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # cuBLAS may split a long sum, such as the sum over the vocabulary in the head's backward, into
    # parts for several GPU cores. By default it may add up the parts with the precision of the
    # result, only 8 bits (bfloat16) or 11 bits (float16), which is forbidden here: see "Numerical
    # accuracy" in PyTorch's notes.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU has instructions for bfloat16 matmuls (AVX512-BF16 or AMX)."""
    # torch 2.11 has no public functions for this.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def compile_blocks(model: MemorySavingGPT) -> None:
    """Compile each block with torch.compile, and also the softmax of the loss. For each policy only
    the first block costs compile time, because the others reuse its compiled code.

    With the policy `full`, the activation checkpoint is outside of the compiled code and keeps only
    the block's input. (Compiled code does not stop a recompute early, so backward also recomputes
    the block's last matmul.) With any finer policy, the checkpoints are inside the block and are
    compiled with it, because the compiler must see them.
    """
    # Otherwise DDP would split compiled graphs, and also the activation checkpoints in them.
    torch._dynamo.config.optimize_ddp = False
    # Otherwise, on CUDA, recomputed dropout would draw from random generators that
    # torch.manual_seed does not set.
    torch._functorch.config.graphsafe_rng_functionalization = False
    for block in model.blocks:
        block.compile()
    model.compiled_softmax = True


def check_compiler(device: torch.device) -> None:
    """Compile a small function, or raise MiniGPTError if torch.compile does not work on this
    machine: it needs a C++ compiler or Triton, and a folder for its results."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except (RuntimeError, OSError) as error:
        raise MiniGPTError(
            f"--compile: torch.compile fails here: {str(error).splitlines()[0]}; it needs a C++ "
            "compiler (on a GPU: Triton) and a cache folder (TORCHINDUCTOR_CACHE_DIR) whose path "
            "has no blank; or: --no-compile"
        ) from None


# ---- memory


def free_and_total_memory(
    device: torch.device, root: str = "/"
) -> tuple[int, int] | tuple[None, None]:
    """Return the free and the total memory of the device in bytes; (None, None): unknown.

    For a CPU these are the figures of the machine, or of the tightest limit on this process (a
    control group's memory.max, as for a container or a job of a cluster), known on Linux only.
    Cached files count as free, because the kernel drops them when memory is needed.

    `root`: folder with the folders proc and sys.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    machine = read_kernel_numbers(f"{root}/proc/meminfo")
    if "MemAvailable" not in machine:
        return None, None
    free, total = 1024 * machine["MemAvailable"], 1024 * machine["MemTotal"]
    # The line "0::/GROUP" names this process's control group, version 2 (man 7 cgroups). The limits
    # of the groups above it apply, too.
    group = PurePosixPath(read_or_empty(f"{root}/proc/self/cgroup").rpartition("0::")[2].strip())
    for name in (group, *group.parents):
        folder = f"{root}/sys/fs/cgroup/{name}"
        limit = read_or_empty(f"{folder}/memory.max").strip()
        if limit.isdigit():  # (not "max")
            cached = read_kernel_numbers(f"{folder}/memory.stat").get("inactive_file", 0)
            used = int(read_or_empty(f"{folder}/memory.current") or 0) - cached
            free, total = min(free, max(0, int(limit) - used)), min(total, int(limit))
    return free, total


def read_or_empty(path: str) -> str:
    """Return the text of a file of the kernel; "" if there is no such file."""
    return Path(path).read_text() if os.access(path, os.R_OK) else ""


def read_kernel_numbers(path: str) -> dict[str, int]:
    """Return the numbers in a file of the kernel, each by the name that begins its line."""
    lines = re.findall(r"^(\w+):? +(\d+)", read_or_empty(path), re.MULTILINE)
    return {name: int(number) for name, number in lines}


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of memory that one process may use, for its tensors and for everything else: the total
    `limit_bytes` is --memory-budget, the memory of a card, or the free memory."""

    limit_bytes: int | None  # None: unknown
    device_type: str
    is_free: bool = False  # True: the total is the free memory
    # Bytes of CPU memory that a GPU run may use in addition, for offloaded tensors; None: unknown.
    host_usable_bytes: int | None = None

    @property
    def margin(self) -> int:
        """Bytes of the total that tensors may not use.

        The margin is a tenth of the total, and on a GPU at least 1 GiB (but a quarter of a total
        below 4 GiB), because an allocator cannot use every gap between tensors. A GPU's memory also
        holds the driver's context of some hundred MiB, the code of kernels, and NCCL's buffers.
        """
        total = self.limit_bytes or 0
        least = min(total // 4, GIB) if self.device_type == "cuda" else 0
        return max(total // 10, least)

    @property
    def bytes_within_margin(self) -> int | None:
        """Bytes that tensors may use: the total minus the margin; None: unknown."""
        return None if self.limit_bytes is None else self.limit_bytes - self.margin

    @property
    def bytes_left_by_context(self) -> int | None:
        """Bytes that tensors can take at most, without any margin: the total minus CUDA_CONTEXT
        (minus the margin, if that is less); None: unknown. The free memory of a GPU is what a
        context has left."""
        needs_context = self.device_type == "cuda" and not self.is_free
        context = min(CUDA_CONTEXT, self.margin) if needs_context else 0
        return None if self.limit_bytes is None else self.limit_bytes - context

    def __str__(self) -> str:
        """Return the usable bytes as text: "54.0 MiB (60.0 MiB less a margin of 6.0 MiB)"."""
        usable, total, margin = format_sizes(
            [self.bytes_within_margin or 0, self.limit_bytes or 0, self.margin]
        )
        return f"{usable} ({total}{' free,' * self.is_free} less a margin of {margin})"


def budget_on(
    device: torch.device,
    budget: int | None = None,
    processes: int = 1,
    here: int = 1,
) -> MemoryBudget:
    """Return the memory budget of one process: `budget` bytes or, if that is None, the process's
    share of the device's free memory; for a GPU also its share of the CPU memory.

    Args:
        processes: number of processes that share the device's free memory. here: number of
        processes on this machine, which share the CPU memory.
    """
    host = (
        None
        if device.type == "cpu"
        else budget_on(torch.device("cpu"), None, here).bytes_within_margin
    )
    free = free_and_total_memory(device)[0] if budget is None else None
    limit = budget if free is None else free // processes
    return MemoryBudget(limit, device.type, is_free=free is not None, host_usable_bytes=host)
