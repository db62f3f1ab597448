"""docs/calculator.js says what planner/ says: its peaks, tables and commands."""

from functools import partial

import pytest
import torch
from harness.calculator import SCRIPT, as_page, evaluate, random_shapes
from harness.runs import parse

from model import MiniGPTConfig
from planner import CARDS, Planner, StepMemory
from planner.formulas import count_parameters, flops_per_token
from scripts import memory_page, plan_memory
from studies.calculator_tables import tables
from trainer.device import without_margin
from trainer.flags import SHAPE_BY_MODEL, model_config
from trainer.optimizer import make_optimizer
from trainer.plan import vocab_size_of
from trainer.process import OneProcess

ALL = random_shapes(60)
# What is drawn rarely: a peak in the optimizer (of few tokens, with copies of tables that are no
# multiple of 64 elements, one or both moments at a time; and beside the head at once), of a narrow
# MLP in attention's backward, or where a replay with dropout ends, and behind all blocks.
SHAPE = {"batch_size": 64, "seq_len": 64, "precision": torch.bfloat16}
SHAPE |= {"optimizer": "adamw", "moments": torch.float32}
LEAN = {"batch_size": 1, "moments": torch.bfloat16}
GPT2 = partial(MiniGPTConfig, 50257)
RARE = [
    SHAPE | LEAN | {"optimizer": "muon", "config": MiniGPTConfig(10007, 64, 2, 4, 200, 800)},
    SHAPE | LEAN | {"seq_len": 7, "config": GPT2(7, 4, 19, 152, 464, loss_chunks=1)},
    SHAPE
    | {"batch_size": 6, "optimizer": "muon", "moments": torch.bfloat16}
    | {"config": GPT2(64, 4, 9, 1152, 4608, loss_chunks=1)},
    SHAPE | {"config": MiniGPTConfig(61, 64, 3, 4, 96, 96, recompute="full")},
    SHAPE | {"config": MiniGPTConfig(61, 64, 1, 4, 96, 96, 0.1, "selective"), "ddp": True},
    SHAPE | {"config": MiniGPTConfig(61, 64, 2, 4, 256, 256, 0.1, "qkv")},
    SHAPE
    | {"batch_size": 19, "seq_len": 7}
    | {"config": MiniGPTConfig(32000, 1024, 6, 3, 120, 480, 0.0, "full", loss_chunks=4)},
]


def planned(shape: dict) -> StepMemory:
    """The step that a trainer with these flags would predict."""
    moments, precision = str(shape["moments"]).removeprefix("torch."), shape["precision"]
    args = parse(f"--optimizer={shape['optimizer']} --moments-dtype={moments}")
    processes = {name: shape[name] for name in ("ddp", "shard_degree") if name in shape}
    cuda = torch.device("cuda")
    return Planner(
        shape["config"],
        shape["seq_len"],
        precision=precision,
        make_optimizer=partial(make_optimizer, args=args, device=cuda, precision=precision),
        clip_gradients=OneProcess(cuda).clip_gradients,
        device_type="cuda",
        **processes,
    ).step(shape["batch_size"])


def merged(parts: dict[str, int]) -> dict[str, int]:
    """Of two instants with as many bytes, in GELU's backward, either may be said to be the peak."""
    passing = ("activations", "recomputed", "temporaries")
    return {k: n for k, n in parts.items() if k not in passing} | {
        "passing": sum(parts[kind] for kind in passing)
    }


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))]
)
def test_a_peak_is_the_planners(part, request):
    """To two thousandths, in the same place, made of the same, as page and documents promise. FLOPs
    and parameters are those of planner/formulas.py."""
    shapes = ALL[10 * part : 10 * part + 10] + RARE * (part == 0)
    asked = "x.map((s) => [peak(s), countParameters(s), ...stepFlops(s)])"
    found = evaluate(asked, list(map(as_page, shapes)), request)
    for shape, (peak, parameters, *flops) in zip(shapes, found, strict=True):
        config, step = shape["config"], planned(shape)
        assert parameters == count_parameters(config)
        assert tuple(flops) == flops_per_token(config, shape["seq_len"])
        assert peak["bytes"] == sum(peak["parts"].values())
        assert peak["where"] == step.peak_location, shape
        assert peak["bytes"] == pytest.approx(step.peak, rel=0.002), shape
        parts = merged(step.bytes_by_kind_at_peak)
        assert merged(peak["parts"]) == pytest.approx(parts, abs=0.002 * step.peak), shape


def test_tables_are_those_of_the_project(request):
    assert tables() in SCRIPT.read_text(), "stale: python -m studies.calculator_tables"
    asked = "Object.keys(CARDS).map((c) => [c, memoryOf(c), forTensors(memoryOf(c))])"
    for name, size, safe in evaluate(asked, None, request):
        assert size == CARDS[name].memory and safe == without_margin(size, "cuda")


# ---- commands


CONTROLS = {
    "layers": "L", "width": "C", "heads": "H", "mlp": "F", "length": "T", "batch": "B",
    "blocks": "layers", **{name: name for name in ("policy", "precision", "moments", "optimizer")},
}  # fmt: skip


def states(n: int) -> list[dict]:
    """What the page's controls may stand at; the shapes by name among them."""
    found = []
    for i, shape in enumerate(map(as_page, random_shapes(n, seed=7))):
        state = {name: shape[letter] for name, letter in CONTROLS.items()}
        if i % 3 == 0:
            layers, heads, width = list(SHAPE_BY_MODEL.values())[i % 4].values()
            state |= {"layers": layers, "heads": heads, "width": width}
            state |= {"blocks": layers, "mlp": 4 * width}
        state |= {
            "vocabulary": max(257, shape["V"]), "dropout": "on" if shape["dropout"] else "off",
            "head": "once" if shape["chunks"] == 1 else "chunks",
            "processes": 4 if shape["ddp"] else shape["shards"],
            "trainer": "ddp" if shape["ddp"] else "fsdp",
            "card": ["RTX 3060 12GB", "A100 40GB", "H100 PCIe"][i % 3],
        }  # fmt: skip
        found.append(state)
    return found


def check_means(args, shape: dict) -> None:
    """Flags mean what the page has computed."""
    precision = "float32" if args.no_amp else args.amp_dtype.replace("auto", "bfloat16")
    asked = vars(args) | {"moments": args.moments_dtype, "precision": precision}
    its = as_page(asked | {"config": model_config(args, vocab_size_of(args))})
    alone = {"ddp": shape["ddp"], "shards": shape["shards"]}  # (what starts processes is no flag)
    assert (its | alone).items() <= shape.items()


def test_commands_are_what_the_trainers_take(request):
    asked = states(200)
    commands = "[shapeOf(s), runCommand(s), planCommand(s), seeCommand(s)]"
    answers = evaluate(f"x.map((s) => {commands})", asked, request)
    for state, (shape, run, plan, see) in zip(asked, answers, strict=True):
        trainer = "ddp" if shape["ddp"] else "fsdp" if shape["shards"] > 1 else "minimal"
        n = state["processes"]
        start = f"torchrun --nproc-per-node={n}" if n > 1 else "python"
        launch, _, flags = run.partition(f" train_{trainer}.py")
        assert launch == start
        args = parse(flags)
        check_means(args, shape)

        _, _, flags = plan.partition("python -m scripts.plan_memory")
        planned = plan_memory.parse(flags.split())
        assert (planned.card, planned.nproc_per_node or 1) == (state["card"], n)
        assert planned.fsdp == (trainer == "fsdp")
        planned.use_activation_checkpoint = args.use_activation_checkpoint  # (it shows all)
        check_means(planned, shape)

        _, _, flags = see.partition("python -m scripts.memory_page")
        check_means(memory_page.parse(flags.split()), shape)
