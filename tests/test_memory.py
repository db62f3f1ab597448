"""The planner is right: about real steps, about formulas, and about what fits."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from cases.shapes import CONFIG, MEMORY, MIXES, PRECISIONS, WIDE, T
from harness.planned import adamw, measured_peak, planner
from harness.runs import parse
from test_model import random_ids
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from memory import POLICIES, expanded
from model import MiniGPT, MiniGPTConfig
from planner import CARDS
from planner.formulas import closed_form, state_bytes, step_flops
from planner.operators import workspaces
from planner.timeline import KINDS
from trainer.clocks import LiveStorages
from trainer.optimizer import make_optimizer
from trainer.process import OneProcess

pytestmark = pytest.mark.usefixtures("everything_travels")

CPU = torch.device("cpu")
MODES = [("adamw", "bfloat16"), ("muon", "float32"), ("muon", "bfloat16")]
FULL = {"recompute": "full"}


class Case(NamedTuple):
    memory: dict
    config: MiniGPTConfig = CONFIG
    batch_size: int = 16
    precision: str = "fp32"
    accumulate: int = 1
    mode: tuple[str, str] = ("", "")  # --optimizer, --moments-dtype; "": torch's own AdamW
    at_a_time: int = 2**22  # elements that the optimizer copies (2^12: a matrix or less)


CASES = [
    *map(Case, [*MEMORY, *MIXES]),
    *(Case(memory, precision="bf16") for memory in (MIXES[0], MIXES[4])),
    *(Case({"recompute": policy}, WIDE, 4, "bf16") for policy in ("none", "mlp", "sdpa")),
    Case({}, accumulate=2),
    Case({"dropout": 0.1}, WIDE, 8),  # which no kernel fuses here
    *(Case(FULL, WIDE, 1, mode=mode) for mode in MODES[:2]),
    Case(FULL, WIDE, 16, "bf16", mode=MODES[1]),
    Case(FULL, WIDE, 16, mode=MODES[2], at_a_time=2**12),
    Case(FULL, WIDE, 1, "bf16", mode=MODES[0], at_a_time=2**12),
    # Of few tokens the gradients' norm is the peak, or what Muon makes of odd matrices.
    Case({}, MiniGPTConfig(1024, 16, 4, 1, 128, 512, 0.0), 1, mode=("adamw", "float32")),
    Case({}, MiniGPTConfig(1024, 31, 4, 1, 31, 124, 0.0), 1, mode=MODES[1]),
]


def maker(mode: tuple[str, str], precision: str = "fp32"):
    """Makes the optimizer that the trainers make."""
    if mode == ("", ""):
        return adamw
    args = parse(f"--optimizer={mode[0]} --moments-dtype={mode[1]}")
    return lambda model: make_optimizer(model, args, CPU, PRECISIONS[precision])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_peak_is_that_of_a_real_step(case, monkeypatch):
    monkeypatch.setattr("trainer.optimizer.AT_A_TIME", case.at_a_time)
    config, make = replace(case.config, **case.memory), maker(case.mode, case.precision)
    seq_len = config.max_position_embeddings
    how = {"make_optimizer": make, "seq_len": seq_len}
    step = planner(config, case.precision, accumulate=case.accumulate > 1, **how)
    measured = measured_peak(config, case.batch_size, case.precision, case.accumulate, **how)
    assert step.step(case.batch_size).peak == pytest.approx(measured, rel=0.003)


# ---- what a step is made of


@pytest.mark.parametrize("memory", [{}, FULL], ids=str)
def test_kinds_add_up_and_are_what_they_say(memory):
    plan = planner(WIDE)
    step = plan.step(24, **memory)
    assert sum(step.at_peak.values()) == step.peak == step.total.max()
    weights = sum(p.nbytes for p in plan.model.parameters())
    kinds = dict(zip(KINDS, step.timeline.T, strict=True))
    forward, head, update = map(step.phase, ("forward", "head", "optimizer"))
    assert (kinds["parameters"] == weights).all() and (kinds["optimizer"] >= 2 * weights).all()
    # All gradients are there when the optimizer begins, and none before backward.
    assert kinds["gradients"][update.start] == weights and not kinds["gradients"][forward].any()
    # What forward keeps is there when the head begins, and gone after backward but for the ids.
    assert kinds["activations"][head].min() > 0
    assert kinds["activations"][update.start] < 3 * 24 * T * 8
    assert (kinds["recomputed"].max() > 0) == bool(memory)
    assert not kinds["recomputed"][forward].any()
    assert kinds["head"][forward].max() <= 4 and kinds["head"][update].max() <= 4  # the loss itself


def test_where_the_peak_stands_and_what_a_block_keeps():
    configs = [replace(WIDE, n_layers=n, vocab_size=31) for n in (8, 7)]
    eight, seven = (planner(config).step(32, **FULL) for config in configs)
    assert (eight.where, seven.where) == ("backward, block 7", "backward, block 6")
    assert eight.kept - seven.kept == eight.kept_per_block == seven.kept_per_block


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ddp_takes_what_is_predicted(accumulate, tmp_path):
    """By the ladder's tracker, around the real wrapper, as the trainers use it: gradients stay."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with LiveStorages() as storages:
            model = MiniGPT(CONFIG).train()
            optimizer = adamw(model)
            wrapper = DistributedDataParallel(model, gradient_as_bucket_view=True)
            for _ in range(3):  # DDP sorts its buckets anew in the second step
                storages.peak = storages.now
                for still in reversed(range(accumulate)):  # micro-batches
                    with wrapper.no_sync() if still else nullcontext():
                        ids = random_ids(16, T)
                        wrapper(ids, ids).backward()
                OneProcess(CPU).clip_gradients(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)  # as train_step does with DDP
        del wrapper
    finally:
        dist.destroy_process_group()
    predicted = planner(ddp=True, accumulate=accumulate > 1).step(16).peak
    assert predicted == pytest.approx(storages.peak, rel=0.003)


# ---- a GPU is planned for with what a GPU has


@pytest.mark.parametrize(("policy", "dropout"), [("none", 0.0), ("none", 0.1), ("full", 0.1)])
def test_mps_keeps_attentions_scores(policy, dropout):
    """As a CPU's real step does without fused attention."""
    config = replace(WIDE, dropout=dropout, recompute=policy, n_heads=8)
    fused, mps = (planner(config, device_type=kind).step(40) for kind in ("cuda", "mps"))
    with sdpa_kernel(SDPBackend.MATH):
        assert mps.peak == pytest.approx(measured_peak(config, 40), rel=0.003)
    scores, normaliser = 40 * config.n_heads * T * T * 4, 40 * config.n_heads * T * 4
    if policy == "none" and not dropout:
        assert mps.kept_per_block - fused.kept_per_block == scores - normaliser


@pytest.mark.parametrize(("precision", "each"), [("bf16", 5 * 2 * 128 * (32 + 1) * 4), ("fp32", 0)])
def test_inside_of_a_gpus_kernels(precision, each, monkeypatch):
    """While attention's backward runs: dq_accum and softmax_d; T = 32 and D = 16 are rounded up."""
    monkeypatch.setattr("planner.step.workspaces", lambda: 1000)
    with_kernels = planner(CONFIG, precision, device_type="cuda").step(5, **FULL).total
    monkeypatch.setattr("planner.step.inside", lambda operator, args: 0)
    monkeypatch.setattr("planner.step.workspaces", lambda: 0)
    without = planner(CONFIG, precision, device_type="cuda").step(5, **FULL)
    more = with_kernels - without.total - 1000
    assert sorted(more)[-CONFIG.n_layers - 1 :] == [0] + [each] * CONFIG.n_layers
    assert not more[: without.phase("backward").start].any()


@pytest.mark.parametrize(
    ("major", "arch", "mib"),
    [
        (8, None, 16.25),
        (9, None, 64),
        (10, None, 64),
        (12, None, 64),
        (None, None, 16.25),  # none is here
        # AMD's, which tell a major number as well, and have hipBLASLt's workspaces, too.
        (9, "gfx90a:sramecc+:xnack-", 2 * (32 + 76)),
        (9, "gfx942:sramecc+:xnack-", 2 * (128 + 76)),
        (12, "gfx1201", 2 * (32 + 76)),
    ],
)
def test_what_a_gpus_matmuls_work_in(major, arch, mib, monkeypatch):
    there = SimpleNamespace(major=major, gcnArchName=arch)
    monkeypatch.setattr(torch.version, "hip", arch and "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: major is not None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    assert workspaces() == mib * 2**20


# ---- offload on a GPU


def on_the_gpu(phase: str, policy: str = "full", n_layers: int = 8) -> int:
    """The most bytes beside weights, gradients and moments, with offload."""
    plan = planner(replace(WIDE, n_layers=n_layers), device_type="cuda")
    step = plan.step(24, recompute=f"{policy}+offload")
    assert KINDS[:3] == ("parameters", "gradients", "optimizer")
    return step.timeline[step.phase(phase), 3:].sum(axis=1).max()


@pytest.mark.parametrize("policy", ["full", "mlp"])
def test_offloaded_activations_of_any_depth_take_the_same(policy):
    for phase in ("forward", "backward"):
        assert on_the_gpu(phase, policy, n_layers=5) == on_the_gpu(phase, policy, n_layers=10)


def test_what_is_on_its_way_counts(monkeypatch):
    """And what has left a GPU does not."""
    x, backward, forward = 24 * T * WIDE.d_model * 4, on_the_gpu("backward"), []
    gpu, way = planner(WIDE, device_type="cuda"), {"recompute": "full+offload"}
    assert gpu.step(24, **FULL).kept - gpu.step(24, **way).kept == 3 * x  # of 4 blocks
    assert planner(WIDE).step(24, **way).peak >= planner(WIDE).step(24, **FULL).peak
    for n in (1, 3):  # tensors may be on their way out
        monkeypatch.setattr("memory.offload.IN_FLIGHT", n)
        forward.append(on_the_gpu("forward"))
    assert forward[1] - forward[0] == 2 * x
    monkeypatch.setattr("memory.offload.fetch_all", lambda tickets: None)  # not ahead of its use
    assert backward - on_the_gpu("backward") == x


# ---- formulas


@pytest.mark.parametrize(
    ("config", "precision", "dropout"), [(CONFIG, "fp32", 0.1), (WIDE, "bf16", 0.0)]
)
def test_closed_form_equals_the_simulation(config, precision, dropout):
    config = replace(config, dropout=dropout)
    plan = planner(config, precision, device_type="cuda")
    for memory in [*MEMORY[:-2], MEMORY[-1], *MIXES[:-1]]:  # offload changes where, not what
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


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_closed_form_of_an_optimizer(mode):
    kinds = planner(make_optimizer=maker(mode), device_type="cuda").step(5).timeline[0]
    how = mode[0], getattr(torch, mode[1])
    form = closed_form(CONFIG, 5, T, torch.float32, *how)
    assert form["optimizer"] == kinds[KINDS.index("optimizer")]
    assert sum(form[kind] for kind in KINDS[:3]) == state_bytes(CONFIG, *how)


CHUNKS = {"mlp_chunks": 5, "max_position_embeddings": 330}
IN_CHUNKS = [
    {"recompute": way, **CHUNKS} for way in ("mlp:1,sdpa", "full", "full/2", "full/3+nested")
]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("memory", [*MEMORY[:-2], *MIXES[:-1], *IN_CHUNKS], ids=str)
def test_flops_equal_those_that_torch_counts(memory, dropout):
    """But for attention's own."""
    config = replace(CONFIG, dropout=dropout, **memory)
    T = config.max_position_embeddings
    model, ids = MiniGPT(config).train(), random_ids(2, T)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    needed, replayed = (2 * T * flops for flops in step_flops(config, T))
    attention = 2 * T * 2 * T * config.d_model  # of one block: needed thrice, replayed once
    policies, calls = expanded(config).policies, expanded(config).calls
    again = sum("attention" in POLICIES[policy].twice.split() for policy in policies)
    again += sum(size - 1 for _, size in calls if expanded(config).nested)
    expected = needed + replayed - attention * (3 * config.n_layers + again)
    # Nor a product that adds in place to what is there: the head's weight gradient.
    expected -= 2 * 2 * T * config.vocab_size * config.d_model
    # (A CPU's fused attention is counted since torch 2.15, in full square.)
    flops = counter.get_flop_counts()["Global"].items()
    found = {str(op): n for op, n in flops if "flash_attention_for_cpu" not in str(op)}
    # With dropout a CPU does not fuse it. It is counted in full square; and of several operators
    # no policy keeps the result of all.
    square = 2 * attention * (3 * config.n_layers + again + policies.count("sdpa"))
    assert found.pop("aten.bmm", 0) == square * (dropout > 0)
    assert sum(found.values()) == expected


# ---- batches


ASKED = [(0, {}, 1, {}), (1, FULL, 12, {}), (0, FULL, 8, {"shards": 2, "accumulate": True})]


@pytest.mark.parametrize(("chunks", "memory", "batch_size", "settings"), ASKED, ids=str)
def test_largest_batch_is_the_largest(chunks, memory, batch_size, settings, monkeypatch):
    monkeypatch.setattr("memory.head.CHUNK", 2**15)
    plan = planner(replace(CONFIG, loss_chunks=chunks), **settings)
    for budget in (2**22, 2**23):
        most = plan.largest_batch(budget, batch_size, **memory)
        assert most > 3
        assert plan.step(most, **memory).peak <= budget < plan.step(most + 1, **memory).peak
    assert plan.largest_batch(2**20, batch_size, **memory) == 0  # the weights alone are more


@pytest.mark.parametrize(("policy", "sends_from", "asked"), [("mlp", 13, 12), ("full", 16, 1)])
def test_largest_batch_with_offload(policy, sends_from, asked, monkeypatch):
    """What a tensor's size says of where it waits is not the same for all batches; and in the one
    that is asked for nothing may be large enough to move (`sends_from`: so many sequences)."""
    for room in ("memory.offload", "planner.step"):
        monkeypatch.setattr(f"{room}.SMALL", sends_from * T * CONFIG.d_model * 4)
    memory = {"recompute": f"{policy}+offload"}
    plan, budget = planner(device_type="cuda"), 2**23 + workspaces()
    most = plan.largest_batch(budget, asked, **memory)
    more = most + 1 if policy == "full" else round(1.2 * most)
    assert plan.step(most, **memory).peak <= budget < plan.step(more, **memory).peak


# ---- Muon, and moments in bfloat16


def test_products_of_the_optimizer_take_time():
    """Five times three products of each matrix, the smaller side first (A <= B)."""
    plain, muon = (
        planner(WIDE, "bf16", make_optimizer=maker(mode, "bf16"), device_type="cuda").step(1)
        for mode in (("adamw", "float32"), ("muon", "float32"))
    )
    C, F = WIDE.d_model, WIDE.d_ff
    sides = [(C, 3 * C), (C, C), (C, F), (C, F)]
    flops = sum(5 * (4 * A * A * B + 2 * A**3) for A, B in sides) * WIDE.n_layers
    assert muon.work.flops.sum() - plain.work.flops.sum() == flops
    assert muon.seconds(CARDS["RTX 4090"]) > plain.seconds(CARDS["RTX 4090"])
