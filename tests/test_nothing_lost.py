"""What a run does when something goes wrong around it: no step is lost, no bad one is kept.

A loss that is not finite, an evaluation that dies, a full disk, too little memory: in one process.
In several: test_nothing_lost_ddp.py. (Faults: harness/faults.py, or here by hand.)
"""

import os
import re
import sys
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from harness.faults import Injected
from harness.faults import train_step as faulty_step
from harness.rows import row
from harness.runs import FAULTS, TINY, metrics, run, same, snapshot, train, train_here

import train_minimal
from data import find_dataset

FP32, FP16 = "--no-amp", "--amp-dtype=float16"


def finite(weights: dict) -> bool:
    return all(bool(w.isfinite().all()) for w in weights.values())


@pytest.fixture
def inject(monkeypatch):
    """inject("nan:0:7"): in this process, too."""

    def set_faults(faults: str) -> None:
        monkeypatch.setenv("FAULTS", faults)
        monkeypatch.setattr(train_minimal, "train_step", faulty_step)

    return set_faults


# ---- NaN and infinity


def states_after_each_step(monkeypatch, tmp_path) -> dict[int, dict]:
    states, train_step = {}, train_minimal.train_step

    def spy(run):
        result = train_step(run)
        state = run.optimizer.state_dict()["state"]  # not the rate, which follows the step
        torch.save([run.model.state_dict(), state], tmp_path / "state")
        states[run.step] = torch.load(tmp_path / "state")
        return result

    monkeypatch.setattr(train_minimal, "train_step", spy)
    return states


@pytest.mark.parametrize("fault", ["nan", "infinite-loss"])
@pytest.mark.parametrize("precision", [FP32, FP16])
def test_a_step_that_is_not_finite_changes_nothing(
    tmp_path, monkeypatch, inject, capsys, fault, precision
):
    """Neither weights nor Adam's moments and step count; the next step goes on."""
    path = tmp_path / "run.pt"
    inject(f"{fault}:0:5")
    states = states_after_each_step(monkeypatch, tmp_path)
    assert train_here(path, precision, "--grad-accum-steps=2") == 0
    assert same(states[4], states[5]) and not same(states[5], states[6])
    assert finite(snapshot(path)["model"]) and snapshot(path)["step"] == 20
    assert [r["step"] for r in metrics(path) if r["grad_norm"] is None] == [5]
    (warning,) = re.findall("warning.*", capsys.readouterr().out)
    assert "step 5: loss or gradients are not finite, update skipped" in warning
    scale = snapshot(path)["scaler"].get("scale")
    assert scale == (2.0**15 if precision == FP16 else None)


@row("float16 overflows", "weights unchanged, scale halved, and as much when resumed meanwhile")
def test_float16_finds_its_scale_and_resumes_while_it_does(tmp_path, inject, capsys):
    """Overflows are its way to find the largest scale: they end no run and change no weight."""
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    assert train_here(path, FP16, "--num-steps=1", "--warmup-steps=0") == 0
    state = snapshot(path)
    state["scaler"]["scale"] = 2.0**27
    torch.save(state, path)
    whole.write_bytes(path.read_bytes())
    assert train_here(whole, FP16, "--resume", "--warmup-steps=0") == 0
    skipped = capsys.readouterr().out.count("update skipped (float16: the loss scale is now")
    assert skipped >= 4
    assert snapshot(whole)["scaler"]["scale"] == 2.0 ** (27 - skipped)
    inject("error:0:4")
    with pytest.raises(Injected):
        train_here(path, FP16, "--resume", "--warmup-steps=0", "--save-interval=1")
    assert snapshot(path)["step"] == 1  # the scale is still too large
    inject("")
    assert train_here(path, FP16, "--resume", "--warmup-steps=0") == 0
    for part in ("model", "optimizer", "scaler"):
        assert same(snapshot(path)[part], snapshot(whole)[part])


def test_float16_that_never_finds_a_scale_ends_the_run(tmp_path, inject, capsys):
    inject(" ".join(f"nan:0:{step}" for step in range(2, 40)))
    assert train_here(tmp_path / "run.pt", FP16, "--num-steps=40") == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "20 steps in a row, 2 to 21" in line and "--no-amp" in line


# ---- Save first, then evaluate


@pytest.mark.parametrize("step", [10, 20])
def test_an_evaluation_that_dies_is_made_up_for(tmp_path, monkeypatch, inject, step):
    """The step it was for is saved; the resumed run evaluates first: log and best are complete."""
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    flags = (FP32, "--save-interval=5", "--eval-interval=5")
    assert train_here(whole, *flags) == 0
    real = train_minimal.evaluate

    def evaluate(run):
        if run.step == step:
            raise Injected
        return real(run)

    monkeypatch.setattr(train_minimal, "evaluate", evaluate)
    with pytest.raises(Injected):
        train_here(path, *flags)
    assert snapshot(path)["step"] == step and metrics(path)[-1]["step"] == step - 1
    monkeypatch.undo()
    assert train_here(path, *flags, "--resume") == 0
    results = [[(r["step"], r["train_loss"], r.get("val_loss")) for r in metrics(p)]
               for p in (path, whole)]  # fmt: skip
    assert results[0] == results[1]
    for suffix in (".pt", ".prev.pt", ".best.pt"):
        a, b = (snapshot(p.with_suffix(suffix)) for p in (path, whole))
        assert same(a["optimizer"]["state"], b["optimizer"]["state"])
        assert all(same(a[key], b[key]) for key in ("model", "step", "best_val_loss"))


def test_what_was_evaluated_after_the_save_still_counts(tmp_path, monkeypatch, inject):
    """The snapshot knows the lowest loss of the steps before its own; the log knows the rest."""
    path = tmp_path / "run.pt"
    flags = (FP32, "--save-interval=10", "--eval-interval=10", "--num-steps=30")
    losses = iter([3.0, 1.0, 2.0])
    evaluate = lambda run: dict(val_loss=next(losses), val_ppl=1.0, val_bits_per_byte=None)  # noqa: E731
    monkeypatch.setattr(train_minimal, "evaluate", evaluate)
    inject("error:0:22")
    with pytest.raises(Injected):
        train_here(path, *flags)
    inject("")
    assert train_here(path, *flags, "--resume") == 0
    best = snapshot(tmp_path / "run.best.pt")
    assert (best["step"], best["best_val_loss"]) == (20, 1.0)


# ---- Data that go


@pytest.mark.parametrize("what", ["training", "validation", "all of it"])
def test_a_token_file_that_shrinks(tmp_path, monkeypatch, capsys, what):
    """The weights are those of the last step that was finished: they are saved."""
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    files = {name: tmp_path / f"{name}.bin" for name in ("training", "validation")}
    for file in files.values():
        file.write_bytes(np.tile(np.arange(250, dtype=np.uint16), 3).tobytes())
    flags = [*TINY[TINY.index("--n-layers") :], "--tokenizer-name=byte", "--eval-interval=5"]
    flags += [f"--train-data={files['training']}", f"--val-data={files['validation']}"]
    flags += ["--grad-accum-steps=2", "--save-minutes=0", FP32]
    assert train_minimal.main([*flags, f"--checkpoint-path={whole}"]) == 0
    before, real = files["training"].read_bytes(), train_minimal.train_step

    def train_step(run):
        if run.step == 8:
            for name, file in files.items():
                if what == name:
                    file.write_bytes(b"\1\0")
                elif what not in files:
                    file.unlink()
        return real(run)

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    capsys.readouterr()
    assert train_minimal.main([*flags, f"--checkpoint-path={path}"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    done, name = (10, "validation") if what == "validation" else (7, "training")
    why = "No such file or directory; put it back" if what not in files else "has become shorter"
    assert f"{files[name]}" in line and why in line
    assert line.endswith(f"; then go on from {path}, step {done}, with --resume")
    assert snapshot(path)["step"] == done and snapshot(tmp_path / "run.prev.pt")["step"] == 5
    for file in files.values():
        file.write_bytes(before)
    monkeypatch.undo()
    assert train_minimal.main(["--resume", f"--checkpoint-path={path}"]) == 0
    for part in ("model", "optimizer", "step"):
        assert same(snapshot(path)[part], snapshot(whole)[part])


# ---- A full disk


@contextmanager
def largest_file(n_bytes: int):
    """RLIMIT_FSIZE is the full disk that needs no root."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def disk_full_at_step_10(monkeypatch):
    """A run that from that step on can write no file of more than `n_bytes`."""

    def train_with(path, n_bytes: int, *flags: str) -> int:
        real = train_minimal.train_step
        with ExitStack() as stack, monkeypatch.context() as patch:

            def train_step(run):
                if run.step == 10:
                    stack.enter_context(largest_file(n_bytes))
                return real(run)

            patch.setattr(train_minimal, "train_step", train_step)
            return train_here(path, *flags)

    return train_with


@row(
    "disk full while saving",
    "older snapshots intact, nothing left over, exit 3: disk full, how much is needed and free",
)
def test_disk_full_while_saving(tmp_path, disk_full_at_step_10, capsys):
    path = tmp_path / "run.pt"
    flags = (FP32, "--save-interval=4", "--log-interval=0")
    assert disk_full_at_step_10(path, 20_000, *flags) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: cannot save {path}: disk full .*; it needs 0.1 MB, [0-9.,]+ MB", line)
    assert f"make room, then go on from {path}, step 8, with --resume" in line
    assert {p.name for p in tmp_path.iterdir()} == {
        "run.pt", "run.prev.pt", "run.lock", "run.metrics.jsonl",
    }  # fmt: skip
    assert [snapshot(tmp_path / f"run.{which}pt")["step"] for which in ("", "prev.")] == [8, 4]
    assert train_here(path, *flags, "--resume") == 0
    assert train_here(tmp_path / "whole.pt", *flags) == 0
    assert same(snapshot(path)["model"], snapshot(tmp_path / "whole.pt")["model"])


def test_disk_full_while_logging(tmp_path, disk_full_at_step_10, capsys):
    assert disk_full_at_step_10(tmp_path / "run.pt", 3000, FP32) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert f"cannot save {tmp_path}/run.metrics.jsonl: disk full" in line
    assert "start again (nothing was saved yet)" in line


def test_disk_full_while_the_cache_is_built(tmp_path, cache, monkeypatch, capsys):
    monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", cache)
    with largest_file(100):
        assert train_here(tmp_path / "run.pt") == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "File too large; the token cache needs room there" in line
    assert {path.name for path in cache.iterdir()} <= {".lock"}
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}


@pytest.mark.parametrize(
    ("encoding", "text", "written"),
    [
        ("utf-8", os.fsdecode(b"caf\xe9.pt"), b"caf\xe9.pt"),  # a name that is not UTF-8
        ("ascii", "café.pt", "café.pt".encode()),
        ("utf-8", "half \ud800", b"half ?"),
    ],
)
def test_names_are_printed_as_they_are_stored(encoding, text, written):
    assert text.encode(encoding, "minigpt-as-stored") == written


TRAIN = '"$0" train_minimal.py "$@"'


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
@pytest.mark.slow
@pytest.mark.parametrize("end", ["> /dev/full", "| head -2; exit ${PIPESTATUS[0]}"])
def test_a_full_disk_or_a_broken_pipe_costs_only_the_output(tmp_path, end):
    path = tmp_path / "run.pt"
    flags = [*TINY, "--checkpoint-path", str(path)]
    result = run(["bash", "-c", f"{TRAIN} {end}", sys.executable, *flags])
    assert result.returncode == 0 and result.stderr == ""
    assert len(result.stdout.splitlines()) == (2 if "head" in end else 0)
    assert snapshot(path)["step"] == 20 and len(metrics(path)) == 20


# ---- Out of memory


KNOBS = {
    "--loss-chunks=1": "--loss-chunks 0 ",
    "": "--use-activation-checkpoint (same results",
    "--use-activation-checkpoint=mlp": "--use-activation-checkpoint full",
    "--use-activation-checkpoint --recompute-layers=1": "--use-activation-checkpoint full without",
    "--use-activation-checkpoint=mlp --recompute-layers=1 --recompute-rest=cheap": (
        "--use-activation-checkpoint full without --recompute-layers --recompute-rest (same"
    ),
    "--use-activation-checkpoint --batch-size=6": "--batch-size 3 --grad-accum-steps 2",
    "--use-activation-checkpoint --batch-size=1": "a shorter --seq-len or a smaller model",
}


OUT_OF_MEMORY = row(
    "out of memory, CPU and (by injection) CUDA",
    "exit 4, one line with batch, sequence, policy and the next knob, the best one first",
)


@OUT_OF_MEMORY
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_out_of_memory_on_a_cpu(tmp_path):
    """A real failure of its allocator."""
    flags = ("--seq-len=512", "--max-tokens=9000", "--d-model=128", "--batch-size=8", FP32)
    script = {"script": f"{FAULTS} train_minimal", "FAULTS": "oom:0:2"}
    (line,) = train(tmp_path / "run.pt", *flags, expect=4, **script).stderr.splitlines()
    assert "--batch-size 8 --seq-len 512, recompute none; try --use-activation-checkpoint" in line


@OUT_OF_MEMORY
@pytest.mark.parametrize("flags", KNOBS)
def test_out_of_memory_names_what_helps_next(tmp_path, inject, capsys, flags):
    path = tmp_path / "run.pt"
    inject("cuda-oom:0:7")
    assert train_here(path, "--save-interval=5", *flags.split()) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"error: out of memory with --batch-size \d --seq-len 16, recompute \w+;", line)
    assert f"; try {KNOBS[flags]}" in line
    assert line.endswith(f"; go on from {path}, step 5, with --resume") == ("smaller" not in line)


def test_out_of_memory_before_training(tmp_path, monkeypatch, capsys):
    def make_optimizer(*args):
        raise MemoryError

    monkeypatch.setattr("trainer.setup.make_optimizer", make_optimizer)
    assert train_here(tmp_path / "run.pt") == 4
    assert "; try a smaller model (--n-layers, --d-model)" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["train_minimal.evaluate", "trainer.endings.sample_text"])
def test_out_of_memory_after_the_save(tmp_path, monkeypatch, capsys, where):
    def fail(run):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ...")

    monkeypatch.setattr(where, fail)
    assert train_here(tmp_path / "run.pt") == 4
    assert "step 20, with --resume" in capsys.readouterr().err
    assert snapshot(tmp_path / "run.pt")["step"] == 20


# ---- What a resumed run may change


def test_what_changed_is_said(tmp_path, capsys):
    path = tmp_path / "run.pt"
    assert train_here(path, "--num-steps=3", "--warmup-steps=0") == 0
    assert "resume   changed" not in capsys.readouterr().out
    changed = ("--num-steps=4", "--lr=0.001", "--warmup-steps=0", "--log-interval=2")
    assert train_here(path, "--resume", *changed, "--use-activation-checkpoint") == 0
    (line,) = re.findall("resume   changed.*", capsys.readouterr().out)
    assert line.partition(": ")[2] == (
        "--use-activation-checkpoint none -> full, --num-steps 3 -> 4, --lr 0.025 -> 0.001, "
        "--min-lr 0.0025 -> 0.0001, --log-interval 1 -> 2"
    )
    assert train_here(path, "--resume", "--num-steps=5", *changed[1:], "--save-interval=5") == 0
    assert "--save-interval 0 -> 5" in capsys.readouterr().out
