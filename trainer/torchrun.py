"""What keeps several processes safe that torchrun started: how they meet, and how they end."""

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

# The longest that processes wait for each other; above what one of them alone may take to save, to
# compile, to read its data. The variable MINIGPT_TIMEOUT_S is for tests, and for slow disks.
TIMEOUT_S = "1800"


class Torchrun(OneProcess):
    """A process that torchrun has told who it is, and where the others are."""

    def __init__(self, args: argparse.Namespace):
        """Raises UsageError if it was not torchrun that started it."""
        self.args = args
        try:
            self.rank = int(os.environ["RANK"])
            self.local_rank = int(os.environ["LOCAL_RANK"])
            self.world_size = int(os.environ["WORLD_SIZE"])
            self.port = int(os.environ["MASTER_PORT"])
            self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            self.address = os.environ["MASTER_ADDR"]
            seconds = float(os.environ.get("MINIGPT_TIMEOUT_S", TIMEOUT_S))
        except (KeyError, ValueError) as error:  # a variable is not there, or is no number
            raise UsageError(
                f"{self.script} ({str(error)[:80]}): start it with torchrun: torchrun "
                f"--nproc-per-node=2 {self.script} (for one device: python train_minimal.py)"
            ) from None
        self.timeout = timedelta(seconds=seconds)
        super().__init__(self.local_device(args.device))
        # The store remembers the name of the run for `torchrun --max-restarts`: it is one of all
        # processes, and of those that are started again. (See resume.load_own_run.)
        if self.store is not None:
            self.run_id = self.store.compare_set("minigpt/run", "", self.run_id).decode()
        words = ["torchrun", f"--nproc-per-node={self.local_world_size}"]
        if self.world_size > self.local_world_size:  # several machines: this one's part
            words += [
                f"--nnodes={os.environ.get('GROUP_WORLD_SIZE', '?')}",
                f"--node-rank={os.environ.get('GROUP_RANK', '?')}",
                f"--master-addr={self.address}",
                f"--master-port={self.port}",
            ]
        self.command = (*words, *self.command[1:])

    @cached_property
    def store(self) -> "dist.Store | None":
        """Connect to the store in torchrun itself, which lives longer than what torchrun starts.

        None if it was something else that sets the same variables.
        """
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        store = dist.TCPStore(self.address, self.port, is_master=False, timeout=self.timeout)
        # Whose store is it? On the first machine that of this process's own torchrun, if that lives
        # even now: then it has held the port since before it started this process.
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
        """By --device. Raises UsageError."""
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
        """Connect the CPUs of all processes, by gloo. Raises UsageError if that cannot work here.

        What they tell each other goes that way; it need not wait for the GPUs. Those are connected
        when all are known to train the same: NCCL would wait half an hour for a process that found
        no GPU.
        """
        where: dict[str, Any] = {"timeout": self.timeout}
        if self.store is not None:
            # The store also remembers the addresses of processes that died (pytorch#135712): those
            # that are alive meet under a name of their own.
            name = rendezvous_key(self.store, self.rank, self.world_size, self.timeout)
            where |= {"store": dist.PrefixStore(name, self.store)}
            where |= {"rank": self.rank, "world_size": self.world_size}
        try:
            dist.init_process_group("gloo", **where)
        except RuntimeError as error:
            if not NO_WAY.search(str(error)):
                raise
            raise UsageError(
                f"rank {self.rank} cannot reach the others by gloo ({reason(error)}): set "
                "GLOO_SOCKET_IFNAME on each machine to the network interface that leads to the "
                "others (one name, as `ip addr` lists them)"
            ) from None

    def new_device_group(self) -> "dist.ProcessGroup | None":
        """Connect the devices of all processes, for gradients; None: as the CPUs have met."""
        if self.device.type == "cpu" or not dist.is_nccl_available():  # (Windows; gloo can do both)
            return None
        return dist.new_group(backend="nccl", timeout=self.timeout, device_id=self.device)


def rendezvous_key(store: "dist.Store", rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that all processes of this attempt agree on, and that no earlier attempt knew.

    Each writes a random key over that of its predecessor, then again and again reads all keys and
    publishes their hash. My key is new, so only a process that is alive can publish a hash with it
    inside: when all hashes are the same, all are alive and agree. (torchrun also counts attempts,
    but each machine does so by itself.)
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
    """One line, though all processes may have found the same mistake.

    The first of a machine says it and ends, for which torchrun ends the others. If it has nothing
    to complain about, they live long enough to say it themselves.
    """
    if os.environ.get("LOCAL_RANK", "0") not in ("0", ""):
        time.sleep(10)
    print_error(message)


# What gloo says when it finds no way, or no network interface,
NO_WAY = re.compile("connectFullMesh|Unable to find (address|interface)|device.cc")
# and what NCCL, gloo and the store say when another process is late, and when it is gone.
LATE = re.compile(r"[Tt]imed out|[Tt]imeout")
GONE = re.compile(
    "gloo/|ncclRemoteError|remote process exited|closed by remote peer|Connection (reset|refused|"
    "closed)|Broken pipe|communicator (was )?aborted"
)


def peer_failure_message(error: Exception) -> str | None:
    """What to say if this process failed only because another one did; None if it did not.

    What NCCL finds wrong on this machine is an error of its own, with its traceback.
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
    """What it says, in short, without the place in C++; NCCL has the reason in its last line."""
    says = str(error).partition("Last error:")[2] or str(error) or type(error).__name__
    says = re.sub(r"\[?\S+\.(cc|cpp|h):\d+[],]? ?", "", says)
    return textwrap.shorten(says, 120, placeholder=" ...")


def main_and_exit(main: Callable[[], int]) -> NoReturn:
    """`main`; if anything went wrong, end this process without further ado."""
    try:
        code = main()
    except Exception:
        code = 1
        traceback.print_exc()
    if code != 0:
        # Not sys.exit: on its way out Python would wait for a conversation with processes that
        # in turn wait for this one. torchrun sees the exit code and ends the others.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(0)
