"""--reproducible-sums: the same bits from 1, 2, 4 or 8 processes."""

import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from harness.faults import WHOLE_RUNS, weights_hash
from harness.marks import rest_slow
from harness.rows import row
from harness.runs import (
    FAULTS,
    TINY,
    metrics,
    parse,
    ready,
    same,
    snapshot,
    start_together,
    torchrun,
    train,
)
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from planner import Layout
from planner.shards import RECEIVED
from scripts.plans import CommandPlan
from train_ddp import DDPProcess
from train_fsdp import FSDPProcess
from trainer.reproducible_sums import GradientTree, pairwise_all_reduce_hook, pairwise_sum

slow = pytest.mark.slow
SEEDS = st.integers(0, 2**32)


def drawn(seed: int, n: int) -> list[Tensor]:
    """n gradients of different sizes, so that nearly every order of additions gives other bits."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(50, generator=draw) * 10.0 ** (i % 3) for i in range(n)]


def by_halves(gradients: list) -> Tensor:
    """The definition: the sum of the first half, plus the sum of the second half."""
    first, second = gradients[: len(gradients) // 2], gradients[len(gradients) // 2 :]
    return by_halves(first) + by_halves(second) if first else second[0]


def run_backwards(tree: GradientTree, parameter: nn.Parameter, gradients: list) -> None:
    """One step whose micro-batches have these gradients; None: the parameter takes no part."""
    other = nn.Parameter(torch.ones(()))
    for i, gradient in enumerate(gradients):
        with tree.micro_batch(i):
            part = 0 if gradient is None else (parameter * gradient).sum()
            (part + other).backward()


@given(SEEDS, st.sampled_from([1, 2, 4, 8, 16]), st.booleans())
def test_gradients_are_summed_by_halves(seed, n, in_buckets):
    """In one process as by the definition; no more than log2(n) sums wait. Again after a step that
    broke off, where `.grad` stays in its place (as DDP's buckets need it)."""
    gradients, parameter = drawn(seed, n), nn.Parameter(torch.ones(50))
    tree, bucket = GradientTree([parameter], n), torch.zeros(50)
    for broken_off in (0, seed % n):
        parameter.grad = bucket.zero_() if in_buckets else None
        run_backwards(tree, parameter, drawn(seed + 1, broken_off))
        assert len(tree.pending[parameter]) == broken_off.bit_count()
        run_backwards(tree, parameter, gradients)
        assert torch.equal(parameter.grad, by_halves(gradients))
        assert not tree.pending[parameter]
        assert not in_buckets or parameter.grad.data_ptr() == bucket.data_ptr()
    assert torch.equal(pairwise_sum(torch.stack(gradients)), by_halves(gradients))


@given(SEEDS, st.lists(st.booleans(), min_size=8, max_size=8))
@example(0, [True, False] * 4)
def test_a_parameter_may_take_no_part_in_some_micro_batches(seed, parts):
    """(A changed model.py may skip layers.) Nothing is lost, or left for the next step."""
    there = [g if part else None for g, part in zip(drawn(seed, 8), parts, strict=True)]
    parameter = nn.Parameter(torch.ones(50))
    tree = GradientTree([parameter], 8)
    for _ in range(2):
        parameter.grad = None
        run_backwards(tree, parameter, there)
        expected = sum(g.double() for g in there if g is not None)
        found = 0 if parameter.grad is None else parameter.grad.double()
        torch.testing.assert_close(
            torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("kind", "in_tree"), [(DDPProcess, True), (FSDPProcess, False), (FSDPProcess, True)]
)
def test_every_batch_of_a_step_is_in_one_process(n, kind, in_tree):
    """Pairs that the tree sums first are in the same process, and with shards in neighbours."""
    processes = [kind.__new__(kind) for _ in range(n)]
    for rank, process in enumerate(processes):
        process.layout, process.rank = Layout(kind.kind, rank, n), rank
        process.reproducible_sums = in_tree
    ids = [process.own_batch_ids(range(24, 32)) for process in processes]
    assert sorted(i for own in ids for i in own) == [*range(24, 32)]
    apart = n if kind is FSDPProcess and in_tree else 1
    assert {own.step for own in ids if len(own) > 1} <= {apart}


def test_without_the_flag_autograd_sums(tmp_path):
    """One copy of the gradients, and the same bits as before there was the flag."""
    run = ready(tmp_path, "--no-amp", "--grad-accum-steps=4")
    assert not run.gradient_tree.pending


# ---- whole runs: 8 micro-batches a step

LAYOUTS = [(f"train_{kind}.py", n) for kind in ("ddp", "fsdp") for n in (2, 4, 8)]
FLAGS = "--reproducible-sums --num-steps=6 --eval-interval=3 --n-heads=2 --max-tokens=700"
VARIANTS = {
    "bfloat16, Muon": "--amp-dtype=bfloat16 --optimizer=muon --use-activation-checkpoint=cheap",
    "float16": "--amp-dtype=float16 --use-activation-checkpoint=full",
    "float32": "--no-amp --grad-clip-norm=0.1 --loss-chunks=3",
    "bfloat16 moments": "--amp-dtype=bfloat16 --moments-dtype=bfloat16 --on-out-of-memory=stop",
    "Muon, bfloat16 moments": "--no-amp --optimizer=muon --moments-dtype=bfloat16",
    "selective": "--no-amp --use-activation-checkpoint=selective:1,mlp --dropout=0.3",
}
CASES = [(variant, *layout) for variant in VARIANTS for layout in LAYOUTS]


def cut(processes: int) -> str:
    return f"--grad-accum-steps={8 // processes}"


@cache
def alone(flags: str) -> Path:
    path = Path(tempfile.mkdtemp(dir=WHOLE_RUNS.name), "run.pt")
    train(path, *flags.split(), cut(1))
    return path


def bits(path: Path) -> tuple:
    """Hashes and numbers that must not depend on the number of processes."""
    state = snapshot(path)
    names = ("step", "train_loss", "grad_norm", "val_loss", "val_bits_per_byte")
    logged = [[record.get(name) for name in names] for record in metrics(path)]
    best = snapshot(path.with_suffix(".best.pt"))["model"]
    hashes = [weights_hash(x) for x in (state["model"], state["optimizer"]["state"], best)]
    return *hashes, state["scaler"], logged


@pytest.mark.parametrize(
    ("variant", "script", "processes"),
    rest_slow(CASES, lambda case: case[0] == "bfloat16, Muon" and case[2] == 4),
)
def test_the_same_bits_from_any_number_of_processes(variant, script, processes, path):
    flags = f"{FLAGS} {VARIANTS[variant]}"
    torchrun(path, *flags.split(), cut(processes), script=script, processes=processes)
    assert bits(path) == bits(alone(flags))


@slow
@row("`--reproducible-sums`: 1 -> 4 -> 2")
@pytest.mark.parametrize(
    "flags", [f"{FLAGS} {VARIANTS['bfloat16, Muon']} --num-steps=20 --eval-interval=0"]
)
def test_elastic(flags, path):
    """One process, four of train_ddp.py, four of train_fsdp.py, each until one is killed; then two
    to the end."""
    parts = [("train_minimal", 1, "kill:0:8", 6), ("train_ddp", 4, "kill:2:14", 12)]
    parts += [("train_fsdp", 4, "kill:1:17", 15), ("train_ddp", 2, "", 20)]
    for script, processes, faults, saved in parts:
        words = [FAULTS, script, *TINY, *flags.split(), "--save-interval=3", cut(processes)]
        words += [f"--checkpoint-path={path}", *["--resume"] * path.exists()]
        result = start_together(words, processes, FAULTS=faults).end()
        assert (result.returncode == 0) == (saved == 20) and snapshot(path)["step"] == saved
    ends, whole = snapshot(path), snapshot(alone(flags))
    assert same(ends["model"], whole["model"])
    assert same(ends["optimizer"]["state"], whole["optimizer"]["state"])


# ---- planned

TOY = "--vocab-size=31 --n-layers=2 --n-heads=2 --d-model=16 --batch-size=48 --no-amp"


@pytest.mark.parametrize(
    ("kind", "processes", "n", "more"),
    [
        ("one", 1, 1, 0),
        ("one", 1, 2, 0),
        ("one", 1, 8, 2),
        ("ddp", 4, 1, 0),
        ("ddp", 2, 4, 1),
        ("fsdp", 4, 1, 0),
        ("fsdp", 2, 4, 2),
    ],
)
def test_a_plan_has_the_sums_that_wait(kind, processes, n, more):
    """`more`: sums of a parameter, or of a shard. What they really take: test_memory.py and
    test_shards.py."""
    with_flag, without = (
        CommandPlan(
            parse(TOY, f"--grad-accum-steps={n}", flag),
            *(31, torch.device("cpu"), torch.float32),
            layout=Layout(kind, 0, processes),
        )
        for flag in ("--reproducible-sums", "")
    )
    planner, plain = with_flag.planner, without.planner
    assert planner.n_pending_sums == more and plain.n_pending_sums == 0
    assert planner.accumulates_gradients == (n > 1 and kind != "fsdp")
    assert (planner.gradient_copies == torch.float32) == (processes > 1)
    if kind != "fsdp":
        assert with_flag.peak - without.peak == more * 4 * with_flag.n_parameters


@pytest.mark.parametrize(("flags", "received"), [("--reproducible-sums", True), ("", False)])
def test_a_gpu_receives_gradients_into_a_copy(flags, received):
    settings, layout = parse(TOY, "--grad-accum-steps=4", flags), Layout("fsdp", 0, 2)
    plan = CommandPlan(settings, 31, torch.device("cuda"), torch.float32, layout=layout)
    sizes = [s.nbytes for s in plan.planner.record(1).storages if s.name == RECEIVED]
    assert all(sizes) and bool(sizes) == received


# ---- what only a GPU runs


def test_on_a_gpu_a_bucket_is_summed_beside_backward(monkeypatch):
    """In a stream that first waits for backward's."""
    calls, bucket = MagicMock(), SimpleNamespace(buffer=lambda: torch.arange(5.0))
    sums = "trainer.reproducible_sums"
    for place in ("torch.cuda.current_stream", "torch.cuda.stream", f"{sums}.Future"):
        monkeypatch.setattr(place, getattr(calls, place.rpartition(".")[2]))
    monkeypatch.setattr(f"{sums}.pairwise_all_reduce", calls.add)
    pairwise_all_reduce_hook(("group", calls.own), bucket)
    order = ["Future", "current_stream", "own.wait_stream", "stream", "stream().__enter__"]
    order += ["add", "Future().set_result", "stream().__exit__"]
    assert [name for name, *_ in calls.mock_calls if "bool" not in name] == order
