"""On which device a run computes, and in which precision."""

import argparse
import warnings
from functools import partial
from typing import Any, cast

import torch

from model import MiniGPT

from .flags import UsageError


def is_here(kind: str) -> bool:
    if kind == "mps":
        return torch.backends.mps.is_available()
    return kind != "cuda" or torch.cuda.is_available()


def choose_device(name: str) -> torch.device:
    """The device that --device names. Raises UsageError if it is not there."""
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if is_here(kind))
    if not is_here(name):
        raise UsageError(f"--device {name}: torch {torch.__version__} finds none; try --device cpu")
    return torch.device(name)


def choose_precision(
    args: argparse.Namespace, device: torch.device, native: bool | None = None
) -> torch.dtype:
    """bfloat16 where the hardware has it, else float16 (CUDA only), else float32.

    `native`: whether a GPU has bfloat16, if it is not there to be asked.

    bfloat16 has float32's range and needs no loss scaling; but a chip without it emulates it,
    which is slower than float32, on some CPUs a hundred times.
    """
    if args.no_amp:
        return torch.float32
    if args.amp_dtype == "bfloat16":
        return torch.bfloat16
    if args.amp_dtype == "float16":
        if device.type == "mps":
            raise UsageError("--amp-dtype float16 needs a GradScaler, which mps lacks: --no-amp")
        return torch.float16
    if device.type == "cuda":
        if native is None:
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    if device.type == "cpu" and cpu_has_bfloat16():
        return torch.bfloat16
    return torch.float32


def check_gather_dtype(args: argparse.Namespace, precision: torch.dtype) -> None:
    """Raise UsageError if blocks do not compute in the precision in which they are gathered, or if
    they add gradients up in it."""
    if args.gather_dtype == "bfloat16" and precision != torch.bfloat16:
        raise UsageError(
            f"--gather-dtype bfloat16: blocks compute in {precision} here; --amp-dtype bfloat16 "
            "goes with it, or --gather-dtype float32"
        )
    if args.gather_dtype == "bfloat16" and args.mlp_chunks != 1:
        raise UsageError(
            f"--mlp-chunks {args.mlp_chunks}: --gather-dtype bfloat16 would add the chunks' "
            "gradients up in bfloat16; --gather-dtype float32 or --mlp-chunks 1"
        )


def set_matmul_precision(device: torch.device, tf32: bool) -> None:
    """How a GPU's matmuls round: float32 to TF32's 10 bits, if `tf32`, and nothing else.

    For the CPU nothing is set: oneDNN would round there as well where the hardware can.
    """
    if device.type != "cuda":
        return
    # Not the newer fp32_precision, which torch 2.9 asks for: torch.compile ends in an error with it
    # (pytorch#166387).
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings")
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    # The compiler advises TF32 in every run; here --tf32 decides.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores .* not enabled. Consider")
    # A long sum (one over the vocabulary, in the head's backward) may be cut in parts for several
    # cores. cuBLAS may add those up in the result's 8 or 11 bits, unless it is told not to: see
    # "Numerical accuracy" in PyTorch's notes.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def cpu_has_bfloat16() -> bool:
    """Has this CPU instructions for bfloat16 matmuls (AVX512-BF16 or AMX)?"""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # no public names yet
    return any(getattr(torch.cpu, probe, lambda: False)() for probe in probes)


def compile_blocks(model: MiniGPT) -> None:
    """torch.compile each block: the first one of a policy pays, the others reuse its code.

    Around `full` the activation checkpoint stays outside of the compiled code, where it keeps the
    block's input alone. (Such code cannot stop half-way: the last matmul is replayed, too.) The
    finer policies are inside: the compiler has to see what they are about.
    """
    torch._dynamo.config.optimize_ddp = False  # DDP would cut graphs, checkpoints as well
    # On CUDA replayed dropout would draw from generators that manual_seed does not reach.
    torch._functorch.config.graphsafe_rng_functionalization = False
    for block in model.blocks:
        block.compile()
    model.head_loss = partial(cast(Any, model.head_loss), compiled=True)


def is_compiled(model: MiniGPT) -> bool:
    return any(block._compiled_call_impl is not None for block in model.blocks)
