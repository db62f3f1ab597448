"""The loop: what is asked for is what is done, printed and written.

The rate follows its schedule, micro-batches add up to the batch, precision follows the hardware;
the lines and the log say the same; `auto` takes the least that fits its budget; and a run that is
out of memory names the next knob. How a run goes on: test_resume.py.
"""

import math
import re

import pytest
import torch
from harness.runs import TINY, metrics, same, snapshot, train, train_here

import train_minimal
from memory.head import softmax_in_place
from model import MiniGPT
from train_minimal import learning_rate
from trainer.device import choose_precision, cpu_has_bfloat16
from trainer.flags import build_parser, fill_in, model_config
from trainer.metrics import format_line
from trainer.optimizer import make_optimizer
from trainer.process import OneProcess
from trainer.report import sample_text
from trainer.setup import set_up

FP32, BF16, FULL = "--no-amp", "--amp-dtype=bfloat16", "--use-activation-checkpoint"


# ---- the learning rate and the batch


def arguments(*flags: str):
    return fill_in(build_parser("test", "x.pt").parse_args(flags))


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
        monkeypatch.setattr("trainer.device.cpu_has_bfloat16", lambda has=has: has)
        assert choose_precision(arguments(), cpu) == dtype
    assert choose_precision(arguments(BF16), cpu) == torch.bfloat16
    assert choose_precision(arguments(FP32), cpu) == torch.float32
    assert isinstance(cpu_has_bfloat16(), bool)


# ---- what is printed and written

LINE = re.compile(
    r"step +(\d+)/20 \| epoch (\S+) \| lr (\S+) \| loss (\S+) ppl (\S+) \| "
    r"(?:val (\S+) ppl (\S+) \| )?(\S+) ms/step \| (\S+) tok/s \| eta (\S+) \| "
    r"peak (\S+) [MG]iB rss"
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


def test_first_lines_predict_the_memory_of_a_step(plans_memory, tmp_path, capsys):
    assert train_here(tmp_path / "run.pt", FULL, "--num-steps=1") == 0
    out = capsys.readouterr().out
    number = r"([\d.]+) KiB"
    (line,) = re.findall(r"^memory   full: .* \(predicted\)$", out, re.M)
    peak, kept, plain_peak, plain_kept = map(float, re.findall(number, line))
    assert 0 < kept < 0.6 * plain_kept < plain_kept < plain_peak and kept < peak < plain_peak


def test_a_prediction_that_fails_does_not_cost_the_run(plans_memory, tmp_path, capsys, monkeypatch):
    def fail(*args):
        raise NotImplementedError("no such device")

    monkeypatch.setattr("trainer.plan.describe_plan", fail)
    assert train_here(tmp_path / "run.pt", "--num-steps=1") == 0
    assert "could not be predicted (NotImplementedError)" in capsys.readouterr().out


def test_auto_takes_the_least_that_fits_and_says_so(plans_memory, tmp_path, capsys):
    """The policy is no part of the result: the same weights as without."""
    # (In one precision on every CPU: which of them it has decides what the rounded figures are.)
    flags = ("--num-steps=3", "--batch-size=8", "--seq-len=64", "--max-tokens=3000")
    flags = (*flags, "--amp-dtype=bfloat16")
    assert train_here(tmp_path / "full.pt", FULL, *flags) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "predicted" in line)
    full, none = (float(peak) for peak in re.findall(r"peak ([\d.]+) MiB", line))
    for tensors in (none + 0.1, (full + none) / 2, full + 0.1):
        budget = tensors / 0.9
        path = tmp_path / f"{budget}.pt"
        auto = ("--use-activation-checkpoint=auto", f"--memory-budget={budget}MiB")
        assert train_here(path, *flags, *auto) == 0
        out = capsys.readouterr().out
        room = f"{budget * 0.9:.1f} MiB ({budget:.1f} MiB less a margin of a tenth)"
        said = f"auto takes (.*): the least that fits in {re.escape(room)}\n"
        (found,) = re.findall(said, out)
        assert (found == "none") == (tensors > none)
        assert snapshot(path)["config"]["recompute"] == found.split()[0]
        assert same(snapshot(path)["model"], snapshot(tmp_path / "full.pt")["model"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("auto", "--memory-budget=100KiB"), "the smallest peak is .* alone take"),
        (("auto", "--memory-budget=8"), "--memory-budget: must be a number with a unit"),
        (("auto", "--memory-budget=0GiB"), "--memory-budget: must be a number with a unit"),
        (("auto", "--memory-budget=8GiBs"), "--memory-budget: must be a number with a unit"),
        (("auto", "--memory-budget=0.1b"), "a byte or more, as in 8GiB, not '0.1b'"),
        (("auto", f"--memory-budget={'9' * 400}b"), f"as in 8GiB, not '{'9' * 40}'"),
        (("auto", "--recompute-layers=1"), "--recompute-layers: .* auto chooses it"),
        (("auto", "--recompute-rest=cheap"), "--recompute-rest: .* auto chooses it"),
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


def test_the_sample_compiles_nothing(tmp_path, monkeypatch):
    """Each of its lengths would be compiled anew; training compiles, and so does evaluation."""
    compiled: list[str] = []
    now = ["training"]

    def backend(graph, inputs):
        compiled.append(now[0])
        return graph.forward

    def sample(run):
        now[0] = "sample"
        text = sample_text(run)
        now[0] = "after"
        run.model.eval()
        run.model(torch.zeros(3, 7, dtype=torch.int64))  # a shape that is compiled if it is new
        return text

    torch._dynamo.reset()
    real = torch.nn.Module.compile
    compile_module = lambda module: real(module, backend=backend, dynamic=False)  # noqa: E731
    monkeypatch.setattr(torch.nn.Module, "compile", compile_module)
    monkeypatch.setattr("memory.head.compiled_softmax", lambda: softmax_in_place)  # without g++
    monkeypatch.setattr("trainer.endings.sample_text", sample)
    flags = ("--compile", "--no-amp", "--num-steps=2", "--sample-tokens=5")
    assert train_here(tmp_path / "run.pt", *flags) == 0
    assert "training" in compiled and "after" in compiled and "sample" not in compiled
    torch._dynamo.reset()


# ---- out of memory, and bugs


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
