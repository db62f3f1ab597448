"""--reproducible-sums: the same bits from 1, 2, 4 or 8 processes."""

import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness.faults import WHOLE_RUNS, weights_hash
from harness.rows import row
from harness.runs import (
    FAULTS,
    TINY,
    metrics,
    parse,
    ready,
    snapshot,
    start_together,
    torchrun,
    train,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from planner import Layout
from planner.shards import RECEIVED
from scripts.advice import smaller_batches
from scripts.plans import CommandPlan as Plan
from train_ddp import DDPProcess
from train_fsdp import FSDPProcess
from trainer.process import OneProcess
from trainer.reproducible_sums import GradientTree, pairwise_all_reduce_hook, pairwise_sum

slow = pytest.mark.slow
SEEDS = st.integers(0, 2**32)


def drawn(seed: int, n: int) -> list[Tensor]:
    """n gradients of different sizes, so that nearly every order of additions gives other bits."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(50, generator=draw) * 10.0 ** (i % 3) for i in range(n)]


def by_halves(gradients: list) -> Tensor:
    """The definition: the sum of the first half, plus the sum of the second half."""
    if len(gradients) == 1:
        return gradients[0]
    middle = len(gradients) // 2
    return by_halves(gradients[:middle]) + by_halves(gradients[middle:])


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
        parameter.grad = bucket if in_buckets and not broken_off else parameter.grad
        run_backwards(tree, parameter, drawn(seed + 1, broken_off))
        if broken_off:
            assert len(tree.pending[parameter]) == broken_off.bit_count()
        run_backwards(tree, parameter, gradients)
        assert torch.equal(parameter.grad, by_halves(gradients))
        assert not tree.pending[parameter]
        if in_buckets:
            assert parameter.grad is not None and parameter.grad.data_ptr() == bucket.data_ptr()
            bucket.zero_()
        else:
            parameter.grad = None
    rows = torch.stack(gradients)
    assert torch.equal(pairwise_sum(rows), by_halves(gradients))


@given(SEEDS, st.sampled_from([2, 4, 8]), st.data())
def test_a_parameter_may_take_no_part_in_some_micro_batches(seed, n, data):
    """(A changed model.py may skip layers.) Nothing is lost, or left for the next step."""
    parts = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    there = [g if part else None for g, part in zip(drawn(seed, n), parts, strict=True)]
    parameter = nn.Parameter(torch.ones(50))
    tree = GradientTree([parameter], n)
    for _ in range(2):
        run_backwards(tree, parameter, there)
        if any(parts):
            expected = sum(g.double() for g in there if g is not None)
            torch.testing.assert_close(parameter.grad.double(), expected, rtol=1e-4, atol=1e-4)
        else:
            assert parameter.grad is None
        parameter.grad = None


def test_every_batch_of_a_step_is_in_one_process():
    """Pairs that the tree sums first are in the same process, and with shards in neighbours."""
    for n in (1, 2, 4, 8):
        for kind, in_tree in ((DDPProcess, True), (FSDPProcess, False), (FSDPProcess, True)):
            ids = []
            for rank in range(n):
                process = kind.__new__(kind)
                process.layout, process.reproducible_sums = Layout(kind.kind, rank, n), in_tree
                ids.append(process.own_batch_ids(range(24, 32)))
            assert sorted(i for own in ids for i in own) == [*range(24, 32)]
            apart = n if kind is FSDPProcess and in_tree else 1
            assert {own.step for own in ids if len(own) > 1} <= {apart}
    assert [*OneProcess(torch.device("cpu")).own_batch_ids(range(3, 6))] == [3, 4, 5]


def test_without_the_flag_autograd_sums(tmp_path):
    """One copy of the gradients, and the same bits as before there was the flag."""
    for flags, has_tree in (("--no-amp", False), ("--reproducible-sums", True)):
        run = ready(tmp_path / flags, flags, "--grad-accum-steps=4")
        assert bool(run.gradient_tree.pending) == has_tree
        run.held_lock.close()


# ---- whole runs: 8 micro-batches a step

LAYOUTS = [("train_ddp.py", 2), ("train_ddp.py", 4), ("train_ddp.py", 8)]
LAYOUTS += [("train_fsdp.py", 2), ("train_fsdp.py", 4), ("train_fsdp.py", 8)]
FLAGS = "--reproducible-sums --num-steps=6 --eval-interval=3 --n-heads=2 --max-tokens=700"
VARIANTS = {
    "bfloat16, Muon": "--amp-dtype=bfloat16 --optimizer=muon --use-activation-checkpoint=cheap",
    "float16": "--amp-dtype=float16 --use-activation-checkpoint=full",
    "float32": "--no-amp --grad-clip-norm=0.1 --loss-chunks=3",
    "bfloat16 moments": "--amp-dtype=bfloat16 --moments-dtype=bfloat16 --on-out-of-memory=stop",
    "Muon, bfloat16 moments": "--no-amp --optimizer=muon --moments-dtype=bfloat16",
    "selective": "--no-amp --use-activation-checkpoint=selective:1,mlp --dropout=0.3",
}
FAST = [("bfloat16, Muon", "train_ddp.py", 4), ("bfloat16, Muon", "train_fsdp.py", 4)]


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
    [
        *FAST,
        *(
            pytest.param(variant, *layout, marks=slow)
            for variant in VARIANTS
            for layout in LAYOUTS
            if (variant, *layout) not in FAST
        ),
    ],
)
def test_the_same_bits_from_any_number_of_processes(variant, script, processes, tmp_path):
    flags = f"{FLAGS} {VARIANTS[variant]}"
    torchrun(
        tmp_path / "run.pt", *flags.split(), cut(processes), script=script, processes=processes
    )
    assert bits(tmp_path / "run.pt") == bits(alone(flags))


@slow
@row("`--reproducible-sums`: 1 -> 4 -> 2")
def test_elastic(tmp_path):
    """One process, four of train_ddp.py, four of train_fsdp.py, each until one is killed; then two
    to the end."""
    path = tmp_path / "run.pt"
    flags = f"{FLAGS} {VARIANTS['bfloat16, Muon']} --num-steps=20 --eval-interval=0".split()
    words = [*flags, "--save-interval=3"]

    def go(script: str, processes: int, faults: str = "", *more: str) -> int:
        command = [FAULTS, script, *TINY, *words, f"--checkpoint-path={path}"]
        how = {"FAULTS": faults}
        return start_together([*command, cut(processes), *more], processes, **how).end().returncode

    assert go("train_minimal", 1, "kill:0:8") != 0
    assert snapshot(path)["step"] == 6
    assert go("train_ddp", 4, "kill:2:14", "--resume") != 0
    assert snapshot(path)["step"] == 12
    assert go("train_fsdp", 4, "kill:1:17", "--resume") != 0
    assert go("train_ddp", 2, "", "--resume") == 0
    ends, whole = snapshot(path), snapshot(alone(" ".join(flags)))
    assert weights_hash(ends["model"]) == weights_hash(whole["model"])
    assert weights_hash(ends["optimizer"]["state"]) == weights_hash(whole["optimizer"]["state"])


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

    def plan(*flags: str, device: str = "cpu") -> Plan:
        settings, layout = parse(TOY, f"--grad-accum-steps={n}", *flags), Layout(kind, 0, processes)
        return Plan(settings, 31, torch.device(device), torch.float32, layout=layout)

    with_flag, without = plan("--reproducible-sums"), plan()
    planner, plain = with_flag.planner, without.planner
    assert planner.n_pending_sums == more and plain.n_pending_sums == 0
    assert planner.accumulates_gradients == (n > 1 and kind != "fsdp")
    assert (planner.gradient_copies == torch.float32) == (processes > 1)
    # Other flags' advice stays within powers of two.
    split = [change["grad_accum_steps"] for change in smaller_batches(with_flag.settings)]
    assert split and all(steps.bit_count() == 1 for steps in split)
    if kind != "fsdp":
        weights = 4 * with_flag.n_parameters
        assert with_flag.peak - without.peak == more * weights
        return
    for flags, received in (("--reproducible-sums", True), ("", False)):
        record = plan(flags, device="cuda").planner.record(1)
        sizes = [storage.nbytes for storage in record.storages if storage.name == RECEIVED]
        assert all(sizes) and bool(sizes) == received


# ---- what only a GPU runs


def test_on_a_gpu_a_bucket_is_summed_beside_backward(tmp_path, monkeypatch):
    """In a stream that first waits for backward's. (Here both are made of a list.)"""
    order, buffer = [], torch.arange(5.0)

    @contextmanager
    def within(stream):
        order.append(f"begin {stream}")
        yield
        order.append(f"end {stream}")

    class Stream(str):
        def wait_stream(self, other: str) -> None:
            order.append(f"{self} waits for {other}")

    monkeypatch.setattr("torch.cuda.current_stream", lambda: "backward")
    monkeypatch.setattr("torch.cuda.stream", within)
    monkeypatch.setattr(
        "trainer.reproducible_sums.pairwise_all_reduce", lambda x, group: order.append((x, group))
    )
    made = []
    monkeypatch.setattr(
        "trainer.reproducible_sums.Future",
        lambda devices: made.append(devices) or SimpleNamespace(set_result=order.append),
    )
    bucket = SimpleNamespace(buffer=lambda: buffer)
    pairwise_all_reduce_hook(("group", Stream("sums")), bucket)
    waits, begin, summed, result, end = order
    assert (waits, begin, end) == ("sums waits for backward", "begin sums", "end sums")
    assert summed == (buffer, "group") and result is buffer and made == [[buffer.device]]
