"""A step that runs out of memory is done again with a deeper policy, and nothing else changes."""

import gc
import random
import re
import sys

import pytest
import torch
from harness import runs
from harness.faults import broken, raising, undisturbed
from harness.marks import rest_slow
from harness.rows import row
from harness.runs import (
    FAULTS,
    metrics,
    parse,
    same,
    snapshot,
    train,
    train_here,
)
from harness.shortage import (
    ERROR,
    operators_of_each,
    repeated,
    running_out,
)
from torch.utils._pytree import tree_leaves

import train_minimal
import trainer.run
from data.errors import MiniGPTError
from planner import Layout
from scripts.plans import plan_for_command
from trainer.plan import plans_to_try
from trainer.resume import settings_of

slow = pytest.mark.slow
STEP = 2  # the first that has the optimizer's state
WAYS = {
    "none": "--no-amp --grad-accum-steps=2",
    "none, in a tree": "--no-amp --grad-accum-steps=4 --reproducible-sums",
    "none, float16": "--amp-dtype=float16 --lr=1e-4",
    "cheap": "--no-amp --loss-chunks=1",
    "selective": "--no-amp --optimizer=muon --moments-dtype=bfloat16",
    "mlp:1,cheap": "--amp-dtype=bfloat16 --loss-chunks=3 --grad-accum-steps=2",
    "attn": "--amp-dtype=bfloat16 --grad-accum-steps=2",
    "sdpa": "--no-amp --dropout=0 --grad-accum-steps=2",
    "full": "--amp-dtype=float16 --lr=1e-4 --grad-accum-steps=2",
    "cheap+offload": "--no-amp",
}

FAST = ["none, in a tree", "cheap+offload"]


def flags_of(way: str) -> list[str]:
    policy, _, _ = way.partition(", ")
    return ["--n-layers=3", f"--use-activation-checkpoint={policy}", *WAYS[way].split()]


def places_in(operators: int, draw: random.Random, number: int) -> list[tuple[int, bool]]:
    return [(draw.randint(1, operators), draw.random() < 0.5) for _ in range(number)]


@row("memory runs out in any")
@pytest.mark.usefixtures("everything_travels")
@pytest.mark.parametrize("way", rest_slow(WAYS, lambda way: way in FAST))
def test_wherever_forward_or_backward_run_out_the_step_ends_with_the_same_bits(
    way, tmp_path, capsys, thorough
):
    """Also if the second attempt fails, too. The first step makes nothing that all others find:
    half made, it would be found, too. (But the buffers of offload, one by one.)"""
    run, draw = runs.ready(tmp_path, *flags_of(way)), random.Random(way)
    first, n = operators_of_each(run, STEP)
    assert first == n or "offload" in way
    number, succeeded, step = 300 if thorough else 8, 0, repeated(run)
    whole, run.clock.predicted = step([]), (0, 1)
    for i in range(number):
        places = places_in(n, draw, 1 + (i % 4 == 3))
        rescued = step(places)
        assert same(whole, rescued) or len(places) == 2 and not rescued, places
        succeeded += bool(rescued) and run.clock.predicted == (run.plans[0].peak, 1)
    said = re.findall("^warning  step 3: out of .*same results$", capsys.readouterr().out, re.M)
    assert len(said) >= succeeded >= 3 * number / 4


POLICY = "--use-activation-checkpoint"


@pytest.mark.parametrize(
    "flags", ["--no-amp", f"--amp-dtype=float16 {POLICY}=auto --memory-budget=600KiB"]
)
def test_the_run_says_it_and_goes_on_with_the_policy_that_it_took(flags, path, capsys):
    """The flags stay as they were typed: --resume takes them again."""
    flags = ["--num-steps=4", "--lr-scheduler=constant", *flags.split()]
    with running_out(STEP, (99, False)):
        assert train_here(path, *flags, "--num-steps=3") == 0
    taken = snapshot(path)["config"]["recompute"]
    said = capsys.readouterr().out
    (line,) = re.findall("^warning  step .*", said, re.M)
    assert f"2: out of memory with recompute none; again, and from now on, with {taken} (" in line
    assert (
        line.endswith(" predicted): same results") and f"; ran out of it: none -> {taken}" in said
    )
    assert train_here(path, "--resume", "--num-steps=4") == 0
    assert "learning rate" not in capsys.readouterr().out
    policies = [record["recompute"] for record in metrics(path)]
    assert policies == ["none", taken, taken, "none"]
    ours, theirs = snapshot(path), snapshot(undisturbed(*flags))
    for part in ("model", "optimizer", "scaler"):
        assert same(ours[part], theirs[part]), part
    assert settings_of(ours) == settings_of(theirs)


@pytest.mark.usefixtures("plans_memory")
@pytest.mark.parametrize(("budget", "planned"), [("300KiB", True), ("1GiB", False)])
def test_near_its_limit_a_run_plans_before_its_first_step(budget, planned, tmp_path, monkeypatch):
    """When memory has run out, there may be none for a simulation. Far from it, there is some."""
    run = runs.ready(tmp_path, "--no-amp", f"{POLICY}=auto", f"--memory-budget={budget}")
    assert run.model.config.recompute == "none" and (len(run.plans) > 1) == planned
    if planned:
        monkeypatch.setattr("trainer.plan.make_planner", raising(MemoryError()))
    assert len([*plans_to_try([run.plans[0], *(run.plans[1:] or run.plans[0].deeper_plans())])]) > 1


@pytest.mark.parametrize("way", ["none", "cheap", "selective"])
def test_nothing_of_the_failed_attempt_stays_alive(way, tmp_path, monkeypatch):
    """Without the garbage collector's help: else the next attempt would have less room."""
    run, draw, left = runs.ready(tmp_path, *flags_of(way)), random.Random(way), []
    (_, n), mode = operators_of_each(run, STEP), None

    def bytes_left(*_: object) -> None:
        there = tree_leaves([[*run.model.parameters()], [*run.optimizer.state.values()]])
        known = {its.untyped_storage()._cdata for its in there if isinstance(its, torch.Tensor)}
        left.append(sum(its().nbytes() for key, its in mode.alive.items() if key not in known))
        raise MemoryError

    monkeypatch.setattr("trainer.run.switch_policy", bytes_left)
    gc.disable()
    try:
        for place in places_in(n, draw, 24):
            with running_out(run.step, place) as (mode,), pytest.raises(MemoryError):
                train_minimal.train_step(run)
    finally:
        gc.enable()
    assert len(left) == 24 and max(left) <= 256


@pytest.mark.usefixtures("plans_memory")
@pytest.mark.parametrize(
    ("step", "flags", "backward"),
    rest_slow(
        [(3, "", False), (3, "--profile=1", True), (4, "--profile=1", True)],
        lambda case: case[0] == 4,
    ),
)
def test_a_step_that_is_looked_at(step, flags, backward, path, capsys):
    """Measured (the third) or profiled (the fourth): neither takes the planner's tensors, nor its
    blocks, for those of the step; and no peak of two attempts is printed."""

    def run_out_once(run) -> None:  # (by no mode: the clock has one)
        def fail(*_: object) -> None:
            handle.remove()
            raise RuntimeError(ERROR)

        block = run.model.blocks[1]
        register = block.register_full_backward_hook if backward else block.register_forward_hook
        handle = register(fail)

    flags = "--no-amp", "--num-steps=5", f"{POLICY}=cheap", *flags.split()
    assert broken(path, {step: run_out_once}, *flags, "--detect-anomaly") == 0
    text = capsys.readouterr().out
    assert len(re.findall("^warning  step .*same results$", text, re.M)) == 1
    peaks = re.findall("^measured peak (.*) of tensors; predicted (.*), without", text, re.M)
    assert [measured == expected for measured, expected in peaks] == [True] * (step == 4)
    assert same(snapshot(path)["model"], snapshot(undisturbed(*flags[:3]))["model"])
    if step == 4:
        trace = path.with_name("run.trace.json").read_text()
        assert '"backward"' in trace


# ---- Where the step cannot be done again


ASK = "what fits: python -m scripts.plan_memory"
CANNOT = {
    "it is not wanted": ("--on-out-of-memory=stop", 1, "none"),
    # With all that are left, too.
    "no other policy": (f"{POLICY}=full/2", 9, "attn"),
    "nothing at all": (f"{POLICY}=attn --batch-size=1", 1, "attn"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_where_nothing_deeper_is_left_or_wanted_it_ends_as_ever(name, path, capsys):
    flags, times, says = CANNOT[name]
    with running_out(STEP, *[(50, False)] * times):
        assert train_here(path, "--no-amp", "--save-interval=1", *flags.split()) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f" --seq-len 16, recompute {says}; {ASK} " in line and snapshot(path)["step"] == 1
    assert f"go on from {path}, step 1" in line


@row("memory runs out once more")
@pytest.mark.parametrize(
    ("place", "error", "says"),
    [
        ("planner.Planner.step", RuntimeError(ERROR), "none"),
        ("trainer.run.plans_to_try", MemoryError(), "none"),
        ("trainer.run.check_model", RuntimeError(ERROR), "selective:1"),
        ("trainer.run.check_model", MiniGPTError("no policy is exact"), "none"),
    ],
)
def test_where_memory_runs_out_in_the_rescue_it_ends_as_ever(
    place, error, says, path, capsys, monkeypatch
):
    monkeypatch.setattr(place, raising(error))
    with running_out(STEP, (50, False)):
        assert train_here(path, "--no-amp", "--save-interval=1") == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f"recompute {says}; {ASK} " in line and f"go on from {path}, step 1" in line


@row("memory runs out in the update")
def test_an_update_that_runs_out_half_way_is_not_done_again(path, capsys, monkeypatch):
    """Some weights have changed already: here those of the first group, in the second step."""
    flags, real = ("--no-amp", "--save-interval=1", "--num-steps=3"), torch._fused_adamw_
    ways = iter([real, real, real, raising(RuntimeError(ERROR))])
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *given, **more: next(ways)(*given, **more))
    assert train_here(path, *flags) == 4 and snapshot(path)["step"] == 1
    captured = capsys.readouterr()
    assert "warning  step" not in captured.out and f"recompute none; {ASK} " in captured.err
    monkeypatch.undo()
    assert train_here(path, *flags, "--resume") == 0
    assert same(snapshot(path)["model"], snapshot(undisturbed(*flags))["model"])


def test_of_a_changed_model_only_what_is_exact_is_taken(path, capsys, monkeypatch):
    """Here it is attn, and what would be taken first without the check is selective:1."""
    exact, looked_at = trainer.run.check_model, []

    def compare(model, *how: object) -> None:
        looked_at.append(model.config.recompute)
        if model.config.recompute != "attn":
            raise MiniGPTError("its result differs")
        exact(model, *how)

    monkeypatch.setattr(trainer.run, "check_model", compare)
    with running_out(STEP, (50, False)):
        assert train_here(path, "--no-amp", "--num-steps=4") == 0
    assert looked_at[0] == "selective:1" and looked_at[-1] == "attn"
    assert "recompute none; again, and from now on, with attn (" in capsys.readouterr().out
    assert same(
        snapshot(path)["model"], snapshot(undisturbed("--no-amp", "--num-steps=4"))["model"]
    )


# ---- For real


LARGE = (
    "--use-toy-data --max-tokens=9000 --vocab-size=256 --n-layers=8 --n-heads=8 --d-model=256 "
    "--seq-len=512 --batch-size=8 --dropout=0.1 --no-amp --num-steps=2 --save-interval=1"
).split()


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("plans_memory")
@pytest.mark.parametrize(
    ("share", "fault", "policy", "code"),
    [
        (0.7, "oom:0:1", "none", 0),
        (0.35, "oom:0:1", "none", 0),
        (-0.05, "oom:0:2", "sdpa:6,attn", 4),
    ],
)
def test_a_process_that_may_have_no_more(share, fault, policy, code, path):
    """A real failure of the CPU's allocator. The planner has no more than the rest, either. It may
    have, beyond what it has before that step, a `share` of the way from what `full` needs to what
    `none` does."""
    planner = plan_for_command(parse(*LARGE), Layout()).planner
    least, most = (planner.step(8, recompute=policy).peak for policy in ("full", "none"))
    weights = sum(weight.nbytes for weight in planner.model.parameters())
    room = str(int(least + share * (most - least) - weights))
    env = {"FAULTS": fault, "ROOM": room, "MALLOC_MMAP_THRESHOLD_": "65536"}
    flags = (*LARGE, f"{POLICY}={policy}")
    result = train(path, *flags, expect=code, script=f"{FAULTS} train_minimal", **env)
    *_, taken = re.findall(r"^warning .* on, with (\S+) .* results$", result.stdout, re.M)
    if code:
        assert f"recompute {taken}; {ASK} " in result.stderr and snapshot(path)["step"] == 1
    else:
        assert same(snapshot(path)["model"], snapshot(undisturbed(*LARGE))["model"])
