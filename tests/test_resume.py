"""A resumed run ends as the one that nothing happened to, to the bit: weights, optimizer, log.

Whatever ended the first part: a crash, a signal, a damaged file, a forgotten --resume. What must
not change in between is refused by the name of its flag; the rest may change. Two runs that want
the same files: test_claim.py; see also test_bad_input.py.
"""

import os
import re

import pytest
import torch
from harness.rows import row
from harness.runs import TINY, Crash, crash_after, metrics, same, snapshot, train_here

import train_minimal
from model import MiniGPT, MiniGPTConfig
from trainer.claim import replaced_runs
from trainer.flags import build_parser, fill_in
from trainer.optimizer import make_optimizer
from trainer.process import OneProcess
from trainer.resume import load_newest, restore
from trainer.setup import set_up

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


@pytest.mark.parametrize(
    ("stop", "precision", "policy"),
    [(1, FP32, "full"), (9, BF16, "cheap"), (12, FP32, "none"), (19, BF16, "full")],
    ids=["first", "middle", "epoch", "last"],
)
def test_resumed_equals_uninterrupted(
    tmp_path, monkeypatch, uninterrupted, precision, policy, stop
):
    """Though backward recomputes in one part only: that changes no weight."""
    flags = (precision, "--eval-interval=4")
    path = tmp_path / "run.pt"
    crash_after(stop, monkeypatch)
    with pytest.raises(Crash):
        train_here(path, *flags, f"{FULL}={policy}", f"--save-interval={stop}")
    assert snapshot(path)["step"] == stop
    monkeypatch.undo()
    assert train_here(path, *flags, f"{FULL}=none", "--resume") == 0
    whole, whole_log = uninterrupted(*flags)
    resumed = snapshot(path)
    for key in ("model", "optimizer", "scaler", "step", "best_val_loss"):
        assert same(resumed[key], whole[key]), key
    assert logged(path) == whole_log


def test_steps_done_twice_are_logged_once(tmp_path, monkeypatch, uninterrupted):
    path = tmp_path / "run.pt"
    crash_after(8, monkeypatch)
    with pytest.raises(Crash):
        train_here(path, FP32, "--eval-interval=4", "--save-interval=5")
    assert [record["step"] for record in metrics(path)] == list(range(1, 9))
    with open(path.with_name("run.metrics.jsonl"), "a") as file:
        file.write('{"step": 9, "train_lo')  # cut short by the crash
    monkeypatch.undo()
    assert train_here(path, FP32, "--eval-interval=4", "--resume") == 0
    assert logged(path) == uninterrupted(FP32, "--eval-interval=4")[1]


@pytest.mark.usefixtures("everything_travels")
@pytest.mark.parametrize("policy", ["cheap", "mlp", "full"])
def test_offloaded_run_ends_with_the_same_weights(tmp_path, uninterrupted, policy):
    """The whole trainer, which counts what is kept on fake tensors before it begins."""
    path = tmp_path / "run.pt"
    assert (
        train_here(path, FP32, "--eval-interval=4", f"{FULL}={policy}", "--offload-activations")
        == 0
    )
    assert same(snapshot(path)["model"], uninterrupted(FP32, "--eval-interval=4")[0]["model"])


def test_evaluating_more_often_changes_no_weight(uninterrupted):
    often, _ = uninterrupted("--eval-interval=1")
    seldom, _ = uninterrupted("--eval-interval=0")
    assert same(often["model"], seldom["model"])


def test_dropout_differs_between_steps_and_seeds(uninterrupted):
    a, _ = uninterrupted("--seed=1")
    b, _ = uninterrupted("--seed=2")
    assert not same(a["model"], b["model"])
    assert len({train_minimal.seed_of(s, n) for s in range(20) for n in range(200)}) == 4000


def test_more_steps_may_be_asked_for(tmp_path):
    path = tmp_path / "run.pt"
    assert train_here(path) == 0
    more = ("--num-steps=25", "--lr=1e-4", "--weight-decay=0.7")
    assert train_here(path, "--resume", *more) == 0
    assert snapshot(path)["step"] == 25
    groups = snapshot(path)["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.7, 0.0]
    assert [record["step"] for record in metrics(path)] == list(range(1, 26))
    marks = [(r["step"], r["resumed_from"]) for r in metrics(path) if "resumed_from" in r]
    assert marks == [(21, 20)]


def test_best_snapshot_survives_a_resumed_run_that_gets_worse(tmp_path):
    path, best = tmp_path / "run.pt", tmp_path / "run.best.pt"
    assert train_here(path) == 0
    before = best.read_bytes()
    worse = ("--num-steps=22", "--lr=3", "--eval-interval=1", "--lr-scheduler=constant")
    assert train_here(path, "--resume", *worse) == 0
    assert metrics(path)[-1]["val_loss"] > metrics(path)[19]["val_loss"]
    assert best.read_bytes() == before


# ---- resuming with other flags, or what is not the newest


def damages(content: bytes, weights: bytes) -> dict[str, bytes]:
    """What can become of a file with these weights in it."""
    here = content.index(weights)
    return {
        "one bit": content[:here] + bytes([content[here] ^ 1]) + content[here + 1 :],
        "truncated": content[:here],
        "empty": b"",
        "zeroed block": content[:here] + bytes(4096) + content[here + 4096 :],
        "no snapshot": b"It was a dark and stormy night.\n" * 99,
    }


@row(
    "newest snapshot damaged in 5 ways; named by itself",
    "one line with file and reason, the one before taken, same weights; named: exit 2",
)
def test_damaged_newest_is_replaced_by_the_one_before(tmp_path, capsys):
    """And not kept in its place at the next save."""
    whole, previous = tmp_path / "whole.pt", tmp_path / "whole.prev.pt"
    assert train_here(whole, "--save-interval=15") == 0
    weights = snapshot(whole)["model"]["token_embedding.weight"].numpy().tobytes()
    for damage, damaged in damages(whole.read_bytes(), weights).items():
        path, before, alone = (tmp_path / f"{damage}{ending}.pt" for ending in ("", ".prev", "!"))
        for file in (path, alone):
            file.write_bytes(damaged)
        before.write_bytes(previous.read_bytes())
        (tmp_path / f"{damage}.damaged.pt").write_text("a run of that name")
        capsys.readouterr()
        assert train_here(path, "--resume", "--save-interval=15") == 0
        said = capsys.readouterr().out
        (line,) = (line for line in said.splitlines() if "taking the one before" in line)
        assert re.match(rf"resume   {path} is (damaged|no snapshot)", line)
        assert f"resume   {before}, step 15\n" in said
        assert (tmp_path / f"{damage}.damaged.pt").read_text() == "a run of that name"
        # (It might be the disk's fault.)
        assert (tmp_path / f"{damage}.damaged-2.pt").read_bytes() == damaged
        assert same(snapshot(path)["model"], snapshot(whole)["model"])
        assert (snapshot(path)["step"], snapshot(before)["step"]) == (20, 15)
        assert train_here(alone, "--resume") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: --resume: {alone} is ")


def test_the_lowest_loss_alone_is_gone_on_from(tmp_path, capsys, uninterrupted):
    """As after a kill between the first evaluation and the first save."""
    path, best = tmp_path / "run.pt", tmp_path / "run.best.pt"
    assert train_here(path, "--eval-interval=4", "--num-steps=4", *CONSTANT) == 0
    path.unlink()
    flags = ("--resume", "--eval-interval=4", "--num-steps=20", *CONSTANT)
    assert train_here(path, *flags) == 0
    note = f"resume   there is no snapshot {path}; taking the one with the lowest val loss"
    assert f"{note}\nresume   {best}, step 4\n" in capsys.readouterr().out
    whole, whole_log = uninterrupted("--eval-interval=4", *CONSTANT)
    assert same(snapshot(path)["model"], whole["model"])
    assert [row[0] for row in logged(path)] == [row[0] for row in whole_log]


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


def test_a_name_that_is_not_utf_8(tmp_path):
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


def test_a_forgotten_resume_costs_nothing(tmp_path, monkeypatch, capsys, uninterrupted):
    """The run that had the name can still go on under its new one, with its log."""
    path = tmp_path / "run.pt"
    with monkeypatch.context() as here, pytest.raises(Crash):
        crash_after(10, here)
        train_here(path, "--save-interval=5")
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
        resume = ["--resume"] if path.exists() else []
        assert (
            train_here(path, FP32, "--lr-scheduler=constant", f"--num-steps={steps}", *resume) == 0
        )
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


def test_precision_may_change(tmp_path):
    path = tmp_path / "run.pt"
    for steps, precision in enumerate((FP32, BF16, "--amp-dtype=float16", FP32), 1):
        resume = ["--resume"] if path.exists() else []
        assert train_here(path, precision, f"--num-steps={steps}", *resume) == 0


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
