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

Read learning_rate, train_step, evaluate and train: they are the training. What a run consists of,
how it is set up and saved, stands in run.py (`run` is a `Run`); the flags are in flags.py.
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
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from data import DataError
from planner.step import is_out_of_memory
from trainer.flags import UsageError, build_parser, choose_device, fill_in, print_error
from trainer.metrics import (
    MetricsFile,
    card_memory,
    describe_result,
    format_line,
    peak_memory,
    perplexity,
)
from trainer.plan import next_knob
from trainer.run import OneProcess, Run, save, set_up
from trainer.snapshot import SaveError, SnapshotError, beside, step_aside

# ------------------------------------------------------------------------------------ learning


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """The rate for step 1..num_steps: a warm-up from 0, then down to `--min-lr` at the last step
    (unless it is to stay constant).

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

        last_of_step = micro_batch == args.grad_accum_steps - 1
        with process.sync_gradients(now=last_of_step):
            with run.autocast():
                loss = run.wrapped(input_ids, labels)
            clock.lap("forward")
            # An infinite loss can have finite gradients (the right token's logit is -inf) and
            # would pass the check below. inf * 0 + 1 is NaN, and makes them NaN; a loss that is
            # finite is multiplied by exactly 1.
            one_or_nan = loss.detach() * 0 + 1
            # backward adds to the gradients that are there; divided by A, the sum is the mean.
            # (The scaler does nothing unless the precision is float16.)
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
    # Freed, the gradients leave room for the next forward. DDP's are views of its buckets, which
    # stay: they are zeroed in place, or backward would make new ones beside the buckets.
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
        if run.step == 0:
            step_aside(args.checkpoint_path)
        run.metrics = MetricsFile(beside(args.checkpoint_path, ".metrics.jsonl"), run.step)
    hide_bar = process.rank > 0 or not sys.stderr.isatty()
    bar = tqdm(initial=run.step, total=args.num_steps, unit="step", disable=hide_bar)
    run.model.train()
    save_due = False
    clock.pause()
    if record:  # of the step that is resumed from: its run died between the save and the log
        evaluate_and_log(run, record, due(run.step, args.eval_interval, args.num_steps))
    with bar, StopSignal() as stop:
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
            last_step = run.step == args.num_steps or run.stopped_by > 0
            log_now = due(run.step, args.log_interval, args.num_steps)
            evaluate_now = due(run.step, args.eval_interval, args.num_steps)
            # While steps are being skipped the weights stay as they are; to save them again would
            # only push the snapshot before out of .prev.pt. A save that is due waits.
            save_due = save_due or due(run.step, args.save_interval, args.num_steps)
            save_now = (save_due and not run.skipped) or last_step
            if log_now or evaluate_now or save_now:
                record = measure(run, losses, grad_norm)
                if save_now:
                    # Before the evaluation: it may take long, or die, and the steps with it.
                    save(run, args.checkpoint_path, record)
                    save_due = False
                    clock.pause()
                evaluate_and_log(run, record, evaluate_now)
    if run.metrics is not None:
        run.metrics.close()
    return record


class StopSignal:
    """Ctrl-C (SIGINT) and a cluster's SIGTERM: finish the step and save, instead of dying in it.

    A context around training. The handler only takes a note, as the signal may come anywhere in
    the step. A second one of the same kind does what signals do: it ends the process at once.
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


class NotFinite(Exception):
    """Training cannot go on: infinities and NaNs, step after step."""


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


def evaluate_and_log(run: Run, record: dict[str, Any], evaluate_now: bool) -> None:
    """Evaluate if it is time to (adding to `record`), keep the best weights, log the step."""
    args, process, clock = run.args, run.process, run.clock
    if evaluate_now:
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
    return step >= num_steps or (interval > 0 and step % interval == 0)


def measure(run: Run, losses: Tensor, grad_norm: Tensor) -> dict[str, Any]:
    """The log record of the step that was just done, and of the time since the last record."""
    args, process, clock = run.args, run.process, run.clock
    # Over all micro-batches of all processes: the loss that this step descended. Reading it waits
    # for the GPU, which makes the times below true.
    loss = process.sum([sum(losses.tolist())])[0] / run.micro_batches
    clock.lap("log")
    seconds = clock.end_interval()
    peak, kind = peak_memory(process.device)
    return {
        "step": run.step,
        "epoch": run.train_batches.epoch(run.step * run.micro_batches),
        "lr": run.optimizer.param_groups[0]["lr"],
        "train_loss": loss,
        "train_ppl": perplexity(loss),
        "grad_norm": grad_norm.item(),
        "step_ms": 1000 * seconds,
        "tokens_per_s": run.micro_batches * args.batch_size * args.seq_len / seconds,
        "eta_s": (args.num_steps - run.step) * seconds,
        "peak_memory_bytes": peak,
        "peak_memory_kind": kind,
    }


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

    def alone() -> OneProcess:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            world = f"WORLD_SIZE is {os.environ['WORLD_SIZE']}"
            raise UsageError(f"torchrun starts train_ddp.py; this is for one process, but {world}")
        return OneProcess(choose_device(args.device))

    return run_safely(args, alone)


def run_safely(
    args: argparse.Namespace,
    make_process: Callable[[], OneProcess],
    complain: Callable[[object], None] = print_error,
) -> int:
    """Train; turn what went wrong, unless it is a bug, into one line and an exit code.

    0 done, 2 bad input, 3 stopped safely, 4 out of memory, 128 + n stopped by signal n.
    """
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
        run = None  # and with it DDP's wrapper: it must go before its connections do. (None of
        # the lines below needs it any more.)
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
        device = run.process.device if run is not None else None
        way = way_back(run) if run is not None and run.saved_step else None
        complain(f"out of memory with {next_knob(args, device, way)}")
        return 4
    except KeyboardInterrupt:
        print(
            "\nstopped; --resume goes on from the last snapshot, if there is one", file=sys.stderr
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
