"""One training run: what it consists of, how it is set up, how it is saved and goes on.

Everything around the loop of train_minimal.py that is not the loop. `OneProcess` is what the loop
asks of the world; train_ddp.py has the answers of several processes.
"""

import argparse
import math
import os
import sys
import uuid
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data import Dataset, TrainBatches, ValBatches, load_dataset
from model import MiniGPT, MiniGPTConfig
from trainer.flags import choose_precision, model_config
from trainer.metrics import MetricsFile, StepClock, describe_run, logged_at
from trainer.plan import plan_memory
from trainer.snapshot import (
    Resumed,
    SnapshotError,
    State,
    beside,
    check_resumable,
    check_writable,
    claim,
    load_newest,
    load_own,
    restore,
    save_snapshot,
)


class OneProcess:
    """What the loop asks of the world when there is one process. train_ddp.py has the other one."""

    rank, world_size = 0, 1
    ddp, processes_on_device = False, 1

    def __init__(self, device: torch.device):
        self.device = device
        self.run_id = uuid.uuid4().hex  # by which a run knows its own snapshots

    def start(self) -> None:
        """Meet the other processes. Called when data and flags are known to be good."""

    def wrap(self, model: MiniGPT) -> nn.Module:
        """The model that the loop calls."""
        return model

    def sync_gradients(self, now: bool) -> AbstractContextManager[Any]:
        """A context for forward *and* backward: average gradients over processes, or not yet."""
        return nullcontext()

    def sum(self, values: list[float]) -> list[float]:
        """Each value summed over all processes."""
        return values

    def largest(self, value: int) -> int:
        """The largest of all processes' values."""
        return value

    def say(self, line: str) -> None:
        """Print a line once, however many processes there are, beside the progress bar."""
        # The reader may be gone (`| head -3`), or the disk with the log full. That ends many
        # programs, and rightly; hours of training it should not. The run goes on in silence:
        # metrics.jsonl has all the figures, and the snapshots are still written.
        with suppress(OSError):
            tqdm.write(line)
            sys.stdout.flush()

    def close(self) -> None:
        """Leave the other processes."""


@dataclass
class Run:
    """One training run: what the loop and its functions share."""

    args: argparse.Namespace
    process: OneProcess
    data: Dataset
    identity: State  # what a snapshot says about the run: config, flags, tokenizer, data
    model: MiniGPT
    wrapped: nn.Module  # the model as the loop calls it: itself, or in DDP's wrapper
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    precision: torch.dtype
    train_batches: TrainBatches
    val_batches: ValBatches
    token_bytes: Tensor  # (V,) bytes that each token id stands for
    clock: StepClock
    held_lock: object = None  # keeps a second run off our files as long as this one lives
    metrics: MetricsFile | None = None  # only process 0 has one
    step: int = 0  # steps done; while one is being done, its number
    skipped: int = 0  # the last ones of them in a row whose update was skipped
    saved_step: int = 0  # the step that --checkpoint-path holds, 0 = none of this run yet
    stopped_by: int = 0  # the signal that ended the run before its last step
    best_val_loss: float = math.inf
    # The log record of the step that was resumed from, if it has not been logged yet.
    unreported: dict[str, Any] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        """In a step, of all processes."""
        return self.args.grad_accum_steps * self.process.world_size

    def autocast(self) -> torch.autocast:
        """Matmuls in the chosen precision; LayerNorm, softmax and loss stay in float32.

        Without the weight cache: it would hold a low-precision copy of every weight until the
        forward ends, to save casts that this model does not repeat.
        """
        enabled = self.precision != torch.float32
        dtype = self.precision if enabled else None  # float32 is no dtype of autocast's
        device_type = self.process.device.type
        return torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=False)


def set_up(args: argparse.Namespace, process: OneProcess) -> Run:
    """Data, model, optimizer; or the last snapshot of them.

    What a user can get wrong goes wrong here, before anything is written or trained.
    Raises UsageError, DataError or SnapshotError.
    """
    device, precision = process.device, choose_precision(args, process.device)
    if args.resume:
        resumed: Resumed | None = load_newest(args.checkpoint_path)
    else:  # what this very run has saved, before torchrun started it again
        resumed = load_own(args.checkpoint_path, process.run_id)
    data = load_data(args, process)
    train_batches = TrainBatches(data.train, args.batch_size, args.seq_len, args.data_seed, device)
    val_batches = ValBatches(data.val, args.batch_size, args.seq_len, args.eval_batches, device)
    asked = model_config(args, data.tokenizer.vocab_size)
    config, plan = plan_memory(
        args, process, asked, precision, partial(make_optimizer, args=args, device=device)
    )
    identity = identify(args, process, config, data)
    if resumed is not None:
        check_resumable(resumed.state, identity, resumed.path)
        identity["run"] = resumed.state.get("run")
    check_writable(args.checkpoint_path, resuming=resumed is not None)
    held_lock = claim(args.checkpoint_path, resumed) if process.rank == 0 else None

    process.start()
    step = resumed.state["step"] if resumed is not None else 0
    # Some may see no file, or an older one: on disks of several machines.
    if process.sum([step])[0] != step * process.world_size:
        raise SnapshotError(f"--resume: not all processes see the same {args.checkpoint_path}")
    torch.manual_seed(args.seed)
    model = MiniGPT(config).to(device)
    run = Run(
        args=args,
        process=process,
        data=data,
        identity=identity,
        model=model,
        wrapped=model,
        optimizer=make_optimizer(model, args, device),
        scaler=torch.amp.GradScaler(device.type, enabled=precision == torch.float16),
        precision=precision,
        train_batches=train_batches,
        val_batches=val_batches,
        token_bytes=torch.from_numpy(data.tokenizer.byte_lengths()).to(device),
        clock=StepClock(),
        held_lock=held_lock,
    )
    if resumed is not None:
        go_on_from(resumed, run)
    if process.rank == 0:  # it looks at files
        process.say(describe_run(run, plan, resumed))
    if args.compile:
        model.compile_blocks()
    run.wrapped = process.wrap(model)
    return run


def load_data(args: argparse.Namespace, process: OneProcess) -> Dataset:
    """Tokens, as the flags of the group "data" ask for. Raises DataError."""
    return load_dataset(
        args.train_data,
        args.val_data,
        val_ratio=args.val_ratio,
        tokenizer_name=args.tokenizer_name,
        vocab_size=args.vocab_size,
        toy=args.use_toy_data,
        max_tokens=args.max_tokens,
        seed=args.data_seed,
        say=process.say,
    )


def make_optimizer(
    model: MiniGPT, args: argparse.Namespace, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019), as one fused kernel where the device has it.

    Weight decay pulls matrices towards zero. A bias or a LayerNorm gain has no reason to be small.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = device.type in ("cuda", "cpu")
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=fused)


def identify(
    args: argparse.Namespace, process: OneProcess, config: MiniGPTConfig, data: Dataset
) -> State:
    """The part of a snapshot that says which run it is of (plain types, no tensors)."""
    return {
        "run": process.run_id,
        "config": asdict(config),
        "args": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "tokenizer": data.tokenizer.state(),
        "data": {
            "description": data.description,
            "fingerprint": data.fingerprint,
            "sequences_per_step": args.batch_size * args.grad_accum_steps * process.world_size,
        },
    }


def save(run: Run, path: Path, record: dict[str, Any]) -> None:
    """Write a snapshot of the run. Process 0 does it: all have the same weights."""
    newest = path == run.args.checkpoint_path
    if run.process.rank == 0:
        state = run.identity | {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "scaler": run.scaler.state_dict(),
            "step": run.step,
            "best_val_loss": run.best_val_loss,
            "record": record,
        }
        save_snapshot(path, state, keep_previous=newest)
    if newest:
        run.saved_step = run.step


def go_on_from(resumed: Resumed, run: Run) -> None:
    """Put the run where the snapshot left it."""
    args, process = run.args, run.process
    restore(resumed, run.model, run.optimizer, run.scaler)
    run.step = run.saved_step = resumed.state["step"]
    run.best_val_loss = resumed.state["best_val_loss"]
    if resumed.damage and process.rank == 0:  # or the next save would keep the damaged one
        os.replace(resumed.path, args.checkpoint_path)
    # The snapshot was written before its step was evaluated and logged. Was that still done?
    logged = None
    if process.rank == 0:
        logged = logged_at(run.step, beside(args.checkpoint_path, ".metrics.jsonl"))
        run.best_val_loss = min(run.best_val_loss, (logged or {}).get("val_loss") or math.inf)
    if process.largest(int(process.rank == 0 and logged is None)):
        run.unreported = dict(resumed.state.get("record", {}))
