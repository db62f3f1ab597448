"""Simulate the forward and the backward of any model on fake tensors, which have no data.

planner/step.py uses these functions for MiniGPT, planner/any_model.py for every other model, so
neither this file nor any file that it imports depends on model.py or memory/.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from inspect import isfunction
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from .op_recorder import CallSiteTracker, OpRecorder
from .operators import cublas_workspace_bytes, kernel_workspace_bytes


class PlanError(ValueError):
    """A step cannot be simulated; the message is one line that begins with the part that cannot."""


CACHED = type(cache(len))  # type of a function with a cache
# Exception that code raises on fake tensors -> reason in the message of a PlanError
REASON_BY_EXCEPTION: dict[type[Exception], str] = {
    DataDependentOutputException: "it needs the value of a tensor, and fake tensors have none",
    DynamicOutputShapeException: "it needs the values of a tensor, and fake tensors have none",
    UnsupportedOperatorException: "an operator that fake tensors do not have",
    CheckpointError: "a block does something else when it runs again (does it fill a cache?)",
}


@contextmanager
def plan_errors(part: str, kinds: type[Exception] = RuntimeError) -> Iterator[None]:
    """Turn errors of these `kinds`, and of REASON_BY_EXCEPTION, into a PlanError whose message
    begins with `part`."""
    try:
        yield
    except (PlanError, MemoryError):
        raise
    except (kinds, *REASON_BY_EXCEPTION) as error:
        reason = REASON_BY_EXCEPTION.get(type(error), type(error).__name__)
        first_line = str(error).partition("\n")[0]
        raise PlanError(f"{part}: {reason}: {first_line}") from error


@contextmanager
def patched(thing: Any, **attributes: Any) -> Iterator[None]:
    """Give `thing` these attributes inside this context, and restore the old ones after it."""
    old_values = {name: getattr(thing, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in old_values.items():
            setattr(thing, name, value)


@contextmanager
def recording_simulated_ops(
    device_type: str,
    fake: FakeTensorMode,
    sources: CallSiteTracker | None = None,
    card_name: str | None = None,
) -> Iterator[OpRecorder]:
    """Record the operators that run on fake tensors in this context; yield the recorder.

    The fake tensors are always on a CPU. For "cuda", stand-ins for dropout and attention save the
    same tensors as the fused kernels, and kernel workspaces are added; for "mps" neither is fused,
    as in real training. `sources`: finds the call sites that the recorder stores; None: store no
    call sites. `card_name`: the planned card; None: this machine's.
    """
    on_cuda = device_type == "cuda"
    with (
        fake,
        OpRecorder(sources, kernel_workspace=kernel_workspace_bytes if on_cuda else None) as log,
        patched(F, **(FUSED_REPLACEMENTS if on_cuda else {})),
        sources.track_running_module() if sources else nullcontext(),
        # On MPS attention is not fused and keeps its scores (B, H, T, T), as MATH does.
        sdpa_kernel(SDPBackend.MATH) if device_type == "mps" else nullcontext(),
        torch.autograd.set_detect_anomaly(False),  # fake tensors have no values to check
    ):
        if on_cuda:
            log.add_non_tensor_storage(
                cublas_workspace_bytes(card_name),
                "workspaces of cuBLAS",
                "its kernels work in them",
                0,
                math.inf,
            )
        yield log


def classes_outside_torch(model: nn.Module) -> set[type]:
    """Return the classes of a model's modules, and their base classes, without torch's own."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    return {cls for cls in classes if not cls.__module__.startswith(("torch.", "builtins"))}


def files_of_classes(model: nn.Module) -> tuple[Path, ...]:
    """Return the files that define the classes of a model's modules, without torch's."""
    names = {cls.__module__ for cls in classes_outside_torch(model)}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    return tuple(Path(file) for file in sorted(filter(None, files)))


@contextmanager
def empty_function_caches(model: nn.Module) -> Iterator[None]:
    """Context in which `model` runs on fake tensors: before and after, empty the caches
    (functools.cache) of functions in the files that define it. Otherwise the real model would find
    a fake tensor in a cache, such as a table of cosines, or the fake model a real one."""
    classes = classes_outside_torch(model)
    members = [member for cls in classes for member in vars(cls).values()]
    files = [member.__globals__.values() for member in members if isfunction(member)]
    caches = [f for f in chain(members, *files) if isinstance(f, CACHED)]
    caches = [f for f in caches if f.__module__ in {cls.__module__ for cls in classes}]
    try:
        for function in caches:
            function.cache_clear()
        yield
    finally:
        for function in caches:
            function.cache_clear()


def forward_and_backward(
    log: OpRecorder, forward: Callable[[], Tensor], precision: torch.dtype, cache_enabled: bool
) -> Tensor:
    """Run `forward` under autocast and then backward; return the loss, a scalar.

    `precision`: dtype of autocast; float32: no autocast. `cache_enabled`: autocast keeps its copies
    of weights until forward ends.
    """
    enabled = precision != torch.float32
    log.enter_phase("forward")
    with torch.autocast("cpu", precision, enabled, cache_enabled):
        loss = forward()
    log.forward_end = log.n_ops
    if log.current_phase == "forward":  # else "head": the head's backward belongs to this phase
        log.enter_phase("backward")
    loss.backward()
    return loss


def label_existing_storages(
    log: OpRecorder,
    names: Mapping[Any, str],
    optimizer: torch.optim.Optimizer,
    sums: Mapping[Any, Tensor],
) -> None:
    """Name the storages of weights, of the optimizer's state, and of existing gradients.

    `names`: weight -> its name. `sums`: weight -> sums of its earlier gradients outside of `.grad`.
    """
    for weight, name in names.items():
        # Also the full weights of a sharded model, whose bytes count when they are gathered.
        log.find_storage(weight).name = name
        named = [
            (weight if weight in optimizer.state else None, "parameters", name),
            (weight.grad, "gradients", f"gradient of {name}"),
            (sums.get(weight), "gradients", f"earlier gradients of {name}"),
            *(
                (state_tensor, "optimizer", f"{state_name} of {name}")
                for state_name, state_tensor in optimizer.state.get(weight, {}).items()
            ),
        ]
        for tensor, kind, tensor_name in named:
            if isinstance(tensor, Tensor):
                log.label_storage(tensor, kind, tensor_name)


@contextmanager
def phase_hooks(
    blocks: nn.ModuleList | list[nn.Module], last: nn.Module, log: OpRecorder
) -> Iterator[None]:
    """Tell the recorder the running phase and block, in forward, backward and recomputations.

    The head begins after the module `last`, which is the last of `blocks` or a module after them.
    """
    indices: dict[nn.Module, list[int]] = {}  # several for a block that runs several times
    for i, block in enumerate(blocks):
        indices.setdefault(block, []).append(i)
    next_call = {block: iter(own) for block, own in indices.items()}

    def enter_block(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        in_forward, own = log.current_phase == "forward", indices[block]
        i: Any = own[0]
        if len(own) > 1:  # a recomputation is of the call whose backward runs
            i = next(next_call[block], own[-1]) if in_forward else log.phase_marks[-1][2]
        # Backward of block i ends when the gradient of the block's input exists.
        if in_forward:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
            log.loop_has_ops |= len(tensors) > 1 or i > 0 and log.n_ops > log.block_end
            when_gradient_is_there(tensors, i - 1 if i > 0 else None)
        log.enter_phase(log.current_phase, i)

    def leave_block(block: nn.Module, args: tuple, output: Any) -> None:
        log.block_end = log.n_ops

    def enter_after_blocks(last: nn.Module, args: tuple) -> None:
        log.enter_phase("forward")
        when_gradient_is_there(args, len(blocks) - 1)

    def enter_head(last: nn.Module, args: tuple, output: Any) -> None:
        if log.current_phase == "forward":  # not a recomputation
            log.enter_phase("head")
            when_gradient_is_there(output, len(blocks) - 1 if last in blocks else None)

    def when_gradient_is_there(tensors: Any, i: int | None) -> None:
        """Enter backward of block i as soon as the first tensor in `tensors` that requires a
        gradient has one."""
        leaves = filter(torch.is_tensor, tree_leaves(tensors))
        for tensor in [leaf for leaf in leaves if leaf.requires_grad][:1]:
            tensor.register_hook(lambda _: log.enter_phase("backward", i))

    with ExitStack() as handles:
        if last not in blocks:
            handles.enter_context(last.register_forward_pre_hook(enter_after_blocks))
        handles.enter_context(last.register_forward_hook(enter_head))
        for block in indices:
            handles.enter_context(block.register_forward_pre_hook(enter_block, with_kwargs=True))
            handles.enter_context(block.register_forward_hook(leave_block))
        yield


# ---- functions that CUDA fuses

ORIGINAL_SDPA = F.scaled_dot_product_attention


def sdpa_without_dropout_mask(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Return the result of F.scaled_dot_product_attention, but keep no dropout mask."""
    return ORIGINAL_SDPA(query, key, value, attn_mask, 0.0, is_causal, **options)


def fused_dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Return the result of F.dropout for x, and keep a mask of one byte for each element."""
    return torch.ops.aten.native_dropout(x, p, training)[0] if p and training else x


FUSED_REPLACEMENTS: dict[str, Any] = {
    "dropout": fused_dropout,
    "scaled_dot_product_attention": sdpa_without_dropout_mask,
}
