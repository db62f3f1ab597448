"""The loop: what is asked for is what is done, printed and written.

The rate follows its schedule, micro-batches add up to the batch, precision follows the hardware;
the lines and the log say the same; `auto` takes the least that fits its budget; and a run that is
out of memory names the next knob. How a run goes on: test_resume.py.
"""

import math
import re

import pytest
import torch
from harness.runs import metrics, same, snapshot, train, train_here

import train_minimal
from memory.head import softmax_in_place
from trainer.device import choose_precision, cpu_has_bfloat16
from trainer.flags import build_parser, fill_in
from trainer.metrics import format_line
from trainer.report import sample_text

FP32, BF16, FULL = "--no-amp", "--amp-dtype=bfloat16", "--use-activation-checkpoint"


# ---- the learning rate and the batch


def arguments(*flags: str):
    return fill_in(build_parser("test", "x.pt").parse_args(flags))


def test_defaults_that_depend_on_others():
    args = arguments("--d-model=768", "--n-heads=12", "--num-steps=1000", "--seq-len=1024")
    assert args.lr == pytest.approx(5.2e-4, rel=0.01)
    assert (args.min_lr, args.warmup_steps) == (args.lr / 10, 50)
    assert (args.d_ff, args.max_position_embeddings, args.data_seed) == (3072, 1024, args.seed)


def test_clipping_sees_true_gradients(tmp_path):
    """float16 gradients are scaled by thousands; the norm that is clipped and logged is not."""
    scaled, plain = tmp_path / "scaled.pt", tmp_path / "plain.pt"
    assert train_here(scaled, "--amp-dtype=float16", "--num-steps=2") == 0
    assert train_here(plain, FP32, "--num-steps=2") == 0
    for a, b in zip(metrics(scaled), metrics(plain), strict=True):
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=0.02)


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


def test_other_runtime_errors_are_bugs(tmp_path, monkeypatch):
    def train_step(run):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    with pytest.raises(RuntimeError, match="shape"):
        train_here(tmp_path / "run.pt")
