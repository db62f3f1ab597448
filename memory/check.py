"""Is what memory/ makes of a model still what model.py says? Whoever changes model.py is told.

A policy calls the parts of a block, and spells none of their arithmetic. So a changed part is
followed. But a replay has to give what forward gave, and some lines prevent that: a random number
that config.dropout does not know of, a count of calls. And the chunked loss stands in
memory/head.py. So each is compared with what model.py does plainly.
"""

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError

from .policies import checkpoint, expanded

TOKENS = 8


def check_techniques(
    model: Any, device: torch.device, precision: torch.dtype, policies: Iterable[str] = ()
) -> None:
    """Compare techniques of a model.MiniGPT with what model.py does plainly, on a few tokens.

    One block of each kind runs forward and backward under the policy that its config has for it,
    and under each of `policies`. What it returns, and all gradients, have to be equal to the bit;
    the loss and its gradients up to rounding. The model may have no memory yet (device "meta"), and
    is not changed. `precision`: of autocast, or float32.

    Raises ValueError, one line that says what differs, and the way out.
    """
    checked = set[Any]()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        check_ends(model)
        for i, own in enumerate(expanded(model.config).policies):
            for policy in {own, *policies} - {"none"}:
                kind = policy, *map(settings, model.blocks[i].modules())
                if kind not in checked and (wrong := compare(model, i, policy, device, precision)):
                    raise ValueError(
                        f"block {i} of model.py is another one under {policy}: {wrong}. Let its "
                        "parts depend on their tensors alone, and draw only by config.dropout; or "
                        "take none"
                    )
                checked.add(kind)


def check_ends(model: Any) -> None:
    """Compare the lookup, the loss and the order of blocks; see `check_techniques`."""
    policy, plain = model.config.recompute, model.schedule.plain
    if policy not in ("none", "full") and [run for run, _ in plain(model)] != [*model.blocks]:
        raise ValueError(f"schedule of model.py is not memory/policies.py's: {policy} ignores it")
    ids, x = torch.arange(2 * TOKENS).view(2, -1), torch.randn(2, TOKENS, 16, requires_grad=True)
    embedding, labels = nn.Embedding(61, 16), ids.where(ids > 0, -100)
    lookup, loss = model.embed, model.head_loss
    if not torch.equal(lookup(embedding, ids)[0], lookup.keywords["plain"](embedding, ids)[0]):
        raise ValueError(
            "embed of model.py is not memory/head.py's: change MiniGPT.forward instead"
        )
    of_each = []
    for function in (loss, loss.keywords["plain"]):
        mean = function(x, embedding.weight, labels, model.config.loss_chunks)
        of_each.append([mean, *torch.autograd.grad(mean, [x, embedding.weight])])
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*of_each, strict=True)):
        raise ValueError("head_loss of model.py is not memory/head.py's: --loss-chunks 1 takes it")


def settings(module: nn.Module) -> tuple:
    """What tells one kind of module from another."""
    shapes = [(name, weight.shape) for name, weight in module.named_parameters(recurse=False)]
    values = [
        item for item in vars(module).items() if isinstance(item[1], bool | int | float | str)
    ]
    return type(module), *shapes, *values


def compare(model: Any, i: int, policy: str, device: torch.device, precision: torch.dtype) -> str:
    """What differs between block `i` under a policy and without; "" if nothing does."""
    config = replace(model.config, n_layers=1, recompute=policy)
    block = copy.deepcopy(model.blocks[i]).to_empty(device=device).train()
    alone = SimpleNamespace(
        config=config, blocks=[block], training=True, parameters=block.parameters
    )
    torch.manual_seed(0)
    for weight in block.parameters():
        nn.init.normal_(weight, std=0.1)
    x, grad = torch.randn(2, 1, TOKENS, config.d_model, device=device).unbind()
    x.requires_grad_()

    def run(calls: Iterable) -> list[Tensor | None]:
        torch.manual_seed(0)
        y, random = x, config.dropout > 0
        low = precision != torch.float32
        with torch.autocast(device.type, precision, enabled=low, cache_enabled=False):
            for call, recompute in calls:
                y = checkpoint(call, y, random=random) if recompute else call(y)
        return [y, *torch.autograd.grad(y, [x, *block.parameters()], grad, allow_unused=True)]

    # (On a GPU fused attention adds in any order.)
    with sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else nullcontext():
        plain = run([(block, False)])
        try:
            found = run(model.schedule(alone))
        except (AttributeError, TypeError, CheckpointError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    names = "the result", "the gradient of x", *(name for name, _ in block.named_parameters())
    pairs = zip(names, plain, found, strict=True)
    return next((f"{name} differs" for name, a, b in pairs if not same(a, b)), "")


def same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
