"""Sections of scripts/gpu_report.py: the machine, the head's matmuls, the head alone."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memory.head import compiled_softmax, count_chunks, head_loss, softmax_in_place
from planner.formulas import head_bytes
from scripts.allocator_trace import trace_events
from scripts.benchmark import describe_device
from scripts.gpu_report_bench import Bench, Jobs, Values, idle_share

# ------------------------------------------------------------------------------------- machine


def machine(bench: Bench) -> Jobs:
    """What everything below is to be compared with."""
    yield "card", partial(card, bench)
    yield "versions", versions
    yield "copy, within the device", partial(copy, bench, bench.device, bench.device)
    cpu = torch.device("cpu")
    for pinned in (True, False):
        name = "pinned" if pinned else "pageable"
        yield f"copy, host to device, {name}", partial(copy, bench, cpu, bench.device, pinned)
        yield f"copy, device to host, {name}", partial(copy, bench, bench.device, cpu, pinned)
    for kind in ("bfloat16", "float16", "float32", "tf32"):
        yield f"matmul, {kind}", partial(large_matmul, bench, kind)


def card(bench: Bench) -> Values:
    values: Values = {"name": describe_device(bench.device)}
    if not bench.on_gpu:
        return values
    about = torch.cuda.get_device_properties(bench.device)
    query = "driver_version,power.limit,clocks.max.sm,clocks.max.mem,pcie.link.gen.current"
    return values | {
        "capability": f"{about.major}.{about.minor}",
        "memory": about.total_memory,
        "free": torch.cuda.mem_get_info()[0],
        "processors": about.multi_processor_count,
        "L2": getattr(about, "L2_cache_size", None),
        query: output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"),
        "CPU": describe_device(torch.device("cpu")),
    }


def versions() -> Values:
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING")
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": cudnn,
        "compiler": output_of(sys.executable, "-c", "import triton; print(triton.__version__)"),
        "commit": output_of("git", "describe", "--always", "--dirty"),
        **{name: os.environ[name] for name in names if name in os.environ},
    }


def output_of(*command: str) -> str | None:
    """What a tool says; None where it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def copy(bench: Bench, source: torch.device, target: torch.device, pinned: bool = False) -> Values:
    """GB/s; within the device both what is read and what is written count."""
    size = bench.pick(2**30 if source == target else 2**28, 2**16)
    a, b = (
        torch.ones(size, dtype=torch.uint8, device=device,
                   pin_memory=pinned and bench.on_gpu and device.type == "cpu")
        for device in (source, target)
    )  # fmt: skip
    ms = bench.milliseconds(lambda: b.copy_(a, non_blocking=pinned))
    moved = size * (2 if source == target else 1)
    return {"GB/s": moved / ms / 1e6, "ms": ms, "size": size}


def large_matmul(bench: Bench, kind: str) -> Values:
    """What the card reaches at best."""
    n = bench.pick(8192, 64)
    dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
    a, b = torch.randn(2, n, n, device=bench.device, dtype=dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        ms = bench.milliseconds(lambda: a @ b)
    finally:
        torch.set_float32_matmul_precision(before)
    return {"TFLOP/s": 2 * n**3 / ms / 1e9, "ms": ms, "n": n}


# ------------------------------------------------------------------------------------- matmuls


def matmuls(bench: Bench) -> Jobs:
    """The head's three products for chunks of n tokens; the weight's gradient in two ways."""
    for V in bench.pick((50257, 50304), (61, 64)):
        for n in bench.pick((166, 512, 1024, 2048, 4096), (4, 8)):
            for name, product in PRODUCTS.items():
                if bench.on_gpu or name != "weight, addmm":  # (a CPU has no such kernel)
                    yield f"V={V} n={n} {name}", partial(time_product, bench, V, n, product)


# x (n, C), weight (V, C), logits and their gradient g (n, V), total (V, C) in float32
def logits_product(x: Tensor, weight: Tensor, g: Tensor, total: Tensor) -> None:
    torch.mm(x, weight.T, out=g)


def x_product(x: Tensor, weight: Tensor, g: Tensor, total: Tensor) -> None:
    g @ weight


def weight_product(x: Tensor, weight: Tensor, g: Tensor, total: Tensor) -> None:
    total.add_(g.T @ x)


def weight_product_addmm(x: Tensor, weight: Tensor, g: Tensor, total: Tensor) -> None:
    torch.addmm(total, g.T, x, out_dtype=torch.float32, out=total)


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], None]] = {
    "logits": logits_product,
    "x": x_product,
    "weight, mm and add_": weight_product,
    "weight, addmm": weight_product_addmm,
}


def time_product(bench: Bench, V: int, n: int, product: Callable[..., None]) -> Values:
    C = bench.args().d_model
    make = partial(torch.randn, device=bench.device)
    x, weight, g = (
        make(*shape, dtype=torch.bfloat16) for shape in ((n, C), (V, C), (n, V))
    )  # fmt: skip
    total = torch.zeros(V, C, device=bench.device)
    ms = bench.milliseconds(lambda: product(x, weight, g, total))
    return {"ms": ms, "TFLOP/s": 2 * n * V * C / ms / 1e9}


# ---------------------------------------------------------------------------------------- head


def head(bench: Bench) -> Jobs:
    """Forward and backward of the head alone, by number of chunks; its values against float64."""
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for chunks in bench.pick((0, 4, 8, 16, 32, 99, 1), (0, 2, 1)):  # (1 may not fit)
            yield f"{name} loss_chunks={chunks}", partial(time_head, bench, dtype, chunks)
            # (Apart: where nobody may profile, the times stay.)
            job = partial(head_kernels, bench, dtype, chunks)
            yield f"{name} loss_chunks={chunks}, kernels", job
        for chunks in bench.pick((0, 8, 1), (0, 2, 1)):
            job = partial(head_errors, bench, dtype, chunks)
            yield f"{name} loss_chunks={chunks}, errors", job
    for chunks in (0, 8) if bench.on_gpu else ():  # (a CPU's compiler takes half a minute)
        job = partial(time_head, bench, torch.bfloat16, chunks, compiled=True)
        yield f"bfloat16 loss_chunks={chunks}, compiled softmax", job


def head_input(bench: Bench, n_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (1, N, C) as a LayerNorm makes it, weight (V, C) as it is initialised, labels (1, N)."""
    args, make = bench.args(), partial(torch.randn, device=bench.device)
    torch.manual_seed(0)
    x = make(1, n_tokens, args.d_model).requires_grad_()
    weight = (0.02 * make(args.vocab_size, args.d_model)).requires_grad_()
    return x, weight, torch.randint(args.vocab_size, (1, n_tokens), device=bench.device)


def run_head(
    bench: Bench,
    inputs: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
    chunks: int,
    compiled: bool = False,
) -> tuple[Tensor, float]:
    """Forward and backward once: the loss, and the factor that the gradients carry."""
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    with torch.autocast(bench.device.type, dtype):
        loss = head_loss(*inputs, chunks, compiled_softmax() if compiled else softmax_in_place)
    (loss * scale).backward()
    return loss.detach(), scale


def head_step(
    bench: Bench, n_tokens: int, dtype: torch.dtype, chunks: int, compiled: bool = False
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two functions: forward and backward once; give back the gradients."""
    x, weight, labels = head_input(bench, n_tokens)

    def forget() -> None:
        x.grad = weight.grad = None

    def step() -> None:
        forget()
        run_head(bench, (x, weight, labels), dtype, chunks, compiled)

    return step, forget


def time_head(bench: Bench, dtype: torch.dtype, chunks: int, compiled: bool = False) -> Values:
    n_tokens, config = bench.pick(16 * 1024, 32), bench.planner().config
    V, C = config.vocab_size, config.d_model
    step, forget = head_step(bench, n_tokens, dtype, chunks, compiled)
    ms = bench.milliseconds(step, 10)
    forget()
    return {
        "chunks": count_chunks(n_tokens, V, chunks, dtype.itemsize),
        "ms": ms,
        "TFLOP/s": 6 * n_tokens * V * C / ms / 1e9,
        "predicted": head_bytes(replace(config, loss_chunks=chunks), n_tokens, dtype),
        "extra": bench.extra_bytes(step),
    }


def head_kernels(bench: Bench, dtype: torch.dtype, chunks: int) -> Values:
    """How many there are, and whether the GPU waits for Python between them."""
    step, _ = head_step(bench, bench.pick(16 * 1024, 32), dtype, chunks)
    for _ in range(2):
        step()
    if bench.on_gpu:
        torch.cuda.synchronize()
    with bench.profile() as profiler:
        step()
        if bench.on_gpu:
            torch.cuda.synchronize()
    kernels = bench.kernels(trace_events(profiler))
    return {
        "kernels": len(kernels),
        "kernels_ms": sum(duration for _, _, duration in kernels) / 1000,
        "idle": idle_share(kernels),
    }


@cache
def exact_head(bench: Bench, n_tokens: int) -> dict[str, Tensor]:
    """Loss and gradients in float64, as autograd makes them."""
    x, weight, labels = head_input(bench, n_tokens)
    x64, weight64 = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    loss = F.cross_entropy((x64 @ weight64.T).flatten(0, 1), labels.flatten())
    loss.backward()
    assert x64.grad is not None and weight64.grad is not None
    return {"loss": loss.detach(), "grad_x": x64.grad, "grad_weight": weight64.grad}


def head_errors(bench: Bench, dtype: torch.dtype, chunks: int) -> Values:
    """Relative errors (of the gradients' norms), on fewer tokens."""
    n_tokens = bench.pick(1024, 16)
    x, weight, labels = head_input(bench, n_tokens)
    loss, scale = run_head(bench, (x, weight, labels), dtype, chunks)
    ours: dict[str, Any] = {"loss": loss, "grad_x": x.grad, "grad_weight": weight.grad}
    exact = exact_head(bench, n_tokens)
    unscale = {"loss": 1.0, "grad_x": 1 / scale, "grad_weight": 1 / scale}
    return {
        f"{name}_error": ((unscale[name] * ours[name].double() - exact[name]).norm()
                          / exact[name].norm()).item()
        for name in ours
    }  # fmt: skip
