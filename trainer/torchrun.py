"""Connect the processes that torchrun started, and end all of them when one fails."""

import argparse
import hashlib
import os
import re
import sys
import textwrap
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .bootstrap import end_with_torchrun
from .device import choose_device
from .flags import UsageError, print_error
from .process import OneProcess

# Seconds that processes wait for each other at most. It is longer than one process alone may take
# to save, to compile or to read its data. The variable MINIGPT_TIMEOUT_S, which overrides it, is
# for tests and for slow disks.
TIMEOUT_S = "1800"


class Torchrun(OneProcess):
    """One of the processes that torchrun started; it reads its rank and address from variables."""

    def __init__(self, args: argparse.Namespace):
        """Read torchrun's environment variables, and choose the device.

        Raises UsageError if torchrun did not start this process, or as `local_device` does.
        """
        self.args = args
        try:
            self.rank = int(os.environ["RANK"])
            self.local_rank = int(os.environ["LOCAL_RANK"])
            self.world_size = int(os.environ["WORLD_SIZE"])
            self.port = int(os.environ["MASTER_PORT"])
            self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            self.address = os.environ["MASTER_ADDR"]
            seconds = float(os.environ.get("MINIGPT_TIMEOUT_S", TIMEOUT_S))
            self.timeout = timedelta(seconds=seconds)
            if not 0 <= self.rank < self.world_size:
                raise ValueError(f"RANK {self.rank} of WORLD_SIZE {self.world_size}")
        except (KeyError, ValueError, OverflowError) as error:  # a variable is missing, or wrong
            raise UsageError(
                f"{self.script} ({str(error)[:80]}): start it with torchrun: torchrun "
                f"--nproc-per-node=2 {self.script} (for one device: python train_minimal.py)"
            ) from None
        super().__init__(self.local_device(args.device))
        # The store remembers the id of the run: all processes have the same id, also those that
        # `torchrun --max-restarts` starts later. (See resume.load_own_run.)
        if self.store is not None:
            self.run_id = self.store.compare_set("minigpt/run", "", self.run_id).decode()
        launcher = ["torchrun", f"--nproc-per-node={self.local_world_size}"]
        if self.world_size > self.local_world_size:  # several machines: the command for this one
            launcher += [
                f"--nnodes={os.environ.get('GROUP_WORLD_SIZE', '?')}",
                f"--node-rank={os.environ.get('GROUP_RANK', '?')}",
                f"--master-addr={self.address}",
                f"--master-port={self.port}",
            ]
        self.command = (*launcher, *self.command[1:])

    @cached_property
    def store(self) -> "dist.Store | None":
        """Return a connection to torchrun's own store, which outlives the processes it starts.

        None if another program than torchrun set the environment variables.
        """
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        store = dist.TCPStore(self.address, self.port, is_master=False, timeout=self.timeout)
        # The store could belong to a later torchrun on the same port. On the first machine it is
        # this process's own if its torchrun is still alive: then that torchrun has held the port
        # since before it started this process.
        end_with_torchrun()
        return store

    def remember_out_of_memory(self, policy: str) -> None:
        if self.store is not None:
            self.store.set("minigpt/shortage", policy)

    def last_out_of_memory(self) -> str:
        if self.store is None or not self.store.check(["minigpt/shortage"]):
            return ""
        return self.store.get("minigpt/shortage").decode()

    def local_device(self, name: str) -> torch.device:
        """Return the device that --device `name` means for this process, a GPU of its own if any.

        Raises UsageError if there are more processes than GPUs, or if the device cannot be used.
        """
        device = choose_device(name)
        if device.type == "cuda":
            n_gpus = torch.cuda.device_count()
            if self.local_rank >= n_gpus:
                raise UsageError(f"--nproc-per-node: more processes than GPUs ({n_gpus})")
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        elif device.type == "mps":
            if name == "mps":
                raise UsageError("--device mps: no backend of torch.distributed has it; use cpu")
            device = torch.device("cpu")
        return device

    def init_process_group(self) -> None:
        """Connect the CPUs of all processes by gloo. Raises UsageError if gloo finds no way.

        Python objects and decisions are sent through this group, so they need not wait for the
        GPUs. The GPUs are connected later (`new_device_group`), when all processes are known to
        train the same: NCCL would wait half an hour for a process that found no GPU.
        """
        options: dict[str, Any] = {"timeout": self.timeout}
        if self.store is not None:
            # The store also remembers the addresses of processes that died (pytorch#135712). So
            # the living processes meet under a key of their own.
            key = agree_on_key(self.store, self.rank, self.world_size, self.timeout)
            options |= {"store": dist.PrefixStore(key, self.store)}
            options |= {"rank": self.rank, "world_size": self.world_size}
        try:
            dist.init_process_group("gloo", **options)
        except RuntimeError as error:
            if "EADDRINUSE" in str(error):
                port = f"MASTER_PORT={self.port}"
                raise UsageError(f"{port}: another program has this port; choose another") from None
            if not NO_WAY.search(str(error)):
                raise
            raise UsageError(
                f"rank {self.rank} cannot reach the others by gloo ({reason(error)}): set "
                "GLOO_SOCKET_IFNAME on each machine to the network interface that leads to the "
                "others (one name, as `ip addr` lists them)"
            ) from None

    def new_device_group(self) -> "dist.ProcessGroup | None":
        """Return a new NCCL group of the GPUs of all processes; None: use the default gloo group.

        All processes must call this together.
        """
        if self.device.type == "cpu" or not dist.is_nccl_available():
            return None  # (Windows has no NCCL; gloo can send a GPU's tensors, too)
        return dist.new_group(backend="nccl", timeout=self.timeout, device_id=self.device)


def agree_on_key(store: "dist.Store", rank: int, world_size: int, timeout: timedelta) -> str:
    """Return a key that all processes of this attempt agree on, and that no earlier attempt used.

    Each process writes a random key over the key of its predecessor. Then it repeatedly reads the
    keys of all ranks and publishes their hash. My key is new, so only a living process can publish
    a hash that includes it: when all hashes are equal, all processes are alive and agree. (torchrun
    also counts attempts, but each machine counts by itself.)

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


def print_error_once(message: object) -> None:
    """Print an error line once a machine, though all processes may have found the same mistake.

    The process with local rank 0 prints the line and ends, so torchrun ends the others. The others
    wait 10 seconds first: if local rank 0 found no mistake, they print the line themselves.
    """
    if os.environ.get("LOCAL_RANK", "0") not in ("0", ""):
        time.sleep(10)
    print_error(message)


# Parts of gloo's messages when it finds no way to the others, or no network interface
NO_WAY = re.compile("connectFullMesh|Unable to find (address|interface)|device.cc")
# Parts of the messages of NCCL, gloo and the store when another process is late (LATE) or has ended
# (GONE)
LATE = re.compile(r"[Tt]imed out|[Tt]imeout")
GONE = re.compile(
    "gloo/|ncclRemoteError|remote process exited|closed by remote peer|Connection (reset|refused|"
    "closed)|Broken pipe|communicator (was )?aborted"
)


def peer_failure_message(error: Exception) -> str | None:
    """Return a line about the failure if another process caused it; None if this one did.

    A fault that NCCL finds on this machine is this process's own error, and gets a traceback.
    """
    text, rank = str(error), os.environ.get("RANK")
    late = isinstance(error, TimeoutError) or LATE.search(text)
    is_theirs = isinstance(error, dist.DistError | TimeoutError) or "gloo/" in text
    if isinstance(error, dist.DistBackendError):
        is_theirs = bool(late or GONE.search(text))
    if rank is None or not is_theirs:
        return None
    if late:
        seconds = os.environ.get("MINIGPT_TIMEOUT_S", TIMEOUT_S)
        vain = f"waited {seconds} s for the others in vain (MINIGPT_TIMEOUT_S): one hangs"
        return f"rank {rank} {vain}"
    return f"rank {rank} lost the connection to another process, which ended ({reason(error)})"


def reason(error: Exception) -> str:
    """Return the error's message in at most 120 characters, without the place in C++ code.

    NCCL's reason stands in the last line, after "Last error:".
    """
    message = str(error).partition("Last error:")[2] or str(error) or type(error).__name__
    message = re.sub(r"\[?\S+\.(cc|cpp|h):\d+[],]? ?", "", message)
    return textwrap.shorten(message, 120, placeholder=" ...")


def main_and_exit(main: Callable[[], int]) -> NoReturn:
    """Run `main` and exit with its code. After an error end this process without cleaning up."""
    try:
        code = main()
    except Exception:
        code = 1
        traceback.print_exc()
    if code != 0:
        # Not sys.exit: at exit Python would wait for a collective with processes that in turn wait
        # for this one. torchrun sees the exit code and ends the others.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(0)
