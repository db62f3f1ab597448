"""Connect the processes that torchrun started, and end all of them when one of them fails."""

import hashlib
import os
import re
import signal
import sys
import textwrap
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from data.errors import MiniGPTError
from planner import Layout

from .device import choose_device
from .flags import print_error
from .process import OneProcess, T
from .settings import Settings

# Maximal time in seconds that processes wait for each other, long enough for what one process does
# alone: save, compile or read its data. The environment variable MINIGPT_TIMEOUT_S overrides it,
# for tests and for slow disks.
TIMEOUT_S = "1800"
FAILED_POLICY = "minigpt/shortage"  # key in torchrun's store


class TorchrunProcess(OneProcess):
    """A process that torchrun started; the environment has its rank and rank 0's address."""

    kind = "ddp"  # of the processes' Layout
    launcher = ("torchrun", "...")  # "...": its own flags, which its processes do not see

    def __init__(self, settings: Settings):
        """Read torchrun's environment variables, and choose the device. Raises MiniGPTError if
        torchrun did not start this process, and whatever `local_device` raises."""
        try:
            names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"
            numbers = [int(os.environ[name]) for name in names]
            rank, self.local_rank, world_size, local_world_size, port = numbers
            address = os.environ["MASTER_ADDR"]
        except (KeyError, ValueError) as error:  # a variable is missing, or no number
            raise MiniGPTError(
                f"{self.script} ({str(error)[:80]}): start it with torchrun: torchrun "
                f"--nproc-per-node=2 {self.script} (for one device: python train_minimal.py)"
            ) from None
        seconds = os.environ.get("MINIGPT_TIMEOUT_S", TIMEOUT_S)
        if not re.fullmatch("[0-9]{1,9}", seconds) or int(seconds) == 0:
            raise MiniGPTError(f"MINIGPT_TIMEOUT_S {seconds[:80]}: a whole number of at least 1")
        self.timeout = timedelta(seconds=int(seconds))
        layout = Layout(self.kind, rank, world_size, local_world_size)
        super().__init__(self.local_device(settings.device), layout)
        # A connection to torchrun's store, which outlives restarts of the processes. (None if
        # another program than torchrun has set the environment variables.)
        self.store: dist.Store | None = None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            self.store = dist.TCPStore(address, port, is_master=False, timeout=self.timeout)
            # The store keeps the id of the run, so that all processes have the same id, even those
            # that `torchrun --max-restarts` starts later. (resume.load_own_run uses the id.)
            self.run_id = self.store.compare_set("minigpt/run", "", self.run_id).decode()
            self.failed_policy = self.store.compare_set(FAILED_POLICY, "", "").decode()

    def remember_failed_policy(self, policy: str) -> None:
        if self.store is not None:
            self.store.set(FAILED_POLICY, policy)

    def local_device(self, name: str) -> torch.device:
        """Return this process's device for --device `name`: no two processes have the same GPU.

        Raises MiniGPTError if there are more processes than GPUs, or if the device cannot be used.
        """
        if name == "mps":
            raise MiniGPTError("--device mps: no backend of torch.distributed has it; use cpu")
        if choose_device(name).type != "cuda":
            return torch.device("cpu")
        if self.local_rank >= torch.cuda.device_count():
            raise MiniGPTError(
                f"--nproc-per-node: more processes than GPUs ({torch.cuda.device_count()})"
            )
        torch.cuda.set_device(self.local_rank)
        return torch.device("cuda", self.local_rank)

    def init_process_group(self) -> None:
        """Connect the CPUs of all processes by gloo.

        Python objects and decisions are sent through this group, so that they need not wait for the
        GPUs. `new_nccl_group` connects the GPUs later, after a check that all processes have the
        same settings. (Otherwise NCCL would wait half an hour for a process that found no GPU.)
        """
        options: dict[str, Any] = {"timeout": self.timeout}
        if self.store is not None:
            # The store also has the addresses of processes that died (pytorch#135712), so the
            # living processes store theirs under a prefix that only they use.
            size = self.layout.world_size
            key = agree_on_key(self.store, self.rank, size, self.timeout)
            store = dist.PrefixStore(key, self.store)
            options |= {"store": store, "rank": self.rank, "world_size": size}
        dist.init_process_group("gloo", **options)

    def all_reduce_max(self, values: list[int]) -> list[int]:
        largest = torch.tensor(values)  # on the CPU: the default group is gloo's
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    def all_gather_object(self, mine: T) -> list[T]:
        gathered = [mine] * self.layout.world_size
        dist.all_gather_object(gathered, mine)
        return gathered

    def new_nccl_group(self) -> "dist.ProcessGroup | None":
        """Return a new NCCL group of all processes' GPUs, which must all call this together, or
        None: use the default gloo group."""
        if self.device.type == "cpu" or not dist.is_nccl_available():
            return None  # (Windows has no NCCL; gloo can send a GPU's tensors, too)
        return dist.new_group(backend="nccl", timeout=self.timeout, device_id=self.device)


def agree_on_key(store: "dist.Store", rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a key that all processes of this attempt agree on, and that no earlier attempt used.

    A new attempt begins each time torchrun starts the processes again. Each process replaces
    its rank's key of the previous attempt by a random one; then it repeatedly reads all ranks' keys
    and writes their hash. A hash that includes this process's new key must come
    from a living process, so when the hashes of all ranks are equal, all processes are alive and
    agree on the hash, which is the result. (torchrun also counts attempts, but its counts can
    differ between machines.)

    Raises TimeoutError if the processes do not agree within `timeout`.
    """
    store.set(f"minigpt/key/{rank}", uuid.uuid4().hex)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        keys = [store.get(f"minigpt/key/{r}") for r in range(world_size)]
        name = hashlib.sha256(b"".join(keys)).hexdigest()
        store.set(f"minigpt/read/{rank}", name)
        if all(store.get(f"minigpt/read/{r}") == name.encode() for r in range(world_size)):
            return name
        time.sleep(0.05)
    raise TimeoutError


def print_error_once(message: object, peer_failed: bool = False) -> None:
    """Print an error line once per machine, even if all its processes found the same mistake.

    The process with local rank 0 prints the line at once and ends, and torchrun ends the others
    before they print: each of them waits 10 seconds first. If a process still lives then, local
    rank 0 found no mistake. `peer_failed`: the mistake is that another process has ended, perhaps
    local rank 0, so local rank 1 prints the line at once, too.
    """
    if os.environ.get("LOCAL_RANK", "0") not in ("0", "", "1" if peer_failed else ""):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # (`stop_signals` would ignore torchrun's)
        time.sleep(10)
    print_error(message)


def peer_failure_message(error: Exception) -> str | None:
    """Return a line about `error` if the communication with other processes failed, else None."""
    text, rank = str(error), os.environ.get("RANK")
    # (gloo's messages contain its path. Errors of NCCL and of the store are DistErrors.)
    if rank is None or not (isinstance(error, dist.DistError | TimeoutError) or "gloo/" in text):
        return None
    if isinstance(error, TimeoutError) or re.search("[Tt]imed? ?out", text):
        return (
            f"rank {rank} waited {os.environ.get('MINIGPT_TIMEOUT_S', TIMEOUT_S)} s for the others "
            "in vain (MINIGPT_TIMEOUT_S): one hangs"
        )
    reason = text.rpartition("Last error:")[2]  # in NCCL's messages the reason is in the last line
    return f"rank {rank} lost the connection to another process ({textwrap.shorten(reason, 200)})"


def main_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run `main` and exit with its code, without Python's own clean-up.

    After an error, the clean-up would wait for a collective with other processes, which in turn
    wait for this process. (torchrun sees the exit code and ends them.) After a success, the
    clean-up could abort the process: FSDP's process group outlives `main`, and a thread of gloo
    that frees a tensor while Python ends is "terminated without an active exception".
    """
    try:
        code = main()
    except Exception:
        code = 1
        traceback.print_exc()
    with suppress(OSError):  # the program that reads the output has ended
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
