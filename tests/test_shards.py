"""Sharded over processes: the planner is right about what one of them needs."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cases.shapes import WIDE, T
from harness.answers import BATCH, SHAPE, ask, parse, room_for
from harness.planned import planner
from harness.runs import start_together
from harness.sharded import CASES

from memory import expanded
from planner.choose import pick_recompute
from planner.formulas import state_bytes
from planner.shards import share_of
from planner.step import Planner
from planner.timeline import KINDS, StepMemory, stretches
from trainer.device import Room
from trainer.flags import UsageError
from trainer.optimizer import make_optimizer
from trainer.plan import Question, choose_recompute

pytestmark = pytest.mark.usefixtures("everything_travels")
CPU = torch.device("cpu")
FEW = ["cheap, bfloat16", "none, accumulated", "many positions", "little but weights, rounded"]
REST = [name for name in CASES if name not in FEW]
SLOW = [pytest.param(REST[i::2], marks=pytest.mark.slow) for i in (0, 1)]


@pytest.mark.parametrize("names", [FEW, *SLOW])
def test_predicted_peak_is_that_of_real_processes(names, tmp_path):
    path = tmp_path / "bytes.json"
    result = start_together(
        ["tests/harness/sharded.py", "memory", str(path), *names],
    ).end(timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    how = {"device": CPU, "precision": torch.float32}
    for name, taken in json.loads(path.read_text()).items():
        case = CASES[name]
        more = {"shards": 2, "accumulate": case.micro_batches > 1}
        more |= {"gather_in_low": case.gather == "bfloat16"}
        more |= {"make_optimizer": partial(make_optimizer, args=case.flags, **how)}
        precision = "fp32" if case.dtype == torch.float32 else "bf16"
        step = planner(case.config, precision, **more).step(case.batch_size)
        kinds = dict(zip(KINDS, step.timeline[0], strict=True))
        assert kinds["parameters"] + kinds["optimizer"] == taken["state"], name
        assert 0.98 <= step.peak / taken["peak"] <= 1.02, name


# ---- what a process has when


def columns(step: StepMemory) -> dict[str, np.ndarray]:
    return dict(zip(KINDS, step.timeline.T, strict=True))


def of(plan: Planner) -> tuple[int, int, int, int]:
    """Bytes of one process's shards, of the root, of the positions, of a block."""
    block = sum(p.nbytes for p in plan.model.blocks[0].parameters())
    whole = sum(p.nbytes for p in plan.model.parameters())
    positions = plan.model.position_embedding.weight.nbytes
    root = whole - positions - plan.config.n_layers * block
    return whole // plan.shards, root, positions, block


@pytest.mark.parametrize(("recompute", "accumulate"), [("none", True), ("full", False)])
def test_what_is_gathered_when(recompute, accumulate):
    config = replace(WIDE, vocab_size=64)
    plan = planner(config, shards=4, device_type="cuda", accumulate=accumulate)
    share, root, positions, block = of(plan)
    step = plan.step(24, recompute=recompute)
    kinds = columns(step)
    beside = kinds["parameters"] - share
    forward, head = step.phase("forward"), step.phase("head")
    assert beside[0] == beside[-1] == 0
    assert beside[forward].max() == max(2 * root + positions, root + 2 * block)
    assert beside[head.start] == beside[head.stop - 1] == root + block  # a buffer
    assert (beside[step.phase("optimizer")] == 0).all()

    gradients = kinds["gradients"]
    assert gradients[0] == accumulate * (root + positions + 4 * block)
    of_root = root + accumulate * positions  # (the head's and ln_f's)
    for phase, i, (begin, *_), end in stretches(step):
        if phase == "backward" and i is not None:
            # Weights, and those of the next one, which arrive.
            assert beside[begin + 3 : end].max() == root + block + (i > 0) * block
            if i < 3:
                done, waiting = 3 - i, accumulate * (i + 1)
                expected = of_root + done * block // 4 + (1 + waiting) * block  # and a buffer
                assert gradients[begin] == expected
    assert (gradients[step.phase("optimizer").start : -1] == share).all()

    assert step.kept == planner(config, device_type="cuda").step(24, recompute=recompute).kept
    assert kinds["activations"][0] == 2 * 24 * T * 8  # ids
    assert (kinds["optimizer"] == kinds["optimizer"][0]).all()
    assert kinds["optimizer"][0] == pytest.approx(2 * share, rel=0.01)


@pytest.mark.parametrize("n", [2, 3, 1000])
def test_rows_that_do_not_divide_are_rounded_up(n):
    """Also where there are more processes than rows. No step takes less than its share."""
    plan = planner(WIDE, shards=n)
    step = plan.step(1, recompute="full")
    parameters = columns(step)["parameters"]
    assert [len(p) for p in plan.own.parameters()] == [
        -(-len(p) // n) for p in plan.model.parameters()
    ]
    parts = plan.own, plan.own.blocks[0], plan.own.position_embedding
    share, block, positions = (sum(p.nbytes for p in part.parameters()) for part in parts)
    assert parameters[0] == share
    root = share - positions - 4 * block
    assert parameters.max() == share + n * (root + block + max(root, block))
    least = share_of(state_bytes(WIDE), WIDE, n)
    assert least < step.peak
    if n == 2:
        assert least == pytest.approx(4 * share + of(plan)[1], rel=0.01)
    assert share_of(100, WIDE, 1) == 100


def test_shards_never_take_a_group():
    plan = planner(WIDE, shards=2)
    assert expanded(pick_recompute(plan, 16, 1).config).group == 1  # nothing fits


# ---- asked by flags

DEEP = "--n-layers 8 --d-model 64 --seq-len 16 --batch-size 2"  # much weight, little else


@pytest.mark.parametrize(
    ("flag", "trainer", "way", "said"),
    [
        ("--fsdp", "train_fsdp.py", {"shards": 4}, "4 processes hold the model between them"),
        # In whole sequences; a step has as many as with one process.
        ("--sp", "train_sp.py", {"processes": 2, "shards": 2, "sharing": 2}, "share each sequence"),
    ],
)
def test_plan_memory_plans_shards(flag, trainer, way, said):
    answer = ask(
        f"--vocab-size 64 --device cpu --memory-budget 1GiB {flag} --nproc-per-node "
        f"{way['shards']} --num-steps 3"
    )
    precision = getattr(torch, answer.json["precision"])
    planner_of = [Question(parse(SHAPE), 64, CPU, precision, **more).planner for more in (way, {})]
    peak, alone = (plan.step(BATCH, recompute="full").peak for plan in planner_of)
    assert answer.peaks["full"] == peak < alone
    assert said in answer.out
    assert answer.json["run"]["tokens"] == 3 * BATCH * 32 * (1 if "sharing" in way else 4)
    command = " ".join(answer.command)
    assert command.startswith(f"torchrun --nproc-per-node={way['shards']} {trainer} --")
    assert flag not in command


def test_the_way_to_shards_is_the_shortest():
    """With what else it takes, no more; and not at all where shards do not help."""
    args = parse(f"{SHAPE} --device cpu --no-amp --use-activation-checkpoint full/2 {DEEP}")
    ddp = Question(args, 64, CPU, torch.float32, ddp=True, processes=4)
    state = ddp.state
    at_state = replace(ddp, room=room_for(state))
    _, knob = at_state.way_out()
    none = "--use-activation-checkpoint none"  # there is so much room then
    assert knob.command(args) == f"train_fsdp.py {none}"
    auto = parse(f"{SHAPE} --device cpu --no-amp --use-activation-checkpoint auto {DEEP}")
    with pytest.raises(UsageError, match=r": train_fsdp.py fits \(the proc"):  # auto stays auto
        choose_recompute(replace(ddp, args=auto, room=Room(state, "cpu")))
    for asked in (replace(ddp, room=room_for(2**16)), replace(at_state, processes=1)):
        _, knob = asked.way_out()
        assert knob is None or not knob.trainer
