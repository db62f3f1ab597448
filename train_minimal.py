"""Train a MiniGPT on one device, with or without activation checkpoints.

Train a tokenizer and a small GPT, with an activation checkpoint around each block, on the built-in
corpus, the source code of Python's standard library (about two minutes on a laptop):
    python train_minimal.py --use-activation-checkpoint

Train GPT-2 small on your own text, on one GPU:
    python train_minimal.py --train-data data/train.txt --n-layers 12 --n-heads 12 --d-model 768 \
        --d-ff 3072 --seq-len 1024 --batch-size 2 --num-steps 10000 --use-activation-checkpoint

Start from the weights of GPT-2, or of an earlier run (docs/weights.md):
    python train_minimal.py --init-from gpt2 --train-data data/train.txt --seq-len 256

Continue a run where it stopped, with the flags that its snapshot holds:
    python train_minimal.py --resume

The functions below are, from top to bottom: the learning rate, one training step, the evaluation,
the training loop. Before the loop, trainer/build.py predicts the memory of a step, encodes the
text, compares a step of two small models with and without the memory techniques (check_model), and
only then allocates the weights. Three objects appear in most functions:
- `run` is a Run (trainer/run.py): the model (MemorySavingGPT of memory/gpt.py), the optimizer, the
  batches, the flags, and the present state of the training.
- `process` is a OneProcess (trainer/process.py): everything that depends on the number of
  processes. The trainers for several devices (train_ddp.py, ...) only override its methods.
- `clock` measures the seconds of the steps, and names their phases in the trace of --profile.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))  # `python -I` omits this folder
import trainer.bootstrap  # noqa: F401  # sets signal handlers and environment variables

# isort: split
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from trainer.build import rename_old_files_and_open_logs, run_safely
from trainer.metrics import format_validation, perplexity
from trainer.optimizer import step_if_finite
from trainer.process import OneProcess
from trainer.report import is_log_overdue, make_step_record, say_rate_change, write_and_print_record
from trainer.run import Run, is_save_overdue, retry_with_deeper_policy, save
from trainer.settings import Settings
from trainer.shutdown import (
    check_skipped_updates,
    count_skipped_update,
    nan_grads_if_infinite,
    stop_signals,
)
from trainer.snapshot import sibling_path


def learning_rate(step: int, settings: Settings) -> float:
    """Return the learning rate of `step`, which is one of 1..num_steps.

    The rate rises linearly from 0 to `--lr` during the warm-up, and then stays constant or falls to
    `--min-lr` at the last step, linearly or as half a cosine (Loshchilov and Hutter, 2017). It
    depends only on step and flags, whereas a scheduler would have state to save and restore.
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    if settings.lr_scheduler == "constant":
        return settings.lr
    progress = (step - settings.warmup_steps) / max(settings.num_steps - settings.warmup_steps, 1)
    if settings.lr_scheduler == "linear":
        decay = 1 - progress
    else:
        decay = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * decay


def train_step(run: Run) -> tuple[Tensor, Tensor]:
    """Run step number `run.step`: forward and backward over its micro-batches, then one update.

    Returns the losses of this process's micro-batches, (A,) with A = --grad-accum-steps, and the
    norm of the gradients before clipping, a scalar. Both stay on the device, so that Python does
    not wait for it; only on MPS, where Python has to read the norm, the norm is on the CPU. Raises
    the errors of `retry_with_deeper_policy` if memory runs out.
    """
    settings, process, clock = run.settings, run.process, run.clock
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.step, settings)
    # Call `accumulate_gradients(run)`, and again with a policy that needs less memory if memory
    # runs out.
    losses = retry_with_deeper_policy(run, accumulate_gradients)

    clock.begin_phase("optimizer")
    run.scaler.unscale_(run.optimizer)  # because the limit below is for unscaled gradients
    grad_norm = process.clip_gradients(run.model.parameters(), settings.grad_clip_norm or math.inf)
    # Call `optimizer.step()`, without effect if the norm is NaN (as it is with one NaN gradient) or
    # infinite; with float16 this replaces `scaler.step`. The norm is the same in all processes, so
    # all of them update or none does. The device decides, so that Python does not wait for it.
    grad_norm = step_if_finite(run.optimizer, grad_norm)
    count_skipped_update(run, grad_norm)
    run.scaler.update()  # with float16 only: halve the loss scale after an overflow
    process.clear_gradients(run.optimizer)
    return torch.stack(losses), grad_norm


def accumulate_gradients(run: Run) -> list[Tensor]:
    """Run forward and backward over the micro-batches of a step; return their losses, each ().

    The gradients are summed in `.grad`, where the optimizer reads them, and the last backward also
    averages them over all processes.
    """
    settings, layout, clock = run.settings, run.process.layout, run.clock
    n_global, losses = run.global_micro_batches_per_step, []
    ids = run.process.own_batch_ids(range((run.step - 1) * n_global, run.step * n_global))
    for micro_batch, batch_id in enumerate(ids):
        clock.begin_phase("data")
        # Data and dropout masks of a micro-batch are functions of (seed, id), so that a snapshot
        # needs no random state, and two processes compute the same as one process with twice the
        # micro-batches per step. In train_sp.py `sp_degree` processes share each sequence: they
        # read the same batch, and draw masks of their own.
        mask_id = batch_id * layout.sp_degree + layout.rank % layout.sp_degree
        torch.manual_seed(derive_seed(settings.seed, mask_id))
        input_ids, labels = run.training_batches[batch_id]  # each (B, T)

        clock.begin_phase("forward")
        sync = batch_id == ids[-1]
        with run.process.gradient_sync(sync), run.gradient_tree.micro_batch(micro_batch):
            with run.autocast():
                # `wrapped_model` is `run.model` or, with DDP, a wrapper whose backward averages
                # gradients. Evaluation, optimizer and snapshots use `run.model`.
                loss = run.wrapped_model(input_ids, labels)
            losses.append(loss.detach())
            clock.begin_phase("backward")
            # Backward adds to `.grad`. (`gradient_tree` acts only with --reproducible-sums, the
            # scaler only with float16.) Each loss is divided by the number of micro-batches of this
            # process or, with --reproducible-sums, of all processes. An infinite loss gets NaN
            # gradients, so that no update follows.
            n_summed = n_global if settings.reproducible_sums else len(ids)
            loss = nan_grads_if_infinite(loss) / n_summed
            run.scaler.scale(loss).backward()
    return losses


def derive_seed(seed: int, number: int) -> int:
    """Return a 63-bit seed made from two numbers: a hash, because a sum would give the same seed
    for (1, 2) and (2, 1)."""
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0] >> 1)


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float | None]:
    """Return the validation loss, its perplexity and its bits per byte of text.

    The keys are `val_loss` (nats per token), `val_ppl` and `val_bits_per_byte` (None if no token
    stands for text). Each evaluation uses the same validation sequences, so that the result is the
    same, up to rounding, with any batch size, any number of processes, and every trainer.

    With W replicas, replica r evaluates the batches r, r + W, r + 2W, ... (A replica is one
    process; in train_sp.py it is all processes together.) Nats, tokens and bytes are summed first
    and then divided, because the last batch may be smaller. An evaluation batch has at most
    --batch-size sequences and no gradients, so it needs less memory than a training step.
    """
    run.model.eval()
    batches = []  # (loss, tokens, bytes) per batch; read after the loop: a read waits for the GPU
    for first_batch in run.first_batches_until_stop():  # fewer, if a signal asks for a stop
        # In the last round, a process without a batch of its own evaluates an earlier one again and
        # ignores the result, because the forward of a sharded model needs all processes.
        i = first_batch + run.process.layout.replica_index
        input_ids, labels = run.val_batches[i % len(run.val_batches)]
        with run.autocast():
            loss = run.model(input_ids, labels)
        if i < len(run.val_batches):
            batches.append((loss, labels.numel(), run.bytes_by_token_id[labels].sum()))
    run.model.train()
    if run.stop_signal:  # an evaluation may take longer than a cluster waits after SIGTERM
        return {}
    nats = tokens = byte_count = 0.0
    for loss, n_tokens, n_bytes in batches:
        nats += loss.item() * n_tokens
        tokens += n_tokens
        byte_count += n_bytes.item()
    nats, tokens, byte_count = run.process.sum_over_replicas([nats, tokens, byte_count])
    mean = nats / tokens
    return {
        "val_loss": mean,
        "val_ppl": perplexity(mean),
        # Unlike perplexity, bits per byte can be compared between tokenizers.
        "val_bits_per_byte": nats / math.log(2) / byte_count if byte_count else None,
    }


def train(run: Run) -> dict[str, Any]:
    """Run the steps after `run.step` until the last or a signal; return the last log record."""
    settings, process, clock = run.settings, run.process, run.clock
    rename_old_files_and_open_logs(run)
    hide_bar = process.rank > 0 or not sys.stderr.isatty()
    bar = tqdm(initial=run.step, total=settings.num_steps, unit="step", disable=hide_bar)
    if run.step == 0 and settings.init_from is not None:  # the loss before training
        process.print0(f"before   val {format_validation(evaluate(run))}")
    say_rate_change(run, learning_rate)
    run.model.train()
    record: dict[str, Any] = {}
    with bar, clock, stop_signals(run):
        while run.step < settings.num_steps and not run.stop_signal:
            run.step += 1
            with clock.step():
                losses, grad_norm = train_step(run)  # forward, backward, update of the weights
            bar.update()
            record = finish_step(run, losses, grad_norm)
    return record


def finish_step(run: Run, losses: Tensor, grad_norm: Tensor) -> dict[str, Any]:
    """Evaluate, log and save after a step, if due; return the log record, {} if nothing is due.

    `losses`, `grad_norm`: the results of `train_step`. The last step always has a record. Raises
    MiniGPTError after several skipped updates in a row, and SaveError if a snapshot cannot be
    written.
    """
    settings, process = run.settings, run.process
    run.recent_losses.append(losses)
    # All processes must do the same after the same step: all stop if one of them received a signal
    # to stop, all save if the last save of one of them is --save-minutes old, and all log if rank 0
    # has printed nothing for a long time.
    run.stop_signal, save_overdue, log_overdue = process.all_reduce_max(
        [run.received_signal, is_save_overdue(run), is_log_overdue(run)]
    )
    log_now = is_due_or_last_step(run, settings.log_interval) or log_overdue
    evaluate_now = is_due_or_last_step(run, settings.eval_interval)
    save_now = save_is_due(run, save_overdue > 0)
    if not (log_now or evaluate_now or save_now):
        return {}
    check_skipped_updates(run)  # if it raises MiniGPTError, nothing is logged or saved
    record = make_step_record(run, losses, grad_norm)
    if evaluate_now:
        evaluate_and_save_best(run, record)
    write_and_print_record(run, record)
    if save_now or run.stop_signal:  # after logging: a resumed run drops lines after its snapshot
        with run.clock.paused("save"):
            save(run, settings.checkpoint_path)
    return record


def is_due_or_last_step(run: Run, interval: int) -> bool:
    """Return True at the last step and at every `interval`-th step (0: only at the last)."""
    return run.step >= run.settings.num_steps or (interval > 0 and run.step % interval == 0)


def save_is_due(run: Run, overdue: bool) -> bool:
    """Return True if a snapshot is to be saved after this step.

    A save is due at the end of the run, if it is `overdue` by --save-minutes, if the last save is
    in an earlier interval of --save-interval steps, and at the first evaluation if nothing was
    saved before. While updates are skipped, a save waits until the run ends, because it would
    rename the last snapshot to `.prev.pt`, and soon both files would have the same weights.
    """
    interval, first = run.settings.save_interval, run.settings.eval_interval
    if run.step == run.settings.num_steps or run.stop_signal:
        return True
    by_steps = interval > 0 and run.step // interval > run.saved_step // interval
    is_first = run.saved_step == 0 and 0 < first <= run.step
    # (Last, because `check_skipped_updates` waits for the GPU.)
    return (overdue or by_steps or is_first) and check_skipped_updates(run) == 0


def evaluate_and_save_best(run: Run, record: dict[str, Any]) -> None:
    """Evaluate, add the results to `record`, and save a snapshot as `.best.pt` if its validation
    loss is the lowest so far."""
    with run.clock.paused("evaluate"):
        record |= evaluate(run)
        if record.get("val_loss", math.inf) < run.best_val_loss:
            run.best_val_loss = record["val_loss"]
            save(run, sibling_path(run.settings.checkpoint_path, ".best.pt"))


def main(argv: list[str] | None = None) -> int:
    """Train on one device; return the exit code. `argv`: flags; None: the command line's flags."""
    settings = Settings.parse(argv, OneProcess.script)
    return run_safely(settings, OneProcess.from_settings, train)


if __name__ == "__main__":
    sys.exit(main())
