"""Plan one training step of any model: an nn.Module whose forward returns a loss.

A copy of the model runs the step on fake tensors, which have shapes but no data, so that the
simulation needs no GPU and almost no memory, and leaves the model unchanged. For MiniGPT use
`Planner` (planner/step.py), which also plans recompute policies and sharding, and finds the largest
batch that fits.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from .op_recorder import CallSiteTracker, OpRecorder
from .operators import EMPTY, MATMUL_DTYPES
from .record import StepRecord, explain_storages
from .simulate import (
    PlanError,
    empty_function_caches,
    files_of_classes,
    forward_and_backward,
    label_existing_storages,
    phase_hooks,
    plan_errors,
    recording_simulated_ops,
)
from .timeline import StepMemory, split_into_segments

# An optimizer, or several that share the parameters (Muon for matrices, AdamW for the rest).
Optimizers = Optimizer | Sequence[Optimizer]


def plan_step(
    model: nn.Module,
    batch: Mapping[str, Any] | Sequence[Any],
    optimizer: Callable[[list[nn.Parameter]], Optimizers],
    *,
    blocks: Iterable[nn.Module] | None = None,
    recompute: str | Sequence[nn.Module] = "none",
    loss: Callable[[Any, Any], Tensor] | None = None,
    precision: torch.dtype = torch.float32,
    device_type: str = "cpu",
    card_name: str | None = None,
    accumulates_gradients: bool = False,
) -> StepMemory:
    """Return the memory, in bytes, of one training step of `model`: forward, backward and update.

    The result's batch size is the first dimension of the first tensor in `batch`, or 0 if there is
    none. The planned step is not the first of a run, so the optimizer's state of all trained
    weights exists before the step begins. Outputs of forward other than the loss, such as logits,
    are freed before backward, as in `model(**batch).loss.backward()`. A tensor of the model that is
    neither a parameter nor a registered buffer is not counted. Tensors in closures and globals are
    not copied with the model, so if forward changes one of them in place, the original changes. On
    a CPU the plan of an nn.LSTM is too small (0.57 of a measured peak), because torch has a
    separate CPU kernel for LSTMs.

    Args:
        model: a module in training mode, on any device, also on "meta"; it is not changed. Without
            `loss`, its forward returns the loss (one element), an object with `.loss`, or a tuple
            or a dict in which the loss is the first tensor of one element.
        batch: forward's keyword arguments (a dict), or its positional arguments (a tuple, a list).
        optimizer: function that makes the optimizer from a list of the trained parameters, such as
            `torch.optim.AdamW`; it may return a list of optimizers.
        blocks: modules of the model, in the order in which they run; in the result, each has its
            own segments of forward and backward.
        recompute: "none", "full", or a list of some of the model's modules. Each listed module, or
            with "full" each block, runs in an activation checkpoint
            (`torch.utils.checkpoint.checkpoint`).
        loss: function (forward's result, batch) -> loss; None: the model returns its loss. With it,
            forward gets only what it takes: of a dict the arguments that it names, of a tuple as
            many as it has without defaults.
        precision: dtype of autocast; float32: no autocast. (The plan uses the autocast of a CPU,
            while CUDA's runs more functions in float32, such as `torch.pow`: a model with these
            functions takes more memory than planned.)
        device_type: type of the device for which the step is planned, "cpu", "cuda" or "mps",
            whatever device the model is on.
        card_name: the planned card's name in CARDS; None: this machine's GPU.
        accumulates_gradients: True: the gradients of an earlier micro-batch exist in forward.

    Raises PlanError (a ValueError) if an argument is invalid, if forward returns no loss, if the
    code of the model or of the optimizer depends on values of floating-point tensors, if a gradient
    is sparse, or if the recomputation of a block saves other tensors than the block's forward. The
    message begins with the name of the argument that causes the error.
    """
    how = recompute, loss, precision, device_type, card_name, accumulates_gradients
    return record_step(model, batch, optimizer, blocks, *how).step_memory


def record_step(
    model: nn.Module,
    batch: Any,
    optimizer: Callable[[list[nn.Parameter]], Optimizers],
    blocks: Iterable[nn.Module] | None = None,
    recompute: str | Sequence[nn.Module] = "none",
    loss: Callable[[Any, Any], Tensor] | None = None,
    precision: torch.dtype = torch.float32,
    device_type: str = "cpu",
    card_name: str | None = None,
    accumulates_gradients: bool = False,
) -> StepRecord:
    """Return the record of the step that `plan_step` plans, which names each storage, and the line
    that made it in the files of the model's classes. Arguments and errors are those of
    `plan_step`."""
    stack = list(dict.fromkeys(blocks)) if isinstance(blocks, Iterable) else []
    named = {"none": [], "full": stack}
    replayed = named.get(recompute) if isinstance(recompute, str) else [*recompute]
    modules = {*model.modules()}
    for is_wrong, message in (
        (not model.training, "model: call .train() first, this is about a training step"),
        (not isinstance(batch, Mapping | tuple | list), "batch: a dict of arguments, or a tuple"),
        (not callable(optimizer), "optimizer: a function that makes it, as torch.optim.AdamW"),
        (blocks is not None and not stack, "blocks: a list of modules, as model.transformer.h"),
        (not modules.issuperset(stack), "blocks: some are no modules of the model"),
        (replayed is None, f"recompute: none or full, not {recompute} (or a list of modules)"),
        (recompute == "full" and not stack, "recompute: full needs blocks, as model.transformer.h"),
        (not modules.issuperset(replayed or ()), "recompute: some are no modules of the model"),
        (precision not in MATMUL_DTYPES, f"precision: one of {MATMUL_DTYPES}, not {precision}"),
        (device_type not in ("cpu", "cuda", "mps"), f"device_type: cpu, cuda, mps: {device_type}?"),
    ):
        if is_wrong:
            raise PlanError(message)
    # Allow inputs that are not fake: tensors that are neither parameters nor buffers stay real.
    fake = FakeModeWithRealInts(allow_non_fake_inputs=True)
    leaves = [*model.parameters(), *model.buffers(), *tree_leaves(batch)]
    with fake:
        copies = {
            id(leaf): copy_tensor_for_simulation(leaf)
            for leaf in leaves
            if isinstance(leaf, Tensor)
        }
    model, stack, replayed, batch = deepcopy((model, stack, replayed, batch), cast(Any, copies))
    for module in replayed or ():
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    if replayed:
        # Turn the KV cache off, because a recomputed block would fill it a second time. The package
        # transformers does the same when its own activation checkpoints are on.
        configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        for config in [config for config in configs if hasattr(config, "use_cache")]:
            config.use_cache = False
    n_args, accepts = (None, lambda name: True) if loss is None else arguments_taken(model.forward)
    of_stack = (name for name, module in model.named_modules() if module in stack)
    blocks_name = next(of_stack, "").rpartition(".")[0]
    tracker = CallSiteTracker(model, blocks_name, files_of_classes(model))
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})

    def forward() -> Tensor:
        result = model(*args[:n_args], **{name: kwargs[name] for name in kwargs if accepts(name)})
        return loss_in(result if loss is None else loss(result, batch))

    recording = partial(recording_simulated_ops, device_type, fake, tracker, card_name)
    with (
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
        empty_function_caches(model),
        plan_errors("model"),
    ):
        updates = make_optimizers(fake, model, optimizer, device_type)
        for _ in range(accumulates_gradients):  # makes the gradients of an earlier micro-batch
            with recording() as log:
                forward_and_backward(log, forward, precision, True)
        with recording() as log:
            with phase_hooks(stack, stack[-1], log) if stack else nullcontext():
                record_training_step(log, model, batch, updates, forward, precision)
    sizes = [leaf.size(0) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    segments = [(segment, 0) for segment in split_into_segments(log)]
    return explain_storages(log, StepMemory(None, sizes[0] if sizes else 0, 0, segments))


def arguments_taken(function: Callable) -> tuple[int | None, Callable[[str], bool]]:
    """Return how many positional arguments a function needs (at least 1; None: it takes any number
    of them), and a function that returns whether it takes a keyword argument of that name."""
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    n_needed = sum(p.default is p.empty and p.kind <= 1 for p in parameters.values())
    n_args = None if inspect.Parameter.VAR_POSITIONAL in kinds else max(1, n_needed)
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    return n_args, lambda name: takes_any or name in parameters


def make_optimizers(
    fake: FakeTensorMode,
    model: nn.Module,
    make: Callable[[list[nn.Parameter]], Optimizers],
    device_type: str,
) -> list[Optimizer]:
    """Return the optimizers of the trained weights, with torch's defaults for `device_type`.

    Raises PlanError if no weight is trained, or if the result of `make` updates parameters that
    were not passed to `make`.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise PlanError("model: none of its weights is trained")
    with fake, plan_errors("optimizer"):
        made = make(trained)
    optimizers = [*made] if isinstance(made, Sequence) else [made]
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        raise PlanError("optimizer: a function that returns a torch.optim.Optimizer, or a list")
    groups = [group for one in optimizers for group in one.param_groups]
    if not {id(p) for group in groups for p in group["params"]} <= {*map(id, trained)}:
        raise PlanError("optimizer: make it of the parameters that it is given")
    for group in [g for g in groups if g.get("foreach", 0) is None]:
        # Torch's default for the planned device; torch itself would choose the default for a CPU,
        # because these tensors are on a CPU.
        group["foreach"] = device_type == "cuda" and not group.get("fused")
    return optimizers


def record_training_step(
    log: OpRecorder,
    model: nn.Module,
    batch: Any,
    optimizers: list[Optimizer],
    forward: Callable[[], Tensor],
    precision: torch.dtype,
) -> None:
    """Record forward, backward and update of a step whose optimizers have their state already."""
    names = {tensor: name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    for tensor, name in names.items():
        log.label_storage(tensor, "parameters", name)  # also buffers and frozen weights
    label_existing_storages(log, names, optimizers[0], {})  # earlier gradients
    log.gradient_sums = {log.find_storage(w.grad) for w in names if w.grad is not None}
    for tensor in filter(torch.is_tensor, tree_leaves(batch)):
        log.label_storage(tensor, "activations", "batch")
    forward_and_backward(log, forward, precision, True)
    with plan_errors("optimizer"):
        # The first update makes the optimizer's state. The record keeps nothing else of this
        # update, as if the state had existed before the step.
        n_ops, n_storages = log.n_ops, len(log.storages)
        for optimizer in optimizers:
            optimizer.step()
            label_existing_storages(log, names, optimizer, {})
        state = [storage for storage in log.storages[n_storages:] if storage.died == math.inf]
        for storage in state:
            storage.born, storage.phase, storage.block_index = 0, "", None
        log.storages[n_storages:] = state
        del log.ops[n_ops + 1 :]
        log.enter_phase("optimizer")
        for optimizer in optimizers:
            optimizer.step()


def loss_in(result: Any) -> Tensor:
    """Return the loss in the result of forward: `.loss`, or the first tensor of one element that
    requires a gradient. Raises PlanError if there is none."""
    leaves = [getattr(result, "loss", None), *tree_leaves(result)]
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)
    loss = next((tensor for tensor in tensors if tensor.numel() == 1), None)
    if loss is None:
        raise PlanError(
            "loss: the model's forward returns no loss (one element, as .loss, or in a tuple); a "
            "function (output, batch) that returns it goes here"
        )
    return loss


def becomes_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no data in the simulation: because it is fake, because it is on
    the device "meta", or because its elements are floating-point."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.is_floating_point()


def copy_tensor_for_simulation(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor on the CPU, without data if `becomes_fake(tensor)`. Call this
    function only inside a FakeTensorMode."""
    if not becomes_fake(tensor):
        return tensor.to("cpu", copy=True)
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


class FakeModeWithRealInts(FakeTensorMode):
    """Fake tensor mode in which integer tensors are real if they depend on integer tensors only.

    Such tensors are small, and models branch on their values, for example on whether a mask
    contains padding, or whether positions start at 0 again.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        tensors = [*filter(torch.is_tensor, tree_leaves((args, kwargs)))]
        dtype = torch.int64 if name == "arange" else kwargs.get("dtype") or torch.float32
        makes_integers = tensors or not dtype.is_floating_point
        if makes_integers and name not in EMPTY and not any(map(becomes_fake, tensors)):
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)
