"""Check at the start that the memory techniques of a run suit model.py, which its user may have
changed: small models with equal weights take a step, one a MiniGPT, the other a MemorySavingGPT.

Policies run the block's own methods, so they follow most changes. They cannot follow a loop of
MiniGPT.forward that does something for each block (a group of blocks is one call of that loop), or
random numbers and counters that a recompute would draw or count again. memory/ has an `embed` and a
`head_loss` of its own, and memory/sequence.py splits q, k and v by heads.
"""

import math
import random
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from data.errors import MiniGPTError
from memory import MemorySavingGPT, policies
from model import DRAWN_LAYERS, MiniGPT, MiniGPTConfig

from .process import OneProcess

CPU, FLOAT32 = torch.device("cpu"), torch.float32
N_TOKENS = 8  # of a sequence of the small model
PLAIN: dict[str, Any] = {"recompute": "none", "loss_chunks": 1, "mlp_chunks": 1}
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


def make_model_without_memory(
    config: MiniGPTConfig, make: Callable[[MiniGPTConfig], MemorySavingGPT]
) -> MemorySavingGPT:
    """Return the model that `make` makes; its layers have their weights on device "meta".

    Raises MiniGPTError if values of another tensor would be lost when the model gets its memory.
    """
    with EmptyOnMeta():
        model = make(config)
    owner: dict[Tensor, nn.Module] = {}
    for module in model.modules():
        weights = dict(module.named_parameters(recurse=False))
        others = {name: value for name, value in vars(module).items() if torch.is_tensor(value)}
        for name, tensor in (others | dict(module.named_buffers(recurse=False)) | weights).items():
            if name not in weights or tensor.is_meta != isinstance(module, DRAWN_LAYERS):
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

    Under a recompute policy losses, gradients and random states must be equal to the bit. The loss
    in chunks, the MLP in chunks and a shared sequence (train_sp.py) must be equal up to rounding.
    The small model has all layers and heads, but few channels, tokens and words. `precision`: dtype
    of autocast; float32: no autocast. `model` may be on device "meta", and does not change. Random
    states do not change. The processes of train_sp.py must call this together.

    Raises MiniGPTError, which names the difference and a remedy.
    """
    on_gpu = process.device.type == "cuda"
    # On a GPU the fused attention kernels add in an order that varies from run to run.
    backend = sdpa_kernel(SDPBackend.MATH) if on_gpu else nullcontext()
    rng = torch.random.fork_rng([process.device] if on_gpu else [])
    with rng, torch.enable_grad(), backend, ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        with ValueReads() as reads:
            config, alone = small_config_and_step(model.config)
        saving, plain = partial(small_step, MemorySavingGPT), replace(config, **PLAIN)
        raise_if_different(
            "model.py: MemorySavingGPT computes other results than MiniGPT ({}): for a new "
            "head_loss use --loss-chunks 1; move a change of embed to MiniGPT.forward",
            alone,
            saving(replace(config, recompute="none")),
        )
        decides = reads.read or alone["what Python draws next"].item() != random.Random(0).random()
        if process.layout.world_size > 1 and decides:
            raise MiniGPTError(
                "model.py: forward decides by a random number or by a tensor's value, and each "
                "process could decide otherwise: train_minimal.py can train it"
            )
        if process.layout.sp_degree > 1:
            check_shared_sequence(process, plain)
        if config.mlp_chunks != 1:
            raise_if_different(
                "--mlp-chunks: the MLP half of model.py looks at other tokens ({}): use "
                "--mlp-chunks 1",
                alone,
                saving(config),
            )
        if config.recompute != "none":
            step = partial(saving, device=process.device, precision=precision)
            raise_if_different(
                f"--use-activation-checkpoint {config.recompute}: model.py computes other results "
                "with this policy than without ({}); see docs/change.md, or use the policy none",
                step(plain),
                step(replace(plain, recompute=config.recompute)),
                to_the_bit=True,
            )


def check_shared_sequence(process: OneProcess, plain: MiniGPTConfig) -> None:
    """Raise MiniGPTError if the processes of train_sp.py together compute other results than one
    process. All of them must call this together. `plain`: config of the small model."""
    n_tokens = max(plain.max_position_embeddings, process.layout.sp_degree)
    ours = replace(plain, dropout=0.0, max_position_embeddings=n_tokens)
    message = (
        "model.py computes other results if processes share each sequence ({}): mix tokens only in "
        "Attention.attend, which gets some of the heads; or use train_fsdp.py"
    )
    try:
        mine = small_step(process.make_model, ours)
    except RuntimeError as error:  # of shapes, for example of grouped heads
        raise MiniGPTError(message.format(str(error).partition("\n")[0])) from error
    # The loss is that of all ranks, and FSDP averages the gradients.
    ranks = process.all_gather_object(mine)
    mean = {name: torch.stack([rank[name] for rank in ranks]).mean(0) for name in mine}
    raise_if_different(message, small_step(MiniGPT, ours), mean)


class ValueReads(TorchDispatchMode):
    """Context that notes in `read` whether Python reads the value of a tensor."""

    read = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read |= func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def raise_if_different(
    message: str, expected: TensorByName, found: TensorByName, to_the_bit: bool = False
) -> None:
    """Raise MiniGPTError if a tensor is missing in `found`, or differs by more than the rounding of
    float32 (`to_the_bit`: or at all). `message`: {} stands for the name of the first such tensor.
    """
    largest = max(tensor.abs().max().item() for tensor in expected.values())
    close = partial(torch.allclose, rtol=1e-4, atol=1e-5 * largest)
    same = torch.equal if to_the_bit else close
    for name in expected | found:
        if not (name in expected and name in found and same(expected[name], found[name])):
            raise MiniGPTError(message.format(f"{name} differs"))


# ---- steps of a small model


def small_config_and_step(config: MiniGPTConfig) -> tuple[MiniGPTConfig, TensorByName]:
    """Return the config of the small model, and its step without any technique.

    The small model has few channels. If model.py cannot have so few, because it names a number of
    channels, the small model has as many as `config`.
    """
    n_tokens = 2 * policies.CHUNK_MULTIPLE if config.mlp_chunks != 1 else N_TOKENS
    few = replace(
        config,
        vocab_size=min(64, config.vocab_size),
        max_position_embeddings=min(n_tokens, config.max_position_embeddings),
        mlp_chunks=min(config.mlp_chunks or 2, 2),
    )
    d_model = min(8, config.d_model // config.n_heads) * config.n_heads
    narrow = replace(few, d_model=d_model, d_ff=math.ceil(config.d_ff * d_model / config.d_model))
    try:
        return narrow, small_step(MiniGPT, replace(narrow, **PLAIN))
    except RuntimeError:
        return few, small_step(MiniGPT, replace(few, **PLAIN))


def small_step(
    make: MakeModel,
    config: MiniGPTConfig,
    device: torch.device = CPU,
    precision: torch.dtype = FLOAT32,
) -> TensorByName:
    """Run forward and backward of two micro-batches of the model that `make` makes. Return the
    losses, the gradients that exist, and the random numbers that would be drawn next."""
    model, ids, labels = small_model_and_batch(make, config, device)
    results, amp = TensorByName(), precision != FLOAT32
    torch.manual_seed(0)
    random.seed(0)
    for i, batch in enumerate((ids, ids.flip(0))):
        with torch.autocast(device.type, precision if amp else None, amp, cache_enabled=False):
            loss = model(batch, labels)
        loss.backward()
        results[f"loss {i}"] = loss.detach()
    named = ((name, weight.grad) for name, weight in model.named_parameters())
    results |= {f"the gradient of {name}": grad for name, grad in named if grad is not None}
    results["what torch draws next"] = torch.rand((), device=device)
    return results | {"what Python draws next": torch.tensor(random.random(), dtype=torch.float64)}


def small_model_and_batch(
    make: MakeModel, config: MiniGPTConfig, device: torch.device = CPU
) -> tuple[MiniGPT, Tensor, Tensor]:
    """Return the model that `make` makes, with random weights, ids and labels, both (2, T). One
    label is ignored."""
    torch.manual_seed(0)
    model = make(config).train()
    for weight in model.parameters():  # no weight is 0 or 1, so each has an effect
        weight.data.add_(0.1 * torch.randn_like(weight))
    ids = torch.arange(2 * config.max_position_embeddings).view(2, -1) % config.vocab_size
    return model.to(device), ids.to(device), ids.where(ids > 0, -100).to(device)
