"""Go on from a snapshot: from which file, with which flags, and what may have changed meanwhile."""

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

import torch

from .flags import LENGTHS, as_argv, build_parser, flag, to_argv
from .optimizer import restore_optimizer
from .run import Run
from .snapshot import LoadedSnapshot, SnapshotError, State, peek, read_snapshot, sibling_path

# Besides its data and its batch, these decide every weight of the run: they must stay.
FIXED = (
    "n_layers n_heads d_model d_ff seq_len max_position_embeddings dropout seed data_seed "
    "optimizer tokenizer_name vocab_size use_toy_data"
).split()
DATA = "train_data val_data val_ratio tokenizer_name vocab_size use_toy_data max_tokens".split()
# A typed flag replaces these flags of the snapshot, too.
REPLACES = {
    "amp_dtype": ["no_amp"],
    "no_amp": ["amp_dtype"],
    **dict.fromkeys(LENGTHS, LENGTHS),
}


def load_newest(path: Path) -> LoadedSnapshot:
    """Load the snapshot at `path`; if it is gone or damaged, the one before it; else the one with
    the lowest validation loss. Raises SnapshotError if none can be read."""
    problems: list[str] = []
    for file in candidate_paths(path):
        try:
            state = read_snapshot(file)
        except SnapshotError as error:
            problems.append(str(error))
            continue
        why = f"{'; '.join(problems)}; taking {file}" if problems else ""
        return LoadedSnapshot(state, file, why)
    # A file that is no snapshot stays.
    start = " under another name" if os.path.exists(path) else ""
    raise SnapshotError(
        f"--resume: {problems[0]}; start without --resume{start}, or name the file with "
        "--checkpoint-path"
    )


def candidate_paths(path: Path) -> tuple[Path, Path, Path]:
    """The snapshots that a run of that name leaves."""
    return path, sibling_path(path, ".prev.pt"), sibling_path(path, ".best.pt")


def load_own_run(path: Path, run_id: str) -> LoadedSnapshot | None:
    """The newest snapshot if it is of the run `run_id`; None if that run has saved nothing yet.

    After a restart by torchrun the file is this run's own, or an older run's, which it was to
    replace and must not resume. Raises SnapshotError as `load_newest` does.
    """
    of_run = (state.get("run") == run_id for state in map(peek, candidate_paths(path)) if state)
    return load_newest(path) if any(of_run) else None


def typed_flags(state: State) -> dict[str, Any]:
    """The flags that the run of a snapshot was started with; the others follow from them."""
    saved = state["args"]
    if "typed" in state:
        return {name: saved[name] for name in state["typed"]}
    # An older snapshot does not tell which were typed: all count. A run has one length.
    others = [name for name in LENGTHS[1:] if saved.get(name) is not None]
    return {name: saved[name] for name in saved if name != "num_steps" or not others}


def restore_flags(args: argparse.Namespace, resumed: LoadedSnapshot) -> None:
    """Give `args` the flags that the resumed run was started with, and over them those that are
    typed now. Raises SnapshotError if a flag of the snapshot is none."""

    def refuse(message: str) -> NoReturn:
        reason = message.removeprefix("argument ")
        raise SnapshotError(f"{resumed.path} is no MiniGPT snapshot (of its flags, {reason})")

    kept = typed_flags(resumed.state)
    for name in (*args.typed, "resume", "checkpoint_path"):
        for replaced in (name, *REPLACES.get(name, ())):
            kept.pop(replaced, None)
    parser = build_parser("", str(args.checkpoint_path))
    parser.error = refuse  # type: ignore[method-assign]
    vars(args).update(vars(parser.parse_args(to_argv(kept) + as_argv(args))))


def check_flags(args: argparse.Namespace, resumed: LoadedSnapshot) -> None:
    """Raise SnapshotError if a flag is another one that decides the run's weights."""
    state = resumed.state
    # These two may be typed as they were, or as they were found.
    found = {
        "tokenizer_name": state["tokenizer"].get("name"),
        "vocab_size": state["config"].get("vocab_size"),
    }
    for name in FIXED:
        before, after = state["args"].get(name), getattr(args, name)
        if name in state["args"] and after not in (before, found.get(name, before)):
            raise SnapshotError(
                f"{flag(name)}: {resumed.path} was trained with "
                f"{found.get(name, before)}, this run has {after}; pass the old value to resume, "
                "or another --checkpoint-path to start a new run"
            )


def check_resumable(saved: State, now: State, path: Path) -> None:
    """Raise SnapshotError if a run that is identified by `now` cannot go on from `saved`.

    Free to change: how memory is spent (it changes no result), learning rate, number of steps,
    intervals, and the number of processes as long as the batch of all of them together stays. A
    text that was edited is still the text that the flags name: `changes` tells of it. (The model's
    shape and what else must stay: `check_flags`.)
    """
    other = [name for name in DATA if saved["args"].get(name) != now["args"][name]]
    if data_changed(saved, now) and other:
        raise SnapshotError(
            f"--train-data: {path} was trained on {saved['data'].get('description')}, this run "
            f"has {now['data']['description']} ({', '.join(map(flag, other))}); the data must stay "
            f"the same to resume; --init-from {path} in place of "
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
    return bool(saved["data"].get("fingerprint") != now["data"]["fingerprint"])


def validation_of(state: State) -> tuple[object, object]:
    """Data and number of tokens. Where both are the same, so are the windows, and losses compare.
    (--seq-len stays.)"""
    return state["data"].get("fingerprint"), state["args"].get("eval_tokens")


def changes(saved: State, now: State) -> list[str]:
    """What may change, and did: `--lr 0.001 -> 0.0001`, and the number of threads. (How long the
    run is: in steps.)"""
    before, after = saved["args"], now["args"]
    untold = {"resume", "checkpoint_path", "model", "num_tokens", "num_epochs"}
    rows = [
        f"{flag(name)} {short(before[name])} -> {short(after[name])}"
        for name in after
        if name in before.keys() - untold and before[name] != after[name]
    ]
    threads = saved.get("threads"), now["threads"]
    if None not in threads and threads[0] != threads[1]:
        rows.append(f"threads {threads[0]} -> {threads[1]}: sums are rounded otherwise")
    return rows


def short(value: object) -> str:
    """A flag's value, as in a command line."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@torch.no_grad()
def restore(resumed: LoadedSnapshot, run: Run) -> None:
    """Put weights, optimizer and loss scale back. Raises SnapshotError if they do not fit."""
    state, part = resumed.state, run.process.local_shard
    try:
        for name, weight in run.model.state_dict().items():
            weight.copy_(part(state["model"][name], weight))
        restore_optimizer(run.optimizer, state["optimizer"], part)
        if state["scaler"] and run.scaler.is_enabled():  # empty unless that run was in float16
            run.scaler.load_state_dict(state["scaler"])
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        raise SnapshotError(f"{resumed.path} does not fit this model: is it damaged?") from None
