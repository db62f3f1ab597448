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
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from data.errors import MiniGPTError
from memory import MemorySavingGPT, policies
from model import DRAWN_LAYERS, MiniGPT, MiniGPTConfig

from .process import OneProcess

CPU, FLOAT32 = torch.device("cpu"), torch.float32
GRADIENT_OF = "the gradient of "
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
    seen = set[Tensor]()
    for module in model.modules():
        weights = dict(module.named_parameters(recurse=False))
        others = {name: value for name, value in vars(module).items() if torch.is_tensor(value)}
        others |= dict(module.named_buffers(recurse=False))
        for name, tensor in (others | weights).items():
            if name not in weights or tensor.is_meta != isinstance(module, DRAWN_LAYERS):
                raise MiniGPTError(
                    "model.py: a model gets its memory after it is made, so the first values of "
                    f"{name} would be lost: compute them in forward, or make a parameter with "
                    f"torch.ones, torch.zeros or torch.randn, outside of {type(module).__name__}"
                )
            if tensor in seen:
                raise MiniGPTError(f"model.py: {name} is in two modules: share one module instead")
            seen.add(tensor)
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
            partial(saving, replace(config, recompute="none")),
        )
        if process.layout.world_size > 1:
            check_for_several_processes(model, process, plain, alone, reads.read)
        if config.mlp_chunks != 1:
            raise_if_different(
                "--mlp-chunks: the MLP half of model.py looks at other tokens ({}): use "
                "--mlp-chunks 1",
                alone,
                partial(saving, config),
            )
        if config.recompute != "none":
            step = partial(saving, device=process.device, precision=precision)
            raise_if_different(
                f"--use-activation-checkpoint {config.recompute}: model.py computes other results "
                "with this policy than without ({}); see docs/change.md, or use the policy none",
                step(plain),
                partial(step, replace(plain, recompute=config.recompute)),
                to_the_bit=True,
            )


def check_for_several_processes(
    model: MiniGPT,
    process: OneProcess,
    plain: MiniGPTConfig,
    alone: TensorByName,
    reads_values: bool,
) -> None:
    """Raise MiniGPTError if model.py does not work with the processes of DDP, FSDP or train_sp.py.

    `plain`: config of the small model. `alone`: its step without techniques, in one process.
    `reads_values`: whether Python has read the value of a tensor in that step.
    """
    named, each = [*model.named_parameters()], [w for b in model.blocks for w in b.parameters()]
    unused = [name for name, w in named if w.requires_grad and GRADIENT_OF + name not in alone]
    scalars, sharded = [name for name, w in named if w.dim() == 0], process.layout.shard_degree > 1
    for wrong, message in (
        (
            reads_values or alone["what Python draws next"].item() != random.Random(0).random(),
            "forward decides by a random number or by a tensor's value, and each process could "
            "decide otherwise: train_minimal.py can train it",
        ),
        (
            process.layout.gradients_persist and unused,
            f"{', '.join(unused)} gets no gradient, for which DDP would wait: remove it, or use "
            "train_fsdp.py",
        ),
        (
            sharded and len({*each}) < len(each),
            "blocks share weights, which FSDP cannot shard: train_ddp.py",
        ),
        (
            sharded and scalars,
            f"FSDP cannot shard the number {', '.join(scalars)}: give it shape (1,)",
        ),
    ):
        if wrong:
            raise MiniGPTError(f"model.py: {message}")
    if process.layout.sp_degree > 1:
        n_tokens = max(plain.max_position_embeddings, process.layout.sp_degree)
        ours = replace(plain, dropout=0.0, max_position_embeddings=n_tokens)

        def mean_of_ranks() -> TensorByName:
            """The loss is that of all ranks, and FSDP averages the gradients."""
            ranks = process.all_gather_object(small_step(process.make_model, ours))
            return {name: torch.stack([rank[name] for rank in ranks]).mean(0) for name in ranks[0]}

        raise_if_different(
            "model.py computes other results if processes share each sequence ({}): mix tokens "
            "only in Attention.attend, which gets some of the heads; or use train_fsdp.py",
            small_step(MiniGPT, ours),
            mean_of_ranks,
        )


class ValueReads(TorchDispatchMode):
    """Context that notes in `read` whether Python reads the value of a tensor."""

    read = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read |= func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def raise_if_different(
    message: str,
    expected: TensorByName,
    step: Callable[[], TensorByName],
    to_the_bit: bool = False,
) -> None:
    """Raise MiniGPTError if `step` fails, or if a tensor is missing, or differs by more than the
    rounding of float32 (`to_the_bit`: or at all).

    `message`: {} stands for the error, or for the name of the first such tensor.
    """
    largest = max(tensor.abs().max().item() for tensor in expected.values())
    close = partial(torch.allclose, rtol=1e-4, atol=1e-5 * largest)
    same = torch.equal if to_the_bit else close
    try:
        found = step()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a line of model.py may raise under a technique
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise MiniGPTError(message.format(why)) from None
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
    except Exception:
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
    results, amp, before = TensorByName(), precision != FLOAT32, numbers_of_modules(model)
    torch.manual_seed(0)
    random.seed(0)
    for i, batch in enumerate((ids, ids.flip(0))):
        with torch.autocast(device.type, precision if amp else None, amp, cache_enabled=False):
            loss = model(batch, labels)
        loss.backward()
        results[f"loss {i}"] = loss.detach()
    if numbers_of_modules(model) != before:
        raise MiniGPTError(
            "model.py: forward counts in an attribute, which no snapshot has: a resumed run, or "
            "more processes, would train another model"
        )
    gradients = {GRADIENT_OF + name: weight.grad for name, weight in model.named_parameters()}
    return {
        **results,
        **{name: gradient for name, gradient in gradients.items() if gradient is not None},
        "what torch draws next": torch.rand((), device=device),
        "what Python draws next": torch.tensor(random.random(), dtype=torch.float64),
    }


def numbers_of_modules(model: MiniGPT) -> list[dict[str, Any]]:
    """Return the attributes of each module that are numbers."""
    attributes = map(vars, model.modules())
    return [{k: v for k, v in of_one.items() if type(v) in (int, float)} for of_one in attributes]


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
