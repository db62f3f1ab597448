"""The optimizer: which parameter is updated how, and when it is not."""

import argparse

import torch
from torch import Tensor

from model import MiniGPT


def make_optimizer(
    model: MiniGPT, args: argparse.Namespace, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2019), as one fused kernel where the device has it.

    Weight decay pulls matrices towards zero. A bias or a LayerNorm gain has no reason to be small.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = device.type in ("cuda", "cpu")
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=fused)


def update_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> None:
    """One step of the optimizer; none, to the bit, if the gradients' norm () is not finite.

    The fused kernel looks by itself at a number on the device, `found_inf`: at 1 it leaves weights,
    moments and step count alone. It was made for GradScaler.step, which would set it by the
    gradients; their norm can overflow where none of them does. Other kernels have to be asked not
    to run, and to ask Python must wait for the device.
    """
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = (~grad_norm.isfinite()).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif grad_norm.isfinite():
        optimizer.step()
