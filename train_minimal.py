"""Train a MiniGPT on one device, and see what activation memory costs.

The main job: the built-in corpus (Python's own standard library), a tokenizer trained on it, a
small GPT with an activation checkpoint around each block; about two minutes on a laptop:
    python train_minimal.py --use-activation-checkpoint

GPT-2 small on your own text, on one GPU:
    python train_minimal.py --train-data data/train.txt --n-layers 12 --n-heads 12 --d-model 768 \
        --d-ff 3072 --seq-len 1024 --batch-size 2 --num-steps 10000 --use-activation-checkpoint

Go on where a run stopped (same flags, plus one):
    python train_minimal.py --use-activation-checkpoint --resume

Several devices: see train_ddp.py, which is the list of differences.

Read learning_rate, train_step, evaluate and train first: they are the training. Before them stands
what they share, after them how a run is set up. The flags are in flags.py.
"""

import os
import time

PROCESS_START = time.perf_counter()  # before `import torch`, which takes a second or two
# Idle OpenMP threads should soon sleep: by default they spin for long, and on a busy machine that
# takes the cores away from the threads that have work. Read when the library is loaded, so it must
# stand before `import torch`.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import argparse
import math
import signal
import sys
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from data import DataError, Dataset, TrainBatches, ValBatches, load_dataset
from flags import (
    UsageError,
    build_parser,
    choose_device,
    choose_precision,
    fill_in,
    model_config,
    print_error,
)
from memory import is_out_of_memory
from metrics import (
    MetricsFile,
    StepClock,
    card_memory,
    describe_result,
    describe_run,
    format_bytes,
    format_line,
    logged_at,
    peak_memory,
    perplexity,
)
from model import MiniGPT, MiniGPTConfig
from plan import (
    choose_recompute,
    default_budget,
    describe_plan,
    describe_recompute,
    make_planner,
)
from snapshot import (
    Resumed,
    SaveError,
    SnapshotError,
    State,
    beside,
    check_resumable,
    check_writable,
    load_newest,
    load_own,
    lock,
    restore,
    save_snapshot,
)


class NotFinite(Exception):
    """Training cannot go on: infinities and NaNs, step after step."""


class OneProcess:
    """What the loop asks of the world when there is one process. train_ddp.py has the other one."""

    rank, world_size = 0, 1
    ddp, processes_on_device = False, 1

    def __init__(self, device: torch.device):
        if type(self) is OneProcess and os.environ.get("WORLD_SIZE", "1") != "1":
            world = f"WORLD_SIZE is {os.environ['WORLD_SIZE']}"
            raise UsageError(f"torchrun starts train_ddp.py; this is for one process, but {world}")
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


class StopSignal:
    """Ctrl-C (SIGINT) and a cluster's SIGTERM: finish the step and save, instead of dying in it.

    A context around training. The handler only takes a note, as the signal may come anywhere in
    the step. A second signal does what signals do: it ends the process at once.
    """

    def __enter__(self) -> "StopSignal":
        self.number = 0
        self.before = {n: signal.signal(n, self.note) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, number: int, frame: object) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


@dataclass
class Run:
    """One training run: what the functions below share."""

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
    step: int = 0  # steps done
    skipped: int = 0  # the last ones of them in a row whose update was skipped
    saved_step: int = 0  # the step that --checkpoint-path holds, 0 = none of this run yet
    stopped_by: int = 0  # the signal that ended the run before its last step
    best_val_loss: float = math.inf
    # The log record of the step that was resumed from, if it has not been logged yet.
    unreported: dict[str, Any] = field(default_factory=dict)

    def autocast(self) -> torch.autocast:
        """Matmuls in the chosen precision; LayerNorm, softmax and loss stay in float32.

        Without the weight cache: it would hold a low-precision copy of every weight until the
        forward ends, to save casts that this model does not repeat.
        """
        enabled = self.precision != torch.float32
        dtype = self.precision if enabled else None  # float32 is no dtype of autocast's
        device_type = self.process.device.type
        return torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=False)


# ------------------------------------------------------------------------------------ learning


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """The rate for step 1..num_steps: a warm-up from 0, then down to `--min-lr` at the last step.

    A function of the step, not a scheduler object: nothing to save, nothing to restore.
    """
    if step <= args.warmup_steps:
        return args.lr * step / args.warmup_steps
    if args.lr_scheduler == "constant":
        return args.lr
    progress = (step - args.warmup_steps) / max(args.num_steps - args.warmup_steps, 1)
    if args.lr_scheduler == "linear":
        height = 1 - progress
    else:
        height = 0.5 * (1 + math.cos(math.pi * progress))
    return args.min_lr + (args.lr - args.min_lr) * height


def train_step(run: Run) -> tuple[Tensor, Tensor]:
    """Step number `run.step`: forward and backward over the micro-batches, then one update.

    Returns (losses of this process's micro-batches (A,), gradient norm ()), both on the device;
    A is --grad-accum-steps.
    """
    args, process, clock = run.args, run.process, run.clock
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.step, args)

    losses = []
    for micro_batch in range(args.grad_accum_steps):
        # Every micro-batch that any process ever computes has a number of its own. Its data and
        # its dropout masks are functions of (seed, number): a resumed run needs no saved random
        # state, and two processes compute what one process with two micro-batches would.
        number = (run.step - 1) * args.grad_accum_steps + micro_batch
        number = number * process.world_size + process.rank
        torch.manual_seed(seed_of(args.seed, number))
        input_ids, labels = run.train_batches[number]  # (B, T), (B, T)
        clock.lap("data")

        last = micro_batch == args.grad_accum_steps - 1
        with process.sync_gradients(now=last):
            with run.autocast():
                loss = run.wrapped(input_ids, labels)
            clock.lap("forward")
            # A loss can be infinite and all its gradients finite (the logit of the right token
            # is -inf). Times NaN they are not; times 1 not a bit of them changes.
            one_or_nan = loss.detach() * 0 + 1
            # backward adds to the gradients that are there; divided by A, the sum is the mean.
            run.scaler.scale(loss * one_or_nan / args.grad_accum_steps).backward()
            clock.lap("backward")
        losses.append(loss.detach())

    run.scaler.unscale_(run.optimizer)  # before clipping: the limit is meant for true gradients
    limit = args.grad_clip_norm or math.inf
    grad_norm = nn.utils.clip_grad_norm_(run.model.parameters(), limit)
    # One NaN among the gradients would be in every weight after one update; clipping does not
    # help, it divides by the NaN. All processes have the same averaged gradients: all skip the
    # update, or none. (Reading the norm makes Python wait for the GPU, once a step: the GPU then
    # waits for the launch of the next kernels, far less time than a step of any real size takes.)
    finite = bool(grad_norm.isfinite())
    run.skipped = 0 if finite else run.skipped + 1
    if finite:
        run.scaler.step(run.optimizer)
    run.scaler.update()  # float16: halves the loss scale after an overflow
    # Frees them for the next forward. In DDP's buckets they stay: out of them, the gradients of
    # several micro-batches would gather beside the buckets.
    run.optimizer.zero_grad(set_to_none=not process.ddp)
    clock.lap("optimizer")
    return torch.stack(losses), grad_norm


def seed_of(seed: int, number: int) -> int:
    """One 63-bit seed from two numbers; a mere sum would give (1, 2) and (2, 1) the same one."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> 1)


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float | None]:
    """Loss on the fixed validation batches, the same number for any number of processes.

    Process r takes the batches r, r + W, r + 2W, ...; what is added up over processes is nats,
    tokens and bytes, not means, because the last batch may be smaller.
    """
    run.model.eval()
    nats = tokens = byte_count = 0.0
    for i in range(run.process.rank, len(run.val_batches), run.process.world_size):
        input_ids, labels = run.val_batches[i]
        with run.autocast():
            # Not through DDP's wrapper, which would wait for processes that have no batch left.
            loss = run.model(input_ids, labels)
        nats += loss.item() * labels.numel()
        tokens += labels.numel()
        byte_count += run.token_bytes[labels].sum().item()
    run.model.train()
    nats, tokens, byte_count = run.process.sum([nats, tokens, byte_count])
    loss = nats / tokens
    return {
        "val_loss": loss,
        "val_ppl": perplexity(loss),
        # Unlike perplexity, this can be compared between tokenizers.
        "val_bits_per_byte": nats / math.log(2) / byte_count if byte_count else None,
    }


def train(run: Run) -> dict[str, Any]:
    """All steps from `run.step` to the last, or to a signal. Returns the last log record."""
    args, process, clock = run.args, run.process, run.clock
    record: dict[str, Any] = run.unreported
    if process.rank == 0:
        run.metrics = MetricsFile(beside(args.checkpoint_path, ".metrics.jsonl"), run.step)
    hide_bar = process.rank > 0 or not sys.stderr.isatty()
    bar = tqdm(initial=run.step, total=args.num_steps, unit="step", disable=hide_bar)
    run.model.train()
    save_due = False
    if run.unreported:  # the run that is resumed died between the save and the evaluation
        report(run, record)
    clock.pause()
    with StopSignal() as stop:
        while run.step < args.num_steps and not run.stopped_by:
            run.step += 1
            losses, grad_norm = train_step(run)

            # ---- The learning ends here. What follows looks at it, saves it and prints it.
            clock.end_step()
            bar.update()
            if run.skipped:
                note_skipped(run)  # raises NotFinite after several in a row
            # All processes must stop after the same step, whichever of them got the signal.
            run.stopped_by = process.largest(stop.number)
            last = run.step == args.num_steps or run.stopped_by > 0
            log_now = due(run.step, args.log_interval, args.num_steps)
            evaluate_now = due(run.step, args.eval_interval, args.num_steps)
            # While steps are being skipped a save that is due waits for a good one: if no good one
            # comes, both snapshots on the disk are from before the trouble.
            save_due = save_due or due(run.step, args.save_interval, args.num_steps)
            save_now = (save_due and not run.skipped) or last
            if log_now or evaluate_now or save_now:
                record = measure(run, losses, grad_norm)
                if save_now:
                    # Before the evaluation: it may take long, or die, and the steps with it.
                    save(run, args.checkpoint_path, record)
                    save_due = False
                    clock.pause()
                report(run, record)
    bar.close()
    if run.metrics is not None:
        run.metrics.close()
    return record


def note_skipped(run: Run) -> None:
    """Say that this step changed nothing. Raises NotFinite after too many of them in a row.

    A single bad batch is no reason to stop. Nor is float16, whose GradScaler looks for the largest
    scale that just does not overflow, by overflowing now and then; but from 65,536 down to 1 it
    needs 16 halvings, so a longer series has another reason.
    """
    args, float16 = run.args, run.scaler.is_enabled()
    limit = 20 if float16 else 3
    if run.skipped < limit:
        scale = f" (float16: the loss scale is now {run.scaler.get_scale():g})" if float16 else ""
        run.process.say(
            f"warning  step {run.step}: loss or gradients are not finite, update skipped{scale}"
        )
        return
    flags = "--amp-dtype bfloat16 or --no-amp" if float16 else f"a lower --lr than {args.lr:.2g}"
    raise NotFinite(
        f"loss or gradients were not finite in {limit} steps in a row, {run.step - limit + 1} to "
        f"{run.step}; {way_back(run)}, and try {flags}; --detect-anomaly finds the operation"
    )


def way_back(run: Run) -> str:
    """What to do when training had to stop."""
    if run.saved_step:
        return f"go on from {run.args.checkpoint_path}, step {run.saved_step}, with --resume"
    return "start again (nothing was saved yet)"


def report(run: Run, record: dict[str, Any]) -> None:
    """Evaluate if it is time to (adding to `record`), keep the best weights, log the step."""
    args, process, clock = run.args, run.process, run.clock
    if due(run.step, args.eval_interval, args.num_steps):
        clock.pause()
        record |= evaluate(run)
        if record["val_loss"] < run.best_val_loss:
            run.best_val_loss = record["val_loss"]
            save(run, beside(args.checkpoint_path, ".best.pt"), record)
        clock.pause()
    if run.metrics is not None:
        run.metrics.write(record)
    process.say(format_line(record, args.num_steps, card_memory(process.device)))
    clock.lap("log")


def due(step: int, interval: int, num_steps: int) -> bool:
    """Every `interval` steps (0 = never), and always at the last one."""
    return step == num_steps or (interval > 0 and step % interval == 0)


def measure(run: Run, losses: Tensor, grad_norm: Tensor) -> dict[str, Any]:
    """The log record of the step that was just done, and of the time since the last record."""
    args, process, clock = run.args, run.process, run.clock
    micro_batches = losses.numel() * process.world_size
    # Over all micro-batches of all processes: the loss that this step descended. Reading it waits
    # for the GPU, which makes the times below true.
    loss = process.sum([sum(losses.tolist())])[0] / micro_batches
    clock.lap("log")
    seconds = clock.end_interval()
    peak, kind = peak_memory(process.device)
    return {
        "step": run.step,
        "epoch": run.train_batches.epoch(run.step * micro_batches),
        "lr": run.optimizer.param_groups[0]["lr"],
        "train_loss": loss,
        "train_ppl": perplexity(loss),
        "grad_norm": grad_norm.item(),
        "step_ms": 1000 * seconds,
        "tokens_per_s": micro_batches * args.batch_size * args.seq_len / seconds,
        "eta_s": (args.num_steps - run.step) * seconds,
        "peak_memory_bytes": peak,
        "peak_memory_kind": kind,
    }


# --------------------------------------------------------------------------- setting up a run


def set_up(args: argparse.Namespace, process: OneProcess) -> Run:
    """Data, model, optimizer; or the last snapshot of them.

    What a user can get wrong goes wrong here, before anything is written or trained.
    Raises UsageError, DataError or SnapshotError.
    """
    device, precision = process.device, choose_precision(args, process.device)
    load = load_newest if args.resume else partial(load_own, run_id=process.run_id)
    resumed = load(args.checkpoint_path)
    data = load_dataset(
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
    train_batches = TrainBatches(data.train, args.batch_size, args.seq_len, args.data_seed, device)
    val_batches = ValBatches(data.val, args.batch_size, args.seq_len, args.eval_batches, device)
    asked = model_config(args, data.tokenizer.vocab_size)
    config, plan = plan_memory(args, process, asked, precision)
    identity = identify(args, process, config, data)
    if resumed is not None:
        check_resumable(resumed.state, identity, resumed.path)
        identity["run"] = resumed.state.get("run")
    check_writable(args.checkpoint_path, resuming=resumed is not None)
    held_lock = lock(args.checkpoint_path) if process.rank == 0 else None

    process.start()
    step = resumed.state["step"] if resumed is not None else 0
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
    if process.rank == 0:
        process.say(describe_run(run, plan, resumed))
    if args.compile:
        model.compile_blocks()
    run.wrapped = process.wrap(model)
    return run


def plan_memory(
    args: argparse.Namespace, process: OneProcess, config: MiniGPTConfig, precision: torch.dtype
) -> tuple[MiniGPTConfig, str]:
    """The config, with what `auto` takes, and in words what memory a step will need.

    Raises UsageError if `auto` finds nothing that fits.
    """
    device = process.device
    make = partial(
        make_planner,
        config=config,
        device_type=device.type,
        precision=precision,
        make_optimizer=lambda model: make_optimizer(model, args, device),
        ddp=process.ddp,
    )
    words, planner = "", None
    if args.use_activation_checkpoint == "auto":
        planner = make(args)
        budget = args.memory_budget or default_budget(device, process.processes_on_device)
        config = choose_recompute(planner, make, args, budget).config
        words = f"auto takes {describe_recompute(config)}: the least that fits "
        words += f"{format_bytes(budget)}\nmemory   "
    if process.rank > 0:
        return config, words
    try:
        words += describe_plan(planner or make(args), config, args.batch_size)
    except Exception as error:  # an aside: where fake tensors do not work, train anyway
        words += f"the peak could not be predicted ({type(error).__name__})"
    return config, words


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
        before = ".prev.pt" if run.saved_step else ".old.pt"  # ours, or another run's
        save_snapshot(path, state, keep_as=before if newest else None)
    if newest:
        run.saved_step = run.step


def sample_text(run: Run) -> str:
    """A document from its beginning. The same run always samples the same text."""
    if run.args.sample_tokens == 0:
        return ""
    torch.manual_seed(run.args.seed)
    start = torch.tensor([[run.data.tokenizer.eot_id]], device=run.process.device)
    with run.autocast():
        ids = run.model.generate(start, run.args.sample_tokens, temperature=0.8, top_k=40)
    return run.data.tokenizer.decode(ids[0, 1:].tolist())


# ------------------------------------------------------------------------------------- main


def main(argv: list[str] | None = None) -> int:
    """Train on one device; returns the exit code."""
    args = build_parser("train_minimal.py", "checkpoints/minigpt_single.pt").parse_args(argv)
    return run_safely(args, lambda: OneProcess(choose_device(args.device)))


def run_safely(
    args: argparse.Namespace,
    make_process: Callable[[], OneProcess],
    complain: Callable[[object], None] = print_error,
) -> int:
    """Train; turn what went wrong, unless it is a bug, into one line and an exit code."""
    code, run = 0, None
    try:
        fill_in(args)
        if isinstance(sys.stdout, TextIOWrapper):  # half a character in a sample is no crash
            sys.stdout.reconfigure(errors="replace")
        torch.autograd.set_detect_anomaly(args.detect_anomaly)
        process = make_process()
        run = set_up(args, process)
        if run.step >= args.num_steps and not run.unreported:
            process.say(f"done     already at step {run.step:,}; raise --num-steps to go on")
        else:
            seconds_before = time.perf_counter() - PROCESS_START
            record = train(run)
            if run.stopped_by and run.step < args.num_steps:
                name = signal.Signals(run.stopped_by).name
                process.say(f"stopped  {name} after step {run.step:,}: saved; go on with --resume")
                code = 128 + run.stopped_by
            else:
                text = sample_text(run) if process.rank == 0 else ""
                seconds = time.perf_counter() - PROCESS_START
                process.say(describe_result(run, record, text, seconds_before, seconds))
        run = None  # and with it DDP's wrapper: it must go before its connections do
        process.close()
        return code
    except (UsageError, DataError, SnapshotError) as error:
        complain(error)
        return 2
    except NotFinite as error:
        complain(error)
        return 3
    except SaveError as error:
        assert run is not None
        complain(f"{error}; make room, then {way_back(run)}")
        return 3
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        complain(f"out of memory with {next_knob(args, run)}")
        return 4
    except KeyboardInterrupt:
        print(
            "\nstopped; --resume goes on from the last snapshot, if there is one", file=sys.stderr
        )
        return 130


def next_knob(args: argparse.Namespace, run: Run | None) -> str:
    """The settings that memory ran out with, and the next change: what helps most at least cost.

    All but the last leave a run that can be resumed: the same sequences make the same step.
    """
    policy = args.use_activation_checkpoint
    now = f"--batch-size {args.batch_size} --seq-len {args.seq_len}, recompute {policy}; try"
    back = f"; {way_back(run)}" if run is not None and run.saved_step else ""
    if run is None:  # it was not even set up
        return f"{now} a smaller model (--n-layers, --d-model), or less data (--max-tokens)"
    if args.loss_chunks == 1:
        return f"{now} --loss-chunks 0 (never holds all logits, costs nothing){back}"
    if policy != "full" or args.recompute_layers is not None:
        knob = "--use-activation-checkpoint" + ("" if policy == "none" else " full, in all layers")
        return f"{now} {knob} (same results, some more time){back}"
    if args.batch_size > 1:
        part = next(n for n in range(2, args.batch_size + 1) if args.batch_size % n == 0)
        size, steps = args.batch_size // part, args.grad_accum_steps * part
        return f"{now} --batch-size {size} --grad-accum-steps {steps} (the same sequences){back}"
    if run.process.device.type == "cuda" and not args.offload_activations:
        return f"{now} --offload-activations{back}"
    return f"{now} a shorter --seq-len or a smaller model"


if __name__ == "__main__":
    sys.exit(main())
