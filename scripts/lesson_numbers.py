"""The answers to docs/lesson.md, each computed when it is asked for, with what there is to see.

One function an exercise. It returns a `Measured`: the answer, and lines that show where it comes
from (`python -m scripts.lesson N --measure`).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from model import MLP, RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig
from planner import Planner, StepMemory
from planner.formulas import head_bytes, recompute_cost
from scripts.kept_tensors import kept_by_one_block, table
from scripts.style import relative_flops

GPT2_SMALL = MiniGPTConfig(dropout=0.0)
SEQ_LEN, SEQUENCES = 1024, 12
MIB, GIB = 2**20, 2**30
BUDGET = 4 * GIB  # exercise 10


@dataclass(frozen=True)
class Measured:
    answer: float | str
    lines: str  # what there is to see


def needed_by_backward() -> Measured:
    """1: which of an MLP's tensors autograd keeps."""
    mlp = MLP(MiniGPTConfig(n_heads=1, d_model=8, d_ff=32))
    x = torch.randn(2, 4, 8, requires_grad=True)
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())  # views of one tensor share it
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):  # MLP.forward, step by step
        wide = mlp.c_fc(x)
        g = F.gelu(wide, approximate="tanh")
        y = mlp.c_proj(g)
    tensors = {"x": x, "wide": wide, "g": g, "y": y}
    kept = {name: t.untyped_storage().data_ptr() in saved for name, t in tensors.items()}
    lines = [f"{name:<5} {'kept' if kept[name] else 'not needed'}" for name in tensors]
    return Measured(sum(kept.values()), "\n".join(lines))


def block_keeps(policy: str, no_amp: bool = False) -> Measured:
    """2, 3 and 4: without autocast's copies of the weights, which do not grow with the batch."""
    size = {"batch_size": 2, "seq_len": SEQ_LEN, "d_model": 768, "n_heads": 12}
    tensors = kept_by_one_block(policy, argparse.Namespace(**size, no_amp=no_amp))
    tensors = [tensor for tensor in tensors if tensor.shape[0] in (2, 2 * SEQ_LEN)]
    btc = 2 * SEQ_LEN * 768
    answer = sum(tensor.bytes for tensor in tensors) / btc
    return Measured(answer, table(policy, tensors, btc))


def cost_of_full() -> Measured:
    """5: of blocks alone, and what the rest of a model makes of it."""

    def relative(vocab_size: int, seq_len: int) -> float:
        config = replace(GPT2_SMALL, vocab_size=vocab_size, recompute="full")
        return relative_flops(config, seq_len)

    answer = relative(1, 0)  # (the head of one id is nothing)
    lines = [f"{answer:.2f}  blocks alone", f"{relative(1, SEQ_LEN):.2f}  and attention's products"]
    lines.append(f"{relative(50257, SEQ_LEN):.2f}  and the head: GPT-2 small, 1,024 tokens")
    return Measured(answer, "\n".join(lines))


def other_dice() -> Measured:
    """6: one step with dropout; without a checkpoint, with one, and with one that forgets."""
    small = MiniGPTConfig(
        vocab_size=64, max_position_embeddings=32, n_layers=2, n_heads=4, d_model=64, d_ff=256
    )

    def step(policy: str) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        model = MiniGPT(replace(small, recompute=policy)).train()
        ids = torch.randint(0, small.vocab_size, (4, 33))
        loss = model(ids[:, :-1], ids[:, 1:])
        return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))

    loss, gradients = step("none")
    lines, answer = [f"no checkpoint             loss {loss:.6f}"], "a"
    for name, remembers in (("checkpoint", True), ("preserve_rng_state=False", False)):

        def other(*args: Any, remembers: bool = remembers, **options: Any) -> Any:
            return checkpoint(*args, **options | {"preserve_rng_state": remembers})

        try:
            with mock.patch("model.checkpoint", other):
                other_loss, other_gradients = step("full")
        except RuntimeError as error:
            lines.append(f"{name:<24}  {error}")
            continue
        pairs = list(zip(gradients, other_gradients, strict=True))
        n_other = sum(not torch.equal(one, two) for one, two in pairs)
        same = torch.equal(loss, other_loss)
        answer = "b" if not same else "c" if n_other else "d"
        how = "equal to the bit" if same else f"{other_loss:.6f}"
        lines.append(f"{name:<24}  loss {how}, {n_other} of {len(pairs)} gradients differ")
    return Measured(answer, "\n".join(lines))


@cache  # it remembers its steps
def planner(accumulate: bool = False) -> Planner:
    """Of GPT-2 small on a GPU."""
    return Planner(
        GPT2_SMALL,
        SEQ_LEN,
        precision=torch.bfloat16,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        device_type="cuda",
        accumulate=accumulate,
    )


def ways(planner: Planner, rows: dict[str, dict]) -> dict[str, StepMemory]:
    """A step of each, with a progress bar on a terminal: a second or two each."""
    bar = tqdm(rows.items(), leave=False, disable=None)
    return {name: planner.step(SEQUENCES, **memory) for name, memory in bar}


def the_head() -> Measured:
    """7"""
    rows = {
        f"{policy}, head {'at once' if chunks else 'in chunks'}": {
            "recompute": policy,
            "loss_chunks": chunks,
        }
        for chunks in (1, 0)
        for policy in ("none", "full")
    }
    steps = ways(planner(), rows)
    at_once = next(iter(steps.values()))
    config = replace(GPT2_SMALL, loss_chunks=1)
    answer = head_bytes(config, SEQUENCES * SEQ_LEN, torch.float32) / GIB
    blocks = at_once.kept_per_block * GPT2_SMALL.n_layers / GIB
    lines = [f"{answer:5.2f} GiB  logits, log-softmax and the gradient of that"]
    lines.append(f"{blocks:5.2f} GiB  kept by 12 blocks")
    lines.append("so the peak of a step is")
    lines += [f"{step.peak / GIB:5.2f} GiB  {name}" for name, step in steps.items()]
    return Measured(answer, "\n".join(lines))


def groups() -> Measured:
    """8: with gradients there all the time, so that the start of backward is the peak."""
    rows = {str(k): {"recompute": "full", "recompute_group": k} for k in (1, 2, 3, 4, 6, 12)}
    steps = ways(planner(accumulate=True), rows)
    lines = ["K   by formula   peak of a step whose gradients are there all the time"]
    for name, step in steps.items():
        k = int(name)
        lines.append(f"{k:<3} {4 * 12 / k + 36 * k:6.0f} BTC   {step.peak / GIB:.2f} GiB")
    return Measured(int(min(steps, key=lambda name: steps[name].peak)), "\n".join(lines))


def gradients_that_wait() -> Measured:
    """9"""
    n_parameters = sum(parameter.numel() for parameter in planner().model.parameters())
    steps = {
        "1 x 12 sequences": planner().step(12),
        "4 x  3 sequences": planner(accumulate=True).step(3),
    }
    lines = ["when a forward begins               peak of the step"]
    for name, step in steps.items():
        start = int(step.total[0])
        each = f"{start / MIB:,.0f} MiB, {start / n_parameters:.0f} a parameter"
        lines.append(f"{each:<33}  {step.peak / MIB:6,.0f} MiB   {name}")
    before, now = steps.values()
    return Measured(int(now.total[0] - before.total[0]) / MIB, "\n".join(lines))


def policy_for_a_card() -> Measured:
    """10"""
    here = planner()
    steps = ways(here, {policy: {"recompute": policy} for policy in RECOMPUTE_POLICIES})
    in_order = sorted(steps, key=lambda name: recompute_cost(steps[name].config, SEQ_LEN))
    lines = ["policy     FLOPs      peak  in 4 GiB"]
    for name in in_order:
        fits = "fits" if steps[name].peak <= BUDGET else "no"
        peak = steps[name].peak / GIB
        flops = relative_flops(steps[name].config, SEQ_LEN)
        lines.append(f"{name:<10}  {flops:.2f}  {peak:.2f} GiB  {fits}")
    answer = next(name for name in in_order if steps[name].peak <= BUDGET)
    return Measured(answer, "\n".join(lines))


MEASURES: dict[int, Callable[[], Measured]] = {
    1: needed_by_backward,
    2: partial(block_keeps, "none", no_amp=True),
    3: partial(block_keeps, "none"),
    4: partial(block_keeps, "cheap"),
    5: cost_of_full,
    6: other_dice,
    7: the_head,
    8: groups,
    9: gradients_that_wait,
    10: policy_for_a_card,
}
