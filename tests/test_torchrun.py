"""Several processes: two are one with twice the micro-batches, to the bit, with the whole model in
each (train_ddp.py) or a half of it (train_fsdp.py). What they send each other; how they meet; and
what they say, in one line, when one of them is different, late or gone.

Those that were started differently do not train, and nothing is written. (Real runs that break:
test_reliability.py.)
"""

import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import runs
from harness.faults import WHOLE_RUNS, broken_together, history
from harness.runs import TINY, metrics, parse, same, snapshot, start_together, torchrun

from data.errors import MiniGPTError
from planner import Layout
from trainer.build import facts_that_must_agree, raise_if_ranks_differ
from trainer.device import MemoryBudget
from trainer.plan import plan_run
from trainer.process import OneProcess
from trainer.snapshot import LoadedSnapshot
from trainer.torchrun import agree_on_key, peer_failure_message

slow = pytest.mark.slow
CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


# ---- They train as one

# To the bit for the same number of threads: a sum is rounded as it is split. Here each process has
# two, and the model is so large that they share the sums; most other tests have one.
FULL = "--amp-dtype=bfloat16 --use-activation-checkpoint"
# 31 validation windows in batches of 7 are four of 7 and one of 3; process 1 has two of them.
LARGE = (
    "--max-tokens=2000 --d-model=64 --seq-len=64 --batch-size=7 --num-steps=4 --warmup-steps=1 "
    "--lr-scheduler=constant --eval-interval=3 --grad-clip-norm=0.1 --sample-tokens=4"
).split()
IN_TWO_THREADS = {"OMP_NUM_THREADS": "2"}
HALVES = {"script": "train_minimal.py", "processes": 1} | IN_TWO_THREADS


@cache
def alone(flags: str) -> Path:
    """The run of one process with two micro-batches."""
    path = Path(tempfile.mkdtemp(dir=WHOLE_RUNS.name), "run.pt")
    torchrun(path, *LARGE, "--grad-accum-steps=2", *flags.split(), **HALVES)
    return path


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_ddp.py", "--no-amp"),
        pytest.param("train_ddp.py", FULL, marks=slow),
        ("train_fsdp.py", FULL),
    ],
)
def test_two_processes_equal_one_with_two_micro_batches(tmp_path, script, flags):
    """Weights, moments, losses, with clipping. One sample is drawn: from shards that needs both."""
    one, two = alone(flags), tmp_path / "two.pt"
    result = torchrun(two, *LARGE, *flags.split(), script=script, **IN_TWO_THREADS)
    ours, theirs = snapshot(two), snapshot(one)
    assert ours.keys() == theirs.keys() and ours["threads"] == 2
    assert same(ours["optimizer"]["state"], theirs["optimizer"]["state"])
    for key in ("model", "scaler", "step", "config", "tokenizer", "data"):
        assert same(ours[key], theirs[key]), key
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["train_loss"] == b["train_loss"] and a["grad_norm"] == b["grad_norm"]
        assert ("val_loss" in a) == ("val_loss" in b) == (a["step"] in (3, 4))
        assert a.get("val_loss", 0) == pytest.approx(b.get("val_loss", 0), rel=1e-6)
    assert result.stdout.count("sample") == 1 and "view tensor" not in result.stderr


# How the 8 sequences of a step are cut: trainer, processes, --batch-size, --grad-accum-steps.
CUTS = [("train_minimal.py", 1, 1, 8), ("train_fsdp.py", 2, 1, 4), ("train_sp.py", 2, 4, 2)]
MORE_CUTS = [
    *(("train_minimal.py", 1, B, 8 // B) for B in (2, 4, 8)),
    *(("train_ddp.py", 2, B, 4 // B) for B in (1, 2, 4)),
    *[("train_ddp.py", 1, 2, 4), ("train_fsdp.py", 2, 4, 1), ("train_sp.py", 2, 1, 8)],
]


@pytest.mark.parametrize("cuts", [CUTS, pytest.param(MORE_CUTS, marks=slow)], ids=len)
def test_the_same_weights_have_one_validation_loss(cuts, tmp_path):
    """At every batch size, accumulation and number of processes, in every trainer: the loss of 13
    of 43 windows. Each run resumes from the same step, and one more changes no weight. (What it
    has to be: test_oracle.py.)"""
    first, losses = tmp_path / "first.pt", []
    flags = "--max-tokens=700 --eval-tokens=220 --batch-size=8 --num-steps=3 --no-amp".split()
    assert runs.train_here(first, *flags) == 0
    for script, processes, batch_size, accumulate in cuts:
        path = Path(shutil.copy(first, tmp_path / f"{len(losses)}.pt"))
        cut = f"--batch-size={batch_size} --grad-accum-steps={accumulate} --num-steps=4 --lr=1e-30"
        words = [script, f"--checkpoint-path={path}", "--resume", *cut.split()]
        assert start_together(words, processes).end().returncode == 0
        losses.append(metrics(path)[-1]["val_loss"])
    assert losses == pytest.approx(losses[:1] * len(cuts), abs=1e-6)


def test_resumed_with_as_many_threads_or_with_others(tmp_path, capsys):
    path, flags = tmp_path / "run.pt", (*LARGE, "--no-amp", "--grad-accum-steps=2")
    said = torchrun(path, *flags, "--num-steps=2", **HALVES).stdout
    assert "1 x cpu (2 threads), " in said
    assert "sums are rounded" not in torchrun(path, *flags, "--resume", **HALVES).stdout
    assert same(snapshot(path)["model"], snapshot(alone("--no-amp"))["model"])
    assert runs.train_here(path, *LARGE, "--resume", "--num-steps=5") == 0
    assert "threads 2 -> 1: sums are rounded differently\n" in capsys.readouterr().out


@pytest.mark.parametrize("which", [pytest.param(of, marks=slow) for of in ("few", "all")])
def test_every_policy_with_shards(which):
    """Each equals DDP, and DDP without recomputation; so does each optimizer. See sharded.py."""
    result = start_together(["tests/harness/sharded.py", "steps", which]).end(timeout=400)
    assert result.stdout.count("variants equal") == 2, result.stdout + result.stderr


# Parameters of TINY (31 ids, 16 positions, 16 channels, 2 layers): a block's; the positions'; what
# is in neither, for two processes to share: 31 rows are 32 then; and all.
BLOCK, POSITIONS, SHARED, ALL = 3280, 256, 544, 496 + 256 + 32 + 2 * 3280


# Weights are gathered in forward, and those of blocks once more in backward (not for a replay);
# gradients are dealt out, and squares of their norm are added up, in float64.
EACH = [4 * BLOCK, 4 * BLOCK, 4 * POSITIONS, 4 * SHARED]
GATHERS = [["_allgather_base_", size] for size in [*EACH, 4 * BLOCK, 4 * BLOCK]]
NORM = [["allreduce_", 8]]
ONCE = [*(["_reduce_scatter_base_", size] for size in EACH), *NORM]
TREE = [["alltoall_base_", size] for size in EACH]  # with --reproducible-sums
# Where sequences are shared, each block's q, k and v go to their heads' process, attention's result
# comes back, and so do gradients: 2 sequences of 8 tokens each. And the loss is summed up.
QKV, ATTENDED = 4 * 2 * 8 * 48, 4 * 2 * 8 * 16
TOKENS = 4 * [["alltoall_base_", QKV], ["alltoall_base_", ATTENDED]] + [["allreduce_", 4]]


@pytest.mark.parametrize(
    ("script", "flags", "expected"),
    [
        pytest.param("train_ddp", "", [["allreduce_", 4 * ALL]], marks=slow),
        ("train_ddp", "--compress-gradients --no-amp", [["allreduce_", 2 * ALL]]),
        (
            "train_ddp",
            "--reproducible-sums --grad-accum-steps=4",
            2 * [["alltoall_base_", 4 * ALL]],
        ),
        pytest.param("train_fsdp", "--use-activation-checkpoint", 3 * GATHERS + ONCE, marks=slow),
        ("train_fsdp", "--reproducible-sums --grad-accum-steps=2", 2 * (GATHERS + TREE) + NORM),
        pytest.param("train_sp", "--no-amp", 3 * (GATHERS + TOKENS) + ONCE, marks=slow),
    ],
)
def test_gradients_travel_once_a_step(tmp_path, script, flags, expected):
    """However many micro-batches it has, mostly three. (With --reproducible-sums, those of shards
    travel in each.) Weights travel in each, if they are dealt out. And all processes have the same
    weights after each step.

    (The fourth step: the first two are about DDP's buckets.)"""
    steps = ("--num-steps=4", "--grad-accum-steps=3", *flags.split())
    broken_together(tmp_path / "run.pt", "", *steps, script=script, COLLECTIVES="watched")
    first, second = (history(tmp_path / "run.pt", rank) for rank in (0, 1))
    assert first == second and first[4]["collectives"] == sorted(expected)


# ---- They meet


def test_each_attempt_meets_under_a_name_of_its_own():
    """Whoever comes first finds what the attempt before has left, and must not take it."""
    store, names, how = dist.HashStore(), set(), (2, timedelta(seconds=30))
    for attempt in range(1, 4):
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(agree_on_key, store, attempt % 2, *how)
            time.sleep(0.2)
            assert agree_on_key(store, 1 - attempt % 2, *how) == first.result()
        names.add(first.result())
        assert len(names) == attempt


# ---- One is late, or gone


WATCHDOG = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
OTHER_END = "/c10d/ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error\n"
OTHER_END += "Last error:\nsocketProgress: Connection closed by remote peer node1<4242>"
GLOO = "[/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:51234: Connection reset by peer. A"
IN_VAIN, LOST = "rank 0 waited 5 s for the others in vain", "rank 0 lost the connection to another "


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (dist.DistBackendError(WATCHDOG), IN_VAIN),
        (TimeoutError(), IN_VAIN),
        (dist.DistBackendError(OTHER_END), f"{LOST}process (socketProgress: Connection closed"),
        (dist.DistNetworkError("recv failed"), f"{LOST}process (recv failed)"),
        (RuntimeError(GLOO), LOST),
        (RuntimeError("timeout"), "None"),  # not of this world
    ],
)
def test_what_is_said_of_the_others(error, says, monkeypatch):
    monkeypatch.setenv("MINIGPT_TIMEOUT_S", "5")
    assert peer_failure_message(error) is None  # without torchrun
    monkeypatch.setenv("RANK", "0")
    assert str(peer_failure_message(error)).startswith(says)


# ---- One is different


def test_other_data(tmp_path, monkeypatch, capsys):
    """Read by each process before they meet."""

    def exchange(process, mine):
        if not isinstance(mine, dict) or "--train-data" not in mine:
            return [mine]
        return [{"--train-data": "a book"}, mine]

    monkeypatch.setattr(OneProcess, "all_gather_object", exchange)
    assert runs.train_here(tmp_path / "run.pt") == 2 and not [*tmp_path.iterdir()]
    start = "error: --train-data: rank 0 has a book, rank 1 has toy data"
    assert capsys.readouterr().err.startswith(start)


@pytest.mark.parametrize(("theirs", "policy"), [(1 << 30, "none"), (400_000, "selective:1,attn")])
def test_the_smallest_budget_counts(monkeypatch, theirs, policy):
    known = (1 << 30, 1 << 31)
    monkeypatch.setattr("trainer.device.free_and_total_memory", lambda device: known)
    args = parse(*TINY, "--use-activation-checkpoint=auto --batch-size=8 --no-amp")
    process = OneProcess(CPU, Layout("fsdp", 0, 2))
    least = MemoryBudget(theirs, "cpu")
    process.all_gather_object = lambda mine: [
        least if isinstance(mine, MemoryBudget) else mine,
        mine,
    ]
    assert plan_run(args, 31, process, torch.float32)[0] == policy


def of(*flags: str, precision=torch.float32, device=CPU, step=None) -> dict[str, object]:
    resumed = LoadedSnapshot({"step": step, "run": "0123456789"}, Path("run.pt")) if step else None
    return facts_that_must_agree(parse(*TINY, *flags), OneProcess(device), precision, resumed)


SAME = "all processes must have the same"


@pytest.mark.parametrize(
    ("of_each", "says"),
    [
        ([of(), of("--device=auto", "--no-amp", "--checkpoint-path=/other/disk.pt")], None),
        ([of(), of("--compile")], "--compile: rank 0 has False, rank 1 has True:"),
        # What follows from it is not to blame.
        ([of("--lr=0.003"), of("--lr=0.001")], "--lr: rank 0 has 0.003, rank 1 has 0.001"),
        ([of(), of(), of("--num-steps=30")], f"--num-steps: rank 0 has 20, rank 2 has 30: {SAME}"),
        ([of(), of("--seq-len=8")], "--seq-len: "),
        ([of(), of("--seed=8")], "--seed: "),
        ([of(), of("--optimizer=muon")], "--optimizer: "),
        ([of(), of(precision=torch.bfloat16)], "--amp-dtype: rank 0 has float32, rank 1 has bfl"),
        ([of(device=GPU), of()], f"--device: rank 0 has cuda, rank 1 has cpu: {SAME}"),
        (
            [of(step=2), of(step=3)],
            "--checkpoint-path: rank 0 has step 2 of run 01234567, rank 1 has step 3 of run "
            f"01234567: {SAME}",
        ),
        (
            [of(), of() | {"the trainer": "y.py"}],
            "the trainer: rank 0 has train_minimal.py, rank ",
        ),
    ],
)
def test_what_differs_is_named(of_each, says):
    if says is None:
        return raise_if_ranks_differ(of_each)
    with pytest.raises(MiniGPTError) as error:
        raise_if_ranks_differ(of_each)
    assert str(error.value).startswith(says)
