"""Set up a run: data, model and optimizer, from scratch or from a snapshot."""

import argparse
import copy
import math
import os
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from data import DataError, Dataset, Tokenizer, TrainBatches, ValBatches, find_dataset
from memory import POLICIES, recompute_plan
from memory.policies import activation_checkpoint, default_generator
from model import MiniGPT, MiniGPTConfig

from . import resume
from .clocks import make_clock
from .device import choose_precision, compile_blocks, set_matmul_precision
from .flags import (
    UsageError,
    flag,
    model_config,
    recompute_plan_of,
    resolve_defaults,
    resolve_num_steps,
)
from .metrics import NEEDS, check_logger, logged_at, open_logger, open_metrics
from .optimizer import make_optimizer
from .plan import MemoryPlan, plan_memory, vocab_size_of
from .pretrained import Origin, Pretrained, open_init_from
from .process import OneProcess
from .report import describe_run
from .run import Run
from .snapshot import (
    LoadedSnapshot,
    SnapshotError,
    State,
    bytes_of,
    check_path,
    check_shapes,
    claim,
    promote_snapshot,
    rename_older_run,
    sibling_path,
)

# These flags may differ between processes; all other flags decide what is trained, or when
# processes wait for each other. Paths differ between machines, and one machine may have "auto"
# where another names a device or a dtype: the data and the choice are compared instead. With its
# own memory budget each process may choose its own policy; where all need the same policy, the
# smallest budget decides. Only rank 0 logs and profiles.
MAY_DIFFER = set(
    "train_data val_data tokenizer_name checkpoint_path init_from device amp_dtype no_amp "
    "memory_budget log_to profile typed".split()
)
HINTS = {
    "--checkpoint-path": "all must see the same snapshot, on a disk that they share",
    "--init-from": "all must start from the same weights",
    "--device": "choose one that all have",
    "--amp-dtype": "choose one that all have",
    "--train-data": "all must have the same data and the same tokenizer",
    "torch": "install the same on all machines",
    "the trainer": "start the same on all machines",
}
# A difference in these flags may follow from another flag (the warm-up from --num-tokens, for
# example). So a difference in other flags is reported first.
DERIVED_FLAGS = (
    "--data-seed --max-position-embeddings --num-steps --warmup-steps --lr --min-lr".split()
)
# Values that must be the same in all processes, by the name under which the user can change them.
Facts = dict[str, Any]


def start_run(
    args: argparse.Namespace, make_process: Callable[[argparse.Namespace], OneProcess]
) -> Run:
    """Set up the run that the flags ask for; with --resume the snapshot supplies untyped flags.

    All mistakes that a user can make are found here, before anything is written or trained.
    Raises UsageError, DataError or SnapshotError, and PredictedOutOfMemory if a step can never fit.
    """
    if args.resume and "init_from" in args.typed:
        raise UsageError("--init-from starts a run and --resume goes on with one: leave one out")
    resumed = None
    if args.resume:
        resumed = resume.load_newest(args.checkpoint_path)
        resume.restore_flags(args, resumed)
    process = make_process(args)
    if resumed is None:
        # If torchrun has restarted this run, resume from what the run itself has saved. The weights
        # of --init-from are not needed then, and may have been deleted.
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
    return set_up(args, process, origin)


def set_up(args: argparse.Namespace, process: OneProcess, origin: Origin = None) -> Run:
    """Make data, model and optimizer, and start from `origin`, a snapshot or pretrained weights.

    `origin` None: draw the weights. Raises what `start_run` does.
    """
    resumed = origin if isinstance(origin, LoadedSnapshot) else None
    device, precision = process.device, choose_precision(args, process.device)
    set_matmul_precision(device, args.tf32)
    data, plan = load_data_and_plan(args, process, precision, origin)
    train = TrainBatches(data.train, args.batch_size, args.seq_len, args.data_seed, device)
    resolve_num_steps(args, process.replicas, train.n_windows)
    val = ValBatches(data.val, args.batch_size, args.seq_len, args.eval_tokens, device)
    identity = run_info(args, process, plan.config, data)
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
    check = partial(check_techniques, model, device, precision, process.sp_degree > 1)
    process.run_on_all_ranks(check)  # (each rank may have its own policy)
    held_lock = process.run_on_rank0(lambda: claim(args.checkpoint_path, resumed))
    process.materialize(model)
    if isinstance(origin, Pretrained):
        origin.fill(model, process.local_shard)
    elif origin is None:
        torch.manual_seed(args.seed)
        model.init_weights(process.local_shard)
    optimizer = make_optimizer(model, args, device, precision)
    clock = make_clock(args, process, model, optimizer, plan.peaks)
    run = Run(args, process, data, identity, model, optimizer, precision, train, val, clock)
    run.held_lock, run.next_smaller_step, run.check = held_lock, plan.next_smaller_step, check
    if resumed is not None:
        continue_from(resumed, run)
    if process.rank == 0:  # only there, because `describe_run` reads files
        process.print0(describe_run(run, plan.words, origin))
    if args.compile:
        compile_blocks(model)
    run.wrapped = process.wrap(model)
    return run


def load_data_and_plan(
    args: argparse.Namespace, process: OneProcess, precision: torch.dtype, origin: Origin
) -> tuple[Dataset, MemoryPlan]:
    """Load the data and predict the memory of a step; check that all processes train the same.

    Encoding a long text (into data/cache) takes long. So the memory is predicted before, with the
    largest vocabulary that the text can have, and all other mistakes are found before, too.
    Raises what `start_run` does.
    """
    process.init_process_group()  # until here each process worked alone; from here on together
    check_same_on_all_ranks(
        process.all_gather_object(consistency_facts(args, process, precision, origin))
    )
    resuming = isinstance(origin, LoadedSnapshot)
    process.run_on_rank0(lambda: check_path(args.checkpoint_path, resuming))
    # Bytes of CPU memory that the snapshot's tensors take until they are restored.
    held = bytes_of(origin.state) if isinstance(origin, LoadedSnapshot) else 0
    config = model_config(args, process.run_on_all_ranks(lambda: max_vocab_size(args, origin)))
    with process.progress_message("predicting the memory of a step"):
        plan = plan_memory(args, process, config, precision, held)
    data = process.run_on_all_ranks(lambda: find_data(args, process, origin))
    check_same_on_all_ranks(process.all_gather_object(data_consistency_facts(data)))
    # (A trained bpe has fewer ids than --vocab-size if its text has too few pairs to merge.)
    config = replace(plan.config, vocab_size=data.tokenizer.vocab_size)
    return data, plan._replace(config=config)


# ---- Check that all processes train the same: each sends its facts, and rank 0's are compared.
#
# Several machines are started by hand, each with its own command line and its own disk. If one of
# them had another --lr, the weights would drift apart without an error.


def consistency_facts(
    args: argparse.Namespace, process: OneProcess, precision: torch.dtype, origin: Origin
) -> Facts:
    """Return all facts that must be the same in all processes, except those of the data."""
    snapshot = "no snapshot to go on from"
    if isinstance(origin, LoadedSnapshot):
        snapshot = f"step {origin.state['step']} of run {str(origin.state.get('run'))[:8]}"
    checksum = origin.checksum if isinstance(origin, Pretrained) else None
    return {
        "--checkpoint-path": snapshot,
        "--init-from": f"weights of checksum {checksum}",
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "the trainer": process.script,
        "--device": process.device.type,
        "--amp-dtype": str(precision).removeprefix("torch."),
        **{flag(name): value for name, value in vars(args).items() if name not in MAY_DIFFER},
    }


def data_consistency_facts(data: Dataset) -> Facts:
    """Return the facts of the data that must be the same in all processes."""
    prints = f"{data.fingerprint[:8]} {data.tokenizer.fingerprint[:8]}"
    return {"--train-data": f"{data.description}, fingerprint {prints}"}


def check_same_on_all_ranks(of_each: list[Facts]) -> None:
    """Raise UsageError for the first fact in which processes differ. `of_each`: facts by rank."""
    first = of_each[0]
    for name in sorted(first, key=DERIVED_FLAGS.__contains__):
        for rank, facts in enumerate(of_each):
            if facts[name] != first[name]:
                hint = HINTS.get(name, "start all with the same flags")
                difference = f"rank 0 has {first[name]}, rank {rank} has {facts[name]}"
                raise UsageError(f"{name}: {difference}: {hint}")


# ---- Parts of a run


def max_vocab_size(args: argparse.Namespace, origin: Origin) -> int:
    """Return the largest number of token ids that the run can have, without reading its data.

    Raises DataError, or SnapshotError as `tokenizer_of` does.
    """
    tokenizer = tokenizer_of(origin)
    return tokenizer.vocab_size if tokenizer else vocab_size_of(args)


def tokenizer_of(origin: Origin) -> Tokenizer | None:
    """Return the tokenizer of the snapshot or of the pretrained weights; None if there is none.

    Raises SnapshotError if the snapshot holds no valid tokenizer.
    """
    if not isinstance(origin, LoadedSnapshot):
        return origin.tokenizer if origin else None
    try:
        return Tokenizer.from_state(origin.state["tokenizer"])
    except DataError as error:
        raise SnapshotError(f"{origin.path} holds {error}") from None


def archive_and_open_logs(run: Run) -> None:
    """Rename an older run's files and open metrics.jsonl, on rank 0: the run's first writes.

    Also opens the logger of --log-to.
    """
    path = run.args.checkpoint_path
    if run.process.rank == 0:
        if run.step == 0:
            rename_older_run(path)
        run.metric_writers.append(open_metrics(sibling_path(path, ".metrics.jsonl"), run.step))
        if run.args.log_to in NEEDS:
            log = open_logger(run.args, run.run_info, run.step, run.process.print0)
            run.metric_writers.append(log)


def find_data(args: argparse.Namespace, process: OneProcess, origin: Origin = None) -> Dataset:
    """Return the data that the flags of the group "data" ask for.

    The text is encoded with `tokenizer_of(origin)`, if there is one. Raises DataError, or
    SnapshotError as `tokenizer_of` does.
    """
    flags = {name: getattr(args, name) for name in [*resume.DATA, "data_seed", "seq_len"]}
    return find_dataset(**flags, tokenizer=tokenizer_of(origin), say=process.print0)


def run_info(
    args: argparse.Namespace, process: OneProcess, config: MiniGPTConfig, data: Dataset
) -> State:
    """Return the part of a snapshot that identifies its run, in plain types, without tensors."""
    # (--profile belongs to one start of the run, not to the run: --resume does not restore it.)
    flags = {name: v for name, v in vars(args).items() if name not in ("typed", "profile")}
    flags["checkpoint_path"] = str(args.checkpoint_path)
    for name in ("train_data", "val_data"):  # absolute: --resume may run in another folder
        flags[name] = flags[name] and [os.path.abspath(path) for path in flags[name]]
    flags["init_from"] = args.init_from and os.path.abspath(args.init_from)
    return {
        "run": process.run_id,
        "config": asdict(config),
        "args": flags,
        "typed": sorted(args.typed & flags.keys()),
        "tokenizer": data.tokenizer.state(),
        # CPU threads split a sum, so their number decides how it is rounded. On a GPU it does not.
        "threads": torch.get_num_threads() if process.device.type == "cpu" else None,
        "data": {
            "description": data.description,
            "fingerprint": data.fingerprint,
            "sequences_per_step": args.batch_size * args.grad_accum_steps * process.replicas,
        },
    }


def continue_from(resumed: LoadedSnapshot, run: Run) -> None:
    """Give a new run the state of a snapshot: weights, optimizer, step, best validation loss.

    If the snapshot is not the newest file of the run, it becomes that. Raises SnapshotError if the
    snapshot does not fit.
    """
    args, process = run.args, run.process
    resume.restore_model_and_optimizer(resumed, run)
    run.step = run.saved_step = resumed.state["step"]
    record = resumed.state.get("record", {})
    if resumed.path != args.checkpoint_path and process.rank == 0:
        promote_snapshot(resumed.path, args.checkpoint_path)
    # A snapshot is written before its step is evaluated and logged. Look in the log, which only
    # rank 0 has, whether that was still done.
    log = sibling_path(args.checkpoint_path, ".metrics.jsonl")
    logged = (
        process.all_gather_object(process.run_on_rank0(lambda: logged_at(run.step, log)))[0] or {}
    )
    run.resumed_record = {} if logged else dict(record)
    if resume.validation_key(resumed.state) == resume.validation_key(run.run_info):
        run.best_val_loss = min(resumed.state["best_val_loss"], logged.get("val_loss") or math.inf)


# ---- Check the policies against model.py, which a user may have changed.
#
# A policy calls the parts of a block and has no arithmetic of its own, so it follows a changed
# part. But a recompute must give the same results as forward, and some lines prevent that: a random
# number although config.dropout is 0, for example, or a counter of calls. And the chunked loss is
# in memory/head.py, apart from model.py. So each technique is compared with model.py without it.

N_CHECK_TOKENS = 8  # number of tokens in these comparisons


def check_techniques(
    model: MiniGPT, device: torch.device, precision: torch.dtype, shared: bool = False
) -> None:
    """Compare the techniques that a model's config asks for with model.py without them.

    One block of each kind runs forward and backward on a few tokens, with its policy and without.
    Its result and all gradients must be equal to the bit; the loss and its gradients must be equal
    up to rounding. The model may be on device "meta", and is not changed.

    `precision`: dtype of autocast; float32: no autocast. `shared`: processes share each
    sequence, so a block may look at other tokens only in Attention.attend.

    Raises UsageError that names the difference and a remedy.
    """
    checked = set[Any]()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        check_ends(model)
        for i, policy in enumerate(recompute_plan(model.config).policies):
            kind = policy, *map(module_settings, model.blocks[i].modules())
            if kind in checked:
                continue
            checked.add(kind)
            if shared and sees_others(model, i, device):
                raise UsageError(
                    f"block {i} of model.py looks at other tokens, or at positions, outside of "
                    "Attention.attend: sequences cannot be shared; train_fsdp.py can train it"
                )
            if policy != "none" and (wrong := compare_block(model, i, policy, device, precision)):
                raise UsageError(
                    f"--use-activation-checkpoint: block {i} under {policy} is not the block of "
                    f"model.py: {wrong}; see docs/change.md, or take none"
                )


def check_ends(model: MiniGPT) -> None:
    """Compare the order of blocks, the embedding lookup and the loss; see `check_techniques`."""
    ours, config, policy = cast(Any, model), model.config, model.config.recompute
    known = policy in ("none", "full") and config.mlp_chunks == 1
    if not known and [run for run, _ in ours.blocks_with_recompute.plain(model)] != [*model.blocks]:
        raise UsageError(
            f"--use-activation-checkpoint {policy}: only none and full (with --mlp-chunks 1) run "
            "blocks in another order, as `blocks_with_recompute` of model.py does now"
        )
    ids, embedding = (
        torch.arange(2 * N_CHECK_TOKENS).view(2, -1),
        nn.Embedding(config.vocab_size, 16),
    )
    ids, labels = ids % config.vocab_size, (ids % config.vocab_size).where(ids > 0, -100)
    lookup, loss, of_each = ours.embed, ours.head_loss, []
    for embed, head_loss in (lookup, loss), (lookup.keywords["plain"], loss.keywords["plain"]):
        torch.manual_seed(0)
        x, weight = embed(embedding, ids)
        mean = head_loss(x, weight, labels, config.loss_chunks)
        of_each.append([x, weight, mean, *torch.autograd.grad(mean, embedding.weight)])
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*of_each, strict=True)):
        raise UsageError(
            "embed or head_loss of model.py is not memory/head.py's: --loss-chunks 1 takes "
            "model.py's head_loss; what embed does now can stand in MiniGPT.forward"
        )


def module_settings(module: nn.Module) -> tuple:
    """Return the type, the weights' shapes and the attributes of a module, to compare modules."""
    shapes = [(name, weight.shape) for name, weight in module.named_parameters(recurse=False)]
    values = [(name, repr(its)) for name, its in vars(module).items() if not name.startswith("_")]
    return type(module), *shapes, *values


def new_block(model: MiniGPT, i: int, device: torch.device) -> Any:
    """Return a copy of block `i` on `device`, with random weights."""
    block = copy.deepcopy(model.blocks[i]).to_empty(device=device)
    torch.manual_seed(0)
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.1)
    return block


def compare_block(
    model: MiniGPT, i: int, policy: str, device: torch.device, precision: torch.dtype
) -> str:
    """Return what differs between block `i` with a policy and without; "" if nothing does."""
    config, block = replace(model.config, n_layers=1, recompute=policy), new_block(model, i, device)
    alone = SimpleNamespace(
        config=config, blocks=[block.train()], training=True, parameters=block.parameters
    )
    n_tokens = min(N_CHECK_TOKENS, config.max_position_embeddings)
    x, grad = torch.randn(2, 1, n_tokens, config.d_model, device=device).unbind()
    inputs = {"x": x.requires_grad_()} | dict(block.named_parameters())
    inputs = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    before = random.getstate()

    def run(calls: Iterable) -> list[Tensor]:
        """Run forward and backward; return result, gradients and states of random generators."""
        torch.manual_seed(0)
        random.seed(0)
        y, has_dropout = x * 1, config.dropout > 0
        low = precision != torch.float32
        with torch.autocast(device.type, precision, enabled=low, cache_enabled=False):
            for call, recompute in calls:
                y = (
                    activation_checkpoint(call, y, has_dropout=has_dropout)
                    if recompute
                    else call(y)
                )
        tensors = [y, *torch.autograd.grad(y, [*inputs.values()], grad, materialize_grads=True)]
        return [*tensors, default_generator(x.device).get_state(), torch.tensor(random.random())]

    try:
        # (On a GPU fused attention adds in an order that varies from run to run.)
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext():
            plain, recomputed = run([(block, False)]), run(model.blocks_with_recompute(alone))
        if (
            POLICIES[policy].supports_mlp_chunks
            and config.mlp_chunks != 1
            and depends_on_earlier_tokens(block.feed_forward, x)
        ):
            return "its MLP half looks at other tokens, and --mlp-chunks is not 1"
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        random.setstate(before)
    # If a recompute draws random numbers that config.dropout does not announce, the generators are
    # in another state afterwards. So their states are compared, too.
    drawn = "what torch draws next", "what Python draws next"
    names = "its result", *(f"the gradient of {name}" for name in inputs), *drawn
    pairs = zip(names, plain, recomputed, strict=True)
    return next((f"{name} differs" for name, a, b in pairs if not torch.equal(a, b)), "")


def sees_others(model: MiniGPT, i: int, device: torch.device) -> bool:
    """Return True if block `i` looks at other tokens, or at positions, outside of attention."""
    block = new_block(model, i, device).eval()
    x = torch.randn(1, N_CHECK_TOKENS, model.config.d_model, device=device)
    block.attn.attend = lambda qkv, kv_cache=None: qkv[..., : x.size(2)]
    return depends_on_earlier_tokens(block, x)


def depends_on_earlier_tokens(run: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return True if the last tokens' results change when the tokens before them are left out.

    `run` maps x, (1, T, C), to a tensor of the same shape.
    """
    last = slice(N_CHECK_TOKENS // 2, None)
    return not torch.allclose(run(x)[:, last], run(x[:, last]), rtol=1e-3, atol=1e-4)
