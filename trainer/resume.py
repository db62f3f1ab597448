"""Resume a run from a snapshot: find the file, restore flags and state, check what has changed
since the save."""

import argparse
import os
from pathlib import Path
from typing import NoReturn

import torch

from .flags import RUN_LENGTH_FLAGS, as_argv, build_parser, flag, to_argv
from .optimizer import restore_optimizer
from .run import Run
from .snapshot import LoadedSnapshot, SnapshotError, State, peek, read_snapshot, sibling_path

# Flags that must not change when a run resumes. They decide the model's shape, the random numbers,
# the optimizer and the tokens. (`check_resumable` checks the data and the batch.)
FIXED_FLAGS = (
    "n_layers n_heads d_model d_ff seq_len max_position_embeddings dropout seed data_seed "
    "optimizer tokenizer_name vocab_size use_toy_data"
).split()
# Flags that choose the data of a run.
DATA_FLAGS = (
    "train_data val_data val_ratio text_key tokenizer_name vocab_size use_toy_data max_tokens"
).split()
# Flag -> flags that it replaces. If the flag is typed now, the snapshot's values of the replaced
# flags are dropped.
DROPPED_IF_TYPED = {
    "amp_dtype": ["no_amp"],
    "no_amp": ["amp_dtype"],
    **dict.fromkeys(RUN_LENGTH_FLAGS, RUN_LENGTH_FLAGS),
}


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


def restore_flags(args: argparse.Namespace, resumed: LoadedSnapshot) -> None:
    """Set in `args` the flags that were typed for the resumed run. Flags that are typed now keep
    their new values. All other flags follow from the typed flags.

    Raises SnapshotError if the parser rejects a flag of the snapshot, or reads another value.
    """

    def refuse(message: str) -> NoReturn:
        """Raise SnapshotError where the parser would print the error and exit."""
        reason = message.removeprefix("argument ")
        raise SnapshotError(f"{resumed.path} is no MiniGPT snapshot (of its flags, {reason})")

    restored = {name: resumed.state["args"][name] for name in resumed.state["typed"]}
    for name in (*args.typed, "resume", "checkpoint_path"):
        for replaced in (name, *DROPPED_IF_TYPED.get(name, ())):
            restored.pop(replaced, None)
    parser = build_parser("", str(args.checkpoint_path))
    parser.error = refuse  # type: ignore[method-assign]
    vars(args).update(vars(parser.parse_args(to_argv(restored) + as_argv(args))))
    for name, value in restored.items():
        if value is None or str(getattr(args, name)) != str(value):
            refuse(f"{flag(name)} is {value}")


def check_flags(args: argparse.Namespace, resumed: LoadedSnapshot) -> None:
    """Raise SnapshotError if a flag in FIXED_FLAGS has another value than in the resumed
    snapshot."""
    state = resumed.state
    # For these two flags, two values are valid: the value that was typed for the old run, and the
    # value that the old run then used (a default, for example).
    resolved = {
        "tokenizer_name": state["tokenizer"].get("name"),
        "vocab_size": state["config"].get("vocab_size"),
    }
    for name in FIXED_FLAGS:
        before, after = state["args"].get(name), getattr(args, name)
        if name in state["args"] and after not in (before, resolved.get(name, before)):
            raise SnapshotError(
                f"{flag(name)}: {resumed.path} was trained with "
                f"{resolved.get(name, before)}, this run has {after}; pass the old value to "
                "resume, or another --checkpoint-path to start a new run"
            )


def check_resumable(saved: State, now: State, path: Path) -> None:
    """Raise SnapshotError if a run cannot resume because its data or its batch has changed.

    `saved`: state of the snapshot at `path`. `now`: result of `setup.make_snapshot_metadata` for
    this run.

    The following may change: flags that only decide how memory is used (they change no result), the
    learning rate, the number of steps, and the intervals of logs, evaluations and saves. The number
    of processes may change if the batch of all processes together stays the same. The text in the
    data files may change if the data flags still name the same files; then the run prints that the
    data changed. (`check_flags` checks all other flags that must not change, such as the model's
    shape.)
    """
    changed = [name for name in DATA_FLAGS if saved["args"].get(name) != now["args"][name]]
    if data_changed(saved, now) and changed:
        raise SnapshotError(
            f"--train-data: {path} was trained on {saved['data'].get('description')}, this run "
            f"has {now['data']['description']} ({', '.join(map(flag, changed))}); the data must "
            f"stay the same to resume; --init-from {path} in place of "
            "--resume starts a new run from its weights"
        )
    before, after = saved["data"]["sequences_per_step"], now["data"]["sequences_per_step"]
    if before != after:
        steps, rest = divmod(before, after // now["args"]["grad_accum_steps"])
        fits = f"--grad-accum-steps {steps}" if not rest else "another --batch-size"
        raise SnapshotError(
            f"--batch-size: {path} was trained with {before} sequences a step over all processes, "
            f"this run has {after}; {fits} fits; or --init-from {path} in "
            "place of --resume starts a new run from its weights"
        )


def data_changed(saved: State, now: State) -> bool:
    """Return True if the data of the two states have different fingerprints."""
    return bool(saved["data"].get("fingerprint") != now["data"]["fingerprint"])


def validation_key(state: State) -> tuple[object, object]:
    """Return the data's fingerprint and --eval-tokens, which together decide the validation
    windows.

    Validation losses of two states can be compared if both values are equal. (The windows also
    depend on --seq-len, but --seq-len cannot change.)
    """
    return state["data"].get("fingerprint"), state["args"].get("eval_tokens")


def describe_each_change(saved: State, now: State) -> list[str]:
    """Return the allowed changes of flags, as text such as `--lr 0.001 -> 0.0001`, and a change of
    the number of CPU threads.

    Of the flags that set the run's length, only --num-steps is listed.
    """
    before, after = saved["args"], now["args"]
    unlisted = {"resume", "checkpoint_path", "model", "num_tokens", "num_epochs"}
    rows = [
        f"{flag(name)} {format_typed_value(before[name])} -> {format_typed_value(after[name])}"
        for name in after
        if name in before.keys() - unlisted and before[name] != after[name]
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
def restore_model_and_optimizer(resumed: LoadedSnapshot, run: Run) -> None:
    """Copy weights, moments and loss scale from a snapshot into `run`.

    Raises SnapshotError if the snapshot does not fit the model or the optimizer of `run`.
    """
    state, shard_like = resumed.state, run.process.shard_like
    try:
        for name, weight in run.model.state_dict().items():
            weight.copy_(shard_like(state["model"][name], weight))
        restore_optimizer(run.optimizer, state["optimizer"], shard_like)
        # (The scaler's state is empty if the saved run had another precision.)
        if run.scaler.is_enabled() and (state["scaler"] or state["args"]["amp_dtype"] == "float16"):
            run.scaler.load_state_dict(state["scaler"])
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        raise SnapshotError(f"{resumed.path} does not fit this model: is it damaged?") from None
