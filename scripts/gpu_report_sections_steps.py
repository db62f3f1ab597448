"""Sections of scripts/gpu_report.py: are steps correct, how fast are they, where do they wait?"""

import gzip
import importlib.util
import json
import os
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from data import TokenFile, TrainBatches
from model import RECOMPUTE_POLICIES, MiniGPT
from scripts.benchmark_worker import Job, RandomTokens
from scripts.gpu_report_bench import (
    Bench,
    Jobs,
    Values,
    idle_share,
    measure_step,
    next_step,
    step_values,
)
from trainer.flags import model_config

ROOT = Path(__file__).resolve().parent.parent

# --------------------------------------------------------------------------------- correctness

# Attention's backward adds up in any order, unless it is told not to.
MATH, FLASH = "math", "flash, deterministic"


def correctness(bench: Bench) -> Jobs:
    """Loss and gradients of each policy beside those of `none`, run in the same way."""
    sum_in_order()
    compile_anew()
    check, dropouts = partial(compare, bench), bench.pick((0.0, 0.1), (0.1,))
    ways = [(backend, False, dropout) for backend in (FLASH, MATH) for dropout in dropouts]
    ways += [(FLASH, True, dropout) for dropout in dropouts]
    yield "float16 from a loss scale of 2^24", partial(float16_recovers, bench)
    for backend, compiled, dropout in ways:
        for policy in RECOMPUTE_POLICIES:  # `none` once more: is it the same twice?
            name = f"{policy}, {'compiled' if compiled else 'eager'}, dropout {dropout}, {backend}"
            yield name, partial(check, backend, compiled, dropout, recompute=policy)
    for policy in ("cheap", "attn", "mlp", "full"):
        job = partial(check, FLASH, False, 0.1, recompute=policy, offload_activations=True)
        yield f"{policy} + offload, eager, dropout 0.1, {FLASH}", job
    for policy in ("full", "mlp"):
        job = partial(same_weights, bench, Job(policy, bench.pick(16, 2)))
        yield f"{policy} + offload, full size, weights after 3 steps, {FLASH}", job


def sum_in_order() -> None:
    """Before a process's first product: or cuBLAS may add as it likes. (It takes other
    workspaces for that: nothing is timed in such a process, and nothing of its memory counts.)"""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def compile_anew() -> None:
    """Each policy for itself. From the ninth on, that would silently not be done."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True


@contextmanager
def pinned_attention(bench: Bench, backend: str) -> Iterator[None]:
    """One kernel for attention, and every kernel in a fixed order of sums."""
    choice = [SDPBackend.MATH]
    if backend != MATH:  # (a CPU's flash attention knows no dropout)
        choice = [SDPBackend.FLASH_ATTENTION] + bench.pick([], choice)
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(choice):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def gradients(
    bench: Bench, backend: str, compiled: bool, dropout: float, **memory: Any
) -> dict[str, Tensor]:
    """Of one micro-batch: the loss, and each weight's gradient."""
    args = bench.args(bench.pick("--n-layers 3 --seq-len 512", ""))
    config = replace(model_config(args, args.vocab_size), dropout=dropout, **memory)
    torch.manual_seed(args.seed)
    model = MiniGPT(config).to(bench.device).train()
    if compiled:
        model.compile_blocks()
    torch.manual_seed(1)
    ids, labels = RandomTokens(args.vocab_size, 2, args.seq_len, bench.device)[0]
    autocast = torch.autocast(bench.device.type, torch.bfloat16, cache_enabled=False)
    with pinned_attention(bench, backend):
        with autocast:
            loss = model(ids, labels)
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


reference = cache(partial(gradients, recompute="none"))


def compare(bench: Bench, backend: str, compiled: bool, dropout: float, **memory: Any) -> Values:
    """The largest of all differences, in units of the largest gradient of the same weight."""
    theirs = reference(bench, backend, compiled, dropout)
    ours = gradients(bench, backend, compiled, dropout, **memory)
    return differences(ours, theirs)


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Values:
    apart = {
        name: ((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item()
        for name in theirs
        if not torch.equal(ours[name], theirs[name])
    }
    worst = max(apart, key=apart.__getitem__, default=None)
    return {
        "bit_equal": not apart,
        "difference": apart[worst] if worst else 0.0,
        "where": worst,
        "differing": len(apart),
        "tensors": len(theirs),
    }


def same_weights(bench: Bench, job: Job) -> Values:
    """Training with offload, beside training without."""
    found = []
    for flags in ("", " --offload-activations"):
        bench.clear()
        run = bench.run(flags, job)
        with pinned_attention(bench, FLASH):
            for _ in range(3):
                next_step(run)
        found.append({name: p.detach().clone() for name, p in run.model.named_parameters()})
        del run
    without, offloaded = found
    return differences(offloaded, without)


def float16_recovers(bench: Bench) -> Values:
    """The scaler halves its scale until gradients are finite; the updates before are skipped."""
    run = bench.run("--amp-dtype float16", Job("full", 2))
    run.scaler = torch.amp.GradScaler(bench.device.type, init_scale=2.0**24)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    norms = torch.stack([next_step(run) for _ in range(bench.pick(20, 12))])
    finite = all(bool(p.isfinite().all()) for p in run.model.parameters())
    moved = sum(not torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    return {
        "steps": run.step,
        "skipped": int((~norms.isfinite()).sum()),
        "scale": run.scaler.get_scale(),
        "recovered": bool(norms[-1].isfinite()),
        "finite": finite,
        "weights_moved": moved,
    }


# --------------------------------------------------------------------------------------- speed

SPEED_POLICIES = ("none", "cheap", "mlp", "sdpa", "full")


def speed(bench: Bench) -> Jobs:
    """Whole steps, in turns, so that a clock that drifts hits all alike."""
    compile_anew()
    size = bench.pick(16, 2)
    ways: dict[str, Callable[[], Values]] = {}
    for compiled in (False, True):
        way = "compiled" if compiled else "eager"
        if bench.nanogpt:
            ways[f"nanoGPT, {way}"] = partial(measure_nanogpt, bench, size, compiled)
        if bench.peer:
            job = Job("none", size, compiled, peer="transformers")
            ways[f"transformers, {way}"] = partial(measure_step, bench, "", job)
        for policy in SPEED_POLICIES:
            ways[f"{policy}, {way}"] = partial(measure_step, bench, "", Job(policy, size, compiled))
    for turn in range(1, bench.pick(4, 2)):
        for name, measure in ways.items():
            yield f"{name}, turn {turn}", measure


def load_nanogpt(folder: Path) -> Any:
    """The model.py of that checkout, under a name of its own: we have a model.py, too."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def nanogpt_matmuls() -> Iterator[None]:
    """Rounded as under its train.py: TF32 is allowed there, all else is as torch has it."""
    matmul = torch.backends.cuda.matmul
    precision = torch.get_float32_matmul_precision()
    reduced = (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    torch.set_float32_matmul_precision("high")
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True
    try:
        yield
    finally:  # the next turn is ours
        torch.set_float32_matmul_precision(precision)
        matmul.allow_bf16_reduced_precision_reduction = reduced[0]
        matmul.allow_fp16_reduced_precision_reduction = reduced[1]


def measure_nanogpt(bench: Bench, batch_size: int, compiled: bool, steps: int = 10) -> Values:
    """The same shape, tokens and precision in nanoGPT's own loop: its autocast, its AdamW, its
    vocabulary (rounded up to a multiple of 64), all of the model compiled."""
    assert bench.nanogpt is not None
    args, library = bench.args(), load_nanogpt(bench.nanogpt)
    config = library.GPTConfig(
        block_size=args.seq_len,
        vocab_size=args.vocab_size + -args.vocab_size % 64,
        n_layer=args.n_layers,
        n_head=args.n_heads,
        n_embd=args.d_model,
        dropout=args.dropout,
        bias=True,
    )
    torch.manual_seed(args.seed)
    model = library.GPT(config).to(bench.device).train()
    if hasattr(model, "configure_optimizers"):
        optimizer = model.configure_optimizers(0.1, args.lr, (0.9, 0.95), bench.device.type)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True)
    called = torch.compile(model) if compiled else model
    tokens = RandomTokens(args.vocab_size, batch_size, args.seq_len, bench.device)

    def step() -> None:
        torch.manual_seed(args.seed)
        ids, labels = tokens[0]
        with torch.autocast(bench.device.type, torch.bfloat16):
            _, loss = called(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with nanogpt_matmuls():
        times = bench.times(step, bench.pick(steps, 2), warm_up=bench.pick(3, 1))
        there = bench.on_gpu and torch.cuda.memory_allocated()
        allocated = bench.extra_bytes(step) + there
    return step_values(bench, args, Job("none", batch_size), times) | {"allocated": allocated}


# --------------------------------------------------------------------------------------- syncs


def syncs(bench: Bench) -> Jobs:
    """Where Python waits for the GPU in a step, and where the GPU waits for Python."""
    for dtype in ("bfloat16", "float16"):
        yield f"waits in a step, {dtype}", partial(waits, bench, f"--amp-dtype {dtype}")
    yield "waits in a step, gradients accumulated", partial(waits, bench, "--grad-accum-steps 2")
    for size in bench.pick((2, 16), (2,)):
        for policy in ("none", "full"):
            yield f"profile, {policy}, {size} sequences", partial(profile_step, bench, policy, size)
        job = partial(profile_step, bench, "none", size, compiled=True)
        yield f"profile, none compiled, {size} sequences", job


def waits(bench: Bench, flags: str) -> Values:
    """The lines that made Python wait, of ours where there is one."""
    run = bench.run(flags, Job("full", 2))
    args = run.args
    file = bench.out / "ids.npy"  # from a file, as in a true run, and by way of pinned memory
    ids = np.random.default_rng(0).integers(args.vocab_size, size=50 * args.seq_len)
    np.save(file, ids.astype(np.uint16))
    run.train_batches = TrainBatches([TokenFile.open(file)], 2, args.seq_len, 0, bench.device)
    for _ in range(2):
        next_step(run)
    if bench.on_gpu:
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            next_step(run)
    finally:
        if bench.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        file.unlink()
    found = Counter(
        f"{short(warning.filename)}:{warning.lineno}"
        for warning in caught
        if "synchroniz" in str(warning.message)
    )
    return {"waits": found.total(), "places": [f"{n} x {line}" for line, n in found.most_common()]}


def short(path: str) -> str:
    """From the project's root, or from site-packages."""
    for folder in (ROOT, *map(Path, sys.path)):
        if path.startswith(f"{folder}/"):
            return path.removeprefix(f"{folder}/")
    return path


def profile_step(bench: Bench, policy: str, size: int, compiled: bool = False) -> Values:
    """Three steps: the ten dearest kernels, and the share of the time without any. The whole trace
    goes into the report's folder (for https://ui.perfetto.dev)."""
    run = bench.run("", Job(policy, size, compiled))
    for _ in range(bench.pick(3, 1)):
        next_step(run)
    steps = bench.pick(3, 1)
    with bench.profile() as profiler:
        for _ in range(steps):
            next_step(run)
        if bench.on_gpu:
            torch.cuda.synchronize()
    file = bench.out / f"trace_{policy}{'_compiled' * compiled}_{size}.json.gz"
    profiler.export_chrome_trace(str(file))
    with gzip.open(file, "rt") as trace:
        kernels = bench.kernels(json.load(trace)["traceEvents"])
    total: dict[str, list[float]] = defaultdict(list)
    for name, _, duration in kernels:
        total[name].append(duration / 1000)
    whole = sum(map(sum, total.values()))
    dearest = sorted(total, key=lambda name: -sum(total[name]))[:10]
    step_ms = None  # (not every machine lets a profiler see kernels)
    if kernels:
        step_ms = (kernels[-1][1] + kernels[-1][2] - kernels[0][1]) / 1000 / steps
    return {
        "step_ms": step_ms,
        "kernels_ms": whole / steps,
        "idle": idle_share(kernels),
        "kernels": round(len(kernels) / steps),
        "trace": file.name,
        "dearest": [
            {
                "kernel": name[:90],
                "calls": round(len(total[name]) / steps),
                "ms": sum(total[name]) / steps,
                "share": sum(total[name]) / whole,
            }
            for name in dearest
        ],
    }
