"""The optimizer: which parameter is updated by which rule, when none is, and how it goes on.

AdamW with float32 moments is torch's own. It stores 8 bytes a parameter beside the weight and the
gradient, which no recompute can free. `LeanOptimizer` stores less, or a part of it.
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

BETAS, EPS = (0.9, 0.95), 1e-8  # of AdamW; the second beta is GPT-3's
MOMENTUM = 0.95  # of Muon
# Muon's polynomial a x + b x^3 + c x^5: five in a row take all singular values from 0.003 to 1 to
# somewhere between 0.68 and 1.2, which is as good as 1 (Jordan, 2024).
NS_COEFFICIENTS, NS_STEPS = (3.4445, -4.7750, 2.0315), 5
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}  # torch's names
# Elements that are copied at a time, at least one matrix: the step shall need little beside what
# it is there to save.
AT_A_TIME = 2**22
LocalShard = Callable[[Tensor, Tensor], Tensor]  # OneProcess.local_shard
Groups = list[dict[str, Any]]
LANES = 64  # a multiple of the floats in a CPU's vector


def make_optimizer(
    model: MiniGPT, args: argparse.Namespace, device: torch.device, precision: torch.dtype
) -> torch.optim.Optimizer:
    """What --optimizer and --moments-dtype name; `precision` is that of the model's products.

    AdamW (Loshchilov and Hutter, 2019), as one fused kernel; or Muon (Jordan, 2024) for the
    matrices of the blocks and AdamW for all else: embeddings, which are tables of vectors, biases
    and gains. (Parameters may be sharded over processes: DTensors.)

    Weight decay pulls matrices towards zero. A bias or a LayerNorm gain has no reason to be small.
    """
    muon = args.optimizer == "muon"
    matrices, decayed, free = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            free.append(parameter)
        elif muon and name.startswith("blocks."):
            matrices.append(parameter)
        else:
            decayed.append(parameter)
    groups: Groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    moments = getattr(torch, args.moments_dtype)
    whole = not any(map(is_sharded, model.parameters()))
    if not muon and moments == torch.float32 and whole:
        return torch.optim.AdamW(groups, lr=args.lr, betas=BETAS, eps=EPS, fused=True)
    if muon:
        groups.append({"params": matrices, "weight_decay": args.weight_decay, "rule": "muon"})
    # The products of Muon are many; half of bfloat16's digits go, and do not matter (Jordan). Where
    # it is emulated the model is trained in float32, and so is this.
    products = torch.bfloat16 if precision == torch.bfloat16 else torch.float32
    lanes = LANES if device.type == "cpu" else 1
    return LeanOptimizer(groups, args.lr, lanes, moments, products)


class LeanOptimizer(torch.optim.Optimizer):
    """AdamW and Muon, each for its groups, with moments in float32 or bfloat16.

    Weights and arithmetic are in float32. Only what is stored between two steps is rounded. A
    moment in bfloat16 stands still when its step is less than 2^-9 of it. AdamW's second moment v
    takes steps of (1 - beta2) (g^2 - v). With a beta2 of 0.95 it stands still only where v is
    within 4 to 8 % of g^2, and the update within 4 %. (With 0.999 it would stand still wherever
    g^2 is less than three times v.)

    A sharded parameter (a DTensor, dealt out by rows) has sharded moments. The weights that come
    out are, to the bit, those of whole parameters (of torch's own AdamW, if each of those fills
    the CPU's vectors: see `to_padded_float32`).

    Args:
        groups: "params", "weight_decay", and the "rule", if that is not "adamw".
        lanes: AdamW's kernel is given a multiple of so many elements (see `to_padded_float32`).
        moments: the dtype in which they are stored.
        products: the dtype of Muon's products.
    """

    found_inf: Tensor | None = None  # () float32: at 1 a step changes nothing. See update_if_finite

    def __init__(
        self, groups: Groups, lr: float, lanes: int, moments: torch.dtype, products: torch.dtype
    ):
        super().__init__(groups, {"lr": lr, "rule": "adamw"})
        self.lanes, self.moments, self.products = lanes, moments, products

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = first_state(parameter, group, self.moments)
            if group["rule"] == "muon":  # matrices of one shape together
                for shape in dict.fromkeys(p.shape for p in parameters):
                    alike = [p for p in parameters if p.shape == shape]
                    n = max(1, AT_A_TIME // shape.numel())
                    for i in range(0, len(alike), n):
                        self.muon(alike[i : i + n], group)
            else:
                for parameter in parameters:
                    self.adamw(parameter, group)

    def adamw(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter, AT_A_TIME elements at a time."""
        state = self.state[parameter]
        every = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        columns = [local_tensor(t).reshape(-1).split(AT_A_TIME) for t in every if t is not None]
        step = state["step"].clone()
        for pieces in zip(*columns, strict=True):
            self.adamw_piece(pieces, state["step"].copy_(step), group)  # the kernel adds 1

    def adamw_piece(self, pieces: tuple[Tensor, ...], step: Tensor, group: dict[str, Any]) -> None:
        """torch's own kernel, on float32 copies of the moments. They are free when this returns,
        before those of the next piece are made."""
        wide = [to_padded_float32(piece, self.lanes) for piece in pieces]
        weights, gradients, first, second = ([copy] for copy in wide)
        adamw(
            weights, gradients, first, second, [], [step],
            lr=group["lr"], weight_decay=group["weight_decay"], beta1=BETAS[0], beta2=BETAS[1],
            eps=EPS, fused=True, found_inf=self.found_inf, amsgrad=False, maximize=False,
        )  # fmt: skip
        for piece, copy in zip(pieces, wide, strict=True):
            if copy is not piece:
                piece.copy_(copy[: piece.numel()])

    def muon(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """One step for matrices of one shape (A, B), as torch.optim.Muon has it.

        The update has a root mean square of 0.2, about as AdamW's has: so one learning rate and
        one weight decay serve both (Liu et al., 2025, arXiv 2502.16982, section 2.2).
        """
        update = orthogonalize_rows(self.nesterov_momentum(matrices), matrices[0])
        update = update.float() * (0.2 * math.sqrt(max(matrices[0].shape)))
        for weight, change in zip(map(local_tensor, matrices), update, strict=True):
            change = (weight * group["weight_decay"]).add_(change).mul_(group["lr"])
            weight.sub_(self.unless_skipped(change))

    def nesterov_momentum(self, matrices: list[Tensor]) -> Tensor:
        """Take the gradients into the momenta; returns Nesterov's mean of both, (n, A, B)."""
        stored = [local_tensor(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        gradients = torch.stack([local_tensor(m.grad) for m in matrices if m.grad is not None])
        momenta = torch.stack(stored).float()
        # Each operation rounds once. (lerp may round once or twice, by an element's place in a
        # vector; of a shard that is another place.)
        change = momenta - gradients
        momenta -= self.unless_skipped(change.mul_(1 - MOMENTUM))
        for kept, momentum in zip(stored, momenta, strict=True):
            kept.copy_(momentum)
        ahead = torch.sub(momenta, gradients, out=change).mul_(MOMENTUM).add_(gradients)
        return ahead.to(self.products)

    def unless_skipped(self, change: Tensor) -> Tensor:
        """`change`, or zeros, by which nothing changes: the device decides."""
        return change if self.found_inf is None else change.masked_fill_(self.found_inf.bool(), 0)


def orthogonalize_rows(rows: Tensor, like: Tensor) -> Tensor:
    """`orthogonalize`, from this process's rows of whole matrices (n, A, B) to its rows of them.
    `like`: one of the parameters, which may be sharded."""
    if not is_sharded(like):
        return orthogonalize(rows)
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh, by_rows = like.device_mesh, [Shard(1)]  # type: ignore[attr-defined]
    shape, stride = torch.Size([len(rows), *like.shape]), (like.numel(), like.size(1), 1)
    dealt = DTensor.from_local(rows, mesh, by_rows, run_check=False, shape=shape, stride=stride)
    whole = orthogonalize(dealt.full_tensor())
    return distribute_tensor(whole, mesh, by_rows, src_data_rank=None).to_local()


def orthogonalize(matrices: Tensor) -> Tensor:
    """Of each U S V' about U V': all that the momentum wants, in every direction as much.

    (n, A, B) -> (n, A, B). Newton-Schulz iterations, products only (Jordan, 2024).
    torch.optim.Muon has them for one matrix at a time, in bfloat16, which some devices emulate.
    """
    a, b, c = NS_COEFFICIENTS
    x = matrices if matrices.size(1) <= matrices.size(2) else matrices.mT  # the smaller products
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
    """From x x' (n, A, A) what all iterations together multiply x (n, A, B) by.

    Fewer FLOPs than one iteration after the other where B > A. But the eigenvalues of x x' are
    squares, for whose range bfloat16 has too few digits, and so has TF32.
    """
    a, b, c = NS_COEFFICIENTS
    total = None
    for i in range(NS_STEPS):
        factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        total = factor if total is None else torch.bmm(factor, total)
        if i < NS_STEPS - 1:  # of the next x
            square = torch.bmm(factor, torch.bmm(square, factor))
    assert total is not None
    return total


def to_padded_float32(piece: Tensor, lanes: int) -> Tensor:
    """A float32 copy of `piece`, with zeros up to a multiple of `lanes` elements; or `piece`.

    A CPU's kernel computes what does not fill a vector by other instructions, which round
    otherwise; and of a shard other elements are left over. A GPU's has no such rest, and each of
    these copies would be a launch.
    """
    wide, missing = piece.float(), -piece.numel() % lanes
    return F.pad(wide, (0, missing)) if missing else wide


def is_sharded(tensor: Tensor) -> bool:
    """Is it a DTensor? (Asked without importing those, which takes half a second.)"""
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Tensor) -> Tensor:
    """What this process has of it: all, unless it is sharded."""
    return getattr(tensor, "to_local", lambda: tensor)()


def first_state(
    parameter: Tensor, group: dict[str, Any], moments: torch.dtype
) -> dict[str, Tensor]:
    """What an optimizer keeps of a parameter, before its first step."""
    rule, state = group.get("rule", "adamw"), {}
    if rule == "adamw":
        state["step"] = torch.tensor(0.0, device=parameter.device)
    for name in MOMENTS[rule]:
        state[name] = torch.zeros_like(parameter, dtype=moments)
    return state


def optimizer_name(args: argparse.Namespace) -> str:
    return {"adamw": "AdamW", "muon": "Muon and AdamW"}[args.optimizer]


def update_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> Tensor:
    """One step of the optimizer; none, to the bit, if the gradients' norm () is not finite.

    The fused kernel looks by itself at a number on the device, `found_inf`: at 1 it leaves weights,
    moments and step count alone. It was made for GradScaler.step, which would set it by the
    gradients; their norm can overflow where none of them does. (LeanOptimizer's Muon goes by it,
    too.) MPS's kernel did not look before pytorch#186360, of June 2026. There Python decides, for
    which it must wait for the device. So the norm is returned: from where it is known.
    """
    if grad_norm.device.type != "mps":
        optimizer.found_inf = (~grad_norm.isfinite()).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif (grad_norm := grad_norm.cpu()).isfinite():
        optimizer.step()
    return grad_norm


@torch.no_grad()
def restore_optimizer(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], part: LocalShard
) -> None:
    """Put the moments of a `state_dict` back, in this optimizer's dtype.

    They are the snapshot's; the settings (weight decay, fused or not) are this run's. So this is
    not load_state_dict, which would take those too, and round all to the dtype of the weights.

    Args:
        part: what this process has of a whole tensor, given the parameter that it is of.
    Raises:
        ValueError, KeyError: it is of another model or optimizer.
    """
    dtype = getattr(optimizer, "moments", torch.float32)
    numbers = [group["params"] for group in saved["param_groups"]]
    if numbers != [group["params"] for group in optimizer.state_dict()["param_groups"]]:
        raise ValueError("other groups of parameters")
    if not saved["state"]:  # all steps were skipped, by an optimizer that was not even asked
        return
    parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for number, (parameter, group) in zip(sum(numbers, []), parameters, strict=True):
        found, state = saved["state"][number], first_state(parameter, group, dtype)
        for name, kept in state.items():
            if name == "step":
                kept.copy_(found[name].reshape(()))
                continue
            if found[name].shape != parameter.shape or not found[name].is_floating_point():
                raise ValueError(f"{name} of another shape or kind")
            # A copy: what `part` returns may be a view, which would keep the whole tensor alive.
            kept.copy_(part(found[name], parameter))
        optimizer.state[parameter] = state
