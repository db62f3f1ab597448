"""Resume from a snapshot: find the file, restore the flags, check what has changed since."""

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

import torch

from .flags import RUN_LENGTH_FLAGS, as_argv, build_parser, flag, to_argv
from .optimizer import restore_optimizer
from .run import Run
from .snapshot import LoadedSnapshot, SnapshotError, State, peek, read_snapshot, sibling_path

# Beside its data and its batch, these flags decide every weight of a run. So they must not change.
FIXED = (
    "n_layers n_heads d_model d_ff seq_len max_position_embeddings dropout seed data_seed "
    "optimizer tokenizer_name vocab_size use_toy_data"
).split()
DATA = "train_data val_data val_ratio tokenizer_name vocab_size use_toy_data max_tokens".split()
# If the flag on the left is typed, these flags of the snapshot are dropped, too.
REPLACES = {
    "amp_dtype": ["no_amp"],
    "no_amp": ["amp_dtype"],
    **dict.fromkeys(RUN_LENGTH_FLAGS, RUN_LENGTH_FLAGS),
}


def load_newest(path: Path) -> LoadedSnapshot:
    """Load the snapshot at `path`; if it is missing or damaged, load `.prev.pt`, else `.best.pt`.

    Raises SnapshotError if none of them can be read.
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
    # A new run cannot take the name of a file that is no snapshot (see `check_path`).
    start = " under another name" if os.path.exists(path) else ""
    raise SnapshotError(
        f"--resume: {problems[0]}; start without --resume{start}, or name the file with "
        "--checkpoint-path"
    )


def candidate_paths(path: Path) -> tuple[Path, Path, Path]:
    """Return the paths of a run's snapshots: the newest, the one before, the best."""
    return path, sibling_path(path, ".prev.pt"), sibling_path(path, ".best.pt")


def load_own_run(path: Path, run_id: str) -> LoadedSnapshot | None:
    """Load the newest snapshot if the run `run_id` has saved one; else return None.

    After a restart by torchrun the files are this run's own, or an older run's, from which it must
    not resume. Raises SnapshotError as `load_newest` does.
    """
    of_run = (state.get("run") == run_id for state in map(peek, candidate_paths(path)) if state)
    return load_newest(path) if any(of_run) else None


def typed_flags(state: State) -> dict[str, Any]:
    """Return the flags that were typed for the run of a snapshot; its other flags follow from them.

    Keys are the names of flags without dashes, e.g. `n_layers`.
    """
    saved = state["args"]
    if "typed" in state:
        return {name: saved[name] for name in state["typed"]}
    # An older snapshot does not record which flags were typed, so all count. But a run's length is
    # set by one flag: num_steps follows from another one of RUN_LENGTH_FLAGS, if there is any.
    others = [name for name in RUN_LENGTH_FLAGS[1:] if saved.get(name) is not None]
    return {name: saved[name] for name in saved if name != "num_steps" or not others}


def restore_flags(args: argparse.Namespace, resumed: LoadedSnapshot) -> None:
    """Give `args` the flags that the resumed run was started with; flags that are typed now win.

    Raises SnapshotError if the snapshot has a flag that the parser rejects.
    """

    def refuse(message: str) -> NoReturn:
        """Raise SnapshotError in place of the parser's usual exit."""
        reason = message.removeprefix("argument ")
        raise SnapshotError(f"{resumed.path} is no MiniGPT snapshot (of its flags, {reason})")

    restored = typed_flags(resumed.state)
    for name in (*args.typed, "resume", "checkpoint_path"):
        for replaced in (name, *REPLACES.get(name, ())):
            restored.pop(replaced, None)
    parser = build_parser("", str(args.checkpoint_path))
    parser.error = refuse  # type: ignore[method-assign]
    vars(args).update(vars(parser.parse_args(to_argv(restored) + as_argv(args))))


def check_flags(args: argparse.Namespace, resumed: LoadedSnapshot) -> None:
    """Raise SnapshotError if a flag of FIXED, which decide the run's weights, has changed."""
    state = resumed.state
    # These two may have the value that was typed for the old run, or the one that it resolved to.
    resolved = {
        "tokenizer_name": state["tokenizer"].get("name"),
        "vocab_size": state["config"].get("vocab_size"),
    }
    for name in FIXED:
        before, after = state["args"].get(name), getattr(args, name)
        if name in state["args"] and after not in (before, resolved.get(name, before)):
            raise SnapshotError(
                f"{flag(name)}: {resumed.path} was trained with "
                f"{resolved.get(name, before)}, this run has {after}; pass the old value to "
                "resume, or another --checkpoint-path to start a new run"
            )


def check_resumable(saved: State, now: State, path: Path) -> None:
    """Raise SnapshotError if a run cannot resume because of its data or its batch.

    `saved`: the state of the snapshot at `path`. `now`: `run_info` of this run.

    These may change: flags that only decide how memory is spent (they change no result), learning
    rate, number of steps, intervals, and the number of processes, if the batch of all processes
    together stays the same. A text that was edited is accepted if the flags name the same files;
    the run prints that the data changed. (`check_flags` checks the model's shape and all other
    flags that must stay.)
    """
    changed = [name for name in DATA if saved["args"].get(name) != now["args"][name]]
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
    """Return True if the fingerprints of the data differ."""
    return bool(saved["data"].get("fingerprint") != now["data"]["fingerprint"])


def validation_key(state: State) -> tuple[object, object]:
    """Return the data's fingerprint and --eval-tokens, which decide the validation windows.

    If both are the same in two states, their validation losses can be compared. (--seq-len cannot
    change.)
    """
    return state["data"].get("fingerprint"), state["args"].get("eval_tokens")


def changes(saved: State, now: State) -> list[str]:
    """Return the flags that may change and did, as `--lr 0.001 -> 0.0001`, and the threads.

    A changed length of the run is listed in steps.
    """
    before, after = saved["args"], now["args"]
    unlisted = {"resume", "checkpoint_path", "model", "num_tokens", "num_epochs"}
    rows = [
        f"{flag(name)} {short(before[name])} -> {short(after[name])}"
        for name in after
        if name in before.keys() - unlisted and before[name] != after[name]
    ]
    threads = saved.get("threads"), now["threads"]
    if None not in threads and threads[0] != threads[1]:
        rows.append(f"threads {threads[0]} -> {threads[1]}: sums are rounded otherwise")
    return rows


def short(value: object) -> str:
    """Return a flag's value as it is typed in a command line."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@torch.no_grad()
def restore_model_and_optimizer(resumed: LoadedSnapshot, run: Run) -> None:
    """Copy weights, moments and loss scale from a snapshot into `run`.

    Raises SnapshotError if they do not fit.
    """
    state, local_shard = resumed.state, run.process.local_shard
    try:
        for name, weight in run.model.state_dict().items():
            weight.copy_(local_shard(state["model"][name], weight))
        restore_optimizer(run.optimizer, state["optimizer"], local_shard)
        if state["scaler"] and run.scaler.is_enabled():  # it is empty unless that run had float16
            run.scaler.load_state_dict(state["scaler"])
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        raise SnapshotError(f"{resumed.path} does not fit this model: is it damaged?") from None
