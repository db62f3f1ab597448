"""Write the text about a run for the user: the first lines, the log record of a step, the last
lines."""

import math
import os
import shlex
import sys
import time
from collections.abc import Callable
from textwrap import indent
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from model import MiniGPTConfig

from .check_model import kv_cache_is_exact
from .device import GENERATION_KERNELS
from .metrics import (
    format_bytes,
    format_line,
    format_loss,
    format_time,
    format_validation,
    peak_memory_fields,
    perplexity,
)
from .pretrained import Pretrained, SnapshotOrPretrained
from .resume import changed_flags, describe_each_change
from .run import Run
from .settings import Settings, to_words
from .snapshot import LoadedSnapshot, sibling_path

MAX_SILENCE_SECONDS = 30  # seconds; longest time without a log line if there is no progress bar


def describe_model(config: MiniGPTConfig) -> str:
    """Return the model's shape as text: "3 layers x 128, 4 heads, vocabulary 1,024"."""
    return (
        f"{config.n_layers} layers x {config.d_model}, {config.n_heads} heads, "
        f"vocabulary {config.vocab_size:,}"
    )


def describe_run(run: Run, plan: str, origin: SnapshotOrPretrained) -> str:
    """Return the first lines of a run: data, model, device, batch, memory, and the source of its
    weights.

    `plan`: text about the memory of a step. `origin`: the snapshot or the pretrained weights from
    which the run starts; None: random weights.
    """
    settings, config, layout = run.settings, run.model.config, run.process.layout
    device, threads = run.process.device, run.snapshot_metadata["threads"]
    micro_batches = run.global_micro_batches_per_step
    epochs = run.training_batches.epochs_before(settings.num_steps * micro_batches)
    tokens = settings.num_steps * settings.tokens_per_step(layout.replicas)
    hardware = {
        "cuda": lambda: f" ({torch.cuda.get_device_name(device)})",
        "cpu": lambda: f" ({threads} thread{'s' * (threads > 1)})",
    }.get(device.type, str)()
    lines = [
        f"data     {run.data.description}",
        f"model    {sum(p.numel() for p in run.model.parameters()):,} parameters: "
        f"{describe_model(config)}",
        f"device   {layout.world_size} x {device.type}{hardware}, "
        f"{str(run.precision).removeprefix('torch.')}",
        f"batch    {micro_batches} x {settings.batch_size} sequences of {settings.seq_len} tokens "
        f"a step, {settings.num_steps:,} steps, {tokens:,} tokens, {epochs:.2f} epochs",
        f"memory   {plan}",
    ]
    if isinstance(origin, Pretrained):
        lines.insert(2, f"weights  {origin.path}")
    if isinstance(origin, LoadedSnapshot):
        lines += resume_lines(run, origin)
    if device.type == "cpu" and config.vocab_size == 50257 and settings.tokenizer_name is None:
        lines.append(
            "note     GPT-2's vocabulary makes a small model about 15 times slower on a CPU: "
            "--tokenizer-name bpe trains one on your text"
        )
    if device.type == "cpu" and settings.device == "auto" and torch.version.cuda:
        lines.append(
            f"note     PyTorch, built for CUDA {torch.version.cuda}, finds no GPU: if there is "
            "one, is its driver new enough (see nvidia-smi)? --device cpu hides this note"
        )
    return "\n".join(lines)


def resume_lines(run: Run, origin: LoadedSnapshot) -> list[str]:
    """Return lines about a resumed run: its snapshot, its step, and what has changed since the
    save."""
    saved, now = origin.state, run.snapshot_metadata
    changed, best = changed_flags(saved, now), run.settings.checkpoint_path
    words = describe_each_change(changed, saved["threads"], now["threads"])
    lines = [
        origin.fallback_reason,
        f"{origin.path}, step {run.step:,}",
        f"changed, from here on: {', '.join(words)}" if words else "",
        "other validation windows than before: the next validation loss counts as the lowest so "
        f"far and replaces {sibling_path(best, '.best.pt')}"
        if "eval_tokens" in changed
        else "",
    ]
    return [f"resume   {line}" for line in lines if line]


def say_rate_change(run: Run, learning_rate: Callable[[int, Settings], float]) -> None:
    """Print a note if a resumed run goes on with another learning rate than it had: a new
    --num-steps moves the whole schedule. `learning_rate(step, settings)`: that of a step."""
    before = run.optimizer.param_groups[0]["lr"]  # of the saved step
    if run.step and (now := learning_rate(run.step, run.settings)) != before:
        run.process.print0(
            f"note     the learning rate of step {run.step:,} was {before:.2g}, and would be "
            f"{now:.2g} with the flags from here on"
        )


def resume_command(run: Run) -> str:
    """Return the command that resumes the run, without other flags."""
    path = run.settings.checkpoint_path if "checkpoint_path" in run.settings.typed else None
    return shlex.join([*run.process.command, "--resume", *to_words({"checkpoint_path": path})])


def generate_command(run: Run) -> str:
    """Return the command that generates text with the run's best snapshot."""
    # The folder of the project; "" if the project is in the current folder.
    folder = os.path.dirname(run.process.command[-1])
    best = sibling_path(run.settings.checkpoint_path, ".best.pt")
    path = best if best.exists() else run.settings.checkpoint_path
    flags = to_words({"checkpoint_path": path})
    command = shlex.join(["python", "-m", "scripts.generate", *flags])
    return f"PYTHONPATH={shlex.quote(folder)} {command}" if folder else command


def make_step_record(run: Run, losses: Tensor, grad_norm: Tensor) -> dict[str, Any]:
    """Return the log record of the step that has just ended, with times as means over the steps
    since the last record.

    `losses`: this process's losses, (micro-batches,). `grad_norm`: a scalar. All processes must
    call this together.
    """
    settings, process, clock = run.settings, run.process, run.clock
    # The mean loss over all micro-batches of all processes, whose gradient the update used.
    # `losses.tolist()` waits for the GPU, so that the times below include the GPU's work.
    loss = process.sum_over_replicas([sum(losses.tolist())])[0] / run.global_micro_batches_per_step
    seconds = clock.pop_mean_step_seconds()
    return {
        "step": run.step,
        "epoch": run.training_batches.epochs_before(run.step * run.global_micro_batches_per_step),
        "lr": run.optimizer.param_groups[0]["lr"],
        "train_loss": loss,
        "train_ppl": perplexity(loss),
        "grad_norm": grad_norm.item(),
        "step_ms": 1000 * seconds,
        "tokens_per_s": run.global_micro_batches_per_step
        * settings.batch_size
        * settings.seq_len
        / seconds,
        "eta_s": (settings.num_steps - run.step) * seconds,
        **peak_memory_fields(process.device),
        "recompute": run.model.config.recompute,
        "run": run.snapshot_metadata["run"],
    }


def write_and_print_record(run: Run, record: dict[str, Any]) -> None:
    """Write the record to metrics.jsonl and to the logger, and print its log line."""
    for write in run.metric_writers:
        write(record)
    run.process.print0(format_line(record, run.settings.num_steps))
    run.last_log_time = time.perf_counter()


def is_log_overdue(run: Run) -> bool:
    """Return True if the loop should log the present step, because there is no progress bar, and no
    log line for MAX_SILENCE_SECONDS. Only rank 0 decides; other ranks return False, and so does
    every rank with --log-interval 0."""
    if run.process.rank > 0 or sys.stderr.isatty() or run.settings.log_interval == 0:
        return False
    return time.perf_counter() - run.last_log_time > MAX_SILENCE_SECONDS


def sample_text(run: Run) -> str:
    """Return a document that the model generates, the same in each repetition of a run, because
    --seed seeds the random generator; "" with --sample-tokens 0."""
    if run.settings.sample_tokens == 0:
        return ""
    how = {"temperature": 0.8, "top_k": 40, "use_cache": kv_cache_is_exact(run.model.config)}
    torch.manual_seed(run.settings.seed)
    start = torch.tensor([[run.data.tokenizer.eot_id]], device=run.process.device)
    # Run eagerly, because compiled blocks would be compiled again for each length of the text.
    with (
        run.autocast(),
        torch.compiler.set_stance("force_eager"),
        sdpa_kernel(GENERATION_KERNELS),
    ):
        ids = run.model.generate(start, run.settings.sample_tokens, **how)
    return run.data.tokenizer.decode(ids[0, 1:].tolist())


def describe_result(
    run: Run, record: dict[str, Any], sample: str, seconds_before: float, seconds: float
) -> str:
    """Return the last lines of a run: loss, speed, memory, time, files, and the next command.

    `record`: the last log record. `sample`: generated text, or "". `seconds_before`: time before
    the first step. `seconds`: total time. All processes must call this together.
    """
    settings, path = run.settings, run.settings.checkpoint_path
    # Without infinite losses and NaNs, because the updates of their steps were skipped.
    losses = [loss for step in run.recent_losses for loss in step.tolist() if math.isfinite(loss)]
    total, count = run.process.sum_over_replicas([sum(losses), len(losses)])
    mean = total / count if count else math.nan
    # The policy with which memory ran out before torchrun restarted this run, if there is one.
    failed = [run.process.failed_policy, *run.policies_out_of_memory]
    policies = [*filter(None, failed), run.model.config.recompute]
    ran_out = f"; ran out of it: {' -> '.join(policies)}" if len(policies) > 1 else ""
    steps, training_seconds = run.clock.last_interval
    tokens = steps * settings.tokens_per_step(run.process.layout.replicas)
    best = sibling_path(path, ".best.pt")
    lines = [
        f"train    loss {format_loss(mean)}, mean of the last {len(run.recent_losses):,} steps",
        f"val      loss {format_validation(record)}",
        f"speed    {tokens / training_seconds:,.0f} tokens/s",
        f"memory   peak {format_bytes(record['peak_memory_bytes'] or 0)} "
        f"({record['peak_memory_kind']}){ran_out}",
        f"time     {format_time(seconds)}, {seconds_before:.1f} s of it before the first step",
        f"saved    {path}" + (f", lowest validation loss: {best}" if best.exists() else ""),
        f"next     {generate_command(run)}",
    ]
    text = indent(sample, "    ")
    return "\n".join([f"\nsample\n{text}\n" if sample else "", *lines])
