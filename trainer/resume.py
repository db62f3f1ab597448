"""Go on from a snapshot: from which file, with which flags, and what may have changed meanwhile."""

import argparse
import glob
import os
from pathlib import Path
from typing import NoReturn

import torch

from .flags import LENGTHS, SHAPES, as_argv, build_parser, flag
from .metrics import format_line
from .optimizer import restore_optimizer
from .run import Run
from .snapshot import (
    Resumed,
    SnapshotError,
    State,
    beside,
    is_second,
    peek,
    read_snapshot,
    twins,
)

# What decides every weight of the run, besides its data and its batch: it must stay.
FIXED = (
    "n_layers n_heads d_model d_ff max_position_embeddings dropout seq_len seed data_seed "
    "optimizer tokenizer_name vocab_size use_toy_data"
).split()
DATA = "train_data val_data val_ratio tokenizer_name vocab_size use_toy_data max_tokens".split()
# A flag that is typed also decides these: they are not taken from the snapshot then.
DECIDES = {
    "use_activation_checkpoint": ["memory_budget", "card"],
    "amp_dtype": ["no_amp"],
    "no_amp": ["amp_dtype"],
    **{name: [other for other in LENGTHS if other != name] for name in LENGTHS},
}


def own_name(path: Path) -> Path:
    """Where a run saves that goes on from `path`: there; but `run.best.pt` is what the run beside
    it writes. Who goes on from it does so as from a copy: `run-best.pt`."""
    name = beside(path, "")
    return name.with_name(f"{name.stem}-best.pt") if name.suffix == ".best" else path


def load_newest(path: Path, named: Path | None = None) -> Resumed:
    """The snapshot at `path`; if that is gone or damaged, the one before it; or else, when nothing
    else is there, the one with the lowest validation loss.

    `named`: the file whose `own_name` is `path`. It counts while there is no snapshot at `path`;
    what is there later has to go on from it. Raises SnapshotError if none of them can be read.
    """
    for twin in twins(path):
        if os.path.isfile(twin) and not os.path.lexists(path):  # else its files would be taken
            raise SnapshotError(
                f"--resume: there is no snapshot {path}, but there is {twin}, which would share "
                "its files; name that with --checkpoint-path, or move it away"
            )
    why = []
    there = any(map(os.path.lexists, newest_first(path)))
    if named is not None and named != path:
        why = [f"{named} is another run's best: this one saves to {path}"]
        if not there:
            return Resumed(read_snapshot(named), named, why[0])
        if not has_saved(peek(named).get("run"), path):
            raise SnapshotError(
                f"--resume: {path} is there and does not go on from {named}; copy that to a name "
                "of its own, and resume the copy"
            )
    elif not there:
        others = [file for file in path.parent.glob("[!.]*.pt") if not is_second(file)]
        newest = max(others, key=lambda file: file.lstat().st_mtime, default=None)
        hint = f" (the newest there: {newest})" if newest else ""
        raise SnapshotError(
            f"--resume: there is no snapshot {path}; start without --resume, or name the file"
            f"{hint} with --checkpoint-path"
        )
    words = "", "the one before", "the one with the lowest val loss"
    wrong: list[str] = []
    for file, what in zip(newest_first(path), words, strict=True):
        try:
            state = read_snapshot(file)
        except SnapshotError as error:
            wrong += [str(error)] * (file == path or os.path.lexists(file))
            continue
        why += [f"{wrong[0]}; taking {what}"] if what else []
        return Resumed(state, file, "; ".join(why))
    raise SnapshotError(f"--resume: {'; '.join(wrong)}")


def newest_first(path: Path) -> tuple[Path, Path, Path]:
    """The snapshots that a run of that name leaves."""
    return path, beside(path, ".prev.pt"), beside(path, ".best.pt")


def has_saved(run_id: str | None, path: Path) -> bool:
    """Is a snapshot of that run there?"""
    return any(state.get("run") == run_id for state in map(peek, newest_first(path)) if state)


def load_own(path: Path, run_id: str) -> Resumed | None:
    """The newest snapshot if it is of the run `run_id`; None if that run has saved nothing yet.

    What a run finds that torchrun has started again: its own, or one of an older run, which it was
    to replace and must not go on from. Raises SnapshotError as `load_newest` does.
    """
    return load_newest(path) if has_saved(run_id, path) else None


def take_flags(args: argparse.Namespace, resumed: Resumed) -> None:
    """Give `args` the flags of the run that is resumed, where none were typed. Raises SnapshotError
    if one was typed that the run cannot change."""
    saved, typed = resumed.state["args"], args.typed
    moot = {"typed", "resume", "checkpoint_path"}
    for name in typed:
        moot |= {name, *DECIDES.get(name, ())}
    if "lr" in typed and saved.get("min_lr") == saved.get("lr", 0) / 10:
        moot.add("min_lr")  # it was left to the default, and that follows --lr
    old = parse_again(saved, resumed.path)
    for name in (vars(args).keys() & saved.keys()) - moot:
        setattr(args, name, getattr(old, name))
    # It may be typed again as it was, though the text had fewer ids.
    vocabulary = resumed.state["config"].get("vocab_size")
    found = {"tokenizer_name": resumed.state["tokenizer"].get("name"), "vocab_size": vocabulary}
    for name in FIXED:
        before, after = saved.get(name), getattr(args, name)
        if name in saved and after not in (before, found.get(name, before)):
            new = "another --checkpoint-path to start a new run"
            if name in ("optimizer", "seed", "data_seed", "dropout"):
                new = fresh_start(resumed.path)
            raise SnapshotError(
                f"{blamed(args, name)}: {resumed.path} was trained with "
                f"{found.get(name, before)}, this run has {after}; pass the old value to resume, "
                f"or {new}"
            )
    if args.use_toy_data and typed & {"train_data", "val_data"}:
        raise SnapshotError(f"--train-data: {resumed.path} was trained on toy data: leave it out")


def check_texts(args: argparse.Namespace) -> None:
    """Raise SnapshotError if a text that the snapshot names is gone."""
    gone = [
        f"{flag(name)} {text}: no such file or folder; if it has moved, add {flag(name)} NEW"
        for name in ("train_data", "val_data")
        for text in getattr(args, name) or ()
        if not (name in args.typed or os.path.lexists(text) or glob.has_magic(text))
    ]
    if gone:
        raise SnapshotError(gone[0])


def keep_batch(args: argparse.Namespace, saved: State, world_size: int) -> None:
    """Drop the old run's --grad-accum-steps where more processes now do without: the step is the
    same. (Nothing is changed that was typed.)"""
    if "grad_accum_steps" not in args.typed:
        if saved["data"].get("sequences_per_step") == args.batch_size * world_size:
            args.grad_accum_steps = 1


def parse_again(saved: State, path: Path) -> argparse.Namespace:
    """The flags of a snapshot, held to what a command line may say. Raises SnapshotError."""

    def refuse(message: str) -> NoReturn:
        raise SnapshotError(
            f"{path} is no MiniGPT snapshot (of its flags, {message.removeprefix('argument ')})"
        )

    parser = build_parser("resume", "unused.pt")
    parser.error = refuse  # type: ignore[method-assign]
    nothing = parser.parse_args([])
    known = vars(nothing).keys() - {"typed", "resume", "checkpoint_path"}
    return parser.parse_args(as_argv(nothing, **{n: saved[n] for n in saved if n in known}))


def fresh_start(path: Path) -> str:
    """What one wants who cannot resume, where the shape of the model is the same."""
    return f"--init-from {path} in place of --resume to start a new run from its weights"


def check_resumable(saved: State, now: State, path: Path) -> None:
    """Raise SnapshotError if a run that is identified by `now` cannot go on from `saved`.

    Free to change: how memory is spent (it changes no result), learning rate, number of steps,
    intervals, and the number of processes as long as the batch of all of them together stays. A
    text that was edited is still the text that the flags name: `changes` tells of it. (The model's
    shape and what else must stay: `take_flags`.)
    """
    try:
        if record := saved.get("record"):  # the log line that may still be due
            format_line(record, 1)
    except (LookupError, TypeError, ValueError, OverflowError):
        raise SnapshotError(f"{path} is no MiniGPT snapshot (a strange record)") from None
    other = [name for name in DATA if saved["args"].get(name) != now["args"][name]]
    if data_changed(saved, now) and other:
        raise SnapshotError(
            f"--train-data: {path} was trained on {saved['data'].get('description')}, this run "
            f"has {now['data']['description']} ({', '.join(map(flag, other))}); the data must stay "
            f"the same to resume; {fresh_start(path)} on it"
        )
    before, after = saved["data"].get("sequences_per_step"), now["data"]["sequences_per_step"]
    if not isinstance(before, int):
        raise SnapshotError(f"{path} is no MiniGPT snapshot (no sequences per step)")
    if before != after:
        raise SnapshotError(
            f"--batch-size: {path} was trained with {before} sequences a step over all processes, "
            f"this run has {after}; {same_batch(before, after, now['args'])}; or "
            + fresh_start(path)
        )


def data_changed(saved: State, now: State) -> bool:
    return bool(saved["data"].get("fingerprint") != now["data"]["fingerprint"])


def validation_of(state: State) -> tuple[object, object]:
    """Data and number of tokens. Where both are the same, so are the windows, and losses compare.
    (--seq-len stays. Older snapshots have no eval_tokens: their windows depended on --batch-size.)
    """
    return state["data"].get("fingerprint"), state["args"].get("eval_tokens")


def same_batch(before: int, after: int, args: State) -> str:
    """How a step gets `before` sequences; with `args` it has `after` of them."""
    processes = after // (args["batch_size"] * args["grad_accum_steps"])
    steps, rest = divmod(before, args["batch_size"] * processes)
    if rest:
        return f"--batch-size times --grad-accum-steps times {processes} has to be {before}"
    return f"--grad-accum-steps {steps} fits"


def changes(saved: State, now: State) -> list[str]:
    """What may change, and did: `--lr 0.001 -> 0.0001`, and the number of threads. (How long the
    run is: in steps.)"""
    before, after = saved["args"], now["args"]
    threads = saved.get("threads"), now["threads"]  # (Older snapshots do not say it.)

    def short(value: object) -> str:
        if isinstance(value, list):
            return " ".join(map(str, value))
        return f"{value:g}" if isinstance(value, float) else str(value)

    rows = [
        f"{flag(name)} {short(before[name])} -> {short(after[name])}"
        for name in after
        if name not in ("resume", "checkpoint_path", "model", "num_tokens", "num_epochs")
        and name in before
        and before[name] != after[name]
    ]
    if all(isinstance(number, int) for number in threads) and threads[0] != threads[1]:
        rows.append(f"threads {threads[0]} -> {threads[1]}: sums are rounded otherwise")
    return rows


def blamed(args: argparse.Namespace, name: str) -> str:
    """The flag that gave args.`name` its value: its own, or --model."""
    shape = args.model is not None and name in SHAPES[args.model]
    return f"--model {args.model}, {flag(name)}" if shape else flag(name)


@torch.no_grad()
def restore(resumed: Resumed, run: Run) -> None:
    """Put weights, optimizer and loss scale back. Raises SnapshotError if they do not fit."""
    state, weights, part = resumed.state, run.model.state_dict(), run.process.part
    expected = {name: (value.shape, value.dtype) for name, value in weights.items()}
    try:
        found = {name: (value.shape, value.dtype) for name, value in state["model"].items()}
        if found != expected:
            raise ValueError
        for name, weight in weights.items():
            weight.copy_(part(state["model"][name], weight))
        restore_optimizer(run.optimizer, state["optimizer"], part)
        if state["scaler"] and run.scaler.is_enabled():  # empty unless that run was in float16
            run.scaler.load_state_dict(state["scaler"])
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError):
        raise SnapshotError(f"{resumed.path} does not fit this model: is it damaged?") from None
