"""Resume a run from a snapshot: find the file, restore flags and state, check what has changed
since the save."""

import os
from pathlib import Path

import torch
from torch import nn

from planner import Layout

from .flags import flag
from .metrics import read_metrics
from .optimizer import restore_optimizer
from .process import OneProcess
from .settings import EXCLUSIVE_FLAGS, ROWS, Rule, S, Settings, flags_with_rule, resolve
from .snapshot import (
    LoadedSnapshot,
    SnapshotError,
    State,
    files_of_run,
    read_snapshot,
    run_id_of_snapshot,
)


def load_newest_readable(path: Path) -> LoadedSnapshot:
    """Load the snapshot at `path` or, if this file is missing or damaged, `.prev.pt`, or else
    `.best.pt`. Raises SnapshotError if none of the three can be read."""
    problems: list[str] = []
    for file in files_of_run(path)[:3]:
        identity = os.stat(file) if os.path.exists(file) else None
        try:
            state = read_snapshot(file)
        except SnapshotError as error:
            problems.append(str(error))
            continue
        why = f"{'; '.join(problems)}; taking {file}" if problems else ""
        return LoadedSnapshot(state, file, why, identity)
    raise SnapshotError(
        f"--resume: {problems[0]}; start without --resume, or name the file with --checkpoint-path"
    )


def load_own_run(path: Path, run_id: str) -> LoadedSnapshot | None:
    """Load the newest snapshot at `path` if the run `run_id` has saved it; else return None.

    When torchrun restarts a run, the files at `path` belong to this run or to an older run, from
    which this run must not resume.
    """
    try:
        newest = load_newest_readable(path)
    except SnapshotError:  # no file, or none of this run
        return None
    return newest if newest.state["run"] == run_id else None


def files_of_other_runs(path: Path, run_id: str) -> list[Path]:
    """Return the snapshots and the metrics beside `path` that the run `run_id` has not written: a
    person may have copied a snapshot of another run to `path`."""
    previous, best, metrics = files_of_run(path)[1:4]
    there = [file for file in (previous, best) if file.is_file()]
    others = [file for file in there if run_id_of_snapshot(file) not in (None, run_id)]
    records = read_metrics(metrics) if metrics.is_file() else []
    return others + [metrics] * any(record.get("run") != run_id for record in records)


def with_saved_flags(settings: S, resumed: LoadedSnapshot) -> S:
    """Return the settings of a resumed run, which follow from the flags that were typed for it and
    from those typed now, which win."""
    saved = type(settings).parse(resumed.state["args"], str(resumed.path)).typed
    pairs = [pair for pair in EXCLUSIVE_FLAGS if settings.typed.keys() & {*pair}]
    kept = {name: value for name, value in saved.items() if name not in sum(pairs, ())}
    path = settings.checkpoint_path  # this trainer's default, if it is not typed
    return type(settings).from_given_flags({**kept, **settings.typed}, checkpoint_path=path)


def settings_of(state: State) -> Settings:
    """Return the resolved settings of the run that has saved the snapshot `state`."""
    typed = Settings.parse(state["args"], "a snapshot")
    per_replica = typed.batch_size * typed.grad_accum_steps
    replicas = state["data"]["sequences_per_step"] // per_replica
    return resolve(typed, Layout("ddp", world_size=replicas))


def check_fixed_flags(settings: Settings, replicas: int, resumed: LoadedSnapshot) -> None:
    """Raise SnapshotError if a flag that may not change has another value than in the resumed
    snapshot, or if a step has another number of sequences.

    `replicas`: number of micro-batches that are computed at the same time. The number of processes
    may change if the batch of all processes together stays the same.
    """
    state, path, saved = resumed.state, resumed.path, settings_of(resumed.state)
    # For these two flags, two values are valid: the value that was typed for the old run, and the
    # value that the old run then used (a default, for example).
    used = {
        "tokenizer_name": state["tokenizer"].get("name"),
        "vocab_size": state["config"].get("vocab_size"),
    }
    for name in flags_with_rule(Rule.FIXED):
        before, after = getattr(saved, name), getattr(settings, name)
        if after not in (before, used.get(name, before)):
            raise SnapshotError(
                f"{flag(name)}: {path} was trained with "
                f"{used.get(name, before)}, this run has {after}; pass the old value to "
                "resume, or another --checkpoint-path to start a new run"
            )
    sequences, micro_batches = state["data"]["sequences_per_step"], settings.batch_size * replicas
    if sequences != micro_batches * settings.grad_accum_steps:
        steps, rest = divmod(sequences, micro_batches)
        fits = f"--grad-accum-steps {steps}" if not rest else "another --batch-size"
        raise SnapshotError(
            f"--batch-size: {path} was trained with {sequences} sequences a step over all "
            f"processes, this run has {micro_batches * settings.grad_accum_steps}; {fits} fits; or "
            f"--init-from {path} in place of --resume starts a new run from its weights"
        )


def check_data_unchanged(saved: State, now: State, path: Path) -> None:
    """Raise SnapshotError if a run cannot resume because its data have changed.

    `saved`: state of the snapshot at `path`. `now`: result of `build.make_snapshot_metadata` for
    this run. (`check_fixed_flags` checks what must not change before data are read.)
    """
    if saved["data"]["fingerprint"] != now["data"]["fingerprint"]:
        changed = [name for name in changed_flags(saved, now) if name in flags_with_rule(Rule.DATA)]
        raise SnapshotError(
            f"--train-data: {path} was trained on {saved['data']['description']}, this run "
            f"has {now['data']['description']} ({', '.join(map(flag, changed)) or 'edited'}); the "
            f"data must stay the same to resume; --init-from {path} in place of --resume starts a "
            "new run from its weights"
        )


def changed_flags(saved: State, now: State) -> dict[str, tuple[object, object]]:
    """Return each flag whose value differs between two states: name -> (value in `saved`, value in
    `now`)."""
    both = settings_of(saved), settings_of(now)
    values = {name: (getattr(both[0], name), getattr(both[1], name)) for name in ROWS}
    return {name: (before, after) for name, (before, after) in values.items() if before != after}


def describe_each_change(
    changed: dict[str, tuple[object, object]], *threads: int | None
) -> list[str]:
    """Return the allowed changes of flags (the result of `changed_flags`), as text such as
    "--lr 0.001 -> 0.0001", and a change of the number of CPU `threads`: those of the saved run, and
    of this."""
    rows = [
        f"{flag(name)} {' -> '.join(map(format_typed_value, values))}"
        for name, values in changed.items()
    ]
    if None not in threads and threads[0] != threads[1]:
        rows.append(f"threads {threads[0]} -> {threads[1]}: sums are rounded differently")
    return rows


def format_typed_value(value: object) -> str:
    """Return a flag's value as text for a command line."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@torch.no_grad()
def restore_model_and_optimizer(
    resumed: LoadedSnapshot,
    process: OneProcess,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Copy weights, moments and loss scale from a snapshot whose weights `check_shapes` accepts."""
    state, shard_like = resumed.state, process.shard_like
    for name, weight in model.state_dict().items():
        weight.copy_(shard_like(state["model"][name], weight))
    restore_optimizer(optimizer, state["optimizer"], shard_like)
    # (The scaler's state is empty if the saved run had another precision.)
    if scaler.is_enabled() and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
