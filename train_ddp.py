"""Train a MiniGPT on several devices: what DistributedDataParallel (DDP) changes, and only that.

Two GPUs; without GPUs two CPU processes:
    torchrun --nproc-per-node=2 train_ddp.py --use-activation-checkpoint

Two machines with eight GPUs each, the same command on both (0 and 1 are their --node-rank; both
need the same data, and a --checkpoint-path on a disk that both see if you want to --resume):
    torchrun --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=HOST --master-port=29500 \
        train_ddp.py --use-activation-checkpoint

A job that torchrun starts again when a process has died; it goes on from its last snapshot:
    torchrun --nproc-per-node=2 --max-restarts=3 train_ddp.py --use-activation-checkpoint

torchrun starts this file once per device and gives each process a rank. Every process holds the
whole model and computes the gradients of its own micro-batches; DDP averages gradients while
backward runs; so all take the same step and stay alike. The loop is train_minimal.py's. It asks
a `OneProcess` what the world looks like; this file has the other answer.
"""

import ctypes
import gc
import hashlib
import os
import signal
import sys
import time
import traceback
import uuid
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from train_minimal import run_safely  # before torch: it starts the clock

# isort: split
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model import MiniGPT
from trainer.flags import UsageError, build_parser, choose_device, print_error
from trainer.run import OneProcess

START = "start it with torchrun: torchrun --nproc-per-node=2 train_ddp.py"
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class TorchrunProcess(OneProcess):
    """One of `world_size` processes that torchrun started."""

    def __init__(self, device_name: str):
        if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
            raise UsageError(f"train_ddp.py: {START} (for one device: python train_minimal.py)")
        self.world_size = environment_number("WORLD_SIZE", 1, 10**6)
        self.rank = environment_number("RANK", 0, self.world_size - 1)
        self.local_rank = environment_number("LOCAL_RANK", 0, self.rank)
        self.port = environment_number("MASTER_PORT", 1, 2**16 - 1)
        if not os.environ.get("MASTER_ADDR"):
            raise UsageError(f"MASTER_ADDR is not set; {START}")
        # The longest that processes wait for each other; above what one of them alone may take to
        # save, to compile, to read its data. MINIGPT_TIMEOUT_S is for tests, and for slow disks.
        os.environ.setdefault("MINIGPT_TIMEOUT_S", "1800")
        self.timeout = timedelta(seconds=environment_number("MINIGPT_TIMEOUT_S", 1, 10**6))
        end_with_torchrun()

        device = choose_device(device_name)
        if device.type == "cuda":
            n_gpus = torch.cuda.device_count()
            if self.local_rank >= n_gpus:
                raise UsageError(f"--nproc-per-node: more processes than GPUs ({n_gpus})")
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        elif device.type == "mps":
            if device_name == "mps":
                raise UsageError("--device mps: no backend of torch.distributed has it; use cpu")
            device = torch.device("cpu")
        super().__init__(device)
        self.ddp = True
        if device.type == "cpu":  # one memory for all processes of the machine
            self.processes_on_device = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.store = None
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # This store lives in torchrun itself, longer than any process that it starts: so it
            # remembers, for `torchrun --max-restarts`, which run is being restarted. (The user
            # started that one without --resume; see snapshot.load_own.)
            self.store = dist.TCPStore(
                os.environ["MASTER_ADDR"], self.port, is_master=False, timeout=self.timeout
            )
            self.run_id = self.store.compare_set("minigpt/run", "", self.run_id).decode()

    def start(self) -> None:
        # Only now, with data and flags in order: what was wrong with them ended each process with
        # its own message, and none waits for another that is gone.
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        if self.store is None:  # started by something else, which sets the same variables
            dist.init_process_group(backend, timeout=self.timeout)
        else:
            # It also remembers the addresses of processes that died (pytorch#135712): those that
            # are alive meet under a name of their own.
            name = common_name(self.store, self.rank, self.world_size, self.timeout)
            store = dist.PrefixStore(name, self.store)
            dist.init_process_group(
                backend,
                timeout=self.timeout,
                store=store,
                rank=self.rank,
                world_size=self.world_size,
            )
        # For what must not wait for the GPUs.
        self.on_cpu = dist.new_group(backend="gloo", timeout=self.timeout)

    def wrap(self, model: MiniGPT) -> nn.Module:
        # Gradients live in DDP's communication buckets instead of beside them: 4 bytes a parameter.
        device_ids = [self.local_rank] if self.device.type == "cuda" else None
        self.wrapper = DistributedDataParallel(
            model, device_ids=device_ids, gradient_as_bucket_view=True
        )
        return self.wrapper

    def sync_gradients(self, now: bool) -> AbstractContextManager[Any]:
        # DDP decides in *forward* whether the coming backward will average gradients.
        return nullcontext() if now else self.wrapper.no_sync()

    def sum(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)  # the default operation is the sum
        return total.tolist()

    def largest(self, value: int) -> int:
        most = torch.tensor(value)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.on_cpu)
        return int(most)

    def say(self, line: str) -> None:
        if self.rank == 0:
            super().say(line)

    def close(self) -> None:
        # The wrapper's threads must be gone before the connections that they use: the other way
        # round, a run that has finished can still abort at exit.
        del self.wrapper
        gc.collect()
        dist.destroy_process_group()


def environment_number(name: str, low: int, high: int) -> int:
    """A variable that torchrun sets. Raises UsageError if it cannot have been torchrun."""
    text = os.environ.get(name, "")
    if not (text.isdecimal() and low <= int(text) <= high):
        raise UsageError(f"{name}={text} is not a number from {low} to {high}; {START}")
    return int(text)


def end_with_torchrun() -> None:
    """Have the kernel end this process when torchrun dies, even by `kill -9` (Linux only).

    Nobody would see, stop or restart it any more, while it keeps its GPU and the snapshots' lock.
    By SIGKILL: one that tried to save first could wait for ever for another that is gone. (To
    stop and save, send SIGTERM to torchrun: it passes it on, and leaves 30 seconds for it.)
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died just before
            os._exit(1)


def common_name(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
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


def complain_once(message: object) -> None:
    """One line, though all processes may have found the same mistake.

    The first of a machine says it and ends, for which torchrun ends the others. If it has nothing
    to complain about, they live long enough to say it themselves.
    """
    if os.environ.get("LOCAL_RANK", "0") not in ("0", ""):
        time.sleep(10)
    print_error(message)


def main(argv: list[str] | None = None) -> int:
    """Train as one of torchrun's processes; returns the exit code of this one."""
    args = build_parser("train_ddp.py", "checkpoints/minigpt_ddp.pt").parse_args(argv)
    return run_safely(args, lambda: TorchrunProcess(args.device), complain_once)


def lost_others(error: Exception) -> str | None:
    """What to say if this process failed only because another one did; None if it did not."""
    text = str(error)
    if not (isinstance(error, dist.DistError | TimeoutError) or "gloo/" in text):
        return None
    rank = f"rank {os.environ.get('RANK')}"
    if isinstance(error, TimeoutError) or "imed out" in text or "timeout" in text:
        seconds = os.environ.get("MINIGPT_TIMEOUT_S")
        return f"{rank} waited {seconds} s for the others in vain (MINIGPT_TIMEOUT_S): one hangs"
    return f"{rank} lost the connection to another process: {text.splitlines()[0][:200]}"


def main_and_exit() -> None:
    """`main`; if anything went wrong, end this process without further ado."""
    try:
        code = main()
    except Exception as error:
        code = 1
        if line := lost_others(error):
            print_error(line)
        else:
            traceback.print_exc()
    if code != 0:
        # Not sys.exit: on its way out Python would wait for a conversation with processes that
        # in turn wait for this one. torchrun sees the exit code and ends the others.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main_and_exit()
