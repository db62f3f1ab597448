"""Check at the start that the memory techniques of a run suit model.py, which its user may have
changed: two small models with equal weights, a MiniGPT and a MemorySavingGPT, take the same step.

Policies run the block's own methods, so they follow most changes. They cannot follow a loop of
MiniGPT.forward that does something for each block (a group of blocks is one call of that loop), or
random numbers and counters that a recompute would draw or count again. memory/ has an `embed` and a
`head_loss` of its own, and memory/sequence.py splits q, k and v by heads.
"""

import math
import pickle
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from data.errors import MiniGPTError
from memory import MemorySavingGPT, policies
from model import INITIALIZED_LAYERS, MiniGPT, MiniGPTConfig
from planner import Layout

from .process import OneProcess

CPU, FLOAT32 = torch.device("cpu"), torch.float32
# Size of the small model: at most so many tokens and ids, channels per head
N_TOKENS, N_IDS, HEAD_SIZE = 64, 256, 4
# The small model computes in float64, where its rounding errors are about 1e-15.
ROUNDING = 1e-9
PLAIN: dict[str, Any] = {"recompute": "none", "loss_chunks": 1, "mlp_chunks": 1}
GRADIENT_OF = "the gradient of "
TensorByName = dict[str, Tensor]
MakeModel = Callable[[MiniGPTConfig], MiniGPT]


# ---- a model without memory


class EmptyOnMeta(TorchFunctionMode):
    """Context in which torch.empty makes tensors on device "meta", where they take no memory.

    torch's layers make their weights with torch.empty, and MiniGPT.init_weights draws their values.
    Parameters that model.py makes with other functions, such as torch.ones, keep their values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_meta = {"device": "meta"} if func is torch.empty else {}
        return func(*args, **{**(kwargs or {}), **on_meta})


def make_model_on_meta(
    config: MiniGPTConfig, make: Callable[[MiniGPTConfig], MemorySavingGPT]
) -> MemorySavingGPT:
    """Return the model that `make` makes, with the weights of its layers on device "meta". Raises
    MiniGPTError if values of another tensor would be lost when the model gets its memory."""
    with EmptyOnMeta():
        model = make(config)
    owner: dict[Tensor, nn.Module] = {}
    for module in model.modules():
        weights = dict(module.named_parameters(recurse=False))
        others = {name: value for name, value in vars(module).items() if torch.is_tensor(value)}
        for name, tensor in (others | dict(module.named_buffers(recurse=False)) | weights).items():
            if name not in weights or tensor.is_meta != isinstance(module, INITIALIZED_LAYERS):
                raise MiniGPTError(
                    "model.py: a model gets its memory after it is made, so the first values of "
                    f"{name} would be lost: compute them in forward, or make a parameter with "
                    f"torch.ones, torch.zeros or torch.randn, outside of {type(module).__name__}"
                )
            if owner.setdefault(tensor, module) is not module:
                raise MiniGPTError(f"model.py: {name} is in two modules: share one module instead")
    return model


# ---- comparisons


def check_model(model: MiniGPT, process: OneProcess, precision: torch.dtype) -> None:
    """Compare a step of a small MiniGPT with one of a MemorySavingGPT of `model.config`.

    Under a recompute policy losses, gradients and random states must be bitwise equal; the loss in
    chunks, the MLP in chunks and a shared sequence (train_sp.py) must be equal up to rounding. The
    small models have all layers and heads, but few channels, tokens and words. `precision`: dtype
    of autocast under a policy; float32: no autocast. `model`, which may be on device "meta", and
    the random states do not change. The processes of train_sp.py must call this together.

    Raises MiniGPTError, which names the difference and a remedy.
    """
    on_gpu = process.device.type == "cuda"
    # On a GPU the fused attention kernels add in an order that varies from run to run.
    backend = sdpa_kernel(SDPBackend.MATH) if on_gpu else nullcontext()
    rng = torch.random.fork_rng([process.device] if on_gpu else [])
    with rng, torch.enable_grad(), backend:
        with TensorBranchDetector() as branches:
            config, alone = small_config_and_reference(model.config)
        saving, plain = partial(small_step, MemorySavingGPT), replace(config, **PLAIN)
        second = small_step(MiniGPT, plain, batches=[1])["loss 1"]
        if not torch.equal(alone["loss 1"], second):
            raise MiniGPTError(
                "model.py: forward remembers something of an earlier micro-batch (a counter, a "
                "list, a generator of random numbers), which no snapshot has: a resumed run, or "
                "more processes, would train another model"
            )
        raise_if_different(
            "model.py: MemorySavingGPT computes other results than MiniGPT ({}): for a new "
            "head_loss use --loss-chunks 1; move a change of embed to MiniGPT.forward",
            alone,
            partial(saving, replace(config, recompute="none")),
        )
        if process.layout.world_size > 1 and branches.seen:
            raise MiniGPTError(
                "model.py: an `if` of forward depends on a tensor, and each process could decide "
                "otherwise: train_minimal.py can train it"
            )
        if process.layout.kind != "one":
            equal_tokens = small_step(
                MiniGPT, replace(plain, vocab_size=1), batches=[2], weights_are_zero=True
            )
            check_parameters(model, process.layout, alone, equal_tokens)
        if process.layout.sp_degree > 1:
            check_shared_sequence(process, plain)
        if config.mlp_chunks != 1:
            raise_if_different(
                "--mlp-chunks: the MLP half of model.py looks at other tokens ({}): use "
                "--mlp-chunks 1",
                alone,
                partial(saving, config),
            )
        if config.recompute != "none":
            step = partial(saving, device=process.device, dtype=torch.float32, precision=precision)
            raise_if_different(
                f"--use-activation-checkpoint {config.recompute}: model.py computes other results "
                "with this policy than without ({}); see docs/change.md, or use the policy none",
                step(plain),
                partial(step, replace(plain, recompute=config.recompute)),
                to_the_bit=True,
            )


def check_parameters(
    model: MiniGPT, layout: Layout, alone: TensorByName, equal_tokens: TensorByName
) -> None:
    """Raise MiniGPTError for parameters with which DDP or FSDP would fail, or wait forever.

    `alone`: the step of a small model in one process. `equal_tokens`: the step of that model with
    weights of 0, a single id and other random numbers, so that a router sends all tokens to the
    same experts. A parameter with a gradient in only one of these steps may have a gradient on only
    some ranks.
    """
    named = dict(model.named_parameters())
    each = [w for block in model.blocks for w in block.parameters()]
    if some := [n for n in alone.keys() ^ equal_tokens.keys() if n.startswith(GRADIENT_OF)]:
        raise MiniGPTError(
            f"model.py: {min(some).removeprefix(GRADIENT_OF)} gets a gradient from some tokens "
            "only, and processes with others would wait for it: run its layer on an empty tensor, "
            "too (docs/change.md), or use train_minimal.py"
        )
    unused = [n for n, w in named.items() if w.requires_grad and f"{GRADIENT_OF}{n}" not in alone]
    if layout.gradients_persist and unused:
        raise MiniGPTError(
            f"model.py: {', '.join(unused)} gets no gradient, for which DDP would wait: remove it, "
            "or use train_fsdp.py"
        )
    if layout.shard_degree > 1 and len({*each}) < len(each):
        raise MiniGPTError("model.py: blocks share weights, which FSDP cannot shard: train_ddp.py")
    if layout.shard_degree > 1 and (numbers := [n for n, w in named.items() if w.dim() == 0]):
        raise MiniGPTError(
            f"model.py: FSDP cannot shard the number {', '.join(numbers)}: give it shape (1,)"
        )


def check_shared_sequence(process: OneProcess, plain: MiniGPTConfig) -> None:
    """Raise MiniGPTError if the processes of train_sp.py, which must all call this, together
    compute other results than one process. `plain`: config of the small model."""
    ours = replace(
        plain,
        dropout=0.0,
        max_position_embeddings=max(plain.max_position_embeddings, process.layout.sp_degree),
    )

    def mean_of_ranks() -> TensorByName:
        """The loss is that of all ranks, and FSDP averages the gradients."""
        ranks = process.all_gather_object(small_step(process.make_model, ours))
        return {name: torch.stack([rank[name] for rank in ranks]).mean(0) for name in ranks[0]}

    raise_if_different(
        "model.py computes other results if processes share each sequence ({}): mix tokens only in "
        "Attention.attend, which gets some of the heads; or use train_fsdp.py",
        small_step(MiniGPT, ours),
        mean_of_ranks,
    )


class TensorBranchDetector(TorchFunctionMode):
    """Context that notes in `seen` whether Python asks if a tensor is true, as `if` does."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func is Tensor.__bool__
        return func(*args, **(kwargs or {}))


def raise_if_different(
    message: str,
    expected: TensorByName,
    step: Callable[[], TensorByName],
    to_the_bit: bool = False,
) -> None:
    """Raise MiniGPTError if `step` fails, or if a tensor is missing in its result, or differs by
    more than ROUNDING (`to_the_bit`: or at all). `message`: {} stands for the error, or for the
    name of the first such tensor."""
    largest = max(tensor.abs().max().item() for tensor in expected.values())
    close = partial(torch.allclose, rtol=ROUNDING, atol=ROUNDING * largest)
    same = torch.equal if to_the_bit else close
    try:
        found = step()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever lines of model.py raise that ran without the technique
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise MiniGPTError(message.format(why)) from error
    for name in expected | found:
        if not (name in expected and name in found and same(expected[name], found[name])):
            raise MiniGPTError(message.format(f"{name} differs"))


# ---- steps of a small model


def small_config_and_reference(config: MiniGPTConfig) -> tuple[MiniGPTConfig, TensorByName]:
    """Return the config of the small model, and its step without any technique.

    The small model has few channels or, if model.py names a number of channels and fails with
    another, as many as `config`.
    """
    n_tokens = 2 * policies.CHUNK_MULTIPLE if config.mlp_chunks != 1 else N_TOKENS
    few = replace(
        config,
        vocab_size=min(N_IDS, config.vocab_size),
        max_position_embeddings=min(n_tokens, config.max_position_embeddings),
        mlp_chunks=min(config.mlp_chunks or 2, 2),
    )
    narrow = with_few_channels(few)
    try:
        return narrow, small_step(MiniGPT, replace(narrow, **PLAIN))
    except RuntimeError:
        return few, small_step(MiniGPT, replace(few, **PLAIN))


def with_few_channels(config: MiniGPTConfig) -> MiniGPTConfig:
    """Return the config with at most HEAD_SIZE channels per head."""
    d_model = min(HEAD_SIZE, config.d_model // config.n_heads) * config.n_heads
    return replace(config, d_model=d_model, d_ff=math.ceil(config.d_ff * d_model / config.d_model))


@torch.no_grad()
def kv_cache_is_exact(config: MiniGPTConfig) -> bool:
    """Return whether a small model computes the same logits with a KV cache, token by token, as
    without. It does not if a changed model.py mixes tokens outside of `Attention.attend`."""
    few = replace(config, vocab_size=min(N_IDS, config.vocab_size), max_position_embeddings=8)
    with torch.random.fork_rng([]):
        small = replace(with_few_channels(few), **PLAIN)
        model, ids, _ = small_model_and_batch(MiniGPT, small, dtype=torch.float64)
    cache: dict[int, Any] = {}
    try:
        parts = [model.eval()(part, kv_cache=cache) for part in ids.split([5, 1, 1, 1], dim=1)]
        whole = model(ids)
    except RuntimeError:  # not with so few channels
        return False
    return torch.allclose(torch.cat(parts, dim=1), whole[:, 4:], rtol=ROUNDING, atol=ROUNDING)


def small_step(
    make: MakeModel,
    config: MiniGPTConfig,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float64,
    precision: torch.dtype = FLOAT32,
    batches: Sequence[int] = (0, 1),
    weights_are_zero: bool = False,
) -> TensorByName:
    """Run forward and backward of these micro-batches of the model that `make` makes. Return the
    losses, the gradients that exist, and the random number that torch would draw next. Raises
    MiniGPTError if forward draws random numbers of Python or numpy."""
    model, *rows = small_model_and_batch(make, config, device, dtype)
    for weight in model.parameters() if weights_are_zero else ():
        weight.data.zero_()
    results, amp, others = TensorByName(), precision != FLOAT32, python_and_numpy_rng()
    for i in batches:
        ids, labels = (tensor.roll(i, 1) for tensor in rows)
        torch.manual_seed(i)
        with torch.autocast(device.type, precision if amp else None, amp, cache_enabled=False):
            loss = model(ids, labels)
        loss.backward()
        results[f"loss {i}"] = loss.detach()
    if python_and_numpy_rng() != others:
        raise MiniGPTError(
            "model.py: forward draws random numbers of Python or numpy, whose state no snapshot "
            "has: draw torch's"
        )
    named = ((name, weight.grad) for name, weight in model.named_parameters())
    results |= {GRADIENT_OF + name: grad for name, grad in named if grad is not None}
    return results | {"what torch draws next": torch.rand((), device=device)}


def python_and_numpy_rng() -> bytes:
    """Return the states of the random number generators of Python and numpy."""
    return pickle.dumps((random.getstate(), numpy.random.get_state()))


def small_model_and_batch(
    make: MakeModel,
    config: MiniGPTConfig,
    device: torch.device = CPU,
    dtype: torch.dtype = FLOAT32,
) -> tuple[MiniGPT, Tensor, Tensor]:
    """Build a model with `make` and random weights; return it with ids and labels, each (2, T), one
    label ignored."""
    torch.manual_seed(0)
    model = make(config).train()
    for weight in model.parameters():  # no weight is 0 or 1, so each has an effect
        weight.data.add_(0.1 * torch.randn_like(weight))
    ids = torch.randint(config.vocab_size, (2, config.max_position_embeddings))
    labels = ids.roll(-1, 1)
    labels[0, 0] = -100
    return model.to(device, dtype), ids.to(device), labels.to(device)
