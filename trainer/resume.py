"""Resume a run from a snapshot: find the file, restore flags and state, check what has changed
since the save."""

import os
from pathlib import Path

import torch
from torch import nn

from .flags import flag
from .optimizer import restore_optimizer
from .process import OneProcess
from .settings import ROWS, Rule, S, Settings, names_with
from .snapshot import LoadedSnapshot, SnapshotError, State, peek, read_snapshot, sibling_path


def load_newest(path: Path) -> LoadedSnapshot:
    """Load the snapshot at `path`. If this file is missing or damaged, load `.prev.pt`, or else
    `.best.pt`.

    Raises SnapshotError if none of the three can be read.
    """
    problems: list[str] = []
    for file in candidate_paths(path):
        try:
            state = read_snapshot(file)
        except SnapshotError as error:
            problems.append(str(error))
            continue
        why = f"{'; '.join(problems)}; taking {file}" if problems else ""
        return LoadedSnapshot(state, file, why)
    # If `path` exists, it is no readable snapshot, and a new run must not replace it (see
    # `check_no_path_conflict`). So suggest another name.
    start = " under another name" if os.path.exists(path) else ""
    raise SnapshotError(
        f"--resume: {problems[0]}; start without --resume{start}, or name the file with "
        "--checkpoint-path"
    )


def candidate_paths(path: Path) -> tuple[Path, Path, Path]:
    """Return the paths of a run's snapshots: the newest, the previous, and the best (lowest
    validation loss)."""
    return path, sibling_path(path, ".prev.pt"), sibling_path(path, ".best.pt")


def load_own_run(path: Path, run_id: str) -> LoadedSnapshot | None:
    """Load the newest snapshot at `path` if the run `run_id` has saved a snapshot there; else
    return None.

    When torchrun restarts a run, the files at `path` belong to this run or to an older run. The
    restarted run must not resume from an older run's files. Raises SnapshotError as `load_newest`
    does.
    """
    of_run = (state.get("run") == run_id for state in map(peek, candidate_paths(path)) if state)
    return load_newest(path) if any(of_run) else None


def with_saved_flags(settings: S, resumed: LoadedSnapshot) -> S:
    """Return the settings of a resumed run: the flags that were typed for it, and those typed now,
    which win. All other flags follow from these."""
    saved = {name: resumed.state["args"][name] for name in resumed.state["typed"]}
    for name in (*settings.typed, *names_with(Rule.THIS_START)):
        for replaced in (name, *ROWS[name]["replaces"]):
            saved.pop(replaced, None)
    typed = {name: getattr(settings, name) for name in settings.typed}
    path = settings.checkpoint_path  # this trainer's default, if it is not typed
    return type(settings).from_typed({**saved, **typed}, checkpoint_path=path)


def check_fixed_flags(settings: Settings, replicas: int, resumed: LoadedSnapshot) -> None:
    """Raise SnapshotError if a flag that may not change has another value than in the resumed
    snapshot, or if a step has another number of sequences.

    `replicas`: number of micro-batches that are computed at the same time. The number of processes
    may change if the batch of all processes together stays the same.
    """
    state, path = resumed.state, resumed.path
    # For these two flags, two values are valid: the value that was typed for the old run, and the
    # value that the old run then used (a default, for example).
    resolved = {
        "tokenizer_name": state["tokenizer"].get("name"),
        "vocab_size": state["config"].get("vocab_size"),
    }
    # The flag that was typed is blamed, not one that follows from it.
    follow = {*names_with(Rule.DERIVED), *names_with(Rule.DATA)}
    for name in sorted(names_with(Rule.FIXED), key=follow.__contains__):
        before, after = state["args"].get(name), getattr(settings, name)
        if name in state["args"] and after not in (before, resolved.get(name, before)):
            raise SnapshotError(
                f"{flag(name)}: {path} was trained with "
                f"{resolved.get(name, before)}, this run has {after}; pass the old value to "
                "resume, or another --checkpoint-path to start a new run"
            )
    before, micro_batches = state["data"]["sequences_per_step"], settings.batch_size * replicas
    if before != (after := micro_batches * settings.grad_accum_steps):
        steps, rest = divmod(before, micro_batches)
        fits = f"--grad-accum-steps {steps}" if not rest else "another --batch-size"
        raise SnapshotError(
            f"--batch-size: {path} was trained with {before} sequences a step over all processes, "
            f"this run has {after}; {fits} fits; or --init-from {path} in place of --resume starts "
            "a new run from its weights"
        )


def check_resumable(saved: State, now: State, path: Path) -> None:
    """Raise SnapshotError if a run cannot resume because its data have changed.

    `saved`: state of the snapshot at `path`. `now`: result of `build.make_snapshot_metadata` for
    this run.

    The following may change: flags that only decide how memory is used (they change no result), the
    learning rate, the number of steps, and the intervals of logs, evaluations and saves.
    (`check_fixed_flags` checks what must not change before data are read.)
    """
    if data_changed(saved, now):
        changed = [
            name for name in names_with(Rule.DATA) if saved["args"].get(name) != now["args"][name]
        ]
        raise SnapshotError(
            f"--train-data: {path} was trained on {saved['data'].get('description')}, this run "
            f"has {now['data']['description']} ({', '.join(map(flag, changed)) or 'edited'}); the "
            f"data must stay the same to resume; --init-from {path} in place of --resume starts a "
            "new run from its weights"
        )


def data_changed(saved: State, now: State) -> bool:
    """Return True if the data of the two states have different fingerprints."""
    return bool(saved["data"].get("fingerprint") != now["data"]["fingerprint"])


def val_windows_changed(saved: State, now: State) -> bool:
    """Return True if the two states have other validation windows, so that their losses cannot be
    compared. Of what decides the windows, only --eval-tokens may change at a resume."""
    return bool(saved["args"].get("eval_tokens") != now["args"]["eval_tokens"])


def describe_each_change(saved: State, now: State) -> list[str]:
    """Return the allowed changes of flags, as text such as `--lr 0.001 -> 0.0001`, and a change of
    the number of CPU threads.

    A flag that stands for others is not listed: of the run's length only --num-steps.
    """
    before, after = saved["args"], now["args"]
    unlisted = names_with(Rule.SHORTHAND) + names_with(Rule.THIS_START)
    rows = [
        f"{flag(name)} {format_typed_value(before[name])} -> {format_typed_value(after[name])}"
        for name in after
        if name in before.keys() - {*unlisted} and before[name] != after[name]
    ]
    threads = saved.get("threads"), now["threads"]
    if None not in threads and threads[0] != threads[1]:
        rows.append(f"threads {threads[0]} -> {threads[1]}: sums are rounded differently")
    return rows


def format_typed_value(value: object) -> str:
    """Return a flag's value as text for a command line."""
    if isinstance(value, list):
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
    """Copy weights, moments and loss scale from a snapshot.

    Raises SnapshotError if the snapshot does not fit the model or the optimizer.
    """
    state, shard_like = resumed.state, process.shard_like
    try:
        for name, weight in model.state_dict().items():
            weight.copy_(shard_like(state["model"][name], weight))
        restore_optimizer(optimizer, state["optimizer"], shard_like)
        # (The scaler's state is empty if the saved run had another precision.)
        if scaler.is_enabled() and (state["scaler"] or state["args"]["amp_dtype"] == "float16"):
            scaler.load_state_dict(state["scaler"])
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        raise SnapshotError(f"{resumed.path} does not fit this model: is it damaged?") from None
