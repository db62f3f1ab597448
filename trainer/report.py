"""Write the text about a run for the user: the first lines, the log record of a step, the last
lines."""

import math
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from model import MiniGPTConfig

from .bootstrap import ALLOCATOR_VARIABLES
from .device import GENERATION_KERNELS
from .metrics import (
    format_bytes,
    format_line,
    format_loss_and_perplexity,
    format_time,
    format_validation,
    peak_memory_fields,
    perplexity,
)
from .pretrained import Pretrained, SnapshotOrPretrained
from .resume import changes, describe_each_change
from .run import Run
from .settings import to_words
from .snapshot import LoadedSnapshot, archived_path, files_of_run, sibling_path

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
    settings, config, process = run.settings, run.model.config, run.process
    n_parameters = sum(p.numel() for p in run.model.parameters())
    epochs = run.training_batches.epochs_before(
        settings.num_steps * run.global_micro_batches_per_step
    )
    tokens = settings.num_steps * settings.tokens_per_step(process.layout.replicas)
    lines = [
        f"data     {run.data.description}",
        f"model    {n_parameters:,} parameters: {describe_model(config)}",
        f"device   {process.layout.world_size} x {describe_device(run)}",
        f"batch    {run.global_micro_batches_per_step} x {settings.batch_size} sequences of "
        f"{settings.seq_len} tokens a step, {settings.num_steps:,} steps, {tokens:,} tokens, "
        f"{epochs:.2f} epochs",
        f"memory   {plan}",
    ]
    if isinstance(origin, Pretrained):
        lines.insert(2, f"weights  {origin.path}, {origin.description}")
    on_cpu = process.device.type == "cpu"
    if on_cpu and config.vocab_size == 50257 and settings.tokenizer_name is None:
        lines.append(
            "note     GPT-2's vocabulary makes a small model about 15 times slower on a CPU: "
            "--tokenizer-name bpe trains one on your text"
        )
    if on_cpu and settings.device == "auto" and torch.version.cuda:
        lines.append(
            f"note     PyTorch, built for CUDA {torch.version.cuda}, finds no GPU: if there is "
            "one, is its driver new enough (see nvidia-smi)? --device cpu hides this note"
        )
    if settings.compile:
        lines.append("compile  the first step waits for the compiler, a minute or more")
    more = (
        resume_lines(run, origin) if isinstance(origin, LoadedSnapshot) else archive_note_lines(run)
    )
    return "\n".join(lines + more)


def describe_device(run: Run) -> str:
    """Return device and precision as text: "cpu (2 threads; another number of threads rounds sums
    differently), bfloat16"."""
    device, threads = run.process.device, run.snapshot_metadata["threads"]
    allocator = [f"; {key}={os.environ[key]}" for key in ALLOCATOR_VARIABLES if key in os.environ]
    hardware = ""
    if device.type == "cuda":
        hardware = f" ({torch.cuda.get_device_name(device)}{''.join(allocator)})"
    elif device.type == "cpu":
        hardware = (
            f" ({threads} thread{'s' if threads > 1 else ''}; "
            "another number of threads rounds sums differently)"
        )
    in_tf32 = run.settings.tf32 and device.type == "cuda" and run.precision == torch.float32
    precision = str(run.precision).removeprefix("torch.")
    return f"{device.type}{hardware}, {precision}{', matmuls in TF32' if in_tf32 else ''}"


def archive_note_lines(run: Run) -> list[str]:
    """Return a list with one line: the new name of the files that an older run has left at the same
    path. Return [] if there is no older run."""
    path = run.settings.checkpoint_path
    archived = archived_path(path)
    if archived is None:
        return []
    pairs = zip(files_of_run(path), files_of_run(archived), strict=True)
    old, new = next((old, new) for old, new in pairs if os.path.lexists(old))
    resumable = old in files_of_run(path)[:3]
    hint = f"; to go on with that one: {resume_command(run, archived)}" if resumable else ""
    return [f"note     {old} is of another run and becomes {new}{hint}"]


def resume_lines(run: Run, origin: LoadedSnapshot) -> list[str]:
    """Return lines about a resumed run: its snapshot, its step, and what has changed since the
    save."""
    about = origin.fallback_reason, f"{origin.path}, step {run.step:,}"
    lines = [f"resume   {text}" for text in about if text]
    saved, now = origin.state, run.snapshot_metadata
    # With no step left, no change has an effect.
    changed = describe_each_change(saved, now) if run.step < run.settings.num_steps else []
    if changed:
        lines.append(f"resume   changed, from here on: {', '.join(changed)}")
    if "eval_tokens" in changes(saved, now):
        best = sibling_path(run.settings.checkpoint_path, ".best.pt")
        lines.append(
            "resume   the validation windows are others than before: the next validation loss "
            f"counts as the lowest so far and replaces {best}"
        )
    return lines


def resume_command(run: Run, path: Path | None = None) -> str:
    """Return the command that resumes from the snapshot `path`, by default from the run's own
    snapshot. The command needs no other flags."""
    if path is None and "checkpoint_path" in run.settings.typed:
        path = run.settings.checkpoint_path
    return shlex.join([*run.process.command, "--resume", *to_words({"checkpoint_path": path})])


def generate_command(run: Run) -> str:
    """Return the command that generates text with the run's snapshot."""
    # The folder of the project; "" if the project is in the current folder.
    folder = os.path.dirname(run.process.command[-1])
    flags = to_words({"checkpoint_path": run.settings.checkpoint_path})
    command = shlex.join(["python", "-m", "scripts.generate", *flags])
    return f"PYTHONPATH={shlex.quote(folder)} {command}" if folder else command


def make_step_record(run: Run, losses: Tensor, grad_norm: Tensor) -> dict[str, Any]:
    """Return the log record of the step that has just ended. Its times are means over the steps
    since the last record.

    `losses`: this process's losses, (micro-batches,). `grad_norm`: a scalar. All processes must
    call this together.
    """
    settings, process, clock = run.settings, run.process, run.clock
    # The mean loss over all micro-batches of all processes. The update of this step uses the
    # gradient of this mean. `losses.tolist()` waits for the GPU, so the times below include the
    # GPU's work.
    loss = process.sum_over_replicas([sum(losses.tolist())])[0] / run.global_micro_batches_per_step
    seconds = clock.end_interval()
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
    }


def write_and_print_record(run: Run, record: dict[str, Any]) -> None:
    """Write the record to metrics.jsonl and to the logger, and print its log line."""
    for write in run.metric_writers:
        write(record)
    run.process.print0(format_line(record, run.settings.num_steps))
    run.last_log_time = time.perf_counter()


def is_log_overdue(run: Run) -> bool:
    """Return True if no progress bar is shown, and if the next step would end more than
    MAX_SILENCE_SECONDS after the last log line. In this case the loop logs the present step.

    Only rank 0 decides this; other ranks return False. With --log-interval 0 the result is always
    False.
    """
    if run.process.rank > 0 or sys.stderr.isatty() or run.settings.log_interval == 0:
        return False
    next_line = time.perf_counter() + run.clock.seconds_per_step()
    return next_line - run.last_log_time > MAX_SILENCE_SECONDS


def describe_recent_loss(run: Run, record: dict[str, Any]) -> str:
    """Return the mean training loss of the last steps as text; if none of them is finite, that of
    `record`. All processes must call this together."""
    values = [loss for losses in run.recent_losses for loss in losses.tolist()]
    # Leave out infinite losses and NaNs: the updates of their steps were skipped.
    finite = [loss for loss in values if math.isfinite(loss)]
    total, count = run.process.sum_over_replicas([sum(finite), len(finite)])
    if not count:
        return f"loss {format_loss_and_perplexity(record['train_loss'])}"
    return (
        f"loss {format_loss_and_perplexity(total / count)}, mean of the last "
        f"{len(run.recent_losses):,} steps"
    )


def sample_text(run: Run) -> str:
    """Return a document that the model generates; "" with --sample-tokens 0. The same run always
    generates the same text, because the random generator is seeded with --seed."""
    if run.settings.sample_tokens == 0:
        return ""
    torch.manual_seed(run.settings.seed)
    start = torch.tensor([[run.data.tokenizer.eot_id]], device=run.process.device)
    # Run eagerly, because compiled blocks would be compiled again for each length of the text.
    with (
        run.autocast(),
        torch.compiler.set_stance("force_eager"),
        sdpa_kernel(GENERATION_KERNELS),
    ):
        ids = run.model.generate(start, run.settings.sample_tokens, temperature=0.8, top_k=40)
    return run.data.tokenizer.decode(ids[0, 1:].tolist())


def describe_out_of_memory_retries(run: Run) -> str:
    """Return how often memory ran out, and the policies that were used in turn, as text: "; ran out
    2 times: none -> cheap -> full". Processes may differ: the text lists each distinct sequence of
    policies. Return "" if memory never ran out. All processes must call this together."""
    # The policy with which memory ran out before torchrun restarted this run, if there is one.
    before = [*filter(None, [run.process.failed_policy])]
    chains = run.process.all_gather_object(
        (*before, *run.policies_out_of_memory, run.model.config.recompute)
    )
    return "".join(
        f"; ran out {(times := len(policies) - 1)} time{'s' * (times > 1)}: {' -> '.join(policies)}"
        for policies in dict.fromkeys(chains)
        if len(policies) > 1
    )


def describe_result(
    run: Run, record: dict[str, Any], sample: str, seconds_before: float, seconds: float
) -> str:
    """Return the last lines of a run: loss, speed, memory, time, files, and the next command.

    `record`: the last log record. `sample`: generated text, or "". `seconds_before`: time before
    the first step. `seconds`: total time. All processes must call this together.
    """
    settings, clock, best = run.settings, run.clock, ""
    usage = peak_memory_fields(run.process.device)
    if (path := sibling_path(settings.checkpoint_path, ".best.pt")).exists():
        best = f", lowest validation loss: {path}"
    tokens = clock.steps * settings.tokens_per_step(run.process.layout.replicas)
    lines = [
        *(["", "sample"] if sample else []),
        *("    " + line for line in sample.splitlines()),
        "",
        f"train    {describe_recent_loss(run, record)}",
        f"val      loss {format_validation(record)}",
        f"speed    {tokens / clock.training_seconds():,.0f} tokens/s",
        f"memory   peak {format_bytes(usage['peak_memory_bytes'] or 0)} "
        f"({usage['peak_memory_kind']}){describe_out_of_memory_retries(run)}",
        f"time     {format_time(seconds)}, {seconds_before:.1f} s of it before the first step",
        f"saved    {settings.checkpoint_path}{best}",
        f"next     {generate_command(run)}",
    ]
    return "\n".join(lines)
