"""Choose the device and the precision of a run; find out how much memory a process may use."""

import os
import warnings
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from data.errors import MiniGPTError
from memory import MemorySavingGPT
from model import MiniGPT

from .bootstrap import read_control_groups, read_or_empty
from .metrics import format_bytes
from .settings import Settings

GIB = 2**30
# Kernels for attention while text is generated: all but cuDNN's. cuDNN makes a new graph for each
# number of keys, and this number grows by one with each token (estimate: 20 to 40 ms per graph).
GENERATION_KERNELS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Name of the cached files in the statistics of a control group; its files: limit of memory, use of
# memory, statistics. Version 2, then version 1.
CGROUP_MEMORY_NAMES = (
    ("inactive_file", "memory.max", "memory.current", "memory.stat"),
    ("total_inactive_file", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
)


def is_available(kind: str) -> bool:
    """Return True if torch finds a device of type `kind` ("cpu", "cuda" or "mps") on this
    machine."""
    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind != "cuda" or torch.cuda.is_available()


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
    """Return the dtype of autocast. float32 means no autocast.

    Without --no-amp and --amp-dtype, the dtype is bfloat16 if the CPU or the CUDA GPU supports it
    in hardware, else float16 on CUDA, else float32. bfloat16 has the range of float32, so it needs
    no loss scaling. But a chip without bfloat16 has to emulate it, which is slower than float32: on
    some CPUs a hundred times slower.

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
    """Raise MiniGPTError if --gather-dtype bfloat16 cannot be used, for one of two reasons: the
    blocks compute in another precision, or the gradients of MLP chunks would be added up in
    bfloat16."""
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
    """Set how a GPU's matmuls round. If `tf32`, float32 inputs are rounded to TF32, which has 10
    mantissa bits. Sums keep float32 precision.

    For a CPU nothing is set. With the setting of `tf32`, oneDNN would round the inputs on a CPU,
    too, if the hardware supports this.
    """
    if device.type != "cuda":
        return
    # Since 2.9 torch recommends the newer setting fp32_precision, but torch.compile fails with it
    # (pytorch#166387).
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings")
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # In every run the compiler prints advice to enable TF32. Hide it, because --tf32 decides.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores .* not enabled. Consider")
    # cuBLAS may split a long sum, such as the sum over the vocabulary in the head's backward, into
    # parts for several GPU cores. By default it may add up the parts with the precision of the
    # result, which is only 8 bits (bfloat16) or 11 bits (float16). Forbid this: see "Numerical
    # accuracy" in PyTorch's notes.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def cpu_has_bfloat16() -> bool:
    """Return whether this CPU has instructions for bfloat16 matmuls (AVX512-BF16 or AMX)."""
    # torch has no public functions for this yet.
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def compile_blocks(model: MemorySavingGPT) -> None:
    """Compile each block with torch.compile, and also the softmax of the loss.

    For each policy only the first block costs compile time: the other blocks reuse its compiled
    code.

    With the policy `full`, the activation checkpoint is outside of the compiled code and keeps only
    the block's input. (Compiled code does not stop a recompute early, so backward also recomputes
    the block's last matmul.) With any finer policy, the checkpoints are inside the block and are
    compiled with it, because the compiler must see them.
    """
    # Without this setting DDP would split compiled graphs, and also the activation checkpoints in
    # these graphs.
    torch._dynamo.config.optimize_ddp = False
    # Without this setting, on CUDA, recomputed dropout draws from random generators that
    # torch.manual_seed does not set.
    torch._functorch.config.graphsafe_rng_functionalization = False
    for block in model.blocks:
        block.compile()
    model.compiled_softmax = True


def import_compiler() -> None:
    """Import torch's compiler, which torch imports at some later place in every run. There an error
    would be hard to understand. Raises MiniGPTError if its cache folder cannot be made."""
    try:
        import torch._dynamo  # noqa: F401
    except OSError as error:
        raise MiniGPTError(
            f"TORCHINDUCTOR_CACHE_DIR: torch's compiler cannot make its cache: {error}; name "
            "a folder that can be written"
        ) from None


def check_compiler(device: torch.device) -> None:
    """Compile a small function. Raises MiniGPTError if torch.compile does not work on this machine:
    it needs a C++ compiler or Triton, and a folder for its results."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except (RuntimeError, OSError) as error:
        raise MiniGPTError(
            f"--compile: torch.compile fails here: {str(error).splitlines()[0]}; it needs a C++ "
            "compiler (on a GPU: Triton) and a cache folder (TORCHINDUCTOR_CACHE_DIR) whose path "
            "has no blank; or: --no-compile"
        ) from None


def is_compiled(model: MiniGPT) -> bool:
    """Return True if any block of the model is compiled."""
    return any(block._compiled_call_impl is not None for block in model.blocks)


# ---- memory


def free_memory(device: torch.device, root: str = "/") -> int | None:
    """Return the free memory of the device in bytes; None if unknown. `root`: folder with the
    folders proc and sys."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return min((free for _, free in cpu_memory(root) if free is not None), default=None)


def total_memory(device: torch.device, root: str = "/") -> int | None:
    """Return the total memory of the device in bytes; None if unknown. For a CPU this is the memory
    of the machine, or the tightest of the limits of this process. `root`: as above."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return min((total for total, _ in cpu_memory(root) if total is not None), default=None)


def cpu_memory(root: str) -> list[tuple[int | None, int | None]]:
    """Return (total, free) bytes of the machine and of each limit of this process; None: unknown,
    or no limit.

    There are limits of control groups, as for a container or a job of a cluster, and a limit of the
    address space (`ulimit -v`). Cached files count as free, because the kernel drops them when
    memory is needed. Swap counts as memory: it is slow, but a run can use it.
    """
    groups = [
        (find_number(limit), find_number(used), find_number(statistics, cached_name) or 0)
        for cached_name, *names in CGROUP_MEMORY_NAMES
        for limit, used, statistics in read_control_groups("memory", names, root)
    ]
    address_space = find_number(read_or_empty(f"{root}/proc/self/limits"), "space")
    limits = [*groups, (address_space, proc_bytes(f"{root}/proc/self/status", "VmSize:"), 0)]
    total = proc_bytes(f"{root}/proc/meminfo", "MemTotal:", "SwapTotal:")
    free = proc_bytes(f"{root}/proc/meminfo", "MemAvailable:")
    # Outside of Linux only the total is known, and on Windows nothing.
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    machine = pages and pages * os.sysconf("SC_PAGE_SIZE")
    return [
        (total or machine, free or machine),
        *(
            (limit, None if limit is None or used is None else max(0, limit - used + cached))
            for limit, used, cached in limits
        ),
    ]


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of memory that one process may use, for its tensors and for everything else.

    The total, `limit_bytes`, is one of three: --memory-budget, the memory of a card, or the free
    memory.
    """

    limit_bytes: int | None  # None: unknown
    device_type: str
    is_free: bool = False  # True: the total is the free memory
    # Bytes of CPU memory that a GPU run may use in addition, for offloaded tensors; None: unknown.
    host_usable_bytes: int | None = None

    @property
    def usable_bytes(self) -> int | None:
        """Bytes that tensors may use: the total minus the margin (see `margin_bytes_and_words`);
        None if the total is unknown."""
        return (
            None if self.limit_bytes is None else without_margin(self.limit_bytes, self.device_type)
        )

    def __str__(self) -> str:
        """Return the usable bytes as text: "54.0 MiB (60.0 MiB less a margin of a tenth)"."""
        assert self.limit_bytes is not None and self.usable_bytes is not None
        _, words = margin_bytes_and_words(self.limit_bytes, self.device_type)
        total = format_bytes(self.limit_bytes) + (" free," if self.is_free else "")
        return f"{format_bytes(self.usable_bytes)} ({total} less a margin of {words})"


def margin_bytes_and_words(total: float, device_type: str) -> tuple[float, str]:
    """Return the margin, which is the number of bytes of `total` that tensors may not use, and the
    same margin in words.

    The margin is a tenth of `total`. On a GPU the margin is at least 1 GiB. But if a GPU's `total`
    is below 4 GiB, the margin is a quarter of `total`.

    There is a margin because an allocator cannot use every gap between tensors. A GPU's memory also
    holds the driver's context of some hundred MiB, the code of kernels, and NCCL's buffers.
    """
    if device_type == "cuda" and total < 10 * GIB:
        return (total / 4, "a quarter") if total < 4 * GIB else (GIB, "1 GiB")
    return 0.1 * total, "a tenth"


def without_margin(total: float, device_type: str) -> int:
    """Return the bytes of `total` that tensors may use: `total` minus the margin."""
    return int(total - margin_bytes_and_words(total, device_type)[0])


def budget_on(
    device: torch.device,
    budget: int | None = None,
    processes: int = 1,
    here: int = 1,
) -> MemoryBudget:
    """Return the memory budget of one process: `budget` bytes or, if that is None, the process's
    share of the device's free memory. For a GPU the result also contains the process's share of the
    CPU memory.

    Args:
        processes: number of processes that share the device's free memory.
        here: number of processes on this machine. They share the CPU memory.
    """
    on_cpu = device.type == "cpu"
    host_bytes = None if on_cpu else budget_on(torch.device("cpu"), None, here).usable_bytes
    free = free_memory(device) if budget is None else None
    limit = budget if free is None else free // processes
    return MemoryBudget(limit, device.type, is_free=free is not None, host_usable_bytes=host_bytes)


def proc_bytes(file: str, *names: str) -> int:
    """Return the sum of the numbers after `names` in a file of /proc, in bytes. A missing number
    counts as 0."""
    return 1024 * sum(find_number(read_or_empty(file), name) or 0 for name in names)


def find_number(text: str, name: str = "") -> int | None:
    """Return the number after the word `name`; without `name`, the first word as a number. Return
    None if there is no such number, for example if the word is "max"."""
    words = text.split()
    try:
        return int(words[words.index(name) + 1 if name else 0])
    except (ValueError, IndexError):
        return None
