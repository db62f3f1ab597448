"""The loop: resumes to the bit, schedules, logs what happened, and answers mistakes in one line."""

import math
import os
import re
import signal
import sys

import pytest
import torch
from runs import TINY, metrics, run, same, snapshot, train, train_here

import train_minimal
from model import MiniGPT
from train_minimal import learning_rate
from trainer.claim import check_writable, step_aside
from trainer.flags import build_parser, choose_precision, cpu_has_bfloat16, fill_in, model_config
from trainer.metrics import format_line
from trainer.process import OneProcess
from trainer.setup import make_optimizer, set_up

FP32, BF16, FULL = "--no-amp", "--amp-dtype=bfloat16", "--use-activation-checkpoint"
LOSSES = ("step", "epoch", "lr", "train_loss", "train_ppl", "grad_norm", "val_loss", "val_ppl")


class Crash(Exception):
    pass


def crash_after(step: int, monkeypatch) -> None:
    real = train_minimal.train_step

    def train_step(run):
        if run.step > step:
            raise Crash
        return real(run)

    monkeypatch.setattr(train_minimal, "train_step", train_step)


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


@pytest.mark.parametrize("stop", [1, 9, 12, 19], ids=["first", "middle", "epoch", "last"])
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("precision", [FP32, BF16])
def test_resumed_equals_uninterrupted(
    tmp_path, monkeypatch, uninterrupted, precision, policy, stop
):
    flags = (precision, f"{FULL}={policy}", "--eval-interval=4")
    path = tmp_path / "run.pt"
    crash_after(stop, monkeypatch)
    with pytest.raises(Crash):
        train_here(path, *flags, f"--save-interval={stop}")
    assert snapshot(path)["step"] == stop
    monkeypatch.undo()
    assert train_here(path, *flags, "--resume") == 0
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


def test_float16_scaler_resumes(tmp_path, monkeypatch, uninterrupted):
    flags = ("--amp-dtype=float16",)
    path = tmp_path / "run.pt"
    crash_after(9, monkeypatch)
    with pytest.raises(Crash):
        train_here(path, *flags, "--save-interval=9")
    assert snapshot(path)["scaler"]["_growth_tracker"] == 9
    monkeypatch.undo()
    assert train_here(path, *flags, "--resume") == 0
    whole, _ = uninterrupted(*flags)
    assert same(snapshot(path)["model"], whole["model"])
    assert same(snapshot(path)["scaler"], whole["scaler"])


def test_resumed_in_another_process(tmp_path):
    """Once as a user does it, in two processes; the policy is changed on the way."""
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    constant = ("--lr-scheduler=constant", "--warmup-steps=1")
    train(parts, "--num-steps=12", *constant)
    train(parts, "--resume", FULL, *constant)
    assert train_here(whole, *constant) == 0
    assert same(snapshot(whole)["model"], snapshot(parts)["model"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_and_stops(tmp_path, monkeypatch, uninterrupted, capsys, number, code):
    path, real = tmp_path / "run.pt", train_minimal.train_step

    def train_step(run):
        if run.step == 7:
            os.kill(os.getpid(), number)  # in the middle of step 7
        return real(run)

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    before = signal.getsignal(number)
    assert train_here(path, FP32, "--eval-interval=4") == code
    assert signal.getsignal(number) is before
    assert f"{number.name} after step 7: saved" in capsys.readouterr().out
    assert snapshot(path)["step"] == 7 and metrics(path)[-1]["step"] == 7
    monkeypatch.undo()
    assert train_here(path, FP32, "--eval-interval=4", "--resume") == 0
    whole, whole_log = uninterrupted(FP32, "--eval-interval=4")
    assert same(snapshot(path)["model"], whole["model"]) and logged(path) == whole_log


def test_second_signal_ends_at_once(tmp_path):
    script = """
import os, signal, sys, train_minimal
real = train_minimal.train_step
def train_step(run):
    if run.step == 7:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    return real(run)
train_minimal.train_step = train_step
sys.exit(train_minimal.main(sys.argv[1:]))
"""
    path = tmp_path / "run.pt"
    result = run([sys.executable, "-c", script, *TINY, "--checkpoint-path", str(path)])
    assert result.returncode == -signal.SIGTERM
    assert not path.exists()


def test_recompute_changes_no_weight(uninterrupted):
    for precision in (FP32, BF16):
        none, _ = uninterrupted(precision, f"{FULL}=none", "--eval-interval=4")
        full, _ = uninterrupted(precision, f"{FULL}=full", "--eval-interval=4")
        assert same(none["model"], full["model"])


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


def test_validation_loss_is_that_of_all_tokens_at_once(tmp_path):
    """12 windows in batches of 5, 5 and 2: a mean of three means would weigh the last two more."""
    losses = []
    for batch_size in (5, 12):
        argv = [*TINY, f"--batch-size={batch_size}", f"--checkpoint-path={tmp_path}/run.pt"]
        run = set_up(arguments(*argv), OneProcess(torch.device("cpu")))
        assert len(run.val_batches) == {5: 3, 12: 1}[batch_size]
        losses.append(train_minimal.evaluate(run)["val_loss"])
        run.held_lock.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_dropout_differs_between_steps_and_seeds(uninterrupted):
    a, _ = uninterrupted("--seed=1")
    b, _ = uninterrupted("--seed=2")
    assert not same(a["model"], b["model"])
    assert len({train_minimal.seed_of(s, n) for s in range(20) for n in range(200)}) == 4000


def test_finished_run_says_so(tmp_path, capsys):
    path = tmp_path / "run.pt"
    assert train_here(path) == 0
    before = path.read_bytes()
    assert train_here(path, "--resume") == 0
    assert "already at step 20" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_more_steps_may_be_asked_for(tmp_path):
    path = tmp_path / "run.pt"
    assert train_here(path) == 0
    assert train_here(path, "--resume", "--num-steps=25", "--lr=1e-4") == 0
    assert snapshot(path)["step"] == 25
    assert [record["step"] for record in metrics(path)] == list(range(1, 26))


def test_best_snapshot_survives_a_resumed_run_that_gets_worse(tmp_path):
    path, best = tmp_path / "run.pt", tmp_path / "run.best.pt"
    assert train_here(path) == 0
    before = best.read_bytes()
    worse = ("--num-steps=22", "--lr=3", "--eval-interval=1", "--lr-scheduler=constant")
    assert train_here(path, "--resume", *worse) == 0
    assert metrics(path)[-1]["val_loss"] > metrics(path)[19]["val_loss"]
    assert best.read_bytes() == before


# ---- the learning rate and the batch


def arguments(*flags: str):
    return fill_in(build_parser("test", "x.pt").parse_args(flags))


def test_learning_rate():
    args = arguments("--lr=1", "--min-lr=0.1", "--warmup-steps=10", "--num-steps=110")
    rates = [learning_rate(step, args) for step in range(1, 111)]
    assert rates[0] == 0.1 and rates[9] == 1  # up in equal steps
    assert rates[59] == pytest.approx(0.55)  # half-way down at half time
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False))
    args.lr_scheduler = "linear"
    assert learning_rate(35, args) == pytest.approx(1 - 0.25 * 0.9)
    args.lr_scheduler = "constant"
    assert learning_rate(110, args) == 1
    assert learning_rate(1, arguments("--warmup-steps=0", "--lr=1")) == pytest.approx(1, rel=1e-4)


def test_defaults_that_depend_on_others():
    args = arguments("--d-model=768", "--n-heads=12", "--num-steps=1000", "--seq-len=1024")
    assert args.lr == pytest.approx(5.2e-4, rel=0.01)
    assert (args.min_lr, args.warmup_steps) == (args.lr / 10, 50)
    assert (args.d_ff, args.max_position_embeddings, args.data_seed) == (3072, 1024, args.seed)


def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path):
    """4 x 2 sequences and 1 x 8 are the same step, up to the order of float32 sums."""
    one, four = tmp_path / "one.pt", tmp_path / "four.pt"
    flags = (FP32, "--dropout=0", "--num-steps=3")
    assert train_here(one, *flags, "--batch-size=8") == 0
    assert train_here(four, *flags, "--batch-size=2", "--grad-accum-steps=4") == 0
    for a, b in zip(metrics(one), metrics(four), strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)


def test_clipping_sees_true_gradients(tmp_path):
    """float16 gradients are scaled by thousands; the norm that is clipped and logged is not."""
    scaled, plain = tmp_path / "scaled.pt", tmp_path / "plain.pt"
    assert train_here(scaled, "--amp-dtype=float16", "--num-steps=2") == 0
    assert train_here(plain, FP32, "--num-steps=2") == 0
    for a, b in zip(metrics(scaled), metrics(plain), strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.02)


def test_weight_decay_is_for_matrices(tmp_path):
    args = arguments("--weight-decay=0.3")
    model = MiniGPT(model_config(args, 31))
    optimizer = make_optimizer(model, args, torch.device("cpu"))
    decayed, free = optimizer.param_groups
    assert decayed["weight_decay"] == 0.3 and free["weight_decay"] == 0
    assert all(p.dim() == 2 for p in decayed["params"]) and all(
        p.dim() == 1 for p in free["params"]
    )
    assert sum(len(g["params"]) for g in (decayed, free)) == len(list(model.parameters()))


def test_precision_follows_the_hardware(monkeypatch):
    cpu = torch.device("cpu")
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("trainer.flags.cpu_has_bfloat16", lambda has=has: has)
        assert choose_precision(arguments(), cpu) == dtype
    assert choose_precision(arguments(BF16), cpu) == torch.bfloat16
    assert choose_precision(arguments(FP32), cpu) == torch.float32
    assert isinstance(cpu_has_bfloat16(), bool)


# ---- what is printed and written

LINE = re.compile(
    r"step +(\d+)/20 \| epoch (\S+) \| lr (\S+) \| loss (\S+) ppl (\S+) \| "
    r"(?:val (\S+) ppl (\S+) \| )?(\S+) ms/step \| (\S+) tok/s \| eta (\S+) \| peak (\S+) MiB rss"
)


def test_lines_and_metrics_say_the_same(tmp_path, capsys):
    path = tmp_path / "run.pt"
    assert train_here(path, "--log-interval=5", "--eval-interval=10") == 0
    lines = [m for m in map(LINE.fullmatch, capsys.readouterr().out.splitlines()) if m]
    records = metrics(path)
    assert [r["step"] for r in records] == [5, 10, 15, 20] == [int(m[1]) for m in lines]
    for match, record in zip(lines, records, strict=True):
        assert float(match[4]) == pytest.approx(record["train_loss"], abs=1e-4)
        assert record["train_ppl"] == pytest.approx(math.exp(record["train_loss"]))
        assert record["tokens_per_s"] == pytest.approx(2 * 16 * 1000 / record["step_ms"])
        assert record["eta_s"] == pytest.approx((20 - record["step"]) * record["step_ms"] / 1000)
        assert record["epoch"] == pytest.approx(record["step"] * 2 / 12)
        assert ("val_loss" in record) == (match[6] is not None) == (record["step"] % 10 == 0)
        assert record["peak_memory_kind"] == "rss" and record["peak_memory_bytes"] > 50e6


def test_first_lines_predict_the_memory_of_a_step(tmp_path, capsys):
    assert train_here(tmp_path / "run.pt", FULL, "--num-steps=1") == 0
    out = capsys.readouterr().out
    number = r"([\d.]+) KiB"
    (line,) = re.findall(r"^memory   full: .* \(predicted\)$", out, re.M)
    peak, kept, plain_peak, plain_kept = map(float, re.findall(number, line))
    assert 0 < kept < 0.6 * plain_kept < plain_kept < plain_peak and kept < peak < plain_peak


def test_a_prediction_that_fails_does_not_cost_the_run(tmp_path, capsys, monkeypatch):
    def fail(*args):
        raise NotImplementedError("no such device")

    monkeypatch.setattr("trainer.plan.describe_plan", fail)
    assert train_here(tmp_path / "run.pt", "--num-steps=1") == 0
    assert "could not be predicted (NotImplementedError)" in capsys.readouterr().out


def test_auto_takes_the_least_that_fits_and_says_so(tmp_path, capsys):
    """The policy is no part of the result: the same weights as without."""
    flags = ("--num-steps=3", "--batch-size=8", "--seq-len=64", "--max-tokens=3000")
    assert train_here(tmp_path / "full.pt", FULL, *flags) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "predicted" in line)
    full, none = (float(peak) for peak in re.findall(r"peak ([\d.]+) MiB", line))
    for budget in (none + 0.1, (full + none) / 2, full + 0.1):
        path = tmp_path / f"{budget}.pt"
        auto = ("--use-activation-checkpoint=auto", f"--memory-budget={budget}MiB")
        assert train_here(path, *flags, *auto) == 0
        out = capsys.readouterr().out
        (found,) = re.findall(r"^memory   auto takes (.*): the least that fits", out, re.M)
        assert (found == "none") == (budget > none)
        assert snapshot(path)["config"]["recompute"] == found.split()[0]
        assert same(snapshot(path)["model"], snapshot(tmp_path / "full.pt")["model"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("auto", "--memory-budget=100KiB"), "the smallest peak is .* alone take"),
        (("auto", "--memory-budget=8"), "--memory-budget: must be a number with a unit"),
        (("auto", "--memory-budget=0GiB"), "--memory-budget: must be a number with a unit"),
        (("auto", "--memory-budget=8GiBs"), "--memory-budget: must be a number with a unit"),
        (("auto", "--recompute-layers=1"), "--recompute-layers: .* auto chooses it"),
        (("auto", "--recompute-group=2"), "--recompute-group: .* auto chooses it"),
        (("full", "--memory-budget=8GiB"), "--memory-budget is for .* auto"),
    ],
)
def test_auto_cannot(tmp_path, capsys, flags, message):
    policy, *rest = flags
    try:
        code = train_here(tmp_path / "run.pt", f"--use-activation-checkpoint={policy}", *rest)
    except SystemExit as stop:
        code = stop.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith("error: ") and re.search(message, line)
    assert not list(tmp_path.iterdir())


def test_auto_names_the_nearest_thing_that_fits(tmp_path, capsys):
    """And it does fit."""
    flags = ["--use-activation-checkpoint=auto", "--memory-budget=600KiB", "--num-steps=1"]
    flags += ["--seq-len=64", "--max-tokens=3000"]
    assert train_here(tmp_path / "run.pt", *flags, "--batch-size=12") == 2
    line = capsys.readouterr().err
    (way_out,) = re.findall(r"; (--batch-size \d+ --grad-accum-steps \d+) fits", line)
    assert train_here(tmp_path / "run.pt", *flags, *way_out.split()) == 0


def test_line_shows_the_share_of_the_card():
    record = dict(step=1, epoch=0, lr=1, train_loss=1, train_ppl=1, step_ms=1, tokens_per_s=1)
    record |= dict(eta_s=3700, peak_memory_bytes=2**30, peak_memory_kind="cuda")
    assert format_line(record, 20, card_bytes=2**32).endswith(
        "eta 1:01:40 | peak 1.0 GiB cuda (25.0% of the card)"
    )


def test_snapshots_beside_each_other(tmp_path):
    path = tmp_path / "run.pt"
    assert train_here(path, "--save-interval=5", "--eval-interval=5") == 0
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"run.pt", "run.prev.pt", "run.best.pt", "run.metrics.jsonl", "run.lock"}
    assert [snapshot(tmp_path / f"run.{which}pt")["step"] for which in ("", "prev.")] == [20, 15]
    best = snapshot(tmp_path / "run.best.pt")
    losses = {r["step"]: r["val_loss"] for r in metrics(path) if "val_loss" in r}
    assert best["best_val_loss"] == min(losses.values()) == losses[best["step"]]


@pytest.mark.slow
def test_compiled_blocks(tmp_path):
    """torch.compile leaves names alone and, with recompute outside of it, the loss as well."""
    plain, compiled, recomputed = (tmp_path / f"{name}.pt" for name in "abc")
    flags = ("--num-steps=5", "--dropout=0", FP32)
    train(plain, *flags)
    train(compiled, *flags, "--compile")
    train(recomputed, *flags, "--compile", FULL)
    assert snapshot(plain)["model"].keys() == snapshot(compiled)["model"].keys()
    for path in (compiled, recomputed):
        for a, b in zip(metrics(plain), metrics(path), strict=True):
            assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-5)


# ---- resuming with other flags, or beside another run; see also test_bad_input.py


def resume_mistake(tmp_path, capsys, *flags: str) -> str:
    path = tmp_path / "run.pt"
    if not path.exists():
        assert train_here(path, "--num-steps=2") == 0
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    capsys.readouterr()
    assert train_here(path, "--resume", *flags) == 2
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--n-layers=3", "--n-layers: .* was trained with 2, this run has 3"),
        ("--d-model=32", "--d-model: .* was trained with 16, this run has 32"),
        ("--vocab-size=32", "--vocab-size: .* was trained with 31, this run has 32"),
        ("--seq-len=8 --max-position-embeddings=16", "--seq-len: .* 16, this run has 8"),
        ("--seed=5", "--seed: .* was trained with 1337, this run has 5"),
        ("--data-seed=5", "--data-seed: .* was trained with 3, this run has 5"),
        ("--dropout=0", "--dropout: .* was trained with 0.1, this run has 0"),
        ("--max-tokens=100", "--train-data"),
        ("--batch-size=1", "--batch-size: .* 2 sequences .* --grad-accum-steps 2 fits"),
    ],
)
def test_resuming_another_run_is_refused(tmp_path, capsys, flags, message):
    assert re.search(message, resume_mistake(tmp_path, capsys, *flags.split()))


def test_second_run_on_the_same_files_is_refused(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.pt"
    real = train_minimal.train_step

    def train_step(run):
        if run.step == 3:  # in the middle of the first run
            other = train(path, expect=2)
            assert "another run is writing" in other.stderr and other.stderr.count("\n") == 1
        return real(run)

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    assert train_here(path) == 0
    assert train_here(path, "--resume", "--num-steps=21") == 0  # its end opened the lock


def test_damaged_newest_is_replaced_by_the_one_before(tmp_path, capsys):
    """And not kept in its place at the next save."""
    path, previous = tmp_path / "run.pt", tmp_path / "run.prev.pt"
    assert train_here(path, "--save-interval=10") == 0
    path.write_bytes(path.read_bytes()[:1000])
    assert train_here(path, "--resume") == 0
    assert "run.pt is no snapshot" in capsys.readouterr().out
    assert snapshot(path)["step"] == 20 and snapshot(previous)["step"] == 10


def test_a_forgotten_resume_costs_nothing(tmp_path, monkeypatch, capsys, uninterrupted):
    """The run that had the name can still go on under its new one, with its log."""
    path, old = tmp_path / "run.pt", tmp_path / "run.old.pt"
    with monkeypatch.context() as here, pytest.raises(Crash):
        crash_after(10, here)
        train_here(path, "--save-interval=5")
    before = path.read_bytes()
    capsys.readouterr()
    assert train_here(path, "--save-interval=5", "--seed=5") == 0
    assert f"run.pt is of another run and becomes {old}: --resume --ch" in capsys.readouterr().out
    assert old.read_bytes() == before
    assert [snapshot(tmp_path / f"run.{which}pt")["step"] for which in ("", "prev.")] == [20, 15]
    assert train_here(old, "--save-interval=5", "--resume") == 0
    whole, whole_log = uninterrupted("--save-interval=5")
    assert same(snapshot(old)["model"], whole["model"]) and logged(old) == whole_log
    assert len(logged(path)) == 20


def test_of_two_old_runs_the_one_that_got_further_stays(tmp_path, capsys):
    """A job that starts again and again without --resume must not lose the days of the first."""
    path, old = tmp_path / "run.pt", tmp_path / "run.old.pt"
    for steps, expected in ((9, None), (2, 9), (3, 9), (10, 9), (2, 10)):
        assert train_here(path, f"--num-steps={steps}", "--save-interval=1") == 0
        assert snapshot(path)["step"] == steps
        if expected:
            assert snapshot(old)["step"] == expected == metrics(old)[-1]["step"]
            assert snapshot(tmp_path / "run.old.prev.pt")["step"] == expected - 1
    assert "which got further, stays" in capsys.readouterr().out


@pytest.mark.parametrize("survived", range(4))
def test_killed_while_the_old_run_is_renamed(tmp_path, monkeypatch, survived):
    """The next start does the rest."""
    path, old = tmp_path / "run.pt", tmp_path / "run.old.pt"
    for steps in (3, 7):
        assert train_here(path, f"--num-steps={steps}", "--save-interval=1") == 0
    before, renames = path.read_bytes(), []

    def replace(source, target):
        if len(renames) == survived:
            raise Crash
        renames.append(source)
        real(source, target)

    real = os.replace
    with monkeypatch.context() as here, pytest.raises(Crash):
        here.setattr(os, "replace", replace)
        step_aside(path)
    step_aside(path)
    assert old.read_bytes() == before and metrics(old)[-1]["step"] == 7
    assert snapshot(tmp_path / "run.old.prev.pt")["step"] == 6
    assert not path.exists() and not (tmp_path / "run.prev.pt").exists()


def test_what_is_left_of_a_run_that_was_killed_in_a_save_is_renamed_too(tmp_path):
    path, previous = tmp_path / "run.pt", tmp_path / "run.prev.pt"
    assert train_here(path, "--num-steps=2", "--save-interval=1") == 0
    before = previous.read_bytes()
    path.unlink()
    step_aside(path)
    assert (tmp_path / "run.old.pt").read_bytes() == before and not previous.exists()


def test_a_run_that_goes_on_as_the_old_one_is_left_alone(tmp_path, capsys, monkeypatch):
    path, old = tmp_path / "run.pt", tmp_path / "run.old.pt"
    assert train_here(path, "--num-steps=2") == train_here(path, "--num-steps=3") == 0
    real, before = train_minimal.train_step, path.read_bytes()

    def train_step(run):  # of the old run; meanwhile somebody starts a third
        monkeypatch.setattr(train_minimal, "train_step", real)
        assert train_here(path, "--num-steps=4") == 2
        return real(run)

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    capsys.readouterr()
    assert train_here(old, "--num-steps=4", "--resume") == 0
    out, err = capsys.readouterr()
    assert "another run is writing to" in err
    assert "of another run and becomes" not in out  # it is known before the run is announced
    assert path.read_bytes() == before and snapshot(old)["step"] == 4


def test_a_snapshot_beyond_the_last_step(tmp_path, capsys):
    """It was copied without its log: its step is evaluated and logged again."""
    path, other = tmp_path / "run.pt", tmp_path / "other.pt"
    assert train_here(path, "--num-steps=7", "--warmup-steps=1") == 0
    other.write_bytes(path.read_bytes())
    assert train_here(other, "--resume", "--num-steps=5", "--warmup-steps=1") == 0
    assert [record["val_loss"] for record in metrics(other)] == [metrics(path)[-1]["val_loss"]]
    assert train_here(other, "--resume", "--num-steps=5", "--warmup-steps=1") == 0
    assert "already at step 7" in capsys.readouterr().out


def test_a_snapshot_that_changes_while_a_run_is_set_up(tmp_path, capsys, monkeypatch):
    """The run before was still at its last save: to go on from the one before would drop that."""
    path = tmp_path / "run.pt"
    assert train_here(path, "--num-steps=2") == 0
    later = snapshot(path) | {"step": 3}

    def save_and_check(*args, **options):
        torch.save(later, path)
        return check_writable(*args, **options)

    monkeypatch.setattr("trainer.setup.check_writable", save_and_check)
    assert train_here(path, "--resume") == 2
    assert "another run was still at" in capsys.readouterr().err
    assert snapshot(path)["step"] == 3


def test_another_run_s_snapshot_is_never_the_one_before(tmp_path, capsys):
    """To go on from it would be to go on with the other run."""
    path = tmp_path / "run.pt"
    assert train_here(path, "--save-interval=5") == 0
    assert train_here(path, "--num-steps=3") == 0
    path.write_bytes(path.read_bytes()[:1000])
    assert train_here(path, "--resume") == 2
    assert "run.pt is no snapshot, or a damaged one" in capsys.readouterr().err


def test_settings_of_the_optimizer_may_change(tmp_path):
    path = tmp_path / "run.pt"
    assert train_here(path, "--num-steps=2") == 0
    assert train_here(path, "--resume", "--num-steps=3", "--weight-decay=0.7") == 0
    groups = snapshot(path)["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.7, 0.0]


def test_precision_may_change(tmp_path):
    path = tmp_path / "run.pt"
    for steps, precision in enumerate((FP32, BF16, "--amp-dtype=float16", FP32), 1):
        resume = ["--resume"] if path.exists() else []
        assert train_here(path, precision, f"--num-steps={steps}", *resume) == 0


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("[..] can't allocate memory: .")],
)
@pytest.mark.parametrize(
    ("flags", "knob"),
    [
        ((), "try --use-activation-checkpoint"),
        ((FULL,), "try --batch-size 1 --grad-accum-steps 2"),
        ((FULL, "--batch-size=1"), "shorter --seq-len"),
    ],
)
def test_out_of_memory_names_the_next_knob(tmp_path, monkeypatch, capsys, error, flags, knob):
    def train_step(run):
        raise error

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    assert train_here(tmp_path / "run.pt", *flags) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory with --batch-size") and knob in line


def test_other_runtime_errors_are_bugs(tmp_path, monkeypatch):
    def train_step(run):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    with pytest.raises(RuntimeError, match="shape"):
        train_here(tmp_path / "run.pt")
