"""A step whose loss or gradients are not finite changes nothing, and the run goes on.

The device skips the update, without Python waiting for it; it is told a step late. Too many in a
row end the run, and nothing of them is saved. (In several processes: test_reliability.py.)
"""

import re
from types import SimpleNamespace

import pytest
import torch
from harness.faults import broken, history
from harness.rows import row
from harness.runs import TINY, metrics, same, snapshot, train_here
from torch.utils._python_dispatch import TorchDispatchMode

import train_minimal
from trainer.endings import NotFinite, SkippedUpdates
from trainer.flags import build_parser, fill_in
from trainer.optimizer import make_optimizer, update_if_finite
from trainer.process import OneProcess
from trainer.setup import set_up

CPU, NAN = torch.device("cpu"), torch.tensor(torch.nan)
FP32, FP16 = "--no-amp", "--amp-dtype=float16"
LEAN = "--optimizer=muon --moments-dtype=bfloat16"


def warned(capsys) -> list[int]:
    said = re.findall(r"warning  step (\d+): .* skipped", capsys.readouterr().out)
    return list(map(int, said))


# ---- What a run promises


@pytest.mark.parametrize(
    ("flags", "kernel"),
    [(FP32, "cpu"), (FP32, "mps"), (FP16, "cpu"), (LEAN, "cpu"), (LEAN, "mps")],
)
def test_a_step_that_is_not_finite_changes_nothing(tmp_path, monkeypatch, capsys, flags, kernel):
    """Neither weights nor moments, with a kernel that can skip and with one that cannot (MPS's);
    and each is said, whether somebody looks at the steps or not."""
    make = lambda model, args, _, dtype: make_optimizer(model, args, torch.device(kernel), dtype)  # noqa: E731
    monkeypatch.setattr("trainer.setup.make_optimizer", make)
    quiet, logged = tmp_path / "quiet.pt", tmp_path / "logged.pt"
    # ("huge" is finite in each number, and in no sum of their squares.)
    faults = "nan:0:4 nan:0:5 overflow:0:9 huge:0:12 infinite-loss:0:19 nan:0:20"
    bad = [4, 5, 9, 12, 19, 20]
    for path, interval in ((quiet, 0), (logged, 1)):
        how = (*flags.split(), f"--log-interval={interval}", "--grad-accum-steps=2")
        assert broken(path, faults, *how) == 0
        assert warned(capsys) == bad
    after = history(quiet)
    for step in range(2, 21):
        now, before = (after[i]["weights"] + after[i]["moments"] for i in (step, step - 1))
        assert (now == before) == (step in bad), step
        if flags == FP16 and step != 12:
            assert after[step]["scale"] == after[step - 1]["scale"] / (1 + (step in bad))
    assert history(logged) == after and max(after) == 20
    assert [r["step"] for r in metrics(logged) if r["grad_norm"] is None] == bad
    assert [r["step"] for r in metrics(quiet)] == [20] == [snapshot(quiet)["step"]]


@row("float16 overflows")
def test_float16_finds_its_scale_and_resumes_while_it_does(tmp_path, capsys):
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
    flags = (FP16, "--resume", "--warmup-steps=0")
    assert broken(path, "error:0:4", *flags, "--save-interval=1") is None
    assert snapshot(path)["step"] == 1  # the scale is still too large
    assert train_here(path, *flags) == 0
    for part in ("model", "optimizer", "scaler"):
        assert same(snapshot(path)[part], snapshot(whole)[part])


THREE = "nan:0:12 nan:0:13 nan:0:14"


@pytest.mark.parametrize(
    ("faults", "flags", "ended", "saved"),
    [
        (THREE, "", 15, []),  # noticed one step late
        (THREE, "--save-interval=5", 15, [10, 5]),
        (THREE, "--save-interval=7", 14, [7]),  # a save asks
        ("nan:0:13 nan:0:14 nan:0:15", "--save-interval=7", 15, [7]),  # and goes on asking
        (THREE, "--eval-interval=14", 14, []),
        ("nan:0:18 nan:0:19 nan:0:20", "--save-interval=9", 20, [9]),  # not even at the end
        ("nan:0:5 nan:0:6 nan:0:7 term:0:7", "", 7, []),  # nor for a signal
        # Two in a row do not end it; and if each step is logged, each is known at once.
        (f"{THREE} nan:0:5 nan:0:6 nan:0:8", "--log-interval=1 --save-interval=1", 14, [11, 10]),
        (" ".join(f"nan:0:{step}" for step in range(2, 30)), f"{FP16} --num-steps=40", 22, []),
    ],
)
def test_too_many_in_a_row_end_the_run_and_nothing_of_it_is_saved(
    tmp_path, capsys, faults, flags, ended, saved
):
    path, float16 = tmp_path / "run.pt", FP16 in flags
    assert (
        broken(path, faults, FP32 * (not float16) or FP16, "--log-interval=0", *flags.split()) == 3
    )
    (line,) = capsys.readouterr().err.splitlines()
    first = int(faults.split(":")[2].split()[0])
    limit, way_out = (20, "--no-amp") if float16 else (3, "a lower --lr than 0.025")
    assert f"not finite in {limit} steps in a row, {first} to {first + limit - 1};" in line
    assert f"{way_out}; --detect-anomaly finds the operation" in line
    assert max(history(path)) == ended
    files = [p for p in (path, tmp_path / "run.prev.pt") if p.exists()]
    assert [snapshot(file)["step"] for file in files] == saved
    go_on = f"go on from {path}, step {saved[0]}, with --resume" if saved else "; start again ("
    assert go_on in line
    assert not any(r["step"] >= first + limit - 1 for r in metrics(path))


# ---- Nobody waits for the device


def test_a_device_that_has_to_be_asked_is_asked_once():
    """On MPS the norm is read before the update, and not again behind it."""
    norm, done = torch.tensor(2.0), []
    for fused, returned in ((False, norm), (True, norm)):
        optimizer = SimpleNamespace(defaults={"fused": fused}, step=lambda: done.append(1))
        on_a_device = SimpleNamespace(cpu=lambda: norm, isfinite=norm.isfinite)
        known = update_if_finite(optimizer, on_a_device)
        assert known is (on_a_device if fused else returned)
    assert len(done) == 2


class Reads(TorchDispatchMode):
    """Notes when Python reads a number from a tensor, which on a GPU waits for all before it."""

    # (item() and bool() end in the first; the others need the number of what they find)
    READING = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2")

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in self.READING:
            self.events.append("read")
        return func(*args, **(kwargs or {}))


def start(tmp_path, *flags: str):
    argv = [*TINY, f"--checkpoint-path={tmp_path}/run.pt", *flags]
    run = set_up(fill_in(build_parser("test", "x.pt").parse_args(argv)), OneProcess(CPU))
    run.model.train()
    return run


@pytest.mark.parametrize(
    "flags",
    [
        f"{FP32} --use-activation-checkpoint=full",
        f"{FP16} --use-activation-checkpoint=cheap",
        "--amp-dtype=bfloat16 --optimizer=muon --moments-dtype=bfloat16",
    ],
)
def test_a_step_reads_nothing_from_the_device(tmp_path, flags):
    run = start(tmp_path, "--grad-accum-steps=2", *flags.split())
    for run.step in (1, 2):
        with Reads() as reads:
            losses, norm = train_minimal.train_step(run)
        assert reads.events == []
    with Reads() as reads:  # it can see them
        assert norm.isfinite() and losses.tolist()
    assert reads.events == ["read"]  # (tolist is no operator)
    run.held_lock.close()


def test_an_evaluation_reads_when_all_is_on_its_way(tmp_path):
    run = start(tmp_path, "--batch-size=5")
    with Reads() as reads:
        run.model.ln_f.register_forward_hook(lambda *_: reads.events.append("batch"))
        train_minimal.evaluate(run)
    assert reads.events == ["batch"] * 3 + ["read"] * 6
    run.held_lock.close()


class SlowDevice:
    """A norm () on a device that has not computed it yet: what is copied is nonsense until then."""

    is_cuda = True

    def __init__(self, value: float) -> None:
        self.value, self.copy = torch.tensor(value), torch.tensor(-1e9)

    def to(self, device: str, non_blocking: bool) -> torch.Tensor:
        assert device == "cpu" and non_blocking
        self.copy.fill_(torch.nan if self.value.isfinite() else 0.0)
        return self.copy


def test_the_copy_is_looked_at_when_it_has_arrived(monkeypatch):
    """And not before the next step, or before somebody asks."""
    norms, waits, said = [], [], []

    class Event:
        def record(self) -> None:
            self.norm = norms[-1]

        def synchronize(self) -> None:
            self.norm.copy.copy_(self.norm.value)
            waits.append(run.step)

    monkeypatch.setattr(torch.cpu, "Event", Event)
    args = fill_in(build_parser("test", "x.pt").parse_args([]))
    scaler = SimpleNamespace(is_enabled=lambda: False)
    process = SimpleNamespace(device=CPU, say=said.append)
    run = SimpleNamespace(args=args, scaler=scaler, process=process, step=0, saved_step=0)
    skipped, inf, nan = SkippedUpdates(run), torch.inf, torch.nan
    for run.step, norm in enumerate([1.0, inf, nan, 2.0, nan, inf, nan], 1):
        norms.append(SlowDevice(norm))
        skipped.take(norms[-1])
        if run.step == 3:
            assert (len(said), skipped.read_last(), skipped.read_last()) == (1, 2, 2)
    # (Somebody has asked for 3, so the step after waits for none.)
    assert waits == [2, 3, 3, 5, 6, 7]
    assert [int(line.split()[2].strip(":")) for line in said] == [2, 3, 5, 6]
    with pytest.raises(NotFinite, match="3 steps in a row, 5 to 7; start again"):
        skipped.read_last()
