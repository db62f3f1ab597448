"""Sharded over processes: the planner is right about what one of them needs."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases.shapes import CONFIG, WIDE, T
from harness.answers import BATCH, SHAPE, ask, question
from harness.marks import rest_slow
from harness.planned import planner
from harness.runs import parse
from harness.sharded import IN_TREE, SETTINGS, UNEVEN, train_step
from torch import Tensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from memory import recompute_plan_of_config
from model import MiniGPTConfig
from planner import Layout, Planner
from planner.choose import pick_fastest_fitting_step
from planner.shards import GLOO, state_bytes
from scripts.plans import CommandPlan
from train_fsdp import FSDPProcess
from train_sp import SPProcess
from trainer.check_model import make_model_on_meta
from trainer.optimizer import make_optimizer
from trainer.reproducible_sums import GradientTree
from trainer.settings import Settings

pytestmark = pytest.mark.usefixtures("everything_travels")
CPU = torch.device("cpu")
slow = pytest.mark.slow


class Case(NamedTuple):
    config: MiniGPTConfig
    batch_size: int
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    settings: Settings = SETTINGS  # of the optimizer
    kind: str = "fsdp"
    seq_len: int = T
    gather: str = "float32"


def long_case(seq_len: int, recompute: str, **changes: int) -> Case:
    long: dict = {"max_position_embeddings": seq_len, "n_heads": 4, "recompute": recompute}
    config = replace(WIDE, **long | changes)
    return Case(config, 1, torch.bfloat16, kind="sp", seq_len=seq_len)


FULL, CHEAP = (replace(WIDE, recompute=policy) for policy in ("full", "cheap"))
CASES = {
    "full, large head": Case(replace(CONFIG, recompute="full"), 16),
    "full": Case(FULL, 24),
    "cheap, bfloat16": Case(CHEAP, 24, torch.bfloat16),
    "none, accumulated": Case(WIDE, 4, micro_batches=2),
    "little but weights": Case(FULL, 1),
    "dropout": Case(replace(WIDE, dropout=0.1), 8),
    "offloaded": Case(replace(FULL, recompute="full+offload"), 24),
    "Muon": Case(WIDE, 8, settings=SETTINGS.replace(optimizer="muon")),
    "bfloat16 moments": Case(WIDE, 8, settings=SETTINGS.replace(moments_dtype="bfloat16")),
    "nested": Case(replace(WIDE, n_layers=5, recompute="full/2+nested"), 24),
    "many positions": Case(replace(CHEAP, max_position_embeddings=4096), 8),
    "rounded": Case(
        replace(WIDE, max_position_embeddings=64), 24, torch.bfloat16, gather="bfloat16"
    ),
    "little but weights, rounded": Case(FULL, 1, torch.bfloat16, gather="bfloat16"),
    "little but weights, in a tree": Case(FULL, 1, micro_batches=4, settings=IN_TREE),
    "in a tree": Case(WIDE, 4, micro_batches=4, settings=IN_TREE),
    "rounded, in a tree": Case(CHEAP, 8, torch.bfloat16, 8, gather="bfloat16", settings=IN_TREE),
    "cheap, rounded, accumulated": Case(CHEAP, 8, torch.bfloat16, 2, gather="bfloat16"),
    "nested, rounded": Case(
        replace(WIDE, recompute="full/3+nested"), 24, torch.bfloat16, gather="bfloat16"
    ),
    "one block": Case(replace(WIDE, n_layers=1), 16),
    # Shared sequences
    "once": long_case(512, "full"),
    "twice": long_case(1024, "full"),
    "uneven": long_case(501, "none", **UNEVEN)._replace(batch_size=4),
    "uneven sdpa": long_case(501, "sdpa", **UNEVEN),
    "uneven groups": long_case(501, "full/2+nested", **UNEVEN),
}
FEW = ["none, accumulated", "many positions", "little but weights, in a tree", "uneven sdpa"]


def planner_of(case: Case, n: int) -> Planner:
    make = partial(
        make_optimizer, settings=case.settings, device=CPU, precision=torch.float32, sharded=True
    )
    in_tree, n_micro_batches = case.settings.reproducible_sums, case.micro_batches
    return planner(
        case.config,
        "fp32" if case.dtype == torch.float32 else "bf16",
        layout=Layout(case.kind, world_size=n),
        seq_len=case.seq_len,
        accumulates_gradients=n_micro_batches > 1 and not in_tree,
        n_pending_sums=int(math.log2(n_micro_batches)) * in_tree,
        gradient_copies=torch.float32 if in_tree else None,
        gather_in_bfloat16=case.gather == "bfloat16",
        make_optimizer=make,
    )


def tracked_peak(case: Case, n: int) -> int:
    """Return the peak bytes of rank 0 in the second of two steps, by torch's FSDPMemTracker. The
    rank belongs to a group whose collectives send nothing."""
    dist.init_process_group("fake", rank=0, world_size=n, store=FakeStore())
    try:
        process: FSDPProcess = object.__new__(SPProcess if case.kind == "sp" else FSDPProcess)
        process.device, process.rank, process.timeout = CPU, 0, None
        process.gather_dtype, in_tree = case.gather, case.settings.reproducible_sums
        process.reproducible_sums = in_tree
        process.layout = Layout(case.kind, world_size=n if case.kind == "sp" else 1)
        model = make_model_on_meta(case.config, process.make_model).train()
        process.allocate_parameters(model)
        optimizer = make_optimizer(model, case.settings, CPU, torch.float32)
        tree = GradientTree(model.parameters() if in_tree else (), case.micro_batches)

        def batch() -> tuple[Tensor, Tensor]:
            rows = torch.zeros(case.batch_size, case.seq_len + 1, dtype=torch.int64)
            return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

        def draw() -> Iterator[tuple[Tensor, Tensor]]:
            while True:
                tracker.reset_mod_stats()  # it allows one forward of each module
                yield batch()

        with FSDPMemTracker(model, optimizer) as tracker:
            for _ in range(2):
                train_step(process, model, optimizer, draw(), tree, case.dtype)
        return tracker.get_tracker_snapshot("peak")[CPU]["Total"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("n", rest_slow([2, 3, 4], lambda n: n == 2))
@pytest.mark.parametrize("name", rest_slow(CASES, FEW.__contains__))
def test_predicted_bytes_are_those_that_torch_tracks(name, n):
    """All but gloo's buffers, which no tensor has, the loss, which the trainers free later, and a
    byte for each label of a shared sequence: whether it counts."""
    case = CASES[name]
    record = planner_of(case, n).record(case.batch_size)
    changes = np.zeros(len(record.operator_names) + 1, np.int64)
    for storage in record.storages:
        if storage.name != GLOO:
            changes[storage.born] += storage.nbytes
            changes[int(min(storage.died + 1, len(changes) - 1))] -= storage.nbytes
    more, labels = (
        tracked_peak(case, n) - changes.cumsum()[:-1].max(),
        case.batch_size * case.seq_len,
    )
    assert more in (0, 4) or case.kind == "sp" and more in (labels, labels + 4)


def test_weights_arrive_when_a_block_begins():
    """In backward, those of the block before, which is the next one to run. A later arrival may
    change no peak."""
    plan = planner(FULL, layout=Layout("fsdp", world_size=2))
    begins = {(phase, block): at for at, phase, block in plan.step(1).phase_marks}
    arrive = [s.born for s in plan.record(1).storages if s.name == "weights as they arrive"]
    assert (*sorted(arrive)[:4], max(arrive)) == (
        *(1, 2, begins["forward", 0], begins["forward", 1]),
        begins["backward", 1],
    )


# ---- what a process has


@pytest.mark.parametrize("n", [2, 3, 1000])
def test_rows_that_do_not_divide_are_rounded_up(n):
    """Also where there are more processes than rows. No step takes less than its share."""
    plan = planner(WIDE, layout=Layout("fsdp", world_size=n))
    assert [len(p) for p in plan.local_model.parameters()] == [
        -(-len(p) // n) for p in plan.model.parameters()
    ]
    gathered = [*plan.model.token_embedding.parameters(), *plan.model.ln_f.parameters()]
    rows = sum(p.nbytes for p in plan.local_model.parameters())
    counters = [torch.zeros(()) for p in plan.model.parameters()]
    state = state_bytes(
        plan.model, [*plan.model.parameters(), *plan.model.parameters(), *counters], n
    )
    assert state == 4 * rows + 4 * len(counters) + sum(p.nbytes for p in gathered)
    assert state < plan.step(1, recompute="full").peak


def test_shards_never_take_a_group():
    plan = planner(WIDE, layout=Layout("fsdp", world_size=2))
    # Nothing fits.
    assert recompute_plan_of_config(pick_fastest_fitting_step(plan, 16, 1).config).group_size == 1


# ---- asked by flags

DEEP = "--n-layers 8 --d-model 64 --seq-len 16 --batch-size 2"  # much weight, little else


@pytest.mark.parametrize(
    ("kind", "n", "replicas", "said"),
    [
        ("fsdp", 4, 4, ", one of 4 processes of train_fsdp.py\n"),
        # (A step has as many as with one process.)
        pytest.param("sp", 2, 1, ", one of 2 processes of train_sp.py\n", marks=slow),
    ],
)
def test_plan_memory_plans_shards(kind, n, replicas, said):
    answer = ask(
        "--vocab-size 64 --device cuda --memory-budget 1GiB --num-steps 3 "
        f"--{kind} --nproc-per-node {n}"
    )
    precision = getattr(torch, answer.json["precision"])
    layouts = Layout(kind, world_size=n), Layout()
    plans = (
        CommandPlan(parse(SHAPE), 64, torch.device("cuda"), precision, layout=layout)
        for layout in layouts
    )
    peak, alone = (plan.planner.step(BATCH, recompute="full").peak for plan in plans)
    assert answer.peaks["full"] == peak < alone
    assert said in answer.out and answer.json["run"]["tokens"] == 3 * BATCH * 32 * replicas
    command = " ".join(answer.command)
    assert command.startswith(f"torchrun --nproc-per-node={n} train_{kind}.py --")
    assert f"--{kind}" not in command


def test_the_update_of_shards_is_planned_as_it_runs():
    """A DTensor is updated by AdamWAndMuon, which calls the kernel for each weight. A planned
    update stands for those of all weights of a shape."""
    for flags, sharded in (("", False), ("--fsdp --nproc-per-node 2", True)):
        plan = question(f"--device cuda {flags}")
        names, work = plan.planner.record(1).operator_names, plan.step.flops_and_bytes_by_op
        weights = [*plan.meta_model.parameters()]
        shapes = {(p.shape, p.dim() > 1) for p in weights}
        assert names.count("_fused_adamw_") == (len(shapes) if sharded else 2)  # 2 groups
        begin = plan.step.phase_slice("optimizer").start
        update = work[(work["at"] >= begin) & (work["times"] > 0)]
        assert (update["times"].max() > 1) == sharded
