"""What offload takes: of a CPU's memory as the planner predicts it, at sizes as they are."""

import gc
import json
import random
import re
from dataclasses import replace
from typing import NamedTuple
from weakref import ref

import pytest
import torch
from cases.shapes import CONFIG, PRECISIONS
from harness.planned import adamw
from harness.planned import planner as planner_of
from test_model import random_ids, tiny

from memory import offload
from model import RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig
from planner import Planner, StepMemory
from planner import step as step_of_planner
from scripts import plan_memory as plan_tool
from trainer.flags import build_parser, fill_in, model_config
from trainer.measured import LiveStorages
from trainer.metrics import format_bytes
from trainer.plan import Plans, TooLarge, plan_memory
from trainer.process import OneProcess

POLICIES = RECOMPUTE_POLICIES[1:]
CLIP = OneProcess(torch.device("cpu")).clip_gradients


class Case(NamedTuple):
    config: MiniGPTConfig
    batch_size: int
    seq_len: int
    precision: torch.dtype


def draw(number: int, policy: str) -> Case:
    """A tiny shape, of whose tensors some are large enough to travel; and some shapes have none."""
    choose = random.Random(number).choice
    n_heads, seq_len = choose((1, 2, 4)), choose((8, 31, 64, 96, 128, 200))
    d_model = n_heads * choose((16, 48, 64))
    config = MiniGPTConfig(
        vocab_size=choose((31, 256, 1000)),
        max_position_embeddings=seq_len,
        n_layers=choose((1, 2, 3, 3, 4)),
        n_heads=n_heads,
        d_model=d_model,
        d_ff=choose((2, 3, 4)) * d_model,
        dropout=number % 2 / 10,
        recompute=policy,
        offload_activations=True,
    )
    precision = [*PRECISIONS.values()][number // 2 % 2]
    return Case(config, max(1, choose((8, 1000, 1500, 2000)) // seq_len), seq_len, precision)


def plan(case: Case, device_type: str = "cpu") -> StepMemory:
    settings = {"precision": case.precision, "make_optimizer": adamw, "device_type": device_type}
    return Planner(case.config, case.seq_len, clip=CLIP, **settings).step(case.batch_size)


def measured_peak(case: Case) -> int:
    """The most bytes that are alive at once in the second of two real steps."""
    config, batch_size, seq_len, precision = case
    in_bf16 = precision != torch.float32
    with LiveStorages() as storages:
        model = MiniGPT(config).train()
        optimizer = adamw(model)
        for _ in range(2):
            storages.peak = storages.now
            ids, labels = torch.zeros(2, batch_size, seq_len, dtype=torch.int64)
            with torch.autocast("cpu", precision, enabled=in_bf16, cache_enabled=False):
                loss = model(ids, labels)
            loss.backward()
            del ids, labels, loss
            CLIP(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return storages.peak


SOME = [(n, [policy]) for n, policy in zip((12, 17, 10, 37, 34, 35), POLICIES, strict=True)]
ALL = [pytest.param(number, POLICIES, marks=pytest.mark.slow) for number in range(12)]


@pytest.mark.parametrize(("number", "policies"), [*SOME, *ALL])
def test_predicted_peak_is_that_of_a_real_offloaded_step(number, policies):
    for policy in policies:
        case = draw(number, policy)
        predicted, measured = plan(case).peak, measured_peak(case)
        assert predicted == pytest.approx(measured, rel=1e-3 if measured > 1e6 else 3e-3), policy


# ---- pinned memory


def pinned_by_torch(size: int) -> int:
    """torch rounds up: c10's CachingHostAllocator."""
    return 1 << (size - 1).bit_length()


@pytest.mark.parametrize("number", range(0, 6, 2))
def test_what_is_pinned_is_what_was_predicted_and_hardly_more_than_what_travels(
    number, monkeypatch
):
    """Seen by a stand-in for the allocator. A GPU's memory is pinned; all else is the same."""
    monkeypatch.setattr(offload, "SMALL", 2**14)
    config, *_, precision = case = draw(number, POLICIES[-number])
    case = case._replace(config=replace(config, n_layers=3))
    step = plan(case)
    assert step.moved
    if config.dropout == 0:  # else a GPU keeps other masks
        assert plan(case, "cuda").moved == step.moved
    asked: list[int] = []
    empty = torch.empty

    def stand_in(*size, **settings):
        if settings.get("dtype") == torch.uint8:
            assert settings["pin_memory"] is False
            asked.extend(size)
        return empty(*size, **settings)

    monkeypatch.setattr(torch, "empty", stand_in)
    model, ids = MiniGPT(case.config).train(), torch.zeros(case[1:3], dtype=torch.int64)
    for _ in range(3):
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss = model(ids, ids)
        loss.backward()
    pinned = sum(map(pinned_by_torch, asked))
    assert pinned == sum(asked) == step.host
    assert sum(step.moved) <= pinned <= 1.05 * sum(step.moved)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_largest_batch_in_the_memory_of_a_cpu(device_type, monkeypatch):
    """Where it is the device, blocks are in the peak; beside a GPU they have room of their own."""
    for room in (offload, step_of_planner):
        monkeypatch.setattr(room, "SMALL", 2**14)
    memory = {"recompute": "mlp", "offload_activations": True}
    planner = planner_of(CONFIG, device_type=device_type)
    for limit in (2**23, 3 * 2**22):
        if device_type == "cpu":
            most = planner.largest_batch(limit, 9, **memory)
            steps = [planner.step(n, **memory).peak for n in (most, most + 1)]
        else:
            most = planner.largest_batch(2**40, 9, host=limit, **memory)
            steps = [planner.step(n, **memory).host for n in (most, most + 1)]
        assert most > 9 and steps[0] <= limit < steps[1]
    too_few = planner.step(1, **memory).host - 1
    assert planner.largest_batch(2**40, 9, host=too_few, **memory) == 0


def test_blocks_are_few_powers_of_two_and_hardly_larger_in_all():
    choose = random.Random(0)
    for bits in range(10, 40):
        sizes = [2**bits, 2**bits + 1, 2 ** (bits + 1) - 1]
        for size in sizes + [choose.randrange(2**bits, 2 ** (bits + 1)) for _ in range(20)]:
            blocks = offload.sizes_of_blocks(size)
            assert all(block == pinned_by_torch(block) for block in blocks) and len(blocks) <= 6
            assert size <= sum(blocks) <= size * 33 / 32


# ---- what is let go of


def test_a_forward_that_is_given_up_lets_go_of_all_it_kept(monkeypatch):
    """Also of what is too small to travel, such as a result that an operator keeps of itself."""
    monkeypatch.setattr(offload, "SMALL", 3 * 3 * 16 * 32 * 4)  # qkv travels
    model, ids = (
        tiny(recompute="mlp", offload_activations=True, n_layers=4).train(),
        random_ids(3, 16),
    )
    loss = model(ids, ids)
    kept = ref(loss)
    del loss
    gc.collect()
    unused = [block for blocks in model.host_memory.unused.values() for block in blocks]
    assert kept() is None and len(unused) == len(model.host_memory.made) > 2


# ---- does it fit


OFFLOADED_FULL = {"recompute": "full", "offload_activations": True}
OFFLOADED = (
    "--use-toy-data --vocab-size 61 --n-layers 4 --n-heads 2 --d-model 16 --seq-len 32 "
    "--batch-size 8 --device {} --use-activation-checkpoint full --offload-activations"
)


@pytest.mark.parametrize(("left", "processes"), [("enough", 3), ("little", 3), ("never", 1)])
def test_the_memory_of_a_cpu_is_part_of_the_room(left, processes, monkeypatch, everything_travels):
    process = OneProcess(torch.device("cuda"))
    process.processes_here = processes
    args = fill_in(build_parser("test", "x.pt").parse_args(OFFLOADED.format("auto").split()))
    need = Plans(61, process.device, torch.float32).planner(args).step(8, **OFFLOADED_FULL).host
    x = 8 * 32 * 16 * 4
    assert need == 3 * x  # of four blocks
    free = {"enough": need, "little": need - 1, "never": need - 1}[left]
    total = processes * (free if left == "never" else need)
    monkeypatch.setattr("trainer.room.for_tensors", lambda room, device_type: int(room))
    monkeypatch.setattr("trainer.plan.own_memory", lambda: 0)
    monkeypatch.setattr("trainer.plan.clock_card", lambda args, device: None)
    for room in ("plan.total_memory", "room.free_memory"):
        there = total if room.startswith("plan") else processes * free
        monkeypatch.setattr(f"trainer.{room}", lambda d, n=there: n if d.type == "cpu" else 2**40)

    def words() -> str:
        return plan_memory(args, process, model_config(args, 61), torch.float32)[1]

    way_out = "--recompute-group 2 (same results, some more time), which fits"
    each = "3 processes, each " * (processes > 1)
    said = f"{each}{need / 1024:.1f} KiB of CPU memory for --offload-activations, "
    if left == "never":
        with pytest.raises(TooLarge, match=re.escape(said + "the machine has ")) as raised:
            words()
        assert str(raised.value).endswith(f"; try {way_out}")
    elif left == "little":
        _, line = words().splitlines()
        assert line.startswith(f"warning  {said}but tensors may take ")
        assert line.endswith(f"; try {way_out}")
    else:
        assert "\n" not in words()


def test_plan_memory_says_what_offload_takes_of_a_cpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(offload, "SMALL", 8 * 32 * 16 * 4)
    flags, file = OFFLOADED.format("cuda").split(), tmp_path / "plan.json"
    flags += ["--memory-budget", "64MiB", "--nproc-per-node=2", "--json", str(file)]

    def planned() -> dict:
        assert plan_tool.main(flags) == 0
        *_, row = json.loads(file.read_text())["rows"]
        return row

    row = planned()
    said = re.search(r"^offload .*", capsys.readouterr().out, re.M)
    assert row["host_bytes"] == 3 * 8 * 32 * 16 * 4 and row["fits"]
    about = 2 * row["host_bytes"] * row["largest_batch_safely"] / 8
    assert said and said[0] == (
        f"offload  pins {format_bytes(2 * row['host_bytes'])} of CPU memory in 2 processes, "
        f"about {format_bytes(about)} for {row['largest_batch_safely']} sequences in each"
    )
    # A GPU that is here is in a machine whose memory is known.
    target = plan_tool.target
    here = replace(target(plan_tool.parse(flags), 2)[2], host=row["host_bytes"] - 1)
    monkeypatch.setattr(plan_tool, "target", lambda *args: (*target(*args)[:2], here))
    less = planned()
    assert not less["fits"] and less["largest_batch"] < 8 <= row["largest_batch"]
