"""Check that what memory/ makes of a model is what model.py says, for those who change model.py.

A policy calls the parts of a block, and spells none of their arithmetic. So a changed part is
followed. But a replay has to give what forward gave, and some lines prevent that: a random number
that config.dropout does not know of, a count of calls. And the chunked loss stands in
memory/head.py. So each is compared with what model.py does plainly.
"""

import copy
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memory import POLICIES, expanded
from memory.policies import checkpoint, generator_of
from model import MiniGPT

from .flags import UsageError

TOKENS = 8


def check_techniques(
    model: MiniGPT, device: torch.device, precision: torch.dtype, shared: bool = False
) -> None:
    """Compare the techniques that a model's config asks for with what model.py does plainly.

    One block of each kind runs forward and backward on a few tokens, under its policy and without.
    What it returns, and all gradients, have to be equal to the bit; the loss and its gradients up
    to rounding. The model may have no memory yet (device "meta"), and is not changed. `precision`:
    of autocast, or float32. `shared`: processes share each sequence, so a block may look at other
    tokens in Attention.attend only.

    Raises UsageError, which says what differs, and the way out.
    """
    checked = set[Any]()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        check_ends(model)
        for i, policy in enumerate(expanded(model.config).policies):
            kind = policy, *map(settings, model.blocks[i].modules())
            if kind in checked:
                continue
            checked.add(kind)
            if shared and sees_others(model, i, device):
                raise UsageError(
                    f"block {i} of model.py looks at other tokens, or at positions, outside of "
                    "Attention.attend: sequences cannot be shared; train_fsdp.py can train it"
                )
            if policy != "none" and (wrong := compare(model, i, policy, device, precision)):
                raise UsageError(
                    f"--use-activation-checkpoint: block {i} under {policy} is not the block of "
                    f"model.py: {wrong}; see docs/change.md, or take none"
                )


def check_ends(model: MiniGPT) -> None:
    """Compare the order of blocks, the lookup and the loss; see `check_techniques`."""
    ours, config, policy = cast(Any, model), model.config, model.config.recompute
    known = policy in ("none", "full") and config.mlp_chunks == 1
    if not known and [run for run, _ in ours.schedule.plain(model)] != [*model.blocks]:
        raise UsageError(
            f"--use-activation-checkpoint {policy}: only none and full (with --mlp-chunks 1) run "
            "blocks in another order, as `schedule` of model.py does now"
        )
    ids, embedding = torch.arange(2 * TOKENS).view(2, -1), nn.Embedding(config.vocab_size, 16)
    ids, labels = ids % config.vocab_size, (ids % config.vocab_size).where(ids > 0, -100)
    lookup, loss, of_each = ours.embed, ours.head_loss, []
    for embed, head_loss in (lookup, loss), (lookup.keywords["plain"], loss.keywords["plain"]):
        torch.manual_seed(0)
        x, weight = embed(embedding, ids)
        mean = head_loss(x, weight, labels, config.loss_chunks)
        of_each.append([x, weight, mean, *torch.autograd.grad(mean, embedding.weight)])
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*of_each, strict=True)):
        raise UsageError(
            "embed or head_loss of model.py is not memory/head.py's: --loss-chunks 1 takes "
            "model.py's head_loss; what embed does now can stand in MiniGPT.forward"
        )


def settings(module: nn.Module) -> tuple:
    """What tells one kind of module from another."""
    shapes = [(name, weight.shape) for name, weight in module.named_parameters(recurse=False)]
    values = [(name, repr(its)) for name, its in vars(module).items() if not name.startswith("_")]
    return type(module), *shapes, *values


def new_block(model: MiniGPT, i: int, device: torch.device) -> Any:
    """A copy of block `i` with random weights."""
    block = copy.deepcopy(model.blocks[i]).to_empty(device=device)
    torch.manual_seed(0)
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.1)
    return block


def compare(
    model: MiniGPT, i: int, policy: str, device: torch.device, precision: torch.dtype
) -> str:
    """What differs between block `i` under a policy and without; "" if nothing does."""
    config, block = replace(model.config, n_layers=1, recompute=policy), new_block(model, i, device)
    alone = SimpleNamespace(
        config=config, blocks=[block.train()], training=True, parameters=block.parameters
    )
    n_tokens = min(TOKENS, config.max_position_embeddings)
    x, grad = torch.randn(2, 1, n_tokens, config.d_model, device=device).unbind()
    inputs = {"x": x.requires_grad_()} | dict(block.named_parameters())
    inputs = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    before = random.getstate(), np.random.get_state()

    def run(calls: Iterable) -> tuple[list[Any], object]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        y, has_dropout = x * 1, config.dropout > 0
        low = precision != torch.float32
        with torch.autocast(device.type, precision, enabled=low, cache_enabled=False):
            for call, recompute in calls:
                y = checkpoint(call, y, random=has_dropout) if recompute else call(y)
        found = [y, *torch.autograd.grad(y, [*inputs.values()], grad, allow_unused=True)]
        drawn = generator_of(x.device).get_state().tolist(), random.random(), np.random.random()
        return found, drawn

    try:
        # (On a GPU fused attention adds in any order.)
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext():
            plain, drawn = run([(block, False)])
            found, then = run(model.schedule(alone))
        if drawn != then:
            return "a replay draws other random numbers, of which config.dropout does not know"
        if POLICIES[policy].cuts_mlp and config.mlp_chunks != 1 and differs(block.feed_forward, x):
            return "its MLP half looks at other tokens, and --mlp-chunks is not 1"
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    names = "its result", *(f"the gradient of {name}" for name in inputs)
    pairs = zip(names, plain, found, strict=True)
    return next((f"{name} differs" for name, a, b in pairs if not same(a, b)), "")


def sees_others(model: MiniGPT, i: int, device: torch.device) -> bool:
    """Does block `i`, but for attention, look at other tokens, or at positions?"""
    block = new_block(model, i, device).eval()
    x = torch.randn(1, TOKENS, model.config.d_model, device=device)
    block.attn.attend = lambda qkv, past=None: qkv[..., : x.size(2)]
    return differs(block, x)


def differs(run: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Is the result (1, T, C) of the last tokens another one without those before them?"""
    last = slice(TOKENS // 2, None)
    return not torch.allclose(run(x)[:, last], run(x[:, last]), rtol=1e-3, atol=1e-4)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
