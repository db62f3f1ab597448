"""What memory a device has: in all, free now, and what of that tensors may take."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from .flags import UsageError
from .metrics import format_bytes

GIB = 2**30

# A container may have less than the machine. Its limit, what it has taken, and what of that is
# cached files, which give way: in cgroups version 2, then version 1.
V2, V1 = "/sys/fs/cgroup/memory.", "/sys/fs/cgroup/memory/memory."
CGROUPS = (
    (f"{V2}max", f"{V2}current", f"{V2}stat", "inactive_file"),
    (f"{V1}limit_in_bytes", f"{V1}usage_in_bytes", f"{V1}stat", "total_inactive_file"),
)


def free_memory(device: torch.device) -> int:
    """Bytes that tensors can still take on the device. Raises UsageError if nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    free = number_in("/proc/meminfo", "MemAvailable:")
    # Not Linux: what is built in, as an upper limit.
    free = built_in_memory() if free is None else 1024 * free
    if free is None:
        raise UsageError("--memory-budget: this system does not tell what is free")
    for limit_file, used_file, statistics, cached in CGROUPS:
        limit, used = number_in(limit_file), number_in(used_file)
        if limit is not None and used is not None:
            free = min(free, limit - used + (number_in(statistics, cached) or 0))
    return free


def total_memory(device: torch.device) -> int | None:
    """Bytes that the device, or the container, has in all; None if nobody knows."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    total = number_in("/proc/meminfo", "MemTotal:")
    swap = number_in("/proc/meminfo", "SwapTotal:") or 0  # slow, but no reason to refuse a run
    limits = [built_in_memory() if total is None else 1024 * (total + swap)]
    limits += [number_in(limit_file) for limit_file, *_ in CGROUPS]
    return min((limit for limit in limits if limit is not None), default=None)


def own_memory() -> int:
    """Bytes of CPU memory that this process holds now: Python, PyTorch, data. 0: unknown."""
    return 1024 * (number_in("/proc/self/status", "VmRSS:") or 0)  # (not Linux: 0)


@dataclass(frozen=True)
class Room:
    """The memory that there is for a process, in bytes: its tensors, and all that is beside them.

    --memory-budget says it, or it is a card's, or what is free.
    """

    budget: int | None  # None: nobody knows
    device_type: str
    is_free: bool = False
    host: int | None = None  # bytes of CPU memory that offload may have beside it; None: who knows

    @property
    def safe(self) -> int | None:
        """What tensors may take of it."""
        return None if self.budget is None else for_tensors(self.budget, self.device_type)

    def __str__(self) -> str:
        """ "54.0 MiB (60.0 MiB less a margin of a tenth)" """
        assert self.budget is not None and self.safe is not None
        _, words = margin(self.budget, self.device_type)
        whole = format_bytes(self.budget) + " free," * self.is_free
        return f"{format_bytes(self.safe)} ({whole} less a margin of {words})"


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


def room_on(
    device: torch.device,
    budget: int | None = None,
    processes: int = 1,
    held: int = 0,
    here: int = 1,
) -> Room:
    """`budget` bytes; if nobody says, what is free, shared by `processes`, and the `held` bytes of
    CPU memory that each of them is about to give back. Beside them, if they are a GPU's, what of
    its machine's each of the processes `here` may have. Raises UsageError if nobody knows."""
    host = None
    if device.type != "cpu":
        with suppress(UsageError):
            host = room_on(torch.device("cpu"), None, here, held).safe
    if budget is not None:
        return Room(budget, device.type, host=host)
    free = free_memory(device) / processes + held * (device.type == "cpu")
    return Room(int(free), device.type, is_free=True, host=host)


def built_in_memory() -> int | None:
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def number_in(file: str, name: str = "") -> int | None:
    """The number after `name` in a file; None if it is not there, or says "max"."""
    try:
        words = Path(file).read_text().split()
        return int(words[words.index(name) + 1 if name else 0])
    except (OSError, ValueError, IndexError):
        return None
