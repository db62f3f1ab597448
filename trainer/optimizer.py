"""Make the optimizer of a run, update weights, skip non-finite updates, restore saved moments.

For AdamW with float32 moments this file uses torch's own class, which stores 8 bytes per parameter
besides the weight and the gradient. No recompute policy can free these bytes, but `AdamWAndMuon`
stores fewer per parameter, or only this process's shard of them.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

from model import MiniGPT

from .settings import Settings

BETAS, EPS = (0.9, 0.95), 1e-8  # for AdamW; the second beta is GPT-3's
MOMENTUM = 0.95  # for Muon
# Coefficients a, b, c of Muon's Newton-Schulz polynomial a x + b x^3 + c x^5. Five iterations map
# all singular values between 0.003 and 1 to values between 0.68 and 1.2, which are as good as 1
# (Jordan, 2024).
NS_COEFFICIENTS, NS_STEPS = (3.4445, -4.7750, 2.0315), 5
# Number of elements that AdamW updates at a time, if moments are bfloat16 or sharded: small, so
# that the temporary copies of an update take much less memory than is saved.
UPDATE_CHUNK_ELEMENTS = 2**22
# A function such as OneProcess.shard_like: (full tensor, parameter) -> this process's rows.
ShardLikeFn = Callable[[Tensor, Tensor], Tensor]
Groups = list[dict[str, Any]]
# On a CPU, AdamW's kernel gets a multiple of this number of elements (see
# `to_lane_padded_float32`), itself a multiple of the floats that fit in a vector register.
PADDING_MULTIPLE = 64


def make_optimizer(
    model: MiniGPT,
    settings: Settings,
    device: torch.device,
    precision: torch.dtype,
    sharded: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizer that --optimizer and --moments-dtype name.

    `adamw` is AdamW (Loshchilov and Hutter, 2019) as one fused kernel. `muon` is Muon (Jordan,
    2024) for the matrices of the blocks, and AdamW for all other parameters: biases, LayerNorm
    gains, and embeddings, which are tables of vectors. Parameters may be sharded over processes
    (DTensors).

    `precision`: the dtype of the model's matmuls. `sharded`: the parameters are this process's rows
    of sharded parameters, as plain tensors (the planner has no DTensors).
    """
    muon, groups = settings.optimizer == "muon", make_param_groups(model, settings)
    moments = getattr(torch, settings.moments_dtype)
    unsharded = not (sharded or any(map(is_sharded, model.parameters())))
    if not muon and moments == torch.float32 and unsharded:
        return torch.optim.AdamW(groups, lr=settings.lr, betas=BETAS, eps=EPS, fused=True)
    # For Muon's many matmuls bfloat16 suffices, with a third of the digits of float32 (Jordan,
    # 2024). But some hardware only emulates it, so they follow the model's matmuls.
    products = torch.bfloat16 if precision == torch.bfloat16 else torch.float32
    lanes = PADDING_MULTIPLE if device.type == "cpu" else 1
    return AdamWAndMuon(groups, settings.lr, lanes, moments, products)


def make_param_groups(model: MiniGPT, settings: Settings) -> Groups:
    """Return the optimizer's groups of parameters.

    Weight decay pulls matrices and embeddings towards zero, but not biases and LayerNorm gains,
    because they have no reason to be small.
    """
    groups = defaultdict[tuple[str, bool], list[Tensor]](list)
    layers = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    by_muon = {layer.weight for layer in layers if settings.optimizer == "muon"}
    for parameter in model.parameters():
        rule = "muon" if parameter in by_muon else "adamw"
        groups[rule, parameter.dim() > 1].append(parameter)
    return [
        {"params": of_one, "rule": rule, "weight_decay": settings.weight_decay * is_matrix}
        for (rule, is_matrix), of_one in groups.items()
    ]


class AdamWAndMuon(torch.optim.Optimizer):
    """AdamW and Muon, each for its own parameter groups, with moments in float32 or bfloat16.

    Weights and arithmetic are in float32 (Muon's matmuls in `products`); only the moments that are
    stored between two steps are rounded to `moments`. A bfloat16 moment does not change if an
    update would change it by less than 2^-9 to 2^-8 of its value, depending on the value. AdamW's
    update changes the second moment v by (1 - beta2) (g^2 - v), where g is the gradient. With beta2
    = 0.95, v stops changing only when v differs from g^2 by at most 4 to 8 % of v, an error that
    changes the weight's update by at most 4 %. (With beta2 = 0.999, v would stop changing wherever
    g^2 is below three times v.)

    A sharded parameter (a DTensor, sharded by rows) has sharded moments, and its new weights are
    bitwise equal to those of an unsharded parameter. With float32 moments they are also bitwise
    equal to those of torch's AdamW, if the parameter fills whole vector registers of the CPU (see
    `to_lane_padded_float32`).

    Args:
        groups: parameter groups with "params", "weight_decay" and "rule".
        lr: learning rate of all groups.
        lanes: AdamW's kernel gets a multiple of this number of elements (see
            `to_lane_padded_float32`).
        moments: dtype of the stored moments.
        products: dtype of Muon's matmuls.
    """

    # Tensor () float32 on the device. If it is 1, a step changes nothing: see `step_if_finite`.
    found_inf: Tensor | None = None

    def __init__(
        self, groups: Groups, lr: float, lanes: int, moments: torch.dtype, products: torch.dtype
    ):
        super().__init__(groups, {"lr": lr})
        self.lanes, self.moments, self.products = lanes, moments, products

    def make_state(self) -> None:
        """Make the state of all parameters that have gradients and no state yet."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = initial_param_state(parameter, group, self.moments)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients; `closure` is not supported."""
        self.make_state()
        for updates in self.updates_by_kind().values():
            for update in updates:
                update()

    def updates_by_kind(self) -> dict[tuple, list[Callable[[], None]]]:
        """Return the updates of a step, each of one parameter and independent of the others.

        Updates of one kind run the same operators on tensors of the same shapes, so that the
        planner need not simulate each of them.
        """
        updates = defaultdict[tuple, list[Callable[[], None]]](list)
        for group in self.param_groups:
            update = self.muon if group["rule"] == "muon" else self.adamw
            for p in group["params"]:
                if p.grad is not None:
                    kind = group["rule"], p.shape, p.stride(), p.grad.stride(), p.grad.dtype
                    updates[kind].append(partial(update, p, p.grad, group))
        return updates

    def adamw(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter with AdamW, UPDATE_CHUNK_ELEMENTS elements at a time."""
        state = self.state[parameter]
        written = parameter, state["exp_avg"], state["exp_avg_sq"]
        weight, *moments = (local_tensor(tensor).view(-1) for tensor in written)
        rows, step = (weight, local_tensor(gradient).reshape(-1), *moments), state["step"].clone()
        # Each call of the kernel adds 1 to the step count, which is reset before each piece.
        for pieces in zip(*(row.split(UPDATE_CHUNK_ELEMENTS) for row in rows), strict=True):
            self.adamw_piece(pieces, state["step"].copy_(step), group)

    def adamw_piece(self, pieces: tuple[Tensor, ...], step: Tensor, group: dict[str, Any]) -> None:
        """Run torch's AdamW kernel on float32 copies of 1-D pieces: weight, gradient, two moments.
        The copies are freed on return, before the copies of the next piece are made."""
        copies = [to_lane_padded_float32(piece, self.lanes) for piece in pieces]
        weights, gradients, first, second = ([copy] for copy in copies)
        adamw(
            weights, gradients, first, second, [], [step],
            lr=group["lr"], weight_decay=group["weight_decay"], beta1=BETAS[0], beta2=BETAS[1],
            eps=EPS, fused=True, found_inf=self.found_inf, amsgrad=False, maximize=False,
        )  # fmt: skip
        for piece, copy in zip(pieces, copies, strict=True):
            if copy is not piece:
                piece.copy_(copy[: piece.numel()])

    def muon(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Update a matrix (A, B) with Muon, as torch.optim.Muon does.

        The root mean square of an update's elements is 0.2, about that of AdamW's updates, so that
        both rules use the same learning rate and the same weight decay (Liu et al., 2025, arXiv
        2502.16982, section 2.2). If the matrix is sharded, all but the orthogonalization is about
        this process's rows.
        """
        stored = local_tensor(self.state[matrix]["momentum_buffer"])
        weight, gradient, momentum = local_tensor(matrix), local_tensor(gradient), stored.float()
        # Not lerp, which rounds once or twice depending on an element's place in a vector register
        # of the CPU. In a shard an element has another place, so its result would differ. The
        # separate operations below round once each.
        change = momentum - gradient
        momentum -= self.zeros_if_skipped(change.mul_(1 - MOMENTUM))
        stored.copy_(momentum)
        # Nesterov's momentum: a weighted mean of the new momentum and the gradient
        nesterov = torch.sub(momentum, gradient, out=change).mul_(MOMENTUM).add_(gradient)
        update = orthogonalize_shard(nesterov.to(self.products), matrix).float()
        update = update * (0.2 * math.sqrt(max(matrix.shape)))
        change = (weight * group["weight_decay"]).add_(update).mul_(group["lr"])
        weight.sub_(self.zeros_if_skipped(change))

    def zeros_if_skipped(self, change: Tensor) -> Tensor:
        """Return `change`, or zeros if this step is skipped: the device decides by `found_inf`, so
        that Python does not wait for it."""
        return change if self.found_inf is None else change.masked_fill_(self.found_inf.bool(), 0)


def orthogonalize_shard(rows: Tensor, like: Tensor) -> Tensor:
    """Return this process's rows of an orthogonalized matrix (A, B).

    `rows`: this process's rows of the matrix. `like`: a parameter of its shape; if it is sharded,
    all processes first gather the whole matrix.
    """
    if not is_sharded(like):
        return orthogonalize(rows)
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, by_rows = like.device_mesh, like.placements  # type: ignore[attr-defined]
    shape, stride = like.shape, like.stride()
    sharded = DTensor.from_local(rows, mesh, by_rows, run_check=False, shape=shape, stride=stride)
    whole = orthogonalize(sharded.full_tensor())
    return distribute_tensor(whole, mesh, by_rows, src_data_rank=None).to_local()


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return an approximation of U V' for the matrix U S V': (A, B) -> (A, B).

    U S V' is the singular value decomposition of a momentum matrix. As an update, U V' has the same
    size in every direction of the momentum.

    The approximation comes from Newton-Schulz iterations, which use matrix products only (Jordan,
    2024). torch.optim.Muon does them in bfloat16, which some devices only emulate.
    """
    a, b, c = NS_COEFFICIENTS
    x = matrix if matrix.size(0) <= matrix.size(1) else matrix.mT  # now A <= B
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NS_STEPS):
        square = x @ x.mT
        factor = torch.addmm(square, square, square, beta=b, alpha=c)
        x = torch.addmm(x, factor, x, beta=a)
    return x if matrix.size(0) <= matrix.size(1) else x.mT


def to_lane_padded_float32(piece: Tensor, lanes: int) -> Tensor:
    """Return a float32 copy of the 1-D `piece`, padded with zeros to a multiple of `lanes`
    elements; `piece` itself if it is in float32 and needs no padding.

    On a CPU the kernel computes the last elements, which do not fill a vector register, with other
    instructions, which round differently. In a shard other elements are the last ones, so without
    padding its results would differ. A GPU's kernel has no such elements, and each copy would cost
    one more kernel launch, so `lanes` is 1 there.
    """
    copy, missing = piece.float(), -piece.numel() % lanes
    return F.pad(copy, (0, missing)) if missing else copy


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without the import of DTensor, which takes half a
    second."""
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's rows of a DTensor, and any other tensor unchanged."""
    return getattr(tensor, "to_local", lambda: tensor)()


def initial_param_state(
    parameter: Tensor, group: dict[str, Any], moments: torch.dtype
) -> dict[str, Tensor]:
    """Return the state of a parameter before its first step: zero moments of the dtype `moments`,
    and AdamW's step count."""
    if group["rule"] == "muon":
        return {"momentum_buffer": torch.zeros_like(parameter, dtype=moments)}
    state = {"step": torch.tensor(0.0, device=parameter.device)}
    names = "exp_avg", "exp_avg_sq"  # as in torch's AdamW
    return state | {name: torch.zeros_like(parameter, dtype=moments) for name in names}


def step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> Tensor:
    """Do one step of the optimizer, without effect if the scalar `grad_norm` is not finite.

    Return `grad_norm`, the norm of all gradients, on MPS as a tensor on the CPU.

    The fused kernel reads the number `found_inf` on the device: if it is 1, the kernel leaves
    weights, moments and step count unchanged, and so does AdamWAndMuon's Muon. torch has
    `found_inf` for GradScaler.step, which sets it to 1 if a gradient is not finite. Here the norm
    decides, because the norm can overflow although each gradient is finite.

    On MPS, Python decides and has to wait for the norm, because MPS's kernel ignored `found_inf`
    before pytorch#186360 (June 2026). The returned norm is on the CPU, so that the caller need not
    wait a second time.
    """
    if grad_norm.device.type != "mps":
        optimizer.found_inf = (~grad_norm.isfinite()).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif (grad_norm := grad_norm.cpu()).isfinite():
        optimizer.step()
    return grad_norm


@torch.no_grad()
def restore_optimizer(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], shard_like: ShardLikeFn
) -> None:
    """Copy the moments of a saved state dict into `optimizer`, in the optimizer's own dtype.

    The moments and the learning rate of the saved step come from the snapshot; the settings (weight
    decay, fused or not) stay those of this run. torch's load_state_dict would also load the
    settings, and would round all state to the dtype of the weights.

    Args:
        saved: state dict of an optimizer, with full tensors.
        shard_like: function (full tensor, parameter) -> this process's rows of the tensor.
    Raises:
        ValueError, LookupError: the state dict is that of another model or optimizer.
    """
    dtype = getattr(optimizer, "moments", torch.float32)
    for group in optimizer.param_groups:
        group["lr"] = saved["param_groups"][0]["lr"]
    parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for i, entry in saved["state"].items():  # without parameters that never got a gradient
        parameter, group = parameters[i]
        state = initial_param_state(parameter, group, dtype)
        for name, tensor in state.items():
            whole = entry[name]
            if whole.shape != tensor.shape:
                raise ValueError(f"{name} of another shape")
            # Copy: `shard_like` may return a view, which would keep the full tensor alive.
            tensor.copy_(shard_like(whole, tensor) if is_sharded(tensor) else whole)
        optimizer.state[parameter] = state
