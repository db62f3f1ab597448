"""How a run is set up: data, model and optimizer, or the last snapshot of them."""

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from data import DataError, Dataset, Tokenizer, TrainBatches, ValBatches, find_dataset
from model import MiniGPT, MiniGPTConfig

from . import resume
from .check import check_techniques
from .clocks import make_clock
from .device import choose_precision, compile_blocks, set_matmul_precision
from .flags import UsageError, fill_in, flag, model_config, settle_length
from .metrics import NEEDS, check_logger, logged_at, open_logger, open_metrics
from .optimizer import make_optimizer
from .plan import Plan, plan_memory, vocabulary
from .pretrained import Origin, Pretrained, open_init_from
from .process import OneProcess
from .report import describe_run
from .run import Run
from .snapshot import (
    Resumed,
    SnapshotError,
    State,
    beside,
    bytes_of,
    check_name,
    check_shapes,
    claim,
    step_aside,
    take_place,
)

# Of these flags each process may have its own; all others decide what is trained, or when processes
# wait for each other. Paths are the machine's own, and "auto" may be what another machine types:
# what was found there and what was chosen is compared. By its budget each process may take a policy
# of its own; if all need the same, the smallest decides. What is logged and profiled is for process
# 0 alone.
OWN = set(
    "train_data val_data tokenizer_name checkpoint_path init_from device amp_dtype no_amp "
    "memory_budget log_to profile typed".split()
)
WAYS_OUT = {
    "--checkpoint-path": "all must see the same snapshot, on a disk that they share",
    "--init-from": "all must start from the same weights",
    "--device": "choose one that all have",
    "--amp-dtype": "choose one that all have",
    "--train-data": "all must have the same data and the same tokenizer",
    "torch": "install the same on all machines",
    "the trainer": "start the same on all machines",
}
# These may only follow from other flags, as the warm-up from --num-tokens: those are named first.
FOLLOW = "--data-seed --max-position-embeddings --num-steps --warmup-steps --lr --min-lr".split()
# What must be the same in all processes, under the name by which the user can change it.
Facts = dict[str, Any]

SCHEDULE = "num_steps lr min_lr lr_scheduler warmup_steps".split()


def start_run(
    args: argparse.Namespace, make_process: Callable[[argparse.Namespace], OneProcess]
) -> Run:
    """The run that the flags ask for; with --resume, those of the snapshot where none were typed.

    What a user can get wrong goes wrong here, before anything is written or trained.
    Raises UsageError, DataError or SnapshotError.
    """
    if args.resume and "init_from" in args.typed:
        raise UsageError("--init-from starts a run and --resume goes on with one: leave one out")
    resumed = None
    if args.resume:
        named, args.checkpoint_path = args.checkpoint_path, resume.own_name(args.checkpoint_path)
        resumed = resume.load_newest(args.checkpoint_path, named)
        resume.restore_flags(args, resumed)
    process = make_process(args)
    if resumed is None:
        # What this very run has saved, before torchrun started it again. The weights that it began
        # with are not needed then, and need not be there any more.
        resumed = resume.load_own(args.checkpoint_path, process.run_id)
        if resumed is not None and args.init_from is not None:
            resume.restore_flags(args, resumed)
    origin = resumed or open_init_from(args)
    fill_in(args, process.replicas)
    if resumed is not None:
        resume.check_flags(args, resumed)
    torch.autograd.set_detect_anomaly(args.detect_anomaly)
    if process.rank == 0:  # it alone logs
        check_logger(args.log_to)
    return set_up(args, process, origin)


def set_up(args: argparse.Namespace, process: OneProcess, origin: Origin = None) -> Run:
    """Data, model, optimizer; or the last snapshot of them. Raises what `start_run` does."""
    resumed = origin if isinstance(origin, Resumed) else None
    device, precision = process.device, choose_precision(args, process.device)
    set_matmul_precision(device, args.tf32)
    data, plan = agree(args, process, precision, origin)
    train = TrainBatches(data.train, args.batch_size, args.seq_len, args.data_seed, device)
    settle_length(args, process.replicas, train.n_windows)
    val = ValBatches(data.val, args.batch_size, args.seq_len, args.eval_tokens, device)
    identity = identify(args, process, plan.config, data)
    with torch.device("meta"):
        model = MiniGPT(plan.config)
    if buffers := [name for name, _ in model.named_buffers()]:
        raise UsageError(
            "model.py: a model gets its memory after it is made, so the numbers in the buffer "
            f"{buffers[0]} would be lost: compute them in forward"
        )
    if resumed is not None:
        check_shapes(resumed.path, resumed.state["model"], model.state_dict())
        resume.check_resumable(resumed.state, identity, resumed.path)
        identity["run"] = resumed.state.get("run")
    # (By all: each may have a policy of its own, under which it alone finds something wrong.)
    process.by_all(lambda: check_techniques(model, device, precision, process.sharing > 1))
    held_lock = process.by_first(lambda: claim(args.checkpoint_path, resumed))
    process.place(model)
    if isinstance(origin, Pretrained):
        origin.fill(model, process.part)
    elif origin is None:
        torch.manual_seed(args.seed)
        model.init_weights(process.part)
    optimizer = make_optimizer(model, args, device, precision)
    clock = make_clock(args, process, model, optimizer, plan.peaks)
    run = Run(args, process, data, identity, model, optimizer, precision, train, val, clock)
    run.held_lock, run.next_policy = held_lock, plan.next_policy
    if resumed is not None:
        go_on_from(resumed, run)
    if process.rank == 0:  # it looks at files
        process.say(describe_run(run, plan.words, origin))
    if args.compile:
        compile_blocks(model)
    run.wrapped = process.wrap(model)
    return run


def agree(
    args: argparse.Namespace, process: OneProcess, precision: torch.dtype, origin: Origin
) -> tuple[Dataset, Plan]:
    """Data, model's shape and the memory of a step: the same in all processes.

    A long text takes long to be encoded, into data/cache. So the step is planned before, with the
    largest vocabulary that the text can have; and what is wrong with anything else is told.
    """
    process.start()  # so far each process by itself; from here on together
    check_alike(process.exchange(facts(args, process, precision, origin)))
    resuming = isinstance(origin, Resumed)
    process.by_first(lambda: check_name(args.checkpoint_path, resuming))
    # Until they are restored: a step does not need them twice.
    held = bytes_of(origin.state) if isinstance(origin, Resumed) else 0
    config = model_config(args, process.by_all(lambda: most_ids(args, origin)))
    with process.waiting("predicting the memory of a step"):
        plan = plan_memory(args, process, config, precision, held)
    data = process.by_all(lambda: find_data(args, process, origin))
    check_alike(process.exchange(data_facts(data)))
    # (A bpe has fewer ids if its text has no more pairs.)
    config = replace(plan.config, vocab_size=data.tokenizer.vocab_size)
    return data, plan._replace(config=config)


# ---- Do all processes train the same? What each says of itself when they meet, and what differs.
#
# Several machines are started by hand, each with a command line and a disk of its own. With another
# --lr on one of them the weights would drift apart without a word.


def facts(
    args: argparse.Namespace, process: OneProcess, precision: torch.dtype, origin: Origin
) -> Facts:
    """All but the data."""
    snapshot = "no snapshot to go on from"
    if isinstance(origin, Resumed):
        snapshot = f"step {origin.state['step']} of run {str(origin.state.get('run'))[:8]}"
    checksum = origin.checksum if isinstance(origin, Pretrained) else None
    return {
        "--checkpoint-path": snapshot,
        "--init-from": f"weights of checksum {checksum}",
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "the trainer": process.script,
        "--device": process.device.type,
        "--amp-dtype": str(precision).removeprefix("torch."),
        **{flag(name): value for name, value in vars(args).items() if name not in OWN},
    }


def data_facts(data: Dataset) -> Facts:
    """What must be the same of the data."""
    prints = f"{data.fingerprint[:8]} {data.tokenizer.fingerprint[:8]}"
    return {"--train-data": f"{data.description}, fingerprint {prints}"}


def check_alike(of_each: list[Facts]) -> None:
    """Raise UsageError for the first thing in which the processes differ; `of_each`: by rank."""
    first = of_each[0]
    for name in sorted(first, key=FOLLOW.__contains__):
        for rank, facts in enumerate(of_each):
            if facts[name] != first[name]:
                way_out = WAYS_OUT.get(name, "start all with the same flags")
                has = f"rank 0 has {show(first[name])}, rank {rank} has {show(facts[name])}"
                raise UsageError(f"{name}: {has}: {way_out}")


def show(value: object) -> str:
    words = {True: "on", False: "off", None: "none"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


# ---- Parts of a run


def most_ids(args: argparse.Namespace, origin: Origin) -> int:
    """The largest vocabulary that the run can have, known without its data. Raises DataError, or
    SnapshotError as `tokenizer_of` does."""
    tokenizer = tokenizer_of(origin)
    return tokenizer.vocab_size if tokenizer else vocabulary(args)


def tokenizer_of(origin: Origin) -> Tokenizer | None:
    """The tokenizer of the run that goes on, or of the weights that it starts from; None: of
    neither. Raises SnapshotError if what a snapshot holds is none."""
    if not isinstance(origin, Resumed):
        return origin.tokenizer if origin else None
    try:
        return Tokenizer.from_state(origin.state["tokenizer"])
    except DataError as error:
        raise SnapshotError(f"{origin.path} holds {error}") from None


def start_log(run: Run, next_rate: float) -> None:
    """The first that is written: an older run's files are renamed, metrics.jsonl is opened.

    `next_rate`: the learning rate of the next step, which may come as a surprise after --resume.
    """
    path = run.args.checkpoint_path
    if run.rate_before is not None and f"{run.rate_before:.2e}" != f"{next_rate:.2e}":
        run.process.say(
            f"resume   the learning rate was {run.rate_before:.2e} at step {run.step:,} and is "
            f"{next_rate:.2e} at the next: the schedule is another one now"
        )
    if run.process.rank == 0:
        if run.step == 0:
            step_aside(path)
        run.metric_writers.append(open_metrics(beside(path, ".metrics.jsonl"), run.step))
        if run.args.log_to in NEEDS:
            log = open_logger(run.args, run.identity, run.step, run.process.say)
            run.metric_writers.append(log)


def find_data(args: argparse.Namespace, process: OneProcess, origin: Origin = None) -> Dataset:
    """What the flags of the group "data" ask for, by `tokenizer_of(origin)` if there is one.

    Raises DataError, or SnapshotError if that is none.
    """
    flags = {name: getattr(args, name) for name in [*resume.DATA, "data_seed", "seq_len"]}
    return find_dataset(**flags, tokenizer=tokenizer_of(origin), say=process.say)


def identify(
    args: argparse.Namespace, process: OneProcess, config: MiniGPTConfig, data: Dataset
) -> State:
    """The part of a snapshot that says which run it is of (plain types, no tensors)."""
    # (--profile is of this start, and not of the run: --resume does not take it over.)
    flags = {name: v for name, v in vars(args).items() if name not in ("typed", "profile")}
    flags["checkpoint_path"] = str(args.checkpoint_path)
    for name in ("train_data", "val_data"):  # from the root: --resume may come from elsewhere
        flags[name] = flags[name] and [os.path.abspath(path) for path in flags[name]]
    flags["init_from"] = args.init_from and os.path.abspath(args.init_from)
    return {
        "run": process.run_id,
        "config": asdict(config),
        "args": flags,
        "typed": sorted(args.typed & flags.keys()),
        "tokenizer": data.tokenizer.state(),
        # That share a sum, and so decide how it is rounded; a GPU's are its own.
        "threads": torch.get_num_threads() if process.device.type == "cpu" else None,
        "data": {
            "description": data.description,
            "fingerprint": data.fingerprint,
            "sequences_per_step": args.batch_size * args.grad_accum_steps * process.replicas,
        },
    }


def go_on_from(resumed: Resumed, run: Run) -> None:
    """Put the run where the snapshot left it."""
    args, process = run.args, run.process
    resume.restore(resumed, run)
    run.step = run.saved_step = resumed.state["step"]
    record = resumed.state.get("record", {})
    if resumed.path != args.checkpoint_path and process.rank == 0:
        take_place(resumed.path, args.checkpoint_path)
    # The snapshot was written before its step was evaluated and logged. Was that still done?
    # Process 0 alone has the log.
    log = beside(args.checkpoint_path, ".metrics.jsonl")
    logged = process.exchange(process.by_first(lambda: logged_at(run.step, log)))[0] or {}
    run.unreported = {} if logged else dict(record)
    if resume.validation_of(resumed.state) == resume.validation_of(run.identity):
        run.best_val_loss = min(resumed.state["best_val_loss"], logged.get("val_loss") or math.inf)
    saved = resumed.state["args"]
    if any(saved.get(name) != getattr(args, name) for name in SCHEDULE):
        run.rate_before = record.get("lr")
