"""The planner is right: about real steps, about formulas, and about what fits."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases.memory_shapes import CONFIG, WIDE, T
from test_model import random_ids
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from model import RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig
from planner import CARDS
from planner.formulas import closed_form, step_flops
from planner.kernels import workspaces
from planner.step import Planner
from planner.timeline import KINDS
from studies.ladder import of_products
from trainer.flags import build_parser, fill_in, model_config
from trainer.measured import LiveStorages
from trainer.optimizer import make_optimizer
from trainer.plan import make_planner, vocabulary
from trainer.process import OneProcess

pytestmark = pytest.mark.usefixtures("everything_travels")

MEMORY = [
    *({"recompute": policy} for policy in RECOMPUTE_POLICIES),
    {"recompute": "mlp", "recompute_layers": 2},
    {"recompute": "full", "recompute_group": 2},
    {"recompute": "full", "recompute_group": 2, "recompute_layers": 3},
    {"recompute": "full", "offload_activations": True},
    {"recompute": "none", "loss_chunks": 1},
]
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def planner(config: MiniGPTConfig = CONFIG, precision: str = "fp32", **settings) -> Planner:
    clip = OneProcess(torch.device(settings.get("device_type", "cpu"))).clip_gradients
    settings = {"make_optimizer": adamw, "clip": clip, "seq_len": T} | settings
    return Planner(config, precision=PRECISIONS[precision], **settings)


def measured_peak(
    config: MiniGPTConfig,
    batch_size: int,
    precision: str = "fp32",
    accumulate: int = 1,
    make_optimizer=adamw,
    seq_len: int = T,
) -> int:
    """Of the second of two real steps, by a tracker that is not ours."""
    dtype = PRECISIONS[precision]
    model = MiniGPT(config).train()
    optimizer = make_optimizer(model)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    for _ in range(2):
        with tracker:
            for _ in range(accumulate):
                tracker.reset_mod_stats()
                ids = random_ids(batch_size, seq_len) % config.vocab_size
                with torch.autocast(
                    "cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False
                ):
                    loss = model(ids, ids)
                loss.backward()
                del loss, ids
            OneProcess(torch.device("cpu")).clip_gradients(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


SHAPES = [
    pytest.param((CONFIG, 2), id="few", marks=pytest.mark.slow),
    pytest.param((CONFIG, 16), id="many"),
    pytest.param((WIDE, 24), id="wide", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("memory", MEMORY, ids=str)
def test_predicted_peak_is_that_of_a_real_step(memory, shape):
    config, batch_size = shape
    predicted = planner(config).step(batch_size, **memory).peak
    measured = measured_peak(replace(config, **memory), batch_size)
    assert predicted == pytest.approx(measured, rel=0.003)


@pytest.mark.parametrize("memory", MEMORY[0:7:3], ids=str)
def test_predicted_peak_under_autocast(memory):
    predicted = planner(WIDE, "bf16").step(4, **memory).peak
    assert predicted == pytest.approx(measured_peak(replace(WIDE, **memory), 4, "bf16"), rel=0.003)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("flags", "seq_len"),
    [("", 16), ("--n-layers=4 --d-model=64", 8), ("--n-layers=4 --d-model=31 --n-heads=1", 31)],
)
def test_of_few_tokens_the_gradients_norm_is_the_peak(flags, seq_len, optimizer):
    """Which the trainers compute in a way of their own."""
    flags = f"{flags} --batch-size=1 --seq-len={seq_len} --optimizer={optimizer} --no-amp"
    args = fill_in(build_parser("test", "x.pt").parse_args(flags.split()))
    config, cpu = model_config(args, vocabulary(args)), torch.device("cpu")
    step = make_planner(args, config, cpu, torch.float32).step(1)
    make = partial(make_optimizer, args=args, device=cpu, precision=torch.float32)
    measured = measured_peak(config, 1, make_optimizer=make, seq_len=seq_len)
    assert step.peak == pytest.approx(measured, rel=0.001 if measured > 2**20 else 0.003)


def test_gradients_of_an_earlier_micro_batch_count():
    once, twice = planner().step(16).peak, planner(accumulate=True).step(16).peak
    assert twice == pytest.approx(measured_peak(CONFIG, 16, accumulate=2), rel=0.003)
    assert twice > 1.03 * once


def test_dropout_without_a_fused_kernel_counts_as_it_is():
    config = replace(WIDE, dropout=0.1)
    assert planner(config).step(8).peak == pytest.approx(measured_peak(config, 8), rel=0.003)


# ---- what a step is made of


@pytest.mark.parametrize("memory", [{}, {"recompute": "full"}], ids=str)
def test_kinds_add_up_and_are_what_they_say(memory):
    plan = planner(WIDE)
    step = plan.step(24, **memory)
    assert sum(step.at_peak.values()) == step.peak == step.total.max()
    weights = sum(p.nbytes for p in plan.model.parameters())
    columns = dict(zip(KINDS, step.timeline.T, strict=True))
    assert (columns["parameters"] == weights).all()
    assert (columns["optimizer"] >= 2 * weights).all()
    # All gradients are there when the optimizer begins, and none before.
    begin = step.phase("optimizer").start
    assert columns["gradients"][begin] == weights
    assert columns["gradients"][step.phase("forward")].max() == 0
    # What forward keeps is there when the head begins, and gone after backward.
    assert columns["activations"][step.phase("head")].min() > 0
    assert columns["activations"][begin] < 3 * 24 * T * 8  # the ids
    assert (columns["recomputed"].max() > 0) == bool(memory)
    assert columns["recomputed"][step.phase("forward")].max() == 0
    outside = np.delete(columns["head"], np.r_[step.phase("head"), step.phase("backward")])
    assert outside.max() <= 4  # the loss itself


def test_where_the_peak_stands():
    long = replace(WIDE, n_layers=8, vocab_size=31)
    assert planner(long).step(32).where.startswith(("head", "backward, block 7"))
    assert planner(long).step(32, recompute="full").where == "backward, block 7"
    assert planner(CONFIG).step(1, recompute="full").where in (
        "backward, block 0",
        "head",
        "optimizer",
    )


def test_activations_per_block_are_what_one_block_more_keeps():
    five, four = (planner(replace(WIDE, n_layers=n)).step(8) for n in (5, 4))
    assert five.kept - four.kept == five.kept_per_block == four.kept_per_block


# ---- a GPU is planned for with what a GPU has


def test_gpu_keeps_masks_of_one_byte_and_no_attention_scores():
    """On a CPU, dropout inside attention keeps (B, H, T, T) scores, and masks are not fused."""
    config = replace(WIDE, dropout=0.1)
    plain = planner(WIDE, device_type="cuda").step(8).kept_per_block
    gpu = planner(config, device_type="cuda").step(8).kept_per_block
    cpu = planner(config).step(8).kept_per_block
    assert gpu - plain == 2 * 8 * T * config.d_model
    assert cpu > 1.3 * gpu


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_mps_keeps_attentions_scores(policy, dropout):
    """As a CPU's real step does without fused attention."""
    config = replace(WIDE, dropout=dropout, recompute=policy, n_heads=8)
    fused, mps = (planner(config, device_type=kind).step(40) for kind in ("cuda", "mps"))
    with sdpa_kernel(SDPBackend.MATH):
        assert mps.peak == pytest.approx(measured_peak(config, 40), rel=0.003)
    scores, normaliser = 40 * config.n_heads * T * T * 4, 40 * config.n_heads * T * 4
    if policy == "none" and not dropout:
        assert mps.kept_per_block - fused.kept_per_block == scores - normaliser


def test_offloaded_activations_leave_a_gpu():
    memory = {"recompute": "full", "offload_activations": True}
    gpu = planner(WIDE, device_type="cuda")
    x = 24 * T * WIDE.d_model * 4
    assert gpu.step(24, recompute="full").kept - gpu.step(24, **memory).kept == 3 * x  # of 4 blocks
    assert planner(WIDE).step(24, **memory).peak >= planner(WIDE).step(24, recompute="full").peak


def on_the_gpu(phase: str, policy: str = "full", n_layers: int = 8) -> int:
    """The most bytes beside weights, gradients and moments, with offload."""
    plan = planner(replace(WIDE, n_layers=n_layers), device_type="cuda")
    step = plan.step(24, recompute=policy, offload_activations=True)
    assert KINDS[:3] == ("parameters", "gradients", "optimizer")
    return step.timeline[step.phase(phase), 3:].sum(axis=1).max()


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("policy", ["full", "mlp"])
def test_offloaded_activations_of_any_depth_take_the_same(policy, phase):
    assert on_the_gpu(phase, policy, n_layers=5) == on_the_gpu(phase, policy, n_layers=10)


def test_what_is_on_its_way_counts(monkeypatch):
    x, backward, forward = 24 * T * WIDE.d_model * 4, on_the_gpu("backward"), []
    for n in (1, 3):  # tensors may be on their way out
        monkeypatch.setattr("memory.offload.IN_FLIGHT", n)
        forward.append(on_the_gpu("forward"))
    assert forward[1] - forward[0] == 2 * x
    monkeypatch.setattr("memory.offload.fetch_all", lambda tickets: None)  # not ahead of its use
    assert backward - on_the_gpu("backward") == x


def test_ddp_holds_gradients_all_the_time():
    plan = planner(WIDE, ddp=True)
    gradients = plan.step(8).timeline[:, KINDS.index("gradients")]
    assert gradients[0] == sum(p.nbytes for p in plan.model.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ddp_takes_what_is_predicted(accumulate, tmp_path):
    """By the ladder's tracker, around the real wrapper, as the trainers use it."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with LiveStorages() as storages:
            model = MiniGPT(CONFIG).train()
            optimizer = adamw(model)
            wrapper = DistributedDataParallel(model, gradient_as_bucket_view=True)
            for _ in range(3):  # DDP sorts its buckets anew in the second step
                storages.peak = storages.now
                for micro_batch in range(accumulate):
                    last = micro_batch == accumulate - 1
                    with nullcontext() if last else wrapper.no_sync():
                        ids = random_ids(16, T)
                        wrapper(ids, ids).backward()
                OneProcess(torch.device("cpu")).clip_gradients(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)  # as train_step does with DDP
        del wrapper
    finally:
        dist.destroy_process_group()
    predicted = planner(ddp=True, accumulate=accumulate > 1).step(16).peak
    assert predicted == pytest.approx(storages.peak, rel=0.003)


# ---- closed form


@pytest.mark.parametrize(("precision", "dropout"), [("fp32", 0.1), ("bf16", 0.0)])
@pytest.mark.parametrize(
    "config",
    [pytest.param(CONFIG, id="head"), pytest.param(WIDE, id="wide", marks=pytest.mark.slow)],
)
def test_closed_form_equals_the_simulation(config, precision, dropout):
    config = replace(config, dropout=dropout)
    plan = planner(config, precision, device_type="cuda")
    for memory in MEMORY[:-2]:  # offload changes where, not what
        step = plan.step(5, **memory)
        form = closed_form(step.config, 5, T, PRECISIONS[precision])
        kinds = dict(zip(KINDS, step.timeline.T, strict=True))
        begin = step.phase("optimizer").start
        assert form["parameters"] == kinds["parameters"][0]
        assert form["gradients"] == kinds["gradients"][begin]
        assert form["optimizer"] == kinds["optimizer"][0]
        assert form["blocks"] == step.kept_per_block * config.n_layers, memory
        head = (kinds["head"] + kinds["gradients"])[step.phase("head")].max()
        assert form["head"] == pytest.approx(head, abs=64), memory


def test_closed_form_of_a_head_at_once():
    config = replace(CONFIG, loss_chunks=1)
    step = planner(config).step(16)
    head = step.timeline[step.phase("head")][:, KINDS.index("head")].max()
    assert closed_form(config, 16, T, torch.float32)["head"] == pytest.approx(head, abs=64)


@pytest.mark.parametrize("memory", MEMORY[:-2], ids=str)
def test_flops_equal_those_that_torch_counts(memory):
    """But for attention's own."""
    config = replace(CONFIG, **memory)
    model, ids = MiniGPT(config).train(), random_ids(2, T)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    needed, replayed = (2 * T * flops for flops in step_flops(config, T))
    attention = 2 * T * 2 * T * config.d_model  # of one block: needed thrice, replayed once
    again = config.n_recomputed if config.recompute in ("attn", "full") else 0
    expected = needed + replayed - attention * (3 * config.n_layers + again)
    # Nor a product that adds in place to what is there: the head's weight gradient.
    expected -= 2 * 2 * T * config.vocab_size * config.d_model
    assert of_products(counter) == expected


# ---- batches


@pytest.mark.parametrize(
    ("chunks", "memory", "batch_size"),
    [(0, {}, 1), (0, {"recompute": "full"}, 12), (1, {}, 12), (4, {}, 2)],
    ids=str,
)
def test_largest_batch_is_the_largest(chunks, memory, batch_size, monkeypatch):
    monkeypatch.setattr("memory.head.CHUNK", 2**15)
    plan = planner(replace(CONFIG, loss_chunks=chunks))
    for budget in (2**22, 2**23):
        most = plan.largest_batch(budget, batch_size, **memory)
        assert most > 3
        assert plan.step(most, **memory).peak <= budget
        assert plan.step(most + 1, **memory).peak > budget
    assert plan.largest_batch(2**20, batch_size, **memory) == 0  # the weights alone are more


@pytest.mark.parametrize("sends_from", [4, 13])  # sequences on
def test_largest_batch_with_offload(sends_from, monkeypatch):
    """What a tensor's size says of where it waits is not the same for all batches."""
    x = T * CONFIG.d_model * 4
    for room in ("memory.offload", "planner.step"):
        monkeypatch.setattr(f"{room}.SMALL", sends_from * x)
    memory = {"recompute": "mlp", "offload_activations": True}
    plan = planner(device_type="cuda")
    budget = 2**23 + workspaces()
    most = plan.largest_batch(budget, 12, **memory)
    assert plan.step(most, **memory).peak <= budget
    assert plan.step(round(1.2 * most), **memory).peak > budget


@pytest.mark.parametrize("asked", [1, 40])
def test_largest_batch_with_offload_of_what_is_small_now(asked, monkeypatch):
    """Nothing is large enough to move in the batch that is asked for, but in larger ones."""
    for room in ("memory.offload", "planner.step"):
        monkeypatch.setattr(f"{room}.SMALL", 16 * T * CONFIG.d_model * 4)
    memory, budget = {"recompute": "full", "offload_activations": True}, 2**24 + workspaces()
    plan = planner(device_type="cuda")
    most = plan.largest_batch(budget, asked, **memory)
    assert plan.step(most, **memory).peak <= budget < plan.step(most + 1, **memory).peak


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("chunks", "memory"),
    [
        *((chunks, {}) for chunks in (2, 3, 4, 5, 31)),
        (23, {"recompute": "full", "offload_activations": True}),
    ],
)
def test_of_many_chunks_a_few_tell(memory, chunks, precision, monkeypatch):
    """Operator by operator, to the byte; also where the last one is smaller."""
    config = replace(CONFIG, n_layers=2, loss_chunks=chunks)  # (all blocks are simulated)
    few = planner(config, precision, device_type="cuda").step(3, **memory)
    monkeypatch.setattr("planner.step.few_of", lambda n: [1] * n)
    every = planner(config, precision, device_type="cuda").step(3, **memory)
    np.testing.assert_array_equal(few.timeline, every.timeline)
    assert (few.places, few.kept, few.config) == (every.places, every.kept, every.config)
    for left, right in ((few.work, every.work), (few.compiled_work, every.compiled_work)):
        assert (len(left.flops) < len(right.flops)) == (chunks > 3)
        assert left.times.sum() == right.times.sum()
        assert left.times @ left.flops == right.times @ right.flops
        # (The cast of a chunk is fused with the end of the one before, and the last is smaller.)
        moved = right.times @ right.moved()
        assert left.times @ left.moved() == pytest.approx(moved, rel=5e-3)
    for card in (CARDS["H100"], CARDS["RTX 4090"]):
        for compiled in (False, True):
            seconds = every.seconds(card, compiled)
            assert few.seconds(card, compiled) == pytest.approx(seconds, rel=1e-3)


def test_a_giant_batch_is_simulated_with_few_operators():
    giant, small = (planner(replace(CONFIG, loss_chunks=0)).step(n) for n in (10**6, 10**4))
    assert max(len(giant.work.flops), len(small.work.flops)) < 1000
    assert max(len(giant.timeline), len(small.timeline)) < 10_000
    assert giant.peak == pytest.approx(100 * small.peak, rel=0.1)
