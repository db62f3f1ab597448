"""An update that is skipped, by the device, without Python waiting for it; and told a step late.

What a skipped step must leave as it was: test_nothing_lost.py, where each step is logged, and so
each norm is read at once. Here none is logged.
"""

import re
from types import SimpleNamespace

import pytest
import torch
from harness.faults import Injected
from harness.faults import train_step as faulty_step
from harness.runs import TINY, metrics, same, snapshot, train_here
from torch.utils._python_dispatch import TorchDispatchMode

import train_minimal
from trainer.endings import NotFinite, SkippedUpdates
from trainer.flags import build_parser, fill_in
from trainer.optimizer import make_optimizer, update_if_finite
from trainer.process import OneProcess
from trainer.setup import set_up

CPU, NAN = torch.device("cpu"), torch.tensor(torch.nan)
QUIET = ("--no-amp", "--log-interval=0")


@pytest.fixture
def inject(monkeypatch):
    """inject("nan:0:7"): in this process; returns the list of the steps that were done."""

    def set_faults(faults: str) -> list[int]:
        done: list[int] = []
        monkeypatch.setenv("FAULTS", faults)
        step = lambda run: (done.append(run.step), faulty_step(run))[1]  # noqa: E731
        monkeypatch.setattr(train_minimal, "train_step", step)
        return done

    return set_faults


def warned(capsys) -> list[str]:
    return re.findall(r"warning  step (\d+): .* skipped", capsys.readouterr().out)


# ---- The update


@pytest.fixture(params=["fused", "not fused"])
def adamw(request, monkeypatch):
    """An optimizer as the trainer makes it, on a CPU and on a device without the fused kernel."""

    def make(model=None):
        model = model or torch.nn.Linear(5, 3)
        device = CPU if request.param == "fused" else torch.device("mps")
        args = fill_in(build_parser("test", "x.pt").parse_args(["--lr=0.1"]))
        optimizer = make_optimizer(model, args, device)
        assert optimizer.defaults["fused"] == (request.param == "fused")
        return model, optimizer

    return make


def after(adamw, gradients: list[float]) -> tuple[dict, dict]:
    """Weights and moments after a step with each of these gradients."""
    torch.manual_seed(1)
    model, optimizer = adamw()
    for gradient in gradients:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update_if_finite(optimizer, norm)
    return model.state_dict(), optimizer.state_dict()["state"]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_an_update_that_is_skipped_leaves_no_trace(adamw, bad):
    """1e30 is finite, and no gradient that is clipped by a norm of infinity would be wrong."""
    assert same(after(adamw, [1.0, bad, -2.0]), after(adamw, [1.0, -2.0]))
    assert same(after(adamw, [bad, bad, 3.0]), after(adamw, [3.0]))
    assert not same(after(adamw, [1.0, -2.0]), after(adamw, [1.0]))


# ---- Nobody waits


def test_a_device_that_has_to_be_asked_is_asked_once(adamw):
    """On MPS the norm is read before the update, and not again behind it."""
    _, optimizer = adamw()
    norm = torch.tensor(2.0)
    on_a_device = SimpleNamespace(cpu=lambda: norm, isfinite=lambda: norm.isfinite())
    returned = update_if_finite(optimizer, on_a_device)
    assert returned is (on_a_device if optimizer.defaults["fused"] else norm)


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


@pytest.mark.parametrize("policy", ["none", "cheap", "full"])
@pytest.mark.parametrize("precision", ["--no-amp", "--amp-dtype=bfloat16", "--amp-dtype=float16"])
def test_a_step_reads_nothing_from_the_device(tmp_path, precision, policy):
    flags = [precision, f"--use-activation-checkpoint={policy}", "--grad-accum-steps=2"]
    if policy == "full":
        flags += ["--optimizer=muon", "--moments-dtype=bfloat16"]
    run = start(tmp_path, *flags)
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

    def finish(self) -> None:
        self.copy.copy_(self.value)


def test_the_copy_is_looked_at_when_it_has_arrived(monkeypatch):
    """And not before the next step, or before somebody asks."""
    norms, waits = [], []

    class Event:
        def record(self) -> None:
            self.norm = norms[-1]

        def synchronize(self) -> None:
            self.norm.finish()
            waits.append(run.step)

    monkeypatch.setattr(torch.cpu, "Event", Event)
    said: list[str] = []
    args = fill_in(build_parser("test", "x.pt").parse_args([]))
    scaler = SimpleNamespace(is_enabled=lambda: False)
    process = SimpleNamespace(device=CPU, say=said.append)
    run = SimpleNamespace(args=args, scaler=scaler, process=process, step=0, saved_step=0)
    skipped = SkippedUpdates(run)
    for run.step, norm in enumerate([1.0, torch.inf, torch.nan, 2.0, torch.nan, torch.inf], 1):
        norms.append(SlowDevice(norm))
        skipped.take(norms[-1])
        if run.step == 3:
            assert (len(said), skipped.read_last(), skipped.read_last()) == (1, 2, 2)
    assert waits == [2, 3, 3, 5, 6]  # (somebody has asked for 3, so the step after waits for none)
    assert [int(line.split()[2].strip(":")) for line in said] == [2, 3, 5]
    run.step = 7
    norms.append(SlowDevice(torch.nan))
    skipped.take(norms[-1])
    with pytest.raises(NotFinite, match="3 steps in a row, 5 to 7; start again"):
        skipped.read_last()


# ---- What a whole run promises, if nobody looks at its steps


def test_each_skipped_step_is_said_and_the_run_goes_on(tmp_path, inject, capsys):
    path, logged = tmp_path / "run.pt", tmp_path / "logged.pt"
    faults = "nan:0:4 nan:0:5 overflow:0:9 infinite-loss:0:19 nan:0:20"
    inject(faults)
    assert train_here(path, *QUIET) == 0
    assert warned(capsys) == ["4", "5", "9", "19", "20"]
    assert [record["step"] for record in metrics(path)] == [20]
    assert train_here(logged, "--no-amp", "--log-interval=1") == 0
    assert warned(capsys) == ["4", "5", "9", "19", "20"]
    assert snapshot(path)["step"] == 20  # the last step saves in any case
    for part in ("model", "optimizer", "step"):
        assert same(snapshot(path)[part], snapshot(logged)[part])


@pytest.mark.parametrize(
    ("faults", "flags", "ended", "saved"),
    [
        ("nan:0:12 nan:0:13 nan:0:14", "", 15, None),  # noticed one step late
        ("nan:0:12 nan:0:13 nan:0:14", "--save-interval=5", 15, (10, 5)),
        ("nan:0:12 nan:0:13 nan:0:14", "--save-interval=7", 14, (7, None)),  # a save asks
        ("nan:0:13 nan:0:14 nan:0:15", "--save-interval=7", 15, (7, None)),  # and goes on asking
        ("nan:0:12 nan:0:13 nan:0:14", "--eval-interval=14", 14, None),
        ("nan:0:18 nan:0:19 nan:0:20", "--save-interval=9", 20, (9, None)),  # not even at the end
        ("nan:0:5 nan:0:6 nan:0:7 term:0:7", "", 7, None),  # nor for a signal
        # Two in a row do not end it; and if each step is logged, each is known at once.
        (
            "nan:0:12 nan:0:13 nan:0:14 nan:0:5 nan:0:6 nan:0:8 nan:0:9",
            "--log-interval=1 --save-interval=1",
            14,
            (11, 10),
        ),
    ],
)
def test_three_in_a_row_end_the_run_and_nothing_of_it_is_saved(
    tmp_path, inject, capsys, faults, flags, ended, saved
):
    path = tmp_path / "run.pt"
    done = inject(faults)
    assert train_here(path, *QUIET, *flags.split()) == 3
    (line,) = capsys.readouterr().err.splitlines()
    first, last = (int(word.split(":")[2]) for word in faults.split()[:3:2])
    assert f"not finite in 3 steps in a row, {first} to {last};" in line
    assert "and try a lower --lr than 0.025; --detect-anomaly finds the operation" in line
    assert done[-1] == ended
    found = [p for p in (path, tmp_path / "run.prev.pt") if p.exists()]
    assert [snapshot(p)["step"] for p in found] == [step for step in saved or () if step]
    again = "; start again (nothing was saved yet), and try"
    assert f"go on from {path}, step {saved[0]}, with --resume" in line if saved else again in line
    assert not any(r["step"] >= last for r in metrics(path))


def test_a_save_waits_until_steps_count_again(tmp_path, inject):
    path = tmp_path / "run.pt"
    inject("nan:0:10 nan:0:11 error:0:14")
    with pytest.raises(Injected):
        train_here(path, *QUIET, "--save-interval=5")
    assert snapshot(path)["step"] == 12
    assert snapshot(tmp_path / "run.prev.pt")["step"] == 5


def test_without_the_fused_kernel(tmp_path, inject, capsys, monkeypatch):
    """MPS has none that can skip."""
    real = make_optimizer
    unfused = lambda model, args, device, _: real(model, args, torch.device("mps"))  # noqa: E731
    monkeypatch.setattr("trainer.setup.make_optimizer", unfused)
    path = tmp_path / "run.pt"
    inject("nan:0:5 nan:0:6")
    assert train_here(path, *QUIET) == 0
    assert warned(capsys) == ["5", "6"]
    steps = {float(state["step"]) for state in snapshot(path)["optimizer"]["state"].values()}
    assert steps == {18.0}
    assert not any(group["fused"] for group in snapshot(path)["optimizer"]["param_groups"])
