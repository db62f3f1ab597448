"""Run a trainer from its settings to its exit code. A run is built in this order: Settings and
weights to start from, a StepPlan (the predicted memory), the data, the model, the Run."""

import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from data import Dataset, MiniGPTError, Tokenizer, TrainBatches, ValBatches, load_dataset
from memory import MemorySavingGPT
from model import MiniGPTConfig

from . import resume
from .bootstrap import PROCESS_START
from .check_model import check_model, make_model_on_meta
from .clocks import make_clock
from .device import (
    check_compiler,
    check_gather_dtype_flag,
    choose_precision,
    compile_blocks,
    set_matmul_precision,
)
from .flags import flag
from .metrics import (
    check_logger,
    finish_wandb,
    open_logger,
    open_metrics,
)
from .optimizer import make_optimizer
from .plan import StepPlan, largest_vocab_size, plan_run
from .pretrained import Pretrained, SnapshotOrPretrained, read_init_from
from .process import OneProcess
from .report import describe_result, describe_run, resume_command, sample_text
from .run import Run, make_scaler
from .settings import ROWS, Rule, Settings, flags_with_rule, resolve
from .shutdown import describe_error
from .snapshot import (
    LoadedSnapshot,
    State,
    check_path,
    check_shapes,
    files_of_run,
    lock_run_files,
    rename_older_run,
    sibling_path,
    unused_path,
)
from .torchrun import peer_failure_message, print_error_once

MakeProcess = Callable[[Settings], OneProcess]


def run_safely(
    settings: Settings, make_process: MakeProcess, train: Callable[[Run], dict[str, Any]]
) -> int:
    """Build a run and `train` it; return the exit code: 0 done, 2 bad input, 3 stopped safely, 4
    out of memory, 128 + n stopped by signal n.

    An error that is not a bug is printed as one line; any other error is raised.
    """
    run = None
    try:
        run = build_run(*choose_settings_and_origin(settings, make_process))
        # Unlock after the run, because this process may start another run.
        with run.held_lock or nullcontext():
            code = train_and_report(run, train)
            # If a process of torchrun ends, torchrun signals the others and their children, such as
            # wandb's, so all wait for the log of rank 0.
            run.process.broadcast_from_rank0(finish_wandb)
            return code
    except KeyboardInterrupt:
        print("\nstopped; --resume continues from the last snapshot, if any", file=sys.stderr)
        return 130
    except Exception as error:
        line, code = describe_error(error, settings, run)
        print_error_once(line, peer_failed=peer_failure_message(error) is not None)
        return code
    finally:
        finish_wandb()


def train_and_report(run: Run, train: Callable[[Run], dict[str, Any]]) -> int:
    """Call `train`, print the last lines of the run, and return the exit code: 0, 3 if the
    validation loss is not finite, or 128 + signal number."""
    settings, say = run.settings, run.process.print0
    if run.step >= settings.num_steps:
        say(
            f"done     already at step {run.step:,}; raise --num-steps to go on: "
            f"{resume_command(run)} --num-steps {2 * run.step}"
        )
        return 0
    seconds_before = time.perf_counter() - PROCESS_START
    record = train(run)
    if run.stop_signal and (run.step < settings.num_steps or "val_loss" not in record):
        with_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        note = " (torchrun's traceback below is no crash)" if with_torchrun else ""
        say(
            f"stopped  {signal.Signals(run.stop_signal).name} after step {run.step:,}: saved{note};"
            f" go on with --resume: {resume_command(run)}"
        )
        return 128 + run.stop_signal
    if not math.isfinite(record["val_loss"]):
        print_error_once(
            f"the validation loss is not finite after the last step, {run.step}: try a lower --lr "
            f"than {settings.lr:.2g}; the weights in {settings.checkpoint_path} are useless"
        )
        return 3
    text = sample_text(run)  # on all ranks, because the forward of a sharded model needs all
    seconds = time.perf_counter() - PROCESS_START
    say(describe_result(run, record, text, seconds_before, seconds))
    return 0


def choose_settings_and_origin(
    settings: Settings, make_process: MakeProcess
) -> tuple[Settings, OneProcess, SnapshotOrPretrained]:
    """Return the settings of the run that the command line describes, its process, and the snapshot
    or the weights from which it starts. With --resume, the snapshot supplies the flags that are not
    typed.

    All mistakes that a user can make are found here or in `build_run`, before the run writes or
    trains anything. Raises MiniGPTError for a mistake.
    """
    if settings.resume and "init_from" in settings.typed:
        raise MiniGPTError("--init-from starts a run and --resume goes on with one: leave one out")
    resumed = None
    if settings.resume:
        resumed = resume.load_newest_readable(settings.checkpoint_path)
        settings = resume.with_saved_flags(settings, resumed)
    process = make_process(settings)
    if resumed is None and "TORCHELASTIC_RUN_ID" in os.environ:
        # If torchrun has restarted this run, resume from the snapshot that the run itself has
        # saved. The weights of --init-from are not needed then, and may have been deleted.
        resumed = resume.load_own_run(settings.checkpoint_path, process.run_id)
        if resumed is not None and settings.init_from is not None:
            settings = resume.with_saved_flags(settings, resumed)
    origin: SnapshotOrPretrained = resumed
    if resumed is None:
        origin, settings = read_init_from(settings)
    settings = resolve(settings, process.layout, process.script)
    if settings.mlp_chunks != 1 and not settings.recompute_plan.supports_mlp_chunks:
        process.print0(
            f"note     --mlp-chunks {settings.mlp_chunks}: --use-activation-checkpoint "
            f"{settings.use_activation_checkpoint} recomputes no MLP half; mlp, sdpa and full do"
        )
    if settings.warmup_steps > settings.num_steps:
        process.print0(
            f"note     --warmup-steps {settings.warmup_steps}: the run ends before, at "
            f"{settings.num_steps / settings.warmup_steps:.0%} of --lr"
        )
    if resumed is not None:
        resume.check_fixed_flags(settings, process.layout.replicas, resumed)
    torch.autograd.set_detect_anomaly(settings.detect_anomaly)
    if process.rank == 0:  # only rank 0 logs
        check_logger(settings.log_to)
    return settings, process, origin


def build_run(settings: Settings, process: OneProcess, origin: SnapshotOrPretrained = None) -> Run:
    """Make the data, the model and the optimizer of a run, and return the run.

    The memory of a step is predicted before the text is encoded. The model is made on device
    "meta", and `check_model` compares two small models of its config, before `allocate_and_fill`
    gives it memory and weights. `origin`: the snapshot or the pretrained weights from which the run
    starts; None: random weights. Raises MiniGPTError for a mistake of the user, and for a step that
    needs more memory than the device has.
    """
    resumed = origin if isinstance(origin, LoadedSnapshot) else None
    device, precision = process.device, choose_precision(settings, process.device)
    set_matmul_precision(device, settings.tf32)
    if process.layout.kind in ("fsdp", "sp"):
        check_gather_dtype_flag(settings, precision)
    data, config, plans, words = load_data_and_plan(settings, process, precision, origin)
    size, seq_len = settings.batch_size, settings.seq_len
    train = TrainBatches(data.train_tokens, size, seq_len, settings.data_seed, device)
    val = ValBatches(data.val_tokens, size, seq_len, settings.eval_tokens, device)
    metadata = make_snapshot_metadata(settings, process, config, data, resumed)
    torch.manual_seed(settings.seed)  # for parameters that model.py itself draws
    model = make_model_on_meta(config, process.make_model)
    if resumed is not None:
        check_shapes(resumed.path, resumed.state["model"], model.state_dict())
        resume.check_data_unchanged(resumed.state, metadata, resumed.path)
    check = partial(check_model, model, process, precision)
    if process.layout.sp_degree > 1:
        check()  # the ranks compute together, so one that fails must end, not wait for the others
    else:
        process.run_on_all_ranks(check)  # (each rank may have its own policy)
    if settings.compile:
        process.run_on_all_ranks(lambda: check_compiler(device))
    held_lock = process.run_on_all_ranks(
        lambda: lock_run_files(settings.checkpoint_path, resumed) if process.rank == 0 else None
    )
    allocate_and_fill(model, settings, process, origin)
    optimizer = make_optimizer(model, settings, device, precision)
    scaler = make_scaler(device, precision)
    restored = {}
    if resumed is not None:
        resume.restore_model_and_optimizer(resumed, process, model, optimizer, scaler)
        restored = restored_progress(resumed, settings, process, metadata)
    peaks = (plans[0].peak, plans[0].without_recompute.peak) if plans else None
    if settings.compile:
        compile_blocks(model)
    run = Run(
        settings=settings,
        process=process,
        data=data,
        snapshot_metadata=metadata,
        model=model,
        wrapped_model=process.wrap(model, settings),
        optimizer=optimizer,
        scaler=scaler,
        precision=precision,
        training_batches=train,
        val_batches=val,
        clock=make_clock(settings, process, model, optimizer, peaks),
        plans=plans,
        held_lock=held_lock,
        **restored,
    )
    if process.rank == 0:  # only on rank 0, because `describe_run` reads files
        process.print0(describe_run(run, words, origin))
    return run


def allocate_and_fill(
    model: MemorySavingGPT, settings: Settings, process: OneProcess, origin: SnapshotOrPretrained
) -> None:
    """Give the model its memory, and the weights of --init-from or random ones. (Those of a
    snapshot come with its optimizer.)"""
    process.allocate_parameters(model)
    if origin is None:
        torch.manual_seed(settings.seed)
        model.init_weights(process.shard_like)
    elif isinstance(origin, Pretrained):
        origin.fill(model, process.shard_like)


def load_data_and_plan(
    settings: Settings,
    process: OneProcess,
    precision: torch.dtype,
    origin: SnapshotOrPretrained,
) -> tuple[Dataset, MiniGPTConfig, list[StepPlan], str]:
    """Load the data and predict the memory of a step, after a check that all processes train the
    same model on the same data. Return the data, the model's config, and plans and text of
    `plan_run`.

    Encoding a long text (into data/cache) takes long, so it comes after all checks of flags and
    path, and after the prediction, which is for the largest vocabulary that the text can give.
    Raises as `build_run`.
    """
    process.init_process_group()  # before this call the processes cannot communicate
    raise_if_ranks_differ(
        process.all_gather_object(facts_that_must_agree(settings, process, precision, origin))
    )
    path, resuming = settings.checkpoint_path, isinstance(origin, LoadedSnapshot)
    process.broadcast_from_rank0(lambda: check_path(path, resuming))
    vocab_size = process.run_on_all_ranks(
        lambda: largest_vocab_size(settings, tokenizer_of(origin))
    )
    with process.showing_message("predicting the memory of a step"):
        policy, plans, words = plan_run(settings, vocab_size, process, precision)
    data = process.run_on_all_ranks(lambda: load_run_data(settings, process, origin))
    prints = f"{data.fingerprint[:8]} {data.tokenizer.fingerprint[:8]}"
    data_facts: dict[str, object] = {"--train-data": f"{data.description}, fingerprint {prints}"}
    raise_if_ranks_differ(process.all_gather_object(data_facts))
    # (A trained bpe has fewer ids than --vocab-size if its training text has too few pairs to
    # merge, so the model gets the vocabulary size of the tokenizer.)
    config = settings.model_config(data.tokenizer.vocab_size)
    return data, replace(config, recompute=policy), plans, words


def facts_that_must_agree(
    settings: Settings,
    process: OneProcess,
    precision: torch.dtype,
    origin: SnapshotOrPretrained,
) -> dict[str, object]:
    """Return what must be the same in all processes before they read the data: name, mostly a flag
    -> value.

    A run on several machines is started by hand on each of them, with its own command line and its
    own disk. If one had another --lr, the weights of the processes would drift apart without an
    error.
    """
    snapshot = None
    if isinstance(origin, LoadedSnapshot):
        snapshot = f"step {origin.state['step']} of run {origin.state['run'][:8]}"
    checksum = origin.weights_checksum if isinstance(origin, Pretrained) else None
    must_agree = [name for name, row in ROWS.items() if Rule.PER_RANK not in row["rules"]]
    return {
        "--checkpoint-path": snapshot or "no snapshot to go on from",
        "--init-from": f"weights of checksum {checksum}",
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "the trainer": process.script,
        "--device": process.device.type,
        "--amp-dtype": str(precision).removeprefix("torch."),
        **{flag(name): getattr(settings, name) for name in must_agree},
    }


def raise_if_ranks_differ(of_each: list[dict[str, object]]) -> None:
    """Raise MiniGPTError for the first fact that differs between processes. `of_each`: the facts of
    each process, in the order of the ranks."""
    for name, value in of_each[0].items():
        for rank, of_rank in enumerate(of_each):
            if of_rank[name] != value:
                raise MiniGPTError(
                    f"{name}: rank 0 has {value}, rank {rank} has {of_rank[name]}: all processes "
                    "must have the same"
                )


# ---- Parts of a run


def tokenizer_of(origin: SnapshotOrPretrained) -> Tokenizer | None:
    """Return the tokenizer of a snapshot or of pretrained weights; None if `origin` is None. Raises
    DataError if a snapshot has none that this project knows."""
    if isinstance(origin, LoadedSnapshot):
        return Tokenizer.from_state(origin.state["tokenizer"])
    return origin.tokenizer if origin else None


def rename_old_files_and_open_logs(run: Run) -> None:
    """On rank 0, rename the files of an older run, and open metrics.jsonl and the logger of
    --log-to. Before this call, a new run has written none of its files except the lock."""
    settings, path, say = run.settings, run.settings.checkpoint_path, run.process.print0
    if run.process.rank > 0:
        return
    id_ = run.snapshot_metadata["run"]
    others = resume.files_of_other_runs(path, id_) if run.step else files_of_run(path)
    if renamed := rename_older_run(path, others):
        has_snapshot = any(map(os.path.exists, files_of_run(renamed)[:3]))
        go_on = f"; to go on with that one: --resume --checkpoint-path {shlex.quote(str(renamed))}"
        say(
            f"note     the files of another run at {path} become those of {renamed}"
            + go_on * has_snapshot
        )
    run.metric_writers.append(open_metrics(sibling_path(path, ".metrics.jsonl"), run.step))
    if settings.log_to != "none":
        log = open_logger(settings, run.snapshot_metadata, run.step, say)
        run.metric_writers.append(log)


def load_run_data(
    settings: Settings, process: OneProcess, origin: SnapshotOrPretrained = None
) -> Dataset:
    """Return the data that the flags of the group "data" describe, encoded with the tokenizer of
    `origin` if it has one. Raises DataError."""
    flags = {name: getattr(settings, name) for name in (*flags_with_rule(Rule.DATA), "data_seed")}
    return load_dataset(**flags, tokenizer=tokenizer_of(origin), say=process.print0)


def make_snapshot_metadata(
    settings: Settings,
    process: OneProcess,
    config: MiniGPTConfig,
    data: Dataset,
    resumed: LoadedSnapshot | None,
) -> State:
    """Return the part of a snapshot that identifies its run: plain types only, no tensors."""
    # Absolute paths, because --resume may run in another folder.
    paths: dict[str, Any] = {name: None for name in flags_with_rule(Rule.THIS_START)}
    for name in ("train_data", "val_data"):
        paths[name] = [os.path.abspath(path) for path in getattr(settings, name) or ()] or None
    paths["init_from"] = settings.init_from and os.path.abspath(settings.init_from)
    per_step = settings.batch_size * settings.grad_accum_steps * process.layout.replicas
    return {
        "run": resumed.state["run"] if resumed else process.run_id,
        "config": asdict(config),
        "args": settings.words(**paths),
        "tokenizer": data.tokenizer.state(),
        # On a CPU the number of threads decides how a sum is split, and thus how it is rounded; on
        # a GPU it has no effect.
        "threads": torch.get_num_threads() if process.device.type == "cpu" else None,
        "data": {
            "description": data.description,
            "fingerprint": data.fingerprint,
            "sequences_per_step": per_step,
        },
    }


def restored_progress(
    resumed: LoadedSnapshot, settings: Settings, process: OneProcess, metadata: State
) -> dict[str, Any]:
    """Return the fields of a Run that tell how far the resumed run was.

    If the snapshot is not the file at --checkpoint-path, that file could not be read. It is renamed
    and not deleted, because perhaps only the disk had a fault, and the file is intact.
    """
    state, path = resumed.state, settings.checkpoint_path
    if process.rank == 0 and resumed.path != path and os.path.lexists(path):
        os.replace(path, unused_path(path, ".damaged"))
    other_windows = "eval_tokens" in resume.changed_flags(state, metadata)
    best = math.inf if other_windows else state["best_val_loss"]
    return {"step": state["step"], "saved_step": state["step"], "best_val_loss": best}
