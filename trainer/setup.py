"""Set up a run: data, model and optimizer, from the beginning or from a snapshot."""

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

from data import DataError, Dataset, Tokenizer, TrainBatches, ValBatches, load_dataset
from memory import POLICIES, recompute_plan_of_config
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
from .pretrained import Pretrained, SnapshotOrPretrained, open_init_from
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
    Raises UsageError, DataError or SnapshotError for a mistake, and PredictedOutOfMemory if a step
    needs more memory than the device has in total.
    """
    if args.resume and "init_from" in args.typed:
        raise UsageError("--init-from starts a run and --resume goes on with one: leave one out")
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
    with torch.device("meta"):
        model = MiniGPT(plan.config)
    if buffers := [name for name, _ in model.named_buffers()]:
        raise UsageError(
            "model.py: a model gets its memory after it is made, so the numbers in the buffer "
            f"{buffers[0]} would be lost: compute them in forward"
        )
    if resumed is not None:
        check_shapes(resumed.path, resumed.state["model"], model.state_dict())
        resume.check_resumable(resumed.state, snapshot_metadata, resumed.path)
        snapshot_metadata["run"] = resumed.state.get("run")
    check = partial(check_techniques_are_exact, model, device, precision, process.sp_degree > 1)
    process.run_on_all_ranks(check)  # (each rank may have its own policy)
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
    run.held_lock, run.predict_step_with_less_memory, run.check_techniques = (
        held_lock,
        plan.predict_step_with_less_memory,
        check,
    )
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
    """Raise UsageError for the first fact that differs between processes.

    `of_each`: the facts of each process, in the order of the ranks.
    """
    first = of_each[0]
    for name in sorted(first, key=DERIVED_FLAGS.__contains__):
        for rank, facts in enumerate(of_each):
            if facts[name] != first[name]:
                hint = RANK_MISMATCH_HINTS.get(name, "start all with the same flags")
                difference = f"rank 0 has {first[name]}, rank {rank} has {facts[name]}"
                raise UsageError(f"{name}: {difference}: {hint}")


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


# ---- Check the policies against model.py, which a user may have changed.
#
# A policy only calls the parts of a block, and has no arithmetic of its own. So if a user changes a
# part, every policy calls the changed part. But a recompute must give the same results as forward,
# and some changes prevent this: for example, a block that draws random numbers although
# config.dropout is 0, or a block that counts its calls. Also, the chunked loss has code of its own
# in memory/head.py, so a change of the loss in model.py does not reach it. For these reasons
# each technique is compared with model.py without the technique.

N_TECHNIQUE_CHECK_TOKENS = 8  # number of tokens in each sequence of these comparisons


def check_techniques_are_exact(
    model: MiniGPT, device: torch.device, precision: torch.dtype, shared: bool = False
) -> None:
    """Compare the results of model.py with and without the memory techniques of the model's config.

    One block of each kind (policy and modules) runs forward and backward on a few tokens, once with
    its policy and once without. The results and all gradients of both runs must be equal to the
    bit. The model's loss is computed with and without memory/head.py. Both losses and their
    gradients must be equal up to rounding. The model may be on device "meta". The check does not
    change the model.

    `precision`: dtype of autocast; float32: no autocast. `shared`: the processes share each
    sequence (train_sp.py), so a block may look at other tokens only in Attention.attend.

    Raises UsageError, which names the difference and a remedy.
    """
    checked = set[Any]()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        check_embed_and_loss_are_exact(model)
        for i, policy in enumerate(recompute_plan_of_config(model.config).policies):
            kind = policy, *map(module_signature, model.blocks[i].modules())
            if kind in checked:
                continue
            checked.add(kind)
            if shared and mixes_tokens_outside_attention(model, i, device):
                raise UsageError(
                    f"block {i} of model.py looks at other tokens, or at positions, outside of "
                    "Attention.attend: sequences cannot be shared; train_fsdp.py can train it"
                )
            if policy != "none" and (
                wrong := describe_recompute_difference(model, i, policy, device, precision)
            ):
                raise UsageError(
                    f"--use-activation-checkpoint: block {i} under {policy} is not the block of "
                    f"model.py: {wrong}; see docs/change.md, or use the policy none"
                )


def check_embed_and_loss_are_exact(model: MiniGPT) -> None:
    """Raise UsageError if the techniques change the order of the blocks, or the results of the
    embedding or of the loss.

    Most policies run the blocks in the order of `model.blocks`. So `blocks_with_recompute` of
    model.py must have this order, too. The embedding and the loss must give the same results with
    and without memory/head.py, up to rounding.
    """
    ours, config, policy = cast(Any, model), model.config, model.config.recompute
    known = policy in ("none", "full") and config.mlp_chunks == 1
    if not known and [run for run, _ in ours.blocks_with_recompute.plain(model)] != [*model.blocks]:
        raise UsageError(
            f"--use-activation-checkpoint {policy}: `blocks_with_recompute` of model.py runs the "
            "blocks in another order, which only none and full (with --mlp-chunks 1) can follow"
        )
    ids, embedding = (
        torch.arange(2 * N_TECHNIQUE_CHECK_TOKENS).view(2, -1),
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
            "embed or head_loss of model.py computes other results than memory/head.py: for "
            "head_loss use --loss-chunks 1; for embed move the change to MiniGPT.forward"
        )


def module_signature(module: nn.Module) -> tuple:
    """Return a module's type, the shapes of its weights, and its attributes, to compare modules."""
    shapes = [(name, weight.shape) for name, weight in module.named_parameters(recurse=False)]
    values = [(name, repr(its)) for name, its in vars(module).items() if not name.startswith("_")]
    return type(module), *shapes, *values


def copy_block_with_random_weights(model: MiniGPT, i: int, device: torch.device) -> Any:
    """Return a copy of block `i` on `device`, with random weights."""
    block = copy.deepcopy(model.blocks[i]).to_empty(device=device)
    torch.manual_seed(0)
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.1)
    return block


def describe_recompute_difference(
    model: MiniGPT, i: int, policy: str, device: torch.device, precision: torch.dtype
) -> str:
    """Run block `i` with `policy` and without it. Return the first difference as text; "" if there
    is none."""
    config, block = (
        replace(model.config, n_layers=1, recompute=policy),
        copy_block_with_random_weights(model, i, device),
    )
    alone = SimpleNamespace(
        config=config, blocks=[block.train()], training=True, parameters=block.parameters
    )
    n_tokens = min(N_TECHNIQUE_CHECK_TOKENS, config.max_position_embeddings)
    x, grad = torch.randn(2, 1, n_tokens, config.d_model, device=device).unbind()
    inputs = {"x": x.requires_grad_()} | dict(block.named_parameters())
    inputs = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    before = random.getstate()

    def run(calls: Iterable) -> list[Tensor]:
        """Run forward and backward. Return the result, the gradients, and the states of the random
        generators."""
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
        # (On a GPU, use the kernel MATH: a fused attention kernel adds in an order that varies from
        # run to run.)
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
    # If a block draws random numbers although config.dropout is 0, the recompute draws more of
    # them. Then the random generators are in another state afterwards. So compare their states,
    # too.
    drawn = "what torch draws next", "what Python draws next"
    names = "its result", *(f"the gradient of {name}" for name in inputs), *drawn
    pairs = zip(names, plain, recomputed, strict=True)
    return next((f"{name} differs" for name, a, b in pairs if not torch.equal(a, b)), "")


def mixes_tokens_outside_attention(model: MiniGPT, i: int, device: torch.device) -> bool:
    """Return True if block `i` uses other tokens, or the position of a token, outside of
    attention."""
    block = copy_block_with_random_weights(model, i, device).eval()
    x = torch.randn(1, N_TECHNIQUE_CHECK_TOKENS, model.config.d_model, device=device)
    block.attn.attend = lambda qkv, kv_cache=None: qkv[..., : x.size(2)]
    return depends_on_earlier_tokens(block, x)


def depends_on_earlier_tokens(run: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Return True if the results for the last tokens change when the tokens before them are left
    out.

    `run` maps x, (1, T, C), to a tensor of the same shape.
    """
    last = slice(N_TECHNIQUE_CHECK_TOKENS // 2, None)
    return not torch.allclose(run(x)[:, last], run(x[:, last]), rtol=1e-3, atol=1e-4)
