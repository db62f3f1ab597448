"""Sharded over processes: the planner is right about what one of them needs."""

import json
import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases.shapes import WIDE
from harness.answers import BATCH, SHAPE, ask, question
from harness.marks import rest_slow
from harness.planned import planner
from harness.runs import parse, start_together
from harness.sharded import CASES, LONG_CASES, Case, train_step
from torch import Tensor
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from memory import MemorySavingGPT, recompute_plan_of_config
from planner import Layout, Planner
from planner.choose import pick_fastest_fitting_step
from planner.shards import GLOO, state_bytes
from scripts.plans import CommandPlan as Plan
from train_fsdp import FSDPProcess
from trainer.optimizer import make_optimizer
from trainer.reproducible_sums import GradientTree

pytestmark = pytest.mark.usefixtures("everything_travels")
CPU = torch.device("cpu")
slow = pytest.mark.slow
FEW = ["cheap, bfloat16", "none, accumulated", "many positions", "little but weights, rounded"]
FEW += ["in a tree", "little but weights, in a tree"]


def planner_of(case: Case, kind: str, n: int) -> Planner:
    make = partial(
        make_optimizer, settings=case.settings, device=CPU, precision=torch.float32, sharded=True
    )
    in_tree, n_micro_batches = case.settings.reproducible_sums, case.micro_batches
    return planner(
        case.config,
        "fp32" if case.dtype == torch.float32 else "bf16",
        layout=Layout(kind, world_size=n),
        seq_len=case.seq_len,
        accumulates_gradients=n_micro_batches > 1 and not in_tree,
        n_pending_sums=int(math.log2(n_micro_batches)) * in_tree,
        gradient_copies=torch.float32 if in_tree else None,
        gather_in_bfloat16=case.gather == "bfloat16",
        make_optimizer=make,
    )


@pytest.mark.parametrize(
    ("act", "n", "names"),
    [
        ("memory", 2, ["cheap, bfloat16", "in a tree"]),
        pytest.param("memory", 2, FEW, marks=slow),
        pytest.param("memory_together", 2, ["sdpa"], marks=slow),  # of train_sp.py
        *(pytest.param("memory_together", n, [*LONG_CASES], marks=slow) for n in (2, 4)),
    ],
)
def test_predicted_peak_is_that_of_real_processes(act, n, names, tmp_path):
    path = tmp_path / "bytes.json"
    words = ["tests/harness/sharded.py", act, str(path), *names]
    result = start_together(words, n).end(timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    cases, kind = (CASES, "fsdp") if act == "memory" else (LONG_CASES, "sp")
    for name, peak in json.loads(path.read_text()).items():
        step = planner_of(cases[name], kind, n).step(cases[name].batch_size)
        assert 0.98 <= step.peak / peak <= 1.02, name


class ProcessOfFakeGroup(FSDPProcess):
    """Rank 0 of a group whose collectives send nothing."""

    def __init__(self, case: Case) -> None:
        self.device, self.gather_dtype = CPU, case.gather
        self.reproducible_sums = case.settings.reproducible_sums
        self.layout = Layout("fsdp")


def tracked_peak(case: Case, n: int) -> int:
    """Return the peak bytes of the second of two steps, by torch's FSDPMemTracker."""
    dist.init_process_group("fake", rank=0, world_size=n, store=FakeStore())
    try:
        process = ProcessOfFakeGroup(case)
        with torch.device("meta"):
            model = MemorySavingGPT(case.config).train()
        process.allocate_parameters(model)
        optimizer = make_optimizer(model, case.settings, CPU, torch.float32)
        parameters = model.parameters() if process.reproducible_sums else ()
        tree = GradientTree(parameters, case.micro_batches)

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


@pytest.mark.parametrize(
    ("name", "n"),
    [
        *rest_slow([(name, 2) for name in CASES], lambda case: case[0] in FEW[:2] + FEW[-1:]),
        *(pytest.param(name, 3, marks=slow) for name in CASES),
    ],
)
def test_predicted_bytes_are_those_that_torch_tracks(name, n):
    """All but gloo's buffers, which no tensor has, and the loss, which the trainers free later."""
    case = CASES[name]
    record = planner_of(case, "fsdp", n).record(case.batch_size)
    changes = np.zeros(len(record.operator_names) + 1, np.int64)
    for storage in record.storages:
        if storage.name != GLOO:
            changes[storage.born] += storage.nbytes
            changes[int(min(storage.died + 1, len(changes) - 1))] -= storage.nbytes
    assert tracked_peak(case, n) - changes.cumsum()[:-1].max() in (0, 4)


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
        Plan(parse(SHAPE), 64, torch.device("cuda"), precision, layout=layout) for layout in layouts
    )
    peak, alone = (plan.planner.step(BATCH, recompute="full").peak for plan in plans)
    assert answer.peaks["full"] == peak < alone
    assert said in answer.out and answer.json["run"]["tokens"] == 3 * BATCH * 32 * replicas
    command = " ".join(answer.command)
    assert command.startswith(f"torchrun --nproc-per-node={n} train_{kind}.py --")
    assert f"--{kind}" not in command


def test_the_update_of_shards_is_planned_as_it_runs():
    """A DTensor is updated by LeanOptimizer, which calls the kernel for each weight. A planned
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
