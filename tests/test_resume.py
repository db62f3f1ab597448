"""A resumed run ends as the one that nothing happened to, to the bit: weights, optimizer, log.

Whatever ended the first part: a crash, a signal, a damaged file, a forgotten --resume. What must
not change in between is refused by the name of its flag; the rest may change. Two runs that want
the same files: test_snapshot.py; flags: test_resume_flags.py, test_bad_input.py.
"""

import os
import re
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from harness.faults import broken
from harness.rows import row
from harness.runs import TINY, metrics, same, snapshot, train_here
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import train_minimal
from model import MiniGPT, MiniGPTConfig
from trainer.claim import replaced_runs
from trainer.flags import build_parser, fill_in
from trainer.optimizer import make_optimizer
from trainer.process import OneProcess
from trainer.resume import load_newest, newest_first, restore
from trainer.setup import set_up
from trainer.snapshot import beside

FP32, BF16, FULL = "--no-amp", "--amp-dtype=bfloat16", "--use-activation-checkpoint"
CONSTANT = ("--lr-scheduler=constant", "--warmup-steps=1")
LOSSES = ("step", "epoch", "lr", "train_loss", "train_ppl", "grad_norm", "val_loss", "val_ppl")


def logged(path) -> list[tuple]:
    return [tuple(record.get(key) for key in LOSSES) for record in metrics(path)]


# ---- resumed == uninterrupted


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Final snapshot and metrics of the run that nothing happened to, by its flags."""
    done = {}

    def get(*flags: str):
        if flags not in done:
            path = tmp_path_factory.mktemp("whole") / "run.pt"
            assert train_here(path, *flags) == 0
            done[flags] = snapshot(path), logged(path)
        return done[flags]

    return get


LEAN = ("--optimizer=muon", "--moments-dtype=bfloat16")
kinds = st.sampled_from(
    [(FP32,), (BF16,), ("--amp-dtype=float16", "--grad-accum-steps=2"), (BF16, LEAN[0])]
)
memory = st.sampled_from(
    [f"{FULL}={words}" for words in ("none", "full", "mlp", "cheap+offload",
                                     "full/2+offload")]
)  # fmt: skip
faults = st.sampled_from(["error", "term", "evaluation"])
stops = st.tuples(st.integers(1, 19), faults, memory)


law = settings(deadline=None, derandomize=True, database=None, max_examples=5)


# (To find the smallest case takes long.)
@settings(law, phases=[Phase.explicit, Phase.generate])
@example((FP32, *LEAN), [(9, "error", FULL)], FULL)
@given(kinds, st.lists(stops, min_size=1, max_size=2, unique_by=lambda stop: stop[0]), memory)
def test_resumed_equals_uninterrupted(uninterrupted, kind, parts, last):
    """However often it is stopped, by a crash or a signal, and whatever memory is spent in between:
    that changes no weight. What is done twice is logged once; a step that was saved when its
    evaluation died is evaluated then."""
    kind = (*kind, "--eval-interval=4")
    with tempfile.TemporaryDirectory() as folder, patch("memory.offload.SMALL", 1):
        path = Path(folder, "run.pt")
        for step, fault, words in sorted(parts):
            if path.exists() and snapshot(path)["step"] >= step:  # it has come further
                continue
            flags = [*kind, *words.split(), "--save-interval=3", *["--resume"] * path.exists()]
            code = broken(path, f"{fault}:0:{step}", *flags)
            assert code == (143 if fault == "term" else None)
            if fault == "term":
                assert snapshot(path)["step"] == step
            with open(path.with_name("run.metrics.jsonl"), "a") as file:
                file.write('{"step": 9, "train_lo')  # cut short by the crash
        flags = [*kind, *last.split(), *["--resume"] * path.exists()]
        assert train_here(path, *flags) == 0
        resumed, log = snapshot(path), logged(path)
    whole, whole_log = uninterrupted(*kind)
    for key in ("model", "optimizer", "scaler", "step", "best_val_loss"):
        assert same(resumed[key], whole[key]), key
    assert log == whole_log


def test_what_decides_the_weights_and_what_does_not(uninterrupted):
    often, seldom, other = (
        uninterrupted(flag)[0]["model"]
        for flag in ("--eval-interval=1", "--eval-interval=0", "--seed=1")
    )
    assert same(often, seldom) and not same(often, other)
    assert len({train_minimal.seed_of(s, n) for s in range(20) for n in range(200)}) == 4000


def test_other_flags_may_be_typed_and_are_said(tmp_path, capsys):
    """The best snapshot survives, though the run gets worse; as may the precision."""
    path, best = tmp_path / "run.pt", tmp_path / "run.best.pt"
    assert train_here(path, "--warmup-steps=0") == 0
    before = best.read_bytes()
    assert "resume   changed" not in capsys.readouterr().out
    other = ("--num-steps=25", "--lr=3", "--weight-decay=0.3", "--warmup-steps=0")
    more = (*other, "--eval-interval=2", "--amp-dtype=float16")
    assert train_here(path, "--resume", *more, FULL) == 0
    (line,) = re.findall("resume   changed.*: (.*)", capsys.readouterr().out)
    for change in (
        "--use-activation-checkpoint none -> full",
        "--num-steps 20 -> 25",
        "--lr 0.025 -> 3",
        "--min-lr 0.0025 -> 0.3",
        "--eval-interval 0 -> 2",
    ):
        assert change in line.split(", ")
    assert train_here(path, "--resume", "--num-steps=26", *other[1:], "--save-interval=5") == 0
    assert "--save-interval 0 -> 5" in capsys.readouterr().out
    assert snapshot(path)["step"] == 26
    groups = snapshot(path)["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert [record["step"] for record in metrics(path)] == list(range(1, 27))
    marks = [(r["step"], r["resumed_from"]) for r in metrics(path) if "resumed_from" in r]
    assert marks == [(21, 20), (26, 25)]
    assert metrics(path)[-1]["val_loss"] > metrics(path)[19]["val_loss"]
    assert best.read_bytes() == before


# ---- resuming from what is not the newest


def damages(content: bytes, weights: bytes) -> dict[str, bytes | None]:
    """What can become of a file with these weights in it."""
    here = content.index(weights)
    return {
        "one bit": content[:here] + bytes([content[here] ^ 1]) + content[here + 1 :],
        "truncated": content[:here],
        "empty": b"",
        "zeroed block": content[:here] + bytes(4096) + content[here + 4096 :],
        "no snapshot": b"It was a dark and stormy night.\n" * 99,
        "not there": None,
    }


@row("newest snapshot damaged")
def test_damaged_snapshots_are_replaced_by_the_next_best(tmp_path, capsys):
    """And not kept in their place at the next save."""
    whole, flags = tmp_path / "whole.pt", ("--save-interval=15", "--eval-interval=4", *CONSTANT)
    assert train_here(whole, *flags) == 0
    files, taking = newest_first(whole), ("the one before", "the one with the lowest val loss")
    weights = snapshot(whole)["model"]["token_embedding.weight"].numpy().tobytes()
    for damage, damaged in damages(whole.read_bytes(), weights).items():
        for lost in (1, 2, 3):  # of the newest, the one before, the best
            path = tmp_path / f"{damage} {lost}.pt"
            contents = [damaged] * lost + [file.read_bytes() for file in files[lost:]]
            for name, content in zip(newest_first(path), contents, strict=True):
                if content is not None:
                    name.write_bytes(content)
            aside, kept = (beside(path, f".damaged{ending}.pt") for ending in ("", "-2"))
            aside.write_text("a run of that name")
            capsys.readouterr()
            code, (said, error) = train_here(path, "--resume", *flags), capsys.readouterr()
            why = f"{path} is " if damaged is not None else f"there is no snapshot {path}"
            if lost == 3:
                assert code == 2 and error.startswith(f"error: --resume: {why}")
                assert error.count("\n") == 1
                assert damaged is None or error.count(".pt is ") == 3
                continue
            taken, step = newest_first(path)[lost], snapshot(files[lost])["step"]
            resumed = f"taking {taking[lost - 1]}\nresume   {taken}, step {step}\n"
            assert code == 0 and re.search(f"resume   {why}.*; {resumed}", said)
            assert aside.read_text() == "a run of that name"
            if damaged is not None:  # (It might be the disk's fault.)
                assert kept.read_bytes() == damaged
            assert same(snapshot(path)["model"], snapshot(whole)["model"])
            assert lost == 2 or snapshot(newest_first(path)[1])["step"] == 15


def test_another_run_s_best_is_gone_on_from_as_a_copy_would(tmp_path, capsys, uninterrupted):
    path, best, copy = (tmp_path / f"run{ending}.pt" for ending in ("", ".best", "-best"))
    assert train_here(path, "--eval-interval=4", "--num-steps=4", *CONSTANT) == 0
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    flags = ("--resume", *CONSTANT, "--save-interval=5")
    for steps in (10, 20):  # a second time it goes on with what it has
        assert train_here(best, *flags, f"--num-steps={steps}", "--eval-interval=4") == 0
        assert f"{best} is another run's best: this one saves to {copy}" in capsys.readouterr().out
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert [row[0] for row in logged(copy)] == list(range(4, 21))
    assert snapshot(copy)["step"] == 20
    previous = tmp_path / "run-best.prev.pt"
    copy.unlink()  # as between the two renames of a save, or damaged: what was before counts
    for steps in (21, 22):
        assert train_here(best, *flags, f"--num-steps={steps}") == 0
        assert f"taking the one before\nresume   {previous}, step" in capsys.readouterr().out
        copy.write_bytes(b"damaged")


def test_a_name_that_is_not_utf_8(tmp_path, capsysbinary):
    path = tmp_path / os.fsdecode(b"caf\xe9.pt")
    try:
        path.touch()
        path.unlink()
    except OSError:
        pytest.skip("this file system has only names in UTF-8")
    assert train_here(path, "--num-steps=2") == 0
    assert train_here(path, "--num-steps=3", "--resume") == 0
    assert snapshot(path)["step"] == 3 and len(metrics(path)) == 3
    assert train_here(path, "--num-steps=1") == 0 and len(replaced_runs(path)) == 1
    assert b"caf\xe9.pt" in capsysbinary.readouterr().out  # as it is stored


def test_a_forgotten_resume_costs_nothing(tmp_path, capsys, uninterrupted):
    """The run that had the name can still go on under its new one, with its log."""
    path = tmp_path / "run.pt"
    assert broken(path, "error:0:11", "--save-interval=5") is None
    before = path.read_bytes()
    capsys.readouterr()
    assert train_here(path, "--save-interval=5", "--seed=5") == 0
    (old,) = replaced_runs(path)
    command = f"python train_minimal.py --resume --checkpoint-path {old}"
    note = f"run.pt is of another run and becomes {old}; to go on with that one: {command}\n"
    assert note in capsys.readouterr().out
    assert old.read_bytes() == before
    assert [snapshot(tmp_path / f"run.{which}pt")["step"] for which in ("", "prev.")] == [20, 15]
    assert train_here(old, "--save-interval=5", "--resume") == 0
    whole, whole_log = uninterrupted("--save-interval=5")
    assert same(snapshot(old)["model"], whole["model"]) and logged(old) == whole_log
    assert len(logged(path)) == 20


def test_a_snapshot_beyond_the_last_step(tmp_path, capsys):
    """It was copied without its log: its step is evaluated and logged again."""
    path, other = tmp_path / "run.pt", tmp_path / "other.pt"
    assert train_here(path, "--num-steps=7", "--warmup-steps=1") == 0
    other.write_bytes(path.read_bytes())
    assert train_here(other, "--resume", "--num-steps=5", "--warmup-steps=1") == 0
    assert [record["val_loss"] for record in metrics(other)] == [metrics(path)[-1]["val_loss"]]
    assert train_here(other, "--resume", "--num-steps=5", "--warmup-steps=1") == 0
    assert "already at step 7" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*is a no-op")  # torch, about copies to "meta"
@pytest.mark.parametrize("fused", [False, True])
def test_the_optimizers_kernel_may_change(tmp_path, monkeypatch, fused):
    """A snapshot of a device without the fused kernel goes on where there is one, or back.

    Which kernel it was stands in the snapshot, and torch would go by that: the step count of
    unfused AdamW stays on the CPU, where the fused kernel cannot read it.
    """
    path = tmp_path / "run.pt"
    kernel = {True: torch.device("cpu"), False: torch.device("mps")}
    for steps, now in ((2, not fused), (4, fused)):
        make = lambda model, args, *_, now=now: make_optimizer(model, args, kernel[now])  # noqa: E731
        monkeypatch.setattr("trainer.setup.make_optimizer", make)
        flags = [f"--num-steps={steps}", *["--resume"] * path.exists()]
        assert train_here(path, FP32, "--lr-scheduler=constant", *flags) == 0
    optimizer = snapshot(path)["optimizer"]
    assert {group["fused"] for group in optimizer["param_groups"]} == {fused}
    assert {float(state["step"]) for state in optimizer["state"].values()} == {4.0}
    assert train_here(tmp_path / "whole.pt", FP32, "--lr-scheduler=constant", "--num-steps=4") == 0
    whole = snapshot(tmp_path / "whole.pt")["model"]
    for name, weight in snapshot(path)["model"].items():
        # (Kernels differ in the last bit; Adam makes steps of the noise in a key's bias.)
        torch.testing.assert_close(weight, whole[name], rtol=1e-4, atol=1e-3)

    args = fill_in(build_parser("test", "x.pt").parse_args([]))
    model = MiniGPT(MiniGPTConfig(**snapshot(path)["config"])).to("meta")
    for other in (False, True):  # on a device that is not the snapshot's, nor the CPU
        optimizer = make_optimizer(model, args, kernel[other])
        restore(load_newest(path), model, optimizer, torch.amp.GradScaler("cpu", enabled=False))
        for state in optimizer.state.values():
            assert state["step"].device.type == ("meta" if other else "cpu")
            assert state["step"].dtype == torch.float32 and state["exp_avg"].is_meta


def test_all_processes_agree_on_the_lowest_loss(tmp_path):
    """Process 0 alone reads the log, which knows more than a snapshot of before its evaluation."""
    path = tmp_path / "run.pt"
    assert train_here(path, "--eval-interval=5") == 0
    best = min(record["val_loss"] for record in metrics(path) if "val_loss" in record)
    argv = [*TINY, f"--checkpoint-path={path}", "--resume", "--num-steps=30"]
    for rank in (0, 1):
        process, asked = OneProcess(torch.device("cpu")), []
        process.rank, process.sum = rank, lambda values, asked=asked: asked.append(values) or values
        args = fill_in(build_parser("test", "x.pt").parse_args(argv))
        resumed = set_up(args, process, load_newest(path))
        assert asked[-1] == [best if rank == 0 else 0.0] == [resumed.best_val_loss]
        if resumed.held_lock is not None:
            resumed.held_lock.close()
