"""Two processes are one process with twice the micro-batches, to the bit: with the whole model in
each (train_ddp.py), and with a half of it (train_fsdp.py). And what they send each other.

To the bit for the same number of threads: a sum is rounded as it is split. Here each process has
two, and the model is so large that they share the sums; most other tests have one.
"""

import shutil
from pathlib import Path

import pytest
import torch
from harness.faults import broken_together, history
from harness.runs import TINY, metrics, same, snapshot, together, torchrun, train_here

from model import MiniGPT, MiniGPTConfig
from trainer.process import OneProcess
from trainer.snapshot import beside

slow = pytest.mark.slow
FULL = "--amp-dtype=bfloat16 --use-activation-checkpoint"
# 31 validation windows in batches of 7 are four of 7 and one of 3; process 1 has two of them.
LARGE = "--max-tokens=2000 --d-model=64 --seq-len=64 --batch-size=7 --num-steps=4 --warmup-steps=1"
LARGE += " --lr-scheduler=constant --eval-interval=3 --grad-clip-norm=0.1 --sample-tokens=4"


def train(path: Path, script: str, *flags: str, processes: int, **env: str) -> str:
    """What the run says."""
    words = [script, *TINY, *LARGE.split(), "--checkpoint-path", str(path), *flags]
    result = together(words, processes, OMP_NUM_THREADS="2", **env)
    assert result.returncode == 0 and "view tensor" not in result.stderr, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory, plans_nothing):
    """The run of one process with two micro-batches."""
    done = {}

    def get(flags: str) -> Path:
        if flags not in done:
            path = tmp_path_factory.mktemp("alone") / "run.pt"
            words = ["--grad-accum-steps=2", *flags.split()]
            train(path, "train_minimal.py", *words, processes=1)
            done[flags] = path
        return done[flags]

    return get


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("train_ddp.py", "--no-amp"),
        pytest.param("train_ddp.py", FULL, marks=slow),
        ("train_fsdp.py", FULL),
    ],
)
def test_two_processes_equal_one_with_two_micro_batches(tmp_path, alone, script, flags):
    """Weights, moments, losses, with clipping. One sample is drawn: from shards that needs both."""
    one, two = alone(flags), tmp_path / "two.pt"
    said = train(two, script, *flags.split(), processes=2)
    ours, theirs = snapshot(two), snapshot(one)
    assert ours.keys() == theirs.keys() and ours["threads"] == 2
    assert same(ours["optimizer"]["state"], theirs["optimizer"]["state"])
    for key in ("model", "scaler", "step", "config", "tokenizer", "data"):
        assert same(ours[key], theirs[key]), key
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["train_loss"] == b["train_loss"] and a["grad_norm"] == b["grad_norm"]
        assert ("val_loss" in a) == ("val_loss" in b) == (a["step"] in (3, 4))
        assert a.get("val_loss", 0) == pytest.approx(b.get("val_loss", 0), rel=1e-6)
    assert said.count("sample") == 1


def test_resumed_with_as_many_threads_or_with_others(tmp_path, alone, capsys):
    path, flags = tmp_path / "run.pt", ("train_minimal.py", "--no-amp", "--grad-accum-steps=2")
    said = train(path, *flags, "--num-steps=2", processes=1)
    assert "1 x cpu (2 threads; another number rounds sums otherwise)" in said
    state = snapshot(path)
    assert "sums are rounded" not in train(path, *flags, "--resume", processes=1)
    assert same(snapshot(path)["model"], snapshot(alone("--no-amp"))["model"])
    for threads in (2, None):  # None: a snapshot from before they were noted
        torch.save(state | {"threads": threads}, path)
        assert train_here(path, *LARGE.split(), "--resume", "--lr=0.002") == 0
        said = "-> 0.0002, threads 2 -> 1: sums are rounded otherwise\n" in capsys.readouterr().out
        assert said == (threads == 2) and snapshot(path)["threads"] == 1


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=slow)])
def test_every_policy_with_shards(which):
    """Each equals DDP, and DDP without recomputation; see fsdp_steps.py."""
    result = together(["tests/harness/fsdp_steps.py", which], timeout=400)
    assert result.stdout.count("variants equal") == 2, result.stdout + result.stderr


def test_weights_are_drawn_one_at_a_time():
    """And they are those that the seed gives without a detour. (That shards are all the memory that
    a process takes: fsdp_steps.py.)"""
    process, seen = OneProcess(torch.device("cpu")), []
    with torch.device("meta"):
        model = MiniGPT(MiniGPTConfig(vocab_size=61, n_layers=2, n_heads=2, d_model=32, d_ff=64))
    assert all(p.is_meta for p in model.parameters())
    process.place(model)
    torch.manual_seed(0)
    model.init_weights(lambda whole, like: seen.append(whole.shape) or whole)
    assert seen == [p.shape for p in model.parameters() if p.dim() > 1]
    other = MiniGPT(model.config)
    torch.manual_seed(0)
    other.init_weights()
    assert same(model.state_dict(), other.state_dict())


def moments(path: Path) -> list[torch.Tensor]:
    """After one step Adam's first moment is a tenth of the (clipped) gradient."""
    return [state["exp_avg"] for state in snapshot(path)["optimizer"]["state"].values()]


@slow
def test_compressed_gradients(tmp_path):
    """Both processes the same to the bit, and to what resumes; nearly what is not compressed."""
    path, part, plain = (tmp_path / name for name in ("run.pt", "part.pt", "plain.pt"))
    # At so low a rate all steps have the gradients of the first weights.
    flags = ("--no-amp", "--num-steps=4", "--save-interval=2", "--lr=1e-6")
    broken_together(path, "", *flags, "--compress-gradients", "--grad-accum-steps=2")
    assert history(path, rank=0) == history(path, rank=1)
    shutil.copy(beside(path, ".prev.pt"), part)
    assert f"resume   {part}, step 2" in torchrun(part, *flags, "--resume").stdout
    assert same(snapshot(part)["model"], snapshot(path)["model"])
    assert train_here(plain, *flags, "--grad-accum-steps=4") == 0
    for a, b in zip(moments(path), moments(plain), strict=True):
        off = (a - b).norm() / b.norm()
        assert 1e-4 < off < 1e-2  # bfloat16 has 8 bits; in float32 only the sums' order differs


# ---- What they send


@slow
def test_gradients_live_in_buckets_from_the_first_on(tmp_path):
    """With accumulation, where they would be made beside DDP's buckets; and after --resume, where
    AdamW's moments are there already. Three steps each."""
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    flags = ("--no-amp", "--grad-accum-steps=2", "--lr-scheduler=constant", "--warmup-steps=0")
    for more in (("--num-steps=3",), ("--num-steps=6", "--resume")):
        result = torchrun(path, *flags, *more, script="tests/harness/ddp_storages.py")
        assert result.stdout.count("bytes, from the first on") == 2
    torchrun(whole, *flags, "--num-steps=6")
    assert same(snapshot(path)["model"], snapshot(whole)["model"])


# Parameters of TINY (31 ids, 16 positions, 16 channels, 2 layers): a block's; what is in no block,
# for two processes to share: 31 rows are 32 then; and all.
BLOCK, SHARED, ALL = 3280, 800, 496 + 256 + 32 + 2 * 3280
# Weights are gathered in forward, and those of blocks once more in backward (not for a replay);
# gradients are dealt out, and squares of their norm are added up, in float64.
GATHERS = [["_allgather_base_", 4 * BLOCK]] * 2 * 2 + [["_allgather_base_", 4 * SHARED]]
ONCE = [["_reduce_scatter_base_", 4 * BLOCK]] * 2 + [["_reduce_scatter_base_", 4 * SHARED]]
ONCE += [["allreduce_", 8]]


@pytest.mark.parametrize(
    ("script", "flags", "expected"),
    [
        ("train_ddp", "", [["allreduce_", 4 * ALL]]),
        ("train_ddp", "--compress-gradients --no-amp", [["allreduce_", 2 * ALL]]),
        ("train_fsdp", "--use-activation-checkpoint", 3 * GATHERS + ONCE),
    ],
)
def test_gradients_travel_once_a_step(tmp_path, script, flags, expected):
    """However many micro-batches it has: here three. Weights travel in each, if they are dealt out.

    (The fourth step: the first two are about DDP's buckets.)"""
    steps = ("--num-steps=4", "--grad-accum-steps=3", *flags.split())
    broken_together(tmp_path / "run.pt", "", *steps, script=script, COLLECTIVES="watched")
    for rank in (0, 1):
        assert history(tmp_path / "run.pt", rank)[4]["collectives"] == sorted(expected)
