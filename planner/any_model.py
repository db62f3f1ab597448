"""Plan one training step of any model: an nn.Module whose forward returns a loss.

A copy of the model runs the step on fake tensors, which have shapes but no data. The simulation
needs no GPU and almost no memory, and it does not change the model. For MiniGPT use `Planner`
(planner/step.py): it also plans all recompute policies and sharding, and finds the largest batch
that fits.
"""

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

from .op_recorder import CallSiteTracker
from .operators import EMPTY, MATMUL_DTYPES
from .record import explain_storages
from .simulate import (
    PlanError,
    empty_function_caches,
    forward_and_backward,
    label_existing_storages,
    phase_hooks,
    plan_errors,
    recording_simulated_ops,
)
from .timeline import StepMemory, split_into_segments


def plan_step(
    model: nn.Module,
    batch: Mapping[str, Any] | Sequence[Any],
    optimizer: Callable[[list[nn.Parameter]], Optimizer],
    *,
    blocks: Iterable[nn.Module] | None = None,
    recompute: str = "none",
    precision: torch.dtype = torch.float32,
    device_type: str = "cpu",
) -> StepMemory:
    """Return the memory, in bytes, of one training step of `model`: forward, backward and update.

    The planned step is not the first step of a run. So the optimizer's state of all trained weights
    exists before the step begins. Outputs of forward other than the loss, such as logits, are freed
    before backward, as in `model(**batch).loss.backward()`. If the model holds a tensor that is
    neither a parameter nor a registered buffer, this tensor is not counted. Tensors in closures and
    globals are not copied with the model. So if forward changes such a tensor in place, the
    original tensor changes.
    On a CPU the plan of an nn.LSTM is too small (0.57 of a measured peak), because torch has a
    separate CPU kernel for it.

    Args:
        model: a module in training mode, on any device, also on "meta". The module is not changed.
            Its forward returns the loss (one element), an object with `.loss`, or a tuple that
            begins with the loss.
        batch: forward's keyword arguments (a dict), or its positional arguments (a tuple, a list).
        optimizer: function that makes the optimizer from a list of the trained parameters, such as
            `torch.optim.AdamW`.
        blocks: modules of the model, in the order in which they run. In the result each block has
            its own segments of forward and backward.
        recompute: "none", or "full". With "full" each block runs in an activation checkpoint
            (`torch.utils.checkpoint.checkpoint`).
        precision: dtype of autocast; float32: no autocast. (The plan uses the autocast of a CPU.
            The autocast of CUDA runs more functions in float32, such as `torch.pow`. So a model
            that calls these functions takes more memory on CUDA than planned.)
        device_type: type of the device for which the step is planned: "cpu", "cuda" or "mps". The
            model itself may be on another device.

    Raises PlanError (a ValueError) if an argument is invalid, if forward returns no loss, if the
    code of the model or of the optimizer depends on values of floating-point tensors, if a gradient
    is sparse, or if the recomputation of a block saves other tensors than the block's forward. The
    message begins with the argument that causes the error.
    """
    stack = list(dict.fromkeys(blocks)) if isinstance(blocks, Iterable) else []
    for is_wrong, message in (
        (not model.training, "model: call .train() first, this is about a training step"),
        (not isinstance(batch, Mapping | tuple | list), "batch: a dict of arguments, or a tuple"),
        (not callable(optimizer), "optimizer: a function that makes it, as torch.optim.AdamW"),
        (blocks is not None and not stack, "blocks: a list of modules, as model.transformer.h"),
        (not {*model.modules()}.issuperset(stack), "blocks: some are no modules of the model"),
        (recompute not in ("none", "full"), f"recompute: none or full, not {recompute}"),
        (recompute == "full" and not stack, "recompute: full needs blocks, as model.transformer.h"),
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
    model, stack, batch = deepcopy((model, stack, batch), cast(Any, copies))
    if recompute == "full":
        for block in stack:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        # A recomputed block would fill a KV cache a second time. So turn the cache off. The package
        # transformers does the same when its own activation checkpoints are on.
        configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
        for config in [config for config in configs if hasattr(config, "use_cache")]:
            config.use_cache = False
    with (
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
        plan_errors("model"),
    ):
        return simulate_step_memory(fake, model, batch, optimizer, stack, precision, device_type)


def simulate_step_memory(
    fake: FakeTensorMode,
    model: nn.Module,
    batch: Mapping[str, Any] | Sequence[Any],
    make_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    blocks: list[nn.Module],
    precision: torch.dtype,
    device_type: str,
) -> StepMemory:
    """Simulate a training step of a model on fake tensors; return the step's memory in bytes.

    Raises PlanError if no weight is trained, if forward returns no loss, or if the result of
    `make_optimizer` updates parameters that were not passed to `make_optimizer`.
    """
    args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
    names = {tensor: name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise PlanError("model: none of its weights is trained")
    with fake:
        optimizer = make_optimizer(trained)
    updated = [weight for group in optimizer.param_groups for weight in group["params"]]
    if not {*map(id, updated)} <= {*map(id, trained)}:
        raise PlanError("optimizer: make it of the parameters that it is given")
    for group in [g for g in optimizer.param_groups if g.get("foreach", 0) is None]:
        # Set torch's default for the planned device. (torch itself would choose the default for
        # a CPU, because these tensors are on a CPU.)
        group["foreach"] = device_type == "cuda" and not group.get("fused")
    in_stack = (name for name, module in model.named_modules() if module in blocks)
    tracker = CallSiteTracker(model, next(in_stack, "").rpartition(".")[0], sources=())
    for _ in range(2):  # the first step makes the optimizer's state, the second is the result
        with (
            recording_simulated_ops(device_type, fake, tracker) as log,
            phase_hooks(blocks, blocks[-1], log) if blocks else nullcontext(),
        ):
            for tensor, name in names.items():
                log.label_storage(tensor, "parameters", name)  # also buffers and frozen weights
            label_existing_storages(log, names, optimizer, {})
            for tensor in filter(torch.is_tensor, tree_leaves(batch)):
                log.label_storage(tensor, "activations", "batch")
            with empty_function_caches(model):
                forward_and_backward(log, lambda: loss_in(model(*args, **kwargs)), precision, True)
            label_existing_storages(log, names, optimizer, {})
            log.enter_phase("optimizer")
            with plan_errors("optimizer"):
                optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    step = StepMemory(None, 0, 0, [(segment, 0) for segment in split_into_segments(log)])
    return explain_storages(log, step).step_memory


def loss_in(result: Any) -> Tensor:
    """Return the loss, a tensor of one element, from the result of forward.

    Raises PlanError if the result has no loss, or if the loss does not require a gradient.
    """
    loss = getattr(result, "loss", result[0] if isinstance(result, tuple) else result)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise PlanError("model: its forward returns no loss (a tensor, .loss, or first of a tuple)")
    return loss


def becomes_fake(tensor: Tensor) -> bool:
    """Return True for a tensor that has no data in the simulation.

    Such a tensor is fake, is on the device "meta", or has floating-point elements.
    """
    return isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.is_floating_point()


def copy_tensor_for_simulation(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU; return the copy.

    The copy has no data if `becomes_fake(tensor)`. Call this function only inside a FakeTensorMode.
    """
    if not becomes_fake(tensor):
        return tensor.to("cpu", copy=True)
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


class FakeModeWithRealInts(FakeTensorMode):
    """Fake tensor mode in which integer tensors are real if they depend on integer tensors only.

    Such tensors are small, and models branch on their values. For example, a model tests whether a
    mask contains padding, or whether positions start at 0 again.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        tensors = [*filter(torch.is_tensor, tree_leaves((args, kwargs)))]
        dtype = torch.int64 if name == "arange" else kwargs.get("dtype") or torch.float32
        makes_integers = tensors or not dtype.is_floating_point
        if makes_integers and name not in EMPTY and not any(map(becomes_fake, tensors)):
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)
