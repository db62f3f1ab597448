"""Make planners for the models in cases/shapes.py, and measure the peak memory of real steps."""

from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from cases.shapes import CONFIG, PRECISIONS, T
from harness.live_storages import LiveStorages
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memory import MemorySavingGPT, head, offload
from model import MiniGPTConfig
from planner import Card, Planner, simulate, step
from trainer import optimizer, plan
from trainer.process import OneProcess
from trainer.reproducible_sums import GradientTree

# A small GPU. The predicted times of our models' steps on it depend on both FLOPs and bytes.
CARD = Card("small", 2**40, (1e12,) * 3, 1e11, launch_s=0)
MAKE_PLANNER = plan.make_planner
MADE: dict[tuple, Planner] = {}
MOST = 50  # largest number of planners in MADE, each with its simulated steps


def shared(key: tuple, make: Any) -> Planner:
    """Return the planner that an earlier test made for the same key. If there is none, call `make`.

    The key in MADE also contains the functions and constants that determine a simulation. So a test
    that has replaced one of these functions or constants gets a new planner.
    """
    changed = (
        Planner.__init__,
        Planner.run_fake_step,
        step.make_chunk_starts_replacement,
        simulate.kernel_workspace_bytes,
        simulate.cublas_workspace_bytes(None),
    )
    changed += (
        step.MemorySavingGPT,
        head.LOGITS_CHUNK_BYTES,
        head.SOFTMAX_SLICE_ELEMENTS,
        optimizer.UPDATE_CHUNK_ELEMENTS,
        offload.MIN_OFFLOAD_BYTES,
    )
    changed += offload.MAX_COPIES_IN_FLIGHT, offload.prefetch_all
    key = *key, changed
    if key not in MADE:
        if len(MADE) == MOST:
            del MADE[next(iter(MADE))]
        MADE[key] = make()
    return MADE[key]


def make_once(settings, vocab_size, device, precision, layout, card, on_simulate) -> Planner:
    """Make a planner, in place of trainer.plan.make_planner, or take that of an earlier test."""
    config = settings.model_config(vocab_size)
    state = settings.optimizer, settings.moments_dtype, settings.compress_gradients
    in_tree = settings.reproducible_sums
    state += settings.grad_accum_steps if in_tree else settings.grad_accum_steps > 1, in_tree
    state += (settings.gather_dtype,)
    where = device, precision, layout, card
    key = config, settings.seq_len, state, *where
    planner = copy(
        shared(key, lambda: MAKE_PLANNER.__wrapped__(settings, vocab_size, *where, on_simulate))
    )
    planner.on_simulate = on_simulate or (lambda n: None)
    return planner


make_once.cache_clear = lambda: None


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def planner(config: MiniGPTConfig = CONFIG, precision: str = "fp32", **settings) -> Planner:
    clip = OneProcess(torch.device(settings.get("device_type", "cpu"))).clip_gradients
    settings = {"make_optimizer": adamw, "seq_len": T} | settings
    return shared(
        (config, precision, *sorted(settings.items())),
        lambda: Planner(config, precision=PRECISIONS[precision], clip_gradients=clip, **settings),
    )


def measured_peak(
    config: MiniGPTConfig,
    batch_size: int,
    precision: str = "fp32",
    accumulate: int = 1,
    make_optimizer=adamw,
    seq_len: int = T,
    ddp: bool = False,
    in_tree: bool = False,
) -> int:
    """Run real steps, and return the peak memory of a step in bytes.

    torch's MemTracker measures the peak. With `ddp`, our LiveStorages measures it instead, because
    it also counts the buckets of DDP.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    dtype, tracker, storages = PRECISIONS[precision], MemTracker(), LiveStorages()

    def step() -> None:
        for i in range(accumulate):
            tracker.reset_mod_stats()
            rows = torch.randint(config.vocab_size, (batch_size, seq_len + 1))
            ids, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            del rows
            in_low = dtype != torch.float32
            with (
                gradient_tree.micro_batch(i),
                wrapped.no_sync() if i < accumulate - 1 and ddp else nullcontext(),
            ):
                with torch.autocast("cpu", dtype, enabled=in_low, cache_enabled=False):
                    loss = wrapped(ids, labels)
                loss.backward()
            del loss, ids, labels
        OneProcess(torch.device("cpu")).clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not ddp)  # as train_minimal.train_step does

    with storages if ddp else nullcontext():
        wrapped = model = MemorySavingGPT(config).train()
        optimizer = make_optimizer(model)
        gradient_tree = GradientTree(model.parameters() if in_tree else (), accumulate)
        if ddp:
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
            step()
            step()  # (DDP makes its final buckets in the second step)
            storages.peak = storages.now
            step()
            return storages.peak
    step()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
