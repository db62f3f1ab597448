"""The optimizer: which rule updates which parameter, when an update is skipped, and how a run
resumes.

AdamW with float32 moments is torch's own. It stores 8 bytes per parameter besides the weight and
the gradient, and no recompute can free them. `LeanOptimizer` stores less, or only a shard.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

from model import MiniGPT

BETAS, EPS = (0.9, 0.95), 1e-8  # for AdamW; the second beta is GPT-3's
MOMENTUM = 0.95  # for Muon
# Muon's Newton-Schulz polynomial a x + b x^3 + c x^5. Five iterations take all singular values
# between 0.003 and 1 to values between 0.68 and 1.2, which is as good as 1 (Jordan, 2024).
NS_COEFFICIENTS, NS_STEPS = (3.4445, -4.7750, 2.0315), 5
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}  # torch's names
# Elements to copy at a time, and at least one matrix: few, so that the temporary copies stay small
# next to the memory that the optimizer saves.
AT_A_TIME = 2**22
LocalShard = Callable[[Tensor, Tensor], Tensor]  # (full, parameter) -> rows; OneProcess.local_shard
Groups = list[dict[str, Any]]
LANES = 64  # a multiple of the floats in a CPU's vector register


def make_optimizer(
    model: MiniGPT, args: argparse.Namespace, device: torch.device, precision: torch.dtype
) -> torch.optim.Optimizer:
    """Return the optimizer that --optimizer and --moments-dtype name.

    AdamW (Loshchilov and Hutter, 2019), as one fused kernel; or Muon (Jordan, 2024) for the
    matrices of the blocks, and AdamW for all else: biases, gains, and embeddings, which are tables
    of vectors. Parameters may be sharded over processes (DTensors).

    Weight decay pulls matrices towards zero. Biases and LayerNorm gains get none: they have no
    reason to be small. `precision`: the dtype of the model's matmuls.
    """
    muon = args.optimizer == "muon"
    matrices, decayed, undecayed = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            undecayed.append(parameter)
        elif muon and name.startswith("blocks."):
            matrices.append(parameter)
        else:
            decayed.append(parameter)
    groups: Groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    moments = getattr(torch, args.moments_dtype)
    unsharded = not any(map(is_sharded, model.parameters()))
    if not muon and moments == torch.float32 and unsharded:
        return torch.optim.AdamW(groups, lr=args.lr, betas=BETAS, eps=EPS, fused=True)
    if muon:
        groups.append({"params": matrices, "weight_decay": args.weight_decay, "rule": "muon"})
    # Muon does many matmuls. bfloat16 loses half of its digits in them, which does not matter
    # (Jordan). Hardware that only emulates bfloat16 trains in float32, and Muon does so, too.
    products = torch.bfloat16 if precision == torch.bfloat16 else torch.float32
    lanes = LANES if device.type == "cpu" else 1
    return LeanOptimizer(groups, args.lr, lanes, moments, products)


class LeanOptimizer(torch.optim.Optimizer):
    """AdamW and Muon, each for its own parameter groups, with moments in float32 or bfloat16.

    Weights and arithmetic are in float32. Only the moments that are stored between two steps are
    rounded. A bfloat16 moment does not change when its step is below 2^-9 of its value. AdamW's
    second moment v takes steps of (1 - beta2) (g^2 - v). With a beta2 of 0.95, v stops changing
    only within 4 to 8 % of g^2, which changes the update by at most 4 %. (With 0.999, v would stop
    changing wherever g^2 is below three times v.)

    A sharded parameter (a DTensor, sharded by rows) has sharded moments. The new weights equal
    those of unsharded parameters to the bit. With float32 moments they also equal those of torch's
    AdamW to the bit, if each parameter fills the CPU's vectors: see `to_padded_float32`.

    Args:
        groups: "params", "weight_decay", and "rule", if it is not "adamw".
        lr: learning rate of all groups.
        lanes: AdamW's kernel gets a multiple of this many elements (see `to_padded_float32`).
        moments: dtype of the stored moments.
        products: dtype of Muon's matmuls.
    """

    # () float32 on the device; at 1 a step changes nothing. See update_if_finite.
    found_inf: Tensor | None = None

    def __init__(
        self, groups: Groups, lr: float, lanes: int, moments: torch.dtype, products: torch.dtype
    ):
        super().__init__(groups, {"lr": lr, "rule": "adamw"})
        self.lanes, self.moments, self.products = lanes, moments, products

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients. `closure` is not supported."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = first_state(parameter, group, self.moments)
            if group["rule"] == "muon":  # batches matrices of one shape
                for shape in dict.fromkeys(p.shape for p in parameters):
                    alike = [p for p in parameters if p.shape == shape]
                    n = max(1, AT_A_TIME // shape.numel())
                    for i in range(0, len(alike), n):
                        self.muon(alike[i : i + n], group)
            else:
                for parameter in parameters:
                    self.adamw(parameter, group)

    def adamw(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter with AdamW, AT_A_TIME elements at a time."""
        state = self.state[parameter]
        tensors = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        columns = [local_tensor(t).reshape(-1).split(AT_A_TIME) for t in tensors if t is not None]
        step = state["step"].clone()
        # Each call of the kernel adds 1 to its step count, so every piece starts from `step`.
        for pieces in zip(*columns, strict=True):
            self.adamw_piece(pieces, state["step"].copy_(step), group)

    def adamw_piece(self, pieces: tuple[Tensor, ...], step: Tensor, group: dict[str, Any]) -> None:
        """Run torch's AdamW kernel on float32 copies of 1-D pieces: weight, gradient, two moments.

        The copies are freed when this returns, before the copies of the next piece are made.
        """
        copies = [to_padded_float32(piece, self.lanes) for piece in pieces]
        weights, gradients, first, second = ([copy] for copy in copies)
        adamw(
            weights, gradients, first, second, [], [step],
            lr=group["lr"], weight_decay=group["weight_decay"], beta1=BETAS[0], beta2=BETAS[1],
            eps=EPS, fused=True, found_inf=self.found_inf, amsgrad=False, maximize=False,
        )  # fmt: skip
        for piece, copy in zip(pieces, copies, strict=True):
            if copy is not piece:
                piece.copy_(copy[: piece.numel()])

    def muon(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape (A, B) with Muon, as torch.optim.Muon does.

        The update has a root mean square of 0.2, about that of AdamW. So one learning rate and one
        weight decay serve both (Liu et al., 2025, arXiv 2502.16982, section 2.2).
        """
        update = orthogonalize_rows(self.nesterov_momentum(matrices), matrices[0])
        update = update.float() * (0.2 * math.sqrt(max(matrices[0].shape)))
        for weight, change in zip(map(local_tensor, matrices), update, strict=True):
            change = (weight * group["weight_decay"]).add_(change).mul_(group["lr"])
            weight.sub_(self.unless_skipped(change))

    def nesterov_momentum(self, matrices: list[Tensor]) -> Tensor:
        """Update the momenta with the gradients, and return Nesterov's mean of both, (n, A, B).

        With sharded matrices A counts this process's rows. The result has the dtype `products`.
        """
        stored = [local_tensor(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        gradients = torch.stack([local_tensor(m.grad) for m in matrices if m.grad is not None])
        momenta = torch.stack(stored).float()
        # Separate operations round once each. lerp rounds once or twice, depending on an element's
        # place in a CPU's vector; in a shard elements have other places.
        change = momenta - gradients
        momenta -= self.unless_skipped(change.mul_(1 - MOMENTUM))
        for moment, momentum in zip(stored, momenta, strict=True):
            moment.copy_(momentum)
        nesterov = torch.sub(momenta, gradients, out=change).mul_(MOMENTUM).add_(gradients)
        return nesterov.to(self.products)

    def unless_skipped(self, change: Tensor) -> Tensor:
        """Return `change`, or zeros if this step is skipped. The device decides: Python does not
        wait for it."""
        return change if self.found_inf is None else change.masked_fill_(self.found_inf.bool(), 0)


def orthogonalize_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return this process's rows of `orthogonalize`, from its rows of the matrices (n, A, B).

    `like`: one of the parameters (A, B), which may be sharded. Then all processes gather the full
    matrices first.
    """
    if not is_sharded(like):
        return orthogonalize(rows)
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh, by_rows = like.device_mesh, [Shard(1)]  # type: ignore[attr-defined]
    shape, stride = torch.Size([len(rows), *like.shape]), (like.numel(), like.size(1), 1)
    sharded = DTensor.from_local(rows, mesh, by_rows, run_check=False, shape=shape, stride=stride)
    whole = orthogonalize(sharded.full_tensor())
    return distribute_tensor(whole, mesh, by_rows, src_data_rank=None).to_local()


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return about U V' for each matrix U S V', an update of equal size in every direction of the
    momentum: (n, A, B) -> (n, A, B).

    Newton-Schulz iterations use matrix products only (Jordan, 2024). torch.optim.Muon does them for
    one matrix at a time, in bfloat16, which some devices emulate.
    """
    a, b, c = NS_COEFFICIENTS
    x = matrices if matrices.size(1) <= matrices.size(2) else matrices.mT  # now A <= B
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if exact and x.size(1) < x.size(2):
        x = torch.bmm(product_of_factors(torch.bmm(x, x.mT)), x)
    else:
        for _ in range(NS_STEPS):
            square = torch.bmm(x, x.mT)
            factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
            x = torch.baddbmm(x, factor, x, beta=a)
    return x if matrices.size(1) <= matrices.size(2) else x.mT


def product_of_factors(square: Tensor) -> Tensor:
    """Return the matrices (n, A, A) by which all iterations together multiply x (n, A, B).

    `square`: x x' (n, A, A). If B > A, this takes fewer FLOPs than one iteration after the other.
    But the eigenvalues of x x' are squares, and bfloat16 and TF32 have too few digits for their
    range.
    """
    a, b, c = NS_COEFFICIENTS
    total = None
    for i in range(NS_STEPS):
        factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        total = factor if total is None else torch.bmm(factor, total)
        if i < NS_STEPS - 1:  # x x' of the next x
            square = torch.bmm(factor, torch.bmm(square, factor))
    assert total is not None
    return total


def to_padded_float32(piece: Tensor, lanes: int) -> Tensor:
    """Return a float32 copy of the 1-D `piece`, padded with zeros to a multiple of `lanes`
    elements. If it is in float32 and needs no padding, return `piece` itself.

    On a CPU the kernel computes elements that do not fill a vector with other instructions, which
    round differently; and a shard has other such elements. A GPU's kernel has no such elements, and
    each copy would be one more launch: `lanes` is 1 there.
    """
    copy, missing = piece.float(), -piece.numel() % lanes
    return F.pad(copy, (0, missing)) if missing else copy


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor, without the import of DTensor, which takes half a
    second."""
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's rows of a DTensor; any other tensor unchanged."""
    return getattr(tensor, "to_local", lambda: tensor)()


def first_state(
    parameter: Tensor, group: dict[str, Any], moments: torch.dtype
) -> dict[str, Tensor]:
    """Return the state of a parameter before its first step: zero moments of the dtype `moments`,
    and AdamW's step count."""
    rule, state = group.get("rule", "adamw"), {}
    if rule == "adamw":
        state["step"] = torch.tensor(0.0, device=parameter.device)
    for name in MOMENTS[rule]:
        state[name] = torch.zeros_like(parameter, dtype=moments)
    return state


def optimizer_name(args: argparse.Namespace) -> str:
    """Return the name of the optimizer for the user."""
    return {"adamw": "AdamW", "muon": "Muon and AdamW"}[args.optimizer]


def update_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> Tensor:
    """Do one step of the optimizer. If the gradients' norm () is not finite, change nothing, to the
    bit.

    The fused kernel itself reads a number on the device, `found_inf`: at 1 it leaves weights,
    moments and step count unchanged, and so does LeanOptimizer's Muon. `found_inf` was made for
    GradScaler.step, which would set it by the gradients; but their norm can overflow although each
    gradient is finite.

    MPS's kernel ignored `found_inf` before pytorch#186360 (June 2026). On MPS Python decides, and
    has to wait for the device. Return the norm, on MPS as a tensor on the CPU, which needs no
    second wait.
    """
    if grad_norm.device.type != "mps":
        optimizer.found_inf = (~grad_norm.isfinite()).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif (grad_norm := grad_norm.cpu()).isfinite():
        optimizer.step()
    return grad_norm


@torch.no_grad()
def restore_optimizer(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], local_shard: LocalShard
) -> None:
    """Copy the moments of a `state_dict` into this optimizer, in its own dtype.

    The moments are the snapshot's; the settings (weight decay, fused or not) are this run's.
    load_state_dict would also load the settings, and round all state to the dtype of the weights.

    Args:
        saved: `state_dict` of an optimizer, with full tensors.
        local_shard: function (full tensor, parameter) -> this process's rows of the tensor.
    Raises:
        ValueError, KeyError: the state is of another model or optimizer.
    """
    dtype = getattr(optimizer, "moments", torch.float32)
    param_ids = [group["params"] for group in saved["param_groups"]]
    if param_ids != [group["params"] for group in optimizer.state_dict()["param_groups"]]:
        raise ValueError("other groups of parameters")
    if not saved["state"]:  # every step was skipped before it reached the optimizer
        return
    parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for param_id, (parameter, group) in zip(sum(param_ids, []), parameters, strict=True):
        entry, state = saved["state"][param_id], first_state(parameter, group, dtype)
        for name, moment in state.items():
            if name == "step":
                moment.copy_(entry[name].reshape(()))
                continue
            if entry[name].shape != parameter.shape or not entry[name].is_floating_point():
                raise ValueError(f"{name} of another shape or kind")
            # Copy: `local_shard` may return a view, which would keep the full tensor alive.
            moment.copy_(local_shard(entry[name], parameter))
        optimizer.state[parameter] = state
