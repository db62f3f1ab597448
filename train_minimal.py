"""Train a MiniGPT on one device, and see what activation memory costs.

The main job: the built-in corpus (Python's own standard library), a tokenizer trained on it, a
small GPT with an activation checkpoint around each block; about two minutes on a laptop:
    python train_minimal.py --use-activation-checkpoint

GPT-2 small on your own text, on one GPU:
    python train_minimal.py --train-data data/train.txt --n-layers 12 --n-heads 12 --d-model 768 \
        --d-ff 3072 --seq-len 1024 --batch-size 2 --num-steps 10000 --use-activation-checkpoint

From the weights of GPT-2, or of a run before (docs/weights.md):
    python train_minimal.py --init-from gpt2 --train-data data/train.txt --seq-len 256

Go on where a run stopped, with the flags that it had:
    python train_minimal.py --resume

Several devices: see train_ddp.py, which is the list of differences.

From top to bottom: the learning rate, one step, the evaluation, the loop. `run` is a Run
(trainer/run.py): model, optimizer, batches, flags and what is known of the run so far. `process`
answers what depends on how many processes there are; alone, it does nothing special
(trainer/process.py). `clock` notes where the time goes.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # (left out by `python -I`)
import trainer.bootstrap  # noqa: F401  # before torch: signals, the end of torchrun, OpenMP

# isort: split
import argparse
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from trainer.flags import build_parser
from trainer.metrics import format_validation, perplexity
from trainer.optimizer import update_if_finite
from trainer.process import OneProcess
from trainer.report import log_overdue, log_record, make_record
from trainer.run import Run, retry_with_less_memory, save, save_is_asked
from trainer.setup import start_log
from trainer.shutdown import Signals, SkippedUpdates, nan_if_infinite, run_safely
from trainer.snapshot import sibling_path


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
        decay = 1 - progress
    else:
        decay = 0.5 * (1 + math.cos(math.pi * progress))
    return args.min_lr + (args.lr - args.min_lr) * decay


def train_step(run: Run) -> tuple[Tensor, Tensor]:
    """Step number `run.step`: forward and backward over the micro-batches, then one update.

    Returns (losses of this process's micro-batches (A,), gradient norm ()), on the device (the norm
    only if Python did not have to read it); A is --grad-accum-steps.
    """
    args, process, clock = run.args, run.process, run.clock
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.step, args)
    losses = retry_with_less_memory(run, accumulate)

    clock.begin_phase("optimizer")
    run.scaler.unscale_(run.optimizer)  # before clipping: the limit is meant for true gradients
    grad_norm = process.clip_gradients(run.model.parameters(), args.grad_clip_norm or math.inf)
    # One NaN among the gradients would be in every weight after one update; clipping does not
    # help, it divides by the NaN. All processes have the same averaged gradients: all skip the
    # update, or none. (The device decides: Python does not wait for it.)
    grad_norm = update_if_finite(run.optimizer, grad_norm)
    run.scaler.update()  # float16: halves the loss scale after an overflow
    process.clear_gradients(run.optimizer)
    return torch.stack(losses), grad_norm


def accumulate(run: Run, average: bool = True) -> list[Tensor]:
    """Forward and backward over a step's micro-batches; returns their losses, each ().

    Gradients are then where the optimizer looks: the `average` over processes, or this one's own.
    """
    args, process, clock = run.args, run.process, run.clock
    losses = []
    for micro_batch in range(args.grad_accum_steps):
        clock.begin_phase("data")
        # Every micro-batch that any process ever computes has a number of its own. Its data and
        # its dropout masks are functions of (seed, number): a resumed run needs no saved random
        # state, and two processes compute what one process with two micro-batches would.
        micro_batch_id = (run.step - 1) * args.grad_accum_steps + micro_batch
        micro_batch_id = micro_batch_id * process.world_size + process.rank
        torch.manual_seed(derive_seed(args.seed, micro_batch_id))
        input_ids, labels = run.train_batches[micro_batch_id // process.sp_degree]  # (B, T), (B, T)

        clock.begin_phase("forward")
        last_of_step = micro_batch == args.grad_accum_steps - 1
        with process.gradient_sync(now=last_of_step and average):
            with run.autocast():
                loss = run.wrapped(input_ids, labels)
            losses.append(loss.detach())
            clock.begin_phase("backward")
            # backward adds to the gradients that are there; divided by A, the sum is the mean.
            # (The scaler does nothing unless the precision is float16.)
            loss = nan_if_infinite(loss) / args.grad_accum_steps
            run.scaler.scale(loss).backward()
    return losses


def derive_seed(seed: int, number: int) -> int:
    """One 63-bit seed from two numbers; a mere sum would give (1, 2) and (2, 1) the same one."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> 1)


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float | None]:
    """Loss on the fixed validation windows: up to rounding the same at any batch size, any number
    of processes, and in every trainer.

    Process r takes the batches r, r + W, r + 2W, ...; the processes add up nats, tokens and bytes,
    not means, because the last batch may be smaller. A batch has at most --batch-size windows and
    no gradients: it needs less memory than a training step.
    """
    run.model.eval()
    batches = []  # on the device, and read after the loop only: each reading waits for the GPU
    for first in range(0, len(run.val_batches), run.process.replicas):
        # In the last round there may be none left for this process. It takes one again, which does
        # not count: if the model is sharded, each forward needs all processes.
        i = first + run.process.rank // run.process.sp_degree
        input_ids, labels = run.val_batches[i % len(run.val_batches)]
        with run.autocast():
            loss = run.model(input_ids, labels)
        if i < len(run.val_batches):
            batches.append((loss, labels.numel(), run.token_bytes[labels].sum()))
    run.model.train()
    nats = tokens = byte_count = 0.0
    for loss, n_tokens, n_bytes in batches:
        nats += loss.item() * n_tokens
        tokens += n_tokens
        byte_count += n_bytes.item()
    nats, tokens, byte_count = run.process.all_reduce_sum([nats, tokens, byte_count])
    mean = nats / tokens
    return {
        "val_loss": mean,
        "val_ppl": perplexity(mean),
        # Unlike perplexity, this can be compared between tokenizers.
        "val_bits_per_byte": nats / math.log(2) / byte_count if byte_count else None,
    }


def train(run: Run) -> dict[str, Any]:
    """All steps after `run.step` to the last, or to a signal. Returns the last log record."""
    args, process, clock = run.args, run.process, run.clock
    with clock.paused("set up"):
        start_log(run)
        hide_bar = process.rank > 0 or not sys.stderr.isatty()
        bar = tqdm(initial=run.step, total=args.num_steps, unit="step", disable=hide_bar)
        if run.step == 0 and args.init_from is not None:  # is there something to gain?
            process.print0(f"before   val {format_validation(evaluate(run))}")
        run.model.train()
    record = run.pending_record
    if record:  # of the step that is resumed from: its run died between the save and the log
        evaluate_and_log(run, record, is_due(run.step, args.eval_interval, args.num_steps))
    skipped = SkippedUpdates(run)
    with bar, clock, Signals(run) as signals:
        while run.step < args.num_steps and not run.stopped_by:
            run.step += 1
            losses, grad_norm = train_step(run)
            run.recent_losses.append(losses)

            # ---- The learning ends here. What follows looks at it, saves it and prints it.
            clock.end_step()
            bar.update()
            skipped.add(grad_norm)  # raises NotFinite after several in a row
            # All processes must do the same after the same step: stop or save, whichever of them is
            # asked to; log, when process 0 has been silent for long.
            run.stopped_by, save_asked, silent = process.all_reduce_max(
                [signals.received, save_is_asked(run), log_overdue(run)]
            )
            log_now = is_due(run.step, args.log_interval, args.num_steps) or silent
            evaluate_now = is_due(run.step, args.eval_interval, args.num_steps)
            save_now = save_is_due(run, skipped, save_asked > 0)
            if log_now or evaluate_now or save_now:
                skipped.read_last()  # one too many ends the run before it is logged or saved
                record = make_record(run, losses, grad_norm)
                if save_now:  # before the evaluation: that may take long, or die
                    with clock.paused("save"):
                        save(run, args.checkpoint_path, record)
                evaluate_and_log(run, record, evaluate_now)
    return record


def is_due(step: int, interval: int, num_steps: int) -> bool:
    """Every `interval` steps (0 = never), and always at the last one."""
    return step >= num_steps or (interval > 0 and step % interval == 0)


def save_is_due(run: Run, skipped: SkippedUpdates, asked: bool) -> bool:
    """At the end; when it is asked for, by a signal or the time; when the last save is in another
    interval of steps; and with the first evaluation, if nothing was saved before.

    But not while steps are being skipped: the weights stay as they are, and to save them again
    would only push the snapshot before out of `.prev.pt`. Such a save waits, unless the run ends.
    """
    interval, first = run.args.save_interval, run.args.eval_interval
    if run.step == run.args.num_steps or run.stopped_by:
        return True
    by_steps = interval > 0 and run.step // interval > run.saved_step // interval
    is_first = run.saved_step == 0 and 0 < first <= run.step
    # (To read the last step is to wait for the GPU: last of all, if a save is due.)
    return (asked or by_steps or is_first) and skipped.read_last() == 0


def evaluate_and_log(run: Run, record: dict[str, Any], evaluate_now: bool) -> None:
    """Evaluate if it is time to (adding to `record`), keep the best weights, log the step."""
    if evaluate_now:
        with run.clock.paused("evaluate"):
            record |= evaluate(run)
            if record["val_loss"] < run.best_val_loss:
                run.best_val_loss = record["val_loss"]
                save(run, sibling_path(run.args.checkpoint_path, ".best.pt"), record)
    log_record(run, record)


def main(argv: list[str] | None = None) -> int:
    """Train on one device; returns the exit code."""
    args = build_parser("train_minimal.py", "checkpoints/minigpt_single.pt").parse_args(argv)
    return run_safely(args, OneProcess.from_args, train)


if __name__ == "__main__":
    sys.exit(main())
