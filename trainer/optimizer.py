"""Make the optimizer of a run, update weights, skip non-finite updates, restore saved moments.

For AdamW with float32 moments this file uses torch's own class. Besides the weight and the
gradient, torch's AdamW stores 8 bytes per parameter. No recompute policy can free these bytes.
`LeanOptimizer` stores fewer bytes per parameter, or only this process's shard of them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

from model import MiniGPT

from .settings import Settings

BETAS, EPS = (0.9, 0.95), 1e-8  # for AdamW; the second beta is GPT-3's
MOMENTUM = 0.95  # for Muon
# Coefficients a, b, c of Muon's Newton-Schulz polynomial a x + b x^3 + c x^5. Five iterations map
# all singular values between 0.003 and 1 to values between 0.68 and 1.2. These values are as good
# as 1 (Jordan, 2024).
NS_COEFFICIENTS, NS_STEPS = (3.4445, -4.7750, 2.0315), 5
# The names that torch's optimizers use.
MOMENT_NAMES_BY_OPTIMIZER = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "muon": ("momentum_buffer",),
}
# Number of elements that are updated at a time (Muon updates at least one matrix). Bfloat16
# moments, Muon and shards save memory. This number is small, so that the temporary copies of an
# update take much less memory than is saved.
UPDATE_CHUNK_ELEMENTS = 2**22
# A function such as OneProcess.shard_like: (full tensor, parameter) -> this process's rows.
ShardLikeFn = Callable[[Tensor, Tensor], Tensor]
Groups = list[dict[str, Any]]
# On a CPU, AdamW's kernel gets a multiple of this number of elements (see
# `to_lane_padded_float32`). This number is a multiple of the number of floats that fit in a vector
# register.
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

    `precision`: the dtype of the model's matmuls. `sharded`: the parameters are this process's
    rows of sharded parameters, as plain tensors (the planner has no DTensors).
    """
    muon, groups = settings.optimizer == "muon", make_param_groups(model, settings)
    moments = getattr(torch, settings.moments_dtype)
    unsharded = not (sharded or any(map(is_sharded, model.parameters())))
    if not muon and moments == torch.float32 and unsharded:
        return torch.optim.AdamW(groups, lr=settings.lr, betas=BETAS, eps=EPS, fused=True)
    # Muon does many matmuls. bfloat16 has a third of the digits of float32, which is enough for
    # these matmuls (Jordan, 2024). But some hardware only emulates bfloat16. So Muon's matmuls are
    # in bfloat16 only if the model's matmuls are, and else in float32.
    products = torch.bfloat16 if precision == torch.bfloat16 else torch.float32
    lanes = PADDING_MULTIPLE if device.type == "cpu" else 1
    return LeanOptimizer(groups, settings.lr, lanes, moments, products)


def make_param_groups(model: MiniGPT, settings: Settings) -> Groups:
    """Return the optimizer's groups of parameters.

    Weight decay pulls matrices and embeddings towards zero. Biases and LayerNorm gains get no
    weight decay, because they have no reason to be small.
    """
    matrices, decayed, undecayed = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            undecayed.append(parameter)
        elif settings.optimizer == "muon" and name.startswith("blocks."):
            matrices.append(parameter)
        else:
            decayed.append(parameter)
    groups: Groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    if settings.optimizer == "muon":
        groups.append({"params": matrices, "weight_decay": settings.weight_decay, "rule": "muon"})
    return groups


def optimizer_state(model: MiniGPT, settings: Settings) -> Iterator[Tensor]:
    """Yield the tensors that the optimizer keeps for `model` from step to step."""
    moments = getattr(torch, settings.moments_dtype)
    for group in make_param_groups(model, settings):
        for parameter in group["params"]:
            yield from initial_param_state(parameter, group, moments).values()


class LeanOptimizer(torch.optim.Optimizer):
    """AdamW and Muon, each for its own parameter groups, with moments in float32 or bfloat16.

    Weights and arithmetic are in float32 (Muon's matmuls in `products`). Only the moments that are
    stored between two steps are rounded to `moments`. A bfloat16 moment does not change if an
    update would change it by less than 2^-9 to 2^-8 of its value, depending on the value. AdamW's
    update changes the second moment v by (1 - beta2) (g^2 - v), where g is the gradient. With
    beta2 = 0.95, v stops changing only when v differs from g^2 by at most 4 to 8 % of v. This
    error changes the weight's update by at most 4 %. (With beta2 = 0.999, v would stop changing
    wherever g^2 is below three times v.)

    A sharded parameter (a DTensor, sharded by rows) has sharded moments. The new weights of a
    sharded parameter equal those of an unsharded parameter to the bit. With float32 moments they
    also equal those of torch's AdamW to the bit, if the parameter fills whole vector registers of
    the CPU (see `to_lane_padded_float32`).

    Args:
        groups: parameter groups with "params" and "weight_decay", and with "rule" if the rule is
            not "adamw".
        lr: learning rate of all groups.
        lanes: AdamW's kernel gets a multiple of this number of elements (see
            `to_lane_padded_float32`).
        moments: dtype of the stored moments.
        products: dtype of Muon's matmuls.
    """

    # Tensor () float32 on the device. If it is 1, a step changes nothing. See `step_if_finite`.
    found_inf: Tensor | None = None

    def __init__(
        self, groups: Groups, lr: float, lanes: int, moments: torch.dtype, products: torch.dtype
    ):
        super().__init__(groups, {"lr": lr, "rule": "adamw"})
        self.lanes, self.moments, self.products = lanes, moments, products

    def make_state(self) -> None:
        """Make the state of all parameters that have gradients and no state yet."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = initial_param_state(parameter, group, self.moments)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients. `closure` is not supported."""
        self.make_state()
        for updates in self.updates_by_kind().values():
            for update in updates:
                update()

    def updates_by_kind(self) -> dict[tuple, list[Callable[[], None]]]:
        """Return the updates of a step, each of one parameter or of one batch of matrices.

        They are independent. Updates of one kind run the same operators on tensors of the same
        shapes, so that the planner need not simulate each of them.
        """
        updates = defaultdict[tuple, list[Callable[[], None]]](list)
        for i, group in enumerate(self.param_groups):
            alike = defaultdict[tuple, list[Tensor]](list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[i, p.shape, p.stride(), p.grad.stride(), p.grad.dtype].append(p)
            for kind, parameters in alike.items():
                if group["rule"] != "muon":
                    updates[kind] = [partial(self.adamw, p, group) for p in parameters]
                    continue
                # Muon updates the matrices of one shape together, in batches of at most n matrices.
                n = max(1, UPDATE_CHUNK_ELEMENTS // parameters[0].numel())
                for at in range(0, len(parameters), n):
                    batch = parameters[at : at + n]
                    updates[kind + (len(batch),)].append(partial(self.muon, batch, group))
        return updates

    def adamw(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter with AdamW, UPDATE_CHUNK_ELEMENTS elements at a time."""
        state = self.state[parameter]
        tensors = parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        local = [local_tensor(tensor) for tensor in tensors if tensor is not None]
        flat = [tensor.reshape(-1) for tensor in local]
        step = state["step"].clone()
        # Each call of the kernel adds 1 to the step count. So reset the count before each piece.
        for pieces in zip(*(row.split(UPDATE_CHUNK_ELEMENTS) for row in flat), strict=True):
            self.adamw_piece(pieces, state["step"].copy_(step), group)
        for tensor, row in zip(local, flat, strict=True):
            if not tensor.is_contiguous():  # `reshape` has copied it
                tensor.copy_(row.view_as(tensor))

    def adamw_piece(self, pieces: tuple[Tensor, ...], step: Tensor, group: dict[str, Any]) -> None:
        """Run torch's AdamW kernel on float32 copies of 1-D pieces: weight, gradient, two moments.

        The copies are freed when this method returns, before the copies of the next piece are made.
        """
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

    def muon(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        """Update matrices of one shape (A, B) with Muon, as torch.optim.Muon does.

        The root mean square of an update's elements is 0.2, which is about that of AdamW's updates.
        So both rules use the same learning rate and the same weight decay (Liu et al., 2025, arXiv
        2502.16982, section 2.2).
        """
        update = orthogonalize_shard(self.nesterov_momentum(matrices), matrices[0])
        update = update.float() * (0.2 * math.sqrt(max(matrices[0].shape)))
        for weight, change in zip(map(local_tensor, matrices), update, strict=True):
            change = (weight * group["weight_decay"]).add_(change).mul_(group["lr"])
            weight.sub_(self.zeros_if_skipped(change))

    def nesterov_momentum(self, matrices: list[Tensor]) -> Tensor:
        """Update the momenta with the gradients, and return the Nesterov momenta, (n, A, B).

        A Nesterov momentum is a weighted mean of the new momentum and the gradient. If the matrices
        are sharded, A is the number of this process's rows. The result has the dtype `products`.
        """
        stored = [local_tensor(self.state[matrix]["momentum_buffer"]) for matrix in matrices]
        gradients = torch.stack([local_tensor(m.grad) for m in matrices if m.grad is not None])
        momenta = torch.stack(stored).float()
        # Do not use lerp. It rounds once or twice, depending on an element's place in a vector
        # register of the CPU. In a shard an element has another place, so its result would differ.
        # The separate operations below round once each.
        change = momenta - gradients
        momenta -= self.zeros_if_skipped(change.mul_(1 - MOMENTUM))
        for moment, momentum in zip(stored, momenta, strict=True):
            moment.copy_(momentum)
        nesterov = torch.sub(momenta, gradients, out=change).mul_(MOMENTUM).add_(gradients)
        return nesterov.to(self.products)

    def zeros_if_skipped(self, change: Tensor) -> Tensor:
        """Return `change`, or zeros if this step is skipped.

        The device reads `found_inf` and decides, so Python does not wait for the device.
        """
        return change if self.found_inf is None else change.masked_fill_(self.found_inf.bool(), 0)


def orthogonalize_shard(rows: Tensor, like: Tensor) -> Tensor:
    """Return this process's rows of the orthogonalized matrices (n, A, B).

    `rows`: this process's rows of the matrices. `like`: one of the parameters (A, B). If `like` is
    sharded, all processes first gather the full matrices.
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
    """Return an approximation of U V' for each matrix U S V': (n, A, B) -> (n, A, B).

    U S V' is the singular value decomposition of a momentum matrix. As an update, U V' has the same
    size in every direction of the momentum.

    The approximation comes from Newton-Schulz iterations, which use matrix products only (Jordan,
    2024). torch.optim.Muon also does these iterations, but for one matrix at a time, and in
    bfloat16, which some devices only emulate.
    """
    a, b, c = NS_COEFFICIENTS
    x = matrices if matrices.size(1) <= matrices.size(2) else matrices.mT  # now A <= B
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    exact = x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    if exact and x.size(1) < x.size(2):
        x = torch.bmm(newton_schulz_total_multiplier(torch.bmm(x, x.mT)), x)
    else:
        for _ in range(NS_STEPS):
            square = torch.bmm(x, x.mT)
            factor = torch.baddbmm(square, square, square, beta=b, alpha=c)
            x = torch.baddbmm(x, factor, x, beta=a)
    return x if matrices.size(1) <= matrices.size(2) else x.mT


def newton_schulz_total_multiplier(square: Tensor) -> Tensor:
    """Return the matrices (n, A, A) by which all iterations together multiply x (n, A, B).

    `square`: x x' (n, A, A). Each iteration multiplies x by a factor (n, A, A). This function
    multiplies the factors with each other, and the caller then multiplies x by their product. If
    B > A, this takes fewer FLOPs than to multiply x by one factor after the other. But it needs
    high precision: the eigenvalues of x x' are the squares of x's singular values, and bfloat16 and
    TF32 have too few digits for the range of these squares. So `orthogonalize` calls this function
    only in full float32.
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


def to_lane_padded_float32(piece: Tensor, lanes: int) -> Tensor:
    """Return a float32 copy of the 1-D `piece`, padded with zeros to a multiple of `lanes`
    elements. If `piece` is in float32 and needs no padding, return `piece` itself.

    On a CPU the kernel computes the last elements, which do not fill a vector register, with other
    instructions. These instructions round differently. In a shard other elements are the last ones,
    so without padding a shard's results would differ. A GPU's kernel has no such elements, and each
    copy would cost one more kernel launch. So `lanes` is 1 on a GPU.
    """
    copy, missing = piece.float(), -piece.numel() % lanes
    return F.pad(copy, (0, missing)) if missing else copy


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a DTensor.

    This function does not import DTensor, because that import takes half a second.
    """
    return hasattr(tensor, "to_local")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's rows of a DTensor. Return any other tensor unchanged."""
    return getattr(tensor, "to_local", lambda: tensor)()


def initial_param_state(
    parameter: Tensor, group: dict[str, Any], moments: torch.dtype
) -> dict[str, Tensor]:
    """Return the state of a parameter before its first step: zero moments of the dtype `moments`,
    and AdamW's step count."""
    rule = group.get("rule", "adamw")
    step = {"step": torch.tensor(0.0, device=parameter.device)} if rule == "adamw" else {}
    names = MOMENT_NAMES_BY_OPTIMIZER[rule]
    return step | {name: torch.zeros_like(parameter, dtype=moments) for name in names}


def optimizer_name(settings: Settings) -> str:
    """Return the name of the optimizer, in words for the user."""
    return {"adamw": "AdamW", "muon": "Muon and AdamW"}[settings.optimizer]


def step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> Tensor:
    """Do one step of the optimizer, but change no bit if the scalar `grad_norm` is not finite.

    `grad_norm` is the norm of all gradients. Return `grad_norm`, on MPS as a tensor on the CPU.

    The fused kernel reads the number `found_inf` on the device. If `found_inf` is 1, the kernel
    leaves weights, moments and step count unchanged. LeanOptimizer's Muon does so, too. torch has
    `found_inf` for GradScaler.step, which sets it to 1 if a gradient is not finite. Here the norm
    decides, because the norm can overflow although each gradient is finite.

    On MPS, Python decides, because MPS's kernel ignored `found_inf` before pytorch#186360 (June
    2026). So Python has to wait for the norm. The returned norm is on the CPU, so that the caller
    need not wait a second time.
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

    The moments come from the snapshot. The settings (weight decay, fused or not) stay those of this
    run. torch's load_state_dict is not used, because it would also load the settings, and would
    round all state to the dtype of the weights.

    Args:
        saved: state dict of an optimizer, with full tensors.
        shard_like: function (full tensor, parameter) -> this process's rows of the tensor.
    Raises:
        ValueError, LookupError: the state dict is that of another model or optimizer.
    """
    dtype = getattr(optimizer, "moments", torch.float32)
    param_ids = [group["params"] for group in saved["param_groups"]]
    if param_ids != [group["params"] for group in optimizer.state_dict()["param_groups"]]:
        raise ValueError("other groups of parameters")
    parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for i, entry in saved["state"].items():  # without parameters that never got a gradient
        parameter, group = parameters[i]
        state = initial_param_state(parameter, group, dtype)
        for name, tensor in state.items():
            whole = entry[name]
            if whole.shape != tensor.shape or not whole.is_floating_point():
                raise ValueError(f"{name} of another shape or kind")
            # Copy: `shard_like` may return a view, which would keep the full tensor alive.
            tensor.copy_(shard_like(whole, tensor) if is_sharded(tensor) else whole)
        optimizer.state[parameter] = state
