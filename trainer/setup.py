"""Set up a run: data, model and optimizer, from the beginning or from a snapshot."""

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from data import DataError, Dataset, Tokenizer, TrainBatches, ValBatches, load_dataset
from data.errors import MiniGPTError
from model import MiniGPTConfig

from . import resume
from .check_model import check_model, make_model_without_memory, make_small_model
from .clocks import make_clock
from .device import (
    check_compiler,
    choose_precision,
    compile_blocks,
    import_compiler,
    set_matmul_precision,
)
from .flags import (
    flag,
    model_config,
    recompute_plan_of,
    resolve_defaults,
    set_num_steps,
)
from .metrics import (
    LOGGER_MODULES,
    check_logger,
    find_logged_record,
    open_external_logger,
    open_metrics,
)
from .optimizer import make_optimizer
from .plan import MemoryPlan, plan_memory, vocab_size_of
from .pretrained import Pretrained, SnapshotOrPretrained, computes_gpt2, open_init_from
from .process import OneProcess
from .report import describe_run
from .run import Run
from .snapshot import (
    LoadedSnapshot,
    SnapshotError,
    State,
    check_no_path_conflict,
    check_shapes,
    claim,
    copy_as_newest_snapshot,
    rename_older_run,
    sibling_path,
)

# Flags that may differ between processes. All other flags must be equal, because they decide what
# is trained, or when processes wait for each other.
#
# Paths may differ between machines. With --device and --amp-dtype, one machine may have "auto"
# where another names a device or a dtype. Processes do not compare these flags. They compare the
# data, the snapshot, the weights, and the chosen device and dtype. --memory-budget may always
# differ: either each process chooses its own policy, or the smallest budget decides for all.
# --log-to and --profile have an effect on rank 0 only. (`typed` is no flag, but the set of the
# flags that the user typed.)
MAY_DIFFER = set(
    "train_data val_data tokenizer_name checkpoint_path init_from device amp_dtype no_amp "
    "memory_budget log_to profile typed".split()
)
# Name in `ConsistencyFactByName` -> advice if processes differ in this fact.
RANK_MISMATCH_HINTS = {
    "--checkpoint-path": "all must see the same snapshot, on a disk that they share",
    "--init-from": "all must start from the same weights",
    "--device": "choose one that all have",
    "--amp-dtype": "choose one that all have",
    "--train-data": "all must have the same data and the same tokenizer",
    "torch": "install the same on all machines",
    "the trainer": "start the same on all machines",
}
# Flags whose values may follow from another flag, as --warmup-steps follows from --num-tokens. If
# processes differ in several flags, the error names a flag that is not in this list, because that
# flag may be the cause of the other differences.
DERIVED_FLAGS = (
    "--data-seed --max-position-embeddings --num-steps --warmup-steps --lr --min-lr".split()
)
# Values that must be the same in all processes. The keys are names that the user knows, mostly
# flags.
ConsistencyFactByName = dict[str, Any]


def set_up_from_flags(
    args: argparse.Namespace, make_process: Callable[[argparse.Namespace], OneProcess]
) -> Run:
    """Set up the run that the flags describe. With --resume, the snapshot supplies the flags that
    are not typed.

    All mistakes that a user can make are found here, before the run writes or trains anything.
    Raises MiniGPTError for a mistake, and for a step that needs more memory than the device has.
    """
    if args.resume and "init_from" in args.typed:
        raise MiniGPTError("--init-from starts a run and --resume goes on with one: leave one out")
    resumed = None
    if args.resume:
        resumed = resume.load_newest(args.checkpoint_path)
        resume.restore_flags(args, resumed)
    process = make_process(args)
    if resumed is None:
        # If torchrun has restarted this run, resume from the snapshot that the run itself has
        # saved. The weights of --init-from are not needed then, and may have been deleted.
        resumed = resume.load_own_run(args.checkpoint_path, process.run_id)
        if resumed is not None and args.init_from is not None:
            resume.restore_flags(args, resumed)
    origin = resumed or open_init_from(args)
    resolve_defaults(args, process.replicas)
    if args.mlp_chunks != 1 and not recompute_plan_of(args).supports_mlp_chunks:
        process.print0(
            f"note     --mlp-chunks {args.mlp_chunks}: --use-activation-checkpoint "
            f"{args.use_activation_checkpoint} recomputes no MLP half; mlp, sdpa and full do"
        )
    if resumed is not None:
        resume.check_flags(args, resumed)
    torch.autograd.set_detect_anomaly(args.detect_anomaly)
    if process.rank == 0:  # only rank 0 logs
        check_logger(args.log_to)
    return build_run(args, process, origin)


def build_run(
    args: argparse.Namespace, process: OneProcess, origin: SnapshotOrPretrained = None
) -> Run:
    """Make the data, the model and the optimizer of a run, and return the run.

    `origin`: the snapshot or the pretrained weights from which the run starts; None: draw random
    weights. Raises the errors of `set_up_from_flags`.
    """
    import_compiler()
    resumed = origin if isinstance(origin, LoadedSnapshot) else None
    device, precision = process.device, choose_precision(args, process.device)
    set_matmul_precision(device, args.tf32)
    data, plan = load_data_and_plan(args, process, precision, origin)
    train = TrainBatches(
        data.train_token_files, args.batch_size, args.seq_len, args.data_seed, device
    )
    set_num_steps(args, process.replicas, train.n_windows)
    val = ValBatches(data.val_token_files, args.batch_size, args.seq_len, args.eval_tokens, device)
    snapshot_metadata = make_snapshot_metadata(args, process, plan.config, data)
    torch.manual_seed(args.seed)  # for parameters that model.py itself draws
    model = make_model_without_memory(plan.config, process.make_model)
    if resumed is not None:
        check_shapes(resumed.path, resumed.state["model"], model.state_dict())
        resume.check_resumable(resumed.state, snapshot_metadata, resumed.path)
        snapshot_metadata["run"] = resumed.state.get("run")
    check = partial(check_model, model, process, precision)
    process.run_on_all_ranks(check)  # (each rank may have its own policy)
    of_gpt2 = isinstance(origin, Pretrained) and os.path.isdir(origin.path)
    if of_gpt2 and process.rank == 0 and not computes_gpt2(make_small_model(plan.config)):
        process.print0(
            f"warning  --init-from {args.init_from}: model.py computes something else than GPT-2 "
            "with these weights"
        )
    if args.compile:
        process.run_on_all_ranks(lambda: check_compiler(device))
    held_lock = process.run_on_rank0_only(lambda: claim(args.checkpoint_path, resumed))
    process.allocate_parameters(model)
    if isinstance(origin, Pretrained):
        origin.fill(model, process.shard_like)
    elif origin is None:
        torch.manual_seed(args.seed)
        model.init_weights(process.shard_like)
    optimizer = make_optimizer(model, args, device, precision)
    clock = make_clock(args, process, model, optimizer, plan.planned_and_plain_peaks)
    run = Run(
        args, process, data, snapshot_metadata, model, optimizer, precision, train, val, clock
    )
    run.held_lock, run.policies, run.check_techniques = held_lock, plan.policies, check
    if resumed is not None:
        restore_run(resumed, run)
    if process.rank == 0:  # only on rank 0, because `describe_run` reads files
        process.print0(describe_run(run, plan.words, origin))
    if args.compile:
        compile_blocks(model)
    run.wrapped_model = process.wrap(model)
    return run


def load_data_and_plan(
    args: argparse.Namespace,
    process: OneProcess,
    precision: torch.dtype,
    origin: SnapshotOrPretrained,
) -> tuple[Dataset, MemoryPlan]:
    """Load the data and predict the memory of a step. Check that all processes train the same model
    on the same data.

    Encoding a long text (into data/cache) takes long. So before the text is encoded, this function
    checks the flags and the path, and predicts the memory. This prediction is for the largest
    vocabulary that the text can give. Raises the errors of `set_up_from_flags`.
    """
    process.init_process_group()  # before this call the processes cannot communicate
    check_same_on_all_ranks(
        process.all_gather_object(consistency_facts(args, process, precision, origin))
    )
    resuming = isinstance(origin, LoadedSnapshot)
    process.run_on_rank0_only(lambda: check_no_path_conflict(args.checkpoint_path, resuming))
    config = model_config(
        args, process.run_on_all_ranks(lambda: vocab_size_upper_bound(args, origin))
    )
    with process.showing_message("predicting the memory of a step"):
        plan = plan_memory(args, process, config, precision)
    data = process.run_on_all_ranks(lambda: find_data(args, process, origin))
    check_same_on_all_ranks(process.all_gather_object(data_consistency_facts(data)))
    # (A trained bpe has fewer ids than --vocab-size if its training text has too few pairs to
    # merge. So the model gets the vocabulary size of the tokenizer.)
    config = replace(plan.config, vocab_size=data.tokenizer.vocab_size)
    return data, plan._replace(config=config)


# ---- Check that all processes train the same model on the same data. Each process sends its facts
# to all others. Then the facts of each rank are compared with the facts of rank 0.
#
# A run on several machines is started by hand on each machine, and each machine has its own command
# line and its own disk. If one machine had another --lr, the weights of the processes would drift
# apart without an error.


def consistency_facts(
    args: argparse.Namespace,
    process: OneProcess,
    precision: torch.dtype,
    origin: SnapshotOrPretrained,
) -> ConsistencyFactByName:
    """Return all facts that must be the same in all processes, except the facts about the data."""
    snapshot = "no snapshot to go on from"
    if isinstance(origin, LoadedSnapshot):
        snapshot = f"step {origin.state['step']} of run {str(origin.state.get('run'))[:8]}"
    checksum = origin.weights_checksum if isinstance(origin, Pretrained) else None
    return {
        "--checkpoint-path": snapshot,
        "--init-from": f"weights of checksum {checksum}",
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "the trainer": process.script,
        "--device": process.device.type,
        "--amp-dtype": str(precision).removeprefix("torch."),
        **{flag(name): value for name, value in vars(args).items() if name not in MAY_DIFFER},
    }


def data_consistency_facts(data: Dataset) -> ConsistencyFactByName:
    """Return the facts about the data that must be the same in all processes."""
    prints = f"{data.fingerprint[:8]} {data.tokenizer.fingerprint[:8]}"
    return {"--train-data": f"{data.description}, fingerprint {prints}"}


def check_same_on_all_ranks(of_each: list[ConsistencyFactByName]) -> None:
    """Raise MiniGPTError for the first fact that differs between processes.

    `of_each`: the facts of each process, in the order of the ranks.
    """
    first = of_each[0]
    for name in sorted(first, key=DERIVED_FLAGS.__contains__):
        for rank, facts in enumerate(of_each):
            if facts[name] != first[name]:
                hint = RANK_MISMATCH_HINTS.get(name, "start all with the same flags")
                difference = f"rank 0 has {first[name]}, rank {rank} has {facts[name]}"
                raise MiniGPTError(f"{name}: {difference}: {hint}")


# ---- Parts of a run


def vocab_size_upper_bound(args: argparse.Namespace, origin: SnapshotOrPretrained) -> int:
    """Return the largest vocabulary size that the run can have, without reading the data.

    Raises DataError, or SnapshotError as `tokenizer_of_origin` does.
    """
    tokenizer = tokenizer_of_origin(origin)
    return tokenizer.vocab_size if tokenizer else vocab_size_of(args)


def tokenizer_of_origin(origin: SnapshotOrPretrained) -> Tokenizer | None:
    """Return the tokenizer of a snapshot or of pretrained weights; None if `origin` is None.

    Raises SnapshotError if the snapshot contains no valid tokenizer.
    """
    if not isinstance(origin, LoadedSnapshot):
        return origin.tokenizer if origin else None
    try:
        return Tokenizer.from_state(origin.state["tokenizer"])
    except DataError as error:
        raise SnapshotError(f"{origin.path} holds {error}") from None


def archive_and_open_logs(run: Run) -> None:
    """On rank 0, rename the files of an older run, and open metrics.jsonl and the logger of
    --log-to.

    Before this call, a new run has written none of its files except the lock.
    """
    path = run.args.checkpoint_path
    if run.process.rank == 0:
        if run.step == 0:
            rename_older_run(path)
        run.metric_writers.append(open_metrics(sibling_path(path, ".metrics.jsonl"), run.step))
        if run.args.log_to in LOGGER_MODULES:
            log = open_external_logger(
                run.args, run.snapshot_metadata, run.step, run.process.print0
            )
            run.metric_writers.append(log)


def find_data(
    args: argparse.Namespace, process: OneProcess, origin: SnapshotOrPretrained = None
) -> Dataset:
    """Return the data that the flags of the group "data" describe.

    If `origin` has a tokenizer, the text is encoded with that tokenizer. Raises DataError, or
    SnapshotError as `tokenizer_of_origin` does.
    """
    flags = {name: getattr(args, name) for name in [*resume.DATA_FLAGS, "data_seed", "seq_len"]}
    return load_dataset(**flags, tokenizer=tokenizer_of_origin(origin), say=process.print0)


def make_snapshot_metadata(
    args: argparse.Namespace, process: OneProcess, config: MiniGPTConfig, data: Dataset
) -> State:
    """Return the part of a snapshot that identifies its run. This part has plain types only, no
    tensors."""
    # (--profile is for one start of the run only, so --resume does not restore it.)
    flags = {name: v for name, v in vars(args).items() if name not in ("typed", "profile")}
    flags["checkpoint_path"] = str(args.checkpoint_path)
    for name in ("train_data", "val_data"):  # absolute, because --resume may run in another folder
        flags[name] = flags[name] and [os.path.abspath(path) for path in flags[name]]
    flags["init_from"] = args.init_from and os.path.abspath(args.init_from)
    return {
        "run": process.run_id,
        "config": asdict(config),
        "args": flags,
        "typed": sorted(args.typed & flags.keys()),
        "tokenizer": data.tokenizer.state(),
        # On a CPU, threads split a sum, so the number of threads decides how the sum is rounded. On
        # a GPU the number of threads has no effect.
        "threads": torch.get_num_threads() if process.device.type == "cpu" else None,
        "data": {
            "description": data.description,
            "fingerprint": data.fingerprint,
            "sequences_per_step": args.batch_size * args.grad_accum_steps * process.replicas,
        },
    }


def restore_run(resumed: LoadedSnapshot, run: Run) -> None:
    """Give a new run the state of a snapshot: weights, optimizer, step, best validation loss.

    If the snapshot is not the file at --checkpoint-path, the snapshot is copied there, and becomes
    the newest one. Raises SnapshotError if the snapshot does not fit.
    """
    args, process = run.args, run.process
    resume.restore_model_and_optimizer(resumed, run)
    run.step = run.saved_step = resumed.state["step"]
    record = resumed.state.get("record", {})
    if resumed.path != args.checkpoint_path and process.rank == 0:
        copy_as_newest_snapshot(resumed.path, args.checkpoint_path)
    # A snapshot is written before its step is evaluated and logged. The log, which only rank 0 has,
    # tells whether the step was logged before the run ended.
    log = sibling_path(args.checkpoint_path, ".metrics.jsonl")
    logged = (
        process.all_gather_object(
            process.run_on_rank0_only(lambda: find_logged_record(run.step, log))
        )[0]
        or {}
    )
    run.unlogged_record = {} if logged else dict(record)
    if resume.validation_key(resumed.state) == resume.validation_key(run.snapshot_metadata):
        run.best_val_loss = min(resumed.state["best_val_loss"], logged.get("val_loss") or math.inf)
