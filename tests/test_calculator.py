"""docs/calculator.html says what planner/ says: its formulas, tables, commands, and the page."""

import re
import shlex
import statistics
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from harness.calculator import LETTERS, PAGE, SCRIPT, as_page, evaluate, random_shapes
from harness.runs import ROOT

from memory.head import count_chunks, rows_of_slice
from model import RECOMPUTE_POLICIES, MiniGPTConfig
from planner import CARDS
from planner import peak as peak_file
from planner.formulas import closed_form, count_parameters, step_flops
from planner.kernels import workspaces
from planner.peak import KEPT, peak
from planner.step import Planner
from planner.timeline import KINDS
from scripts import memory_page, plan_memory
from scripts.memory_timeline_pictures import COLORS, NAMES
from trainer import optimizer as optimizer_file
from trainer.card import device_type
from trainer.flags import SHAPES, build_parser, fill_in, model_config
from trainer.optimizer import make_optimizer
from trainer.plan import vocabulary
from trainer.process import OneProcess
from trainer.room import for_tensors

ALL = random_shapes(200)
EVERYTHING = """x.map((s) => ({
    form: closedForm(s), parameters: countParameters(s), flops: stepFlops(s), peak: peak(s),
    chunks: countChunks(s.B * s.T, s.V, s.chunks, 2), rows: rowsOfSlice(s.B * s.T, s.V),
}))"""


# ---- formulas


def expected(shape: dict) -> dict:
    config, B, T = shape["config"], shape["batch_size"], shape["seq_len"]
    form = (shape[name] for name in ("precision", "optimizer", "moments"))
    where, parts = peak(**shape)
    return {
        "form": closed_form(config, B, T, *form),
        "parameters": count_parameters(config),
        "flops": list(step_flops(config, T)),
        "peak": {"where": where, "bytes": sum(parts.values()), "parts": parts},
        "chunks": count_chunks(B * T, config.vocab_size, config.loss_chunks, 2),
        "rows": rows_of_slice(B * T, config.vocab_size),
    }


def test_200_random_shapes_are_equal_to_the_formulas_to_the_byte(request):
    assert len(ALL) == 200
    found = evaluate(EVERYTHING, list(map(as_page, ALL)), request)
    for shape, its in zip(ALL, found, strict=True):
        assert its == expected(shape), shape


def test_its_constants():
    """Those that are not imported, as nothing is imported from above, or a GPU may be here."""
    assert peak_file.AT_A_TIME == optimizer_file.AT_A_TIME
    assert peak_file.LANES == optimizer_file.LANES
    assert torch.cuda.is_available() or peak_file.WORKSPACES == workspaces()


def test_what_is_kept_is_what_the_closed_form_says():
    """The blocks' bytes, once more, from the table in planner/peak.py."""
    for shape in ALL:
        config, N = shape["config"], shape["batch_size"] * shape["seq_len"]
        walk = peak_file.Walk(config, shape["batch_size"], shape["seq_len"], shape["precision"],
                              False, 1)  # fmt: skip
        x = 4 * N * config.d_model + walk.sizes["mask"]
        kept = {policy: x + sum(map(walk.sizes.get, KEPT[policy])) for policy in KEPT}
        kept["selective"] += 2 * walk.a * N * config.d_model
        blocks = kept[config.recompute] * config.n_recomputed
        blocks += kept["none"] * (config.n_layers - config.n_recomputed)
        form = closed_form(config, shape["batch_size"], shape["seq_len"], shape["precision"])
        assert blocks == form["blocks"]


@pytest.mark.parametrize("memory", [{"recompute_group": 2}, {"offload_activations": True}])
def test_what_has_no_formula(memory):
    config = MiniGPTConfig(recompute="full", **memory)
    with pytest.raises(ValueError, match="no formula for recompute_group"):
        peak(config, 1, 64, torch.float32)


# ---- how far it is from the planner


def planner(shape: dict, **settings) -> Planner:
    """Of what `peak` gets."""
    flags = [f"--optimizer={shape['optimizer']}", f"--moments-dtype={str(shape['moments'])[6:]}"]
    args, precision = fill_in(build_parser("test", "x.pt").parse_args(flags)), shape["precision"]
    make = partial(make_optimizer, args=args, device=torch.device("cuda"), precision=precision)
    config, settings = shape["config"], {"device_type": "cuda"} | settings
    settings |= {name: shape[name] for name in ("ddp", "shards") if name in shape}
    return Planner(
        config,
        shape["seq_len"],
        precision=precision,
        make_optimizer=make,
        clip=OneProcess(torch.device("cuda")).clip_gradients,
        **settings,
    )


def error(shape: dict, plan: Planner) -> float:
    """Of its peak, relative to the planner's; both stand in the same place."""
    step, (where, parts) = plan.simulate_few(shape["batch_size"], shape["config"]), peak(**shape)
    assert (where, parts.keys()) == (step.where, set(KINDS))
    return abs(sum(parts.values()) / step.peak - 1)


def errors(shape: dict, **settings) -> list[float]:
    """Of each policy's."""
    plan, found = planner(shape, **settings), []
    n = shape["config"].recompute_layers
    for policy in RECOMPUTE_POLICIES:
        layers = None if policy == "none" else n
        config = replace(shape["config"], recompute=policy, recompute_layers=layers)
        found.append(error(shape | {"config": config}, plan))
    return found


def small(shape: dict, n_tokens: int) -> dict:
    """Its head shall have few chunks, which are many operators; its blocks are alike, and of twelve
    there is one of each sort."""
    config, some = shape["config"], shape["config"].recompute_layers
    config = replace(config, n_layers=min(12, config.n_layers),
                     recompute_layers=None if some is None else min(12, some))  # fmt: skip
    return shape | {"config": config, "batch_size": max(1, n_tokens // shape["seq_len"])}


@pytest.mark.parametrize("i", range(3))
def test_a_peak_is_close_to_the_planners(i):
    kinds = {"seq_len": 64, "batch_size": [64, 6, 6][i], "moments": torch.float32}
    kinds |= [{}, {"ddp": True}, {"shards": 3}][i]
    precision = [torch.bfloat16, torch.float32, torch.bfloat16][i]
    d_ff = [96, 400, 400][i]  # of a narrow MLP, attention's backward is what takes most
    config = MiniGPTConfig(61, 64, 3, 4, 96, d_ff, dropout=0.1 * (i != 1))
    shape = {"config": config, "precision": precision, "optimizer": "adamw", **kinds}
    assert max(errors(shape)) < 0.001


def test_a_peak_in_the_optimizer():
    """Of few tokens, with copies of tables that are no multiple of 64 elements."""
    config = MiniGPTConfig(10007, 64, 2, 4, 200, 800)
    shape = {"config": config, "batch_size": 1, "seq_len": 64, "precision": torch.bfloat16}
    shape |= {"optimizer": "muon", "moments": torch.bfloat16}
    assert peak(**shape)[0] == "optimizer" and error(shape, planner(shape)) < 0.001


def test_without_dropout_a_cpu_takes_the_same(monkeypatch):
    """But for what kernels work in."""
    monkeypatch.setattr(peak_file, "WORKSPACES", 0)
    config = MiniGPTConfig(331, 64, 3, 4, 96, 400, dropout=0.0)
    shape = {"config": config, "batch_size": 6, "seq_len": 64, "precision": torch.float32}
    shape |= {"optimizer": "adamw", "moments": torch.float32}
    assert error(shape, planner(shape, device_type="cpu")) < 0.001


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_peaks_of_40_random_shapes_are_within_two_thousandths_of_the_planners(part):
    """What the page and docs/planning.md promise."""
    some = [small(shape, 1024) for shape in random_shapes(40, seed=17)[part::2]]
    found = [error(shape, planner(shape)) for shape in some]
    assert len(found) == 20 and max(found) < 0.002
    assert statistics.median(found) < 0.0001


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("gpt2", {}), ("gpt2-medium", {"shards": 4})])
def test_peaks_of_real_shapes_are_even_closer(name, kind):
    config = MiniGPTConfig(50257, 1024, **SHAPES[name], d_ff=4 * SHAPES[name]["d_model"])
    shape = {"config": config, "batch_size": 4, "seq_len": 1024, "precision": torch.bfloat16}
    shape |= {"optimizer": "adamw", "moments": torch.float32, **kind}
    assert max(errors(shape)) < 0.0001


# ---- tables


def test_tables_are_those_of_the_project(request):
    shapes, cards, kinds, policies, memory = evaluate(
        "[SHAPES, CARDS, KINDS, POLICIES, Object.keys(CARDS).map((c) => [c, memoryOf(c),"
        " forTensors(memoryOf(c))])]",
        None,
        request,
    )
    assert shapes == SHAPES
    assert list(cards) == [name for name, card in CARDS.items() if device_type(card) == "cuda"]
    assert tuple(policies) == RECOMPUTE_POLICIES
    assert kinds == list(COLORS) and set(kinds) == set(KINDS)
    for name, size, safe in memory:
        assert size == CARDS[name].memory and safe == for_tensors(size, "cuda")


def test_colours_and_names_are_those_of_the_pictures():
    text = PAGE.read_text()
    assert dict(re.findall(r"--(\w+): (#\w{6});", text)).items() >= COLORS.items()
    for kind, name in NAMES.items():
        assert f'{kind}: "{name}"' in text


def test_the_page_asks_nobody_else():
    text = PAGE.read_text() + SCRIPT.read_text()
    assert "http" not in text and "import " not in SCRIPT.read_text()
    for link in re.findall(r'(?:href|src)="([^"#:,]+)["#]', text):
        assert (ROOT / "docs" / link).exists(), link


# ---- commands


def states(n: int) -> list[dict]:
    """What the page's controls may stand at; the shapes by name among them."""
    found = []
    for i, shape in enumerate(random_shapes(n, seed=7)):
        config = shape["config"]
        if i % 3 == 0:
            name = list(SHAPES)[i % 4]
            config = replace(config, **SHAPES[name], d_ff=4 * SHAPES[name]["d_model"],
                             recompute_layers=None)  # fmt: skip
        shards, ddp = shape.get("shards", 1), shape.get("ddp", False)
        state = {
            "layers": config.n_layers, "width": config.d_model, "heads": config.n_heads,
            "mlp": config.d_ff, "length": shape["seq_len"], "batch": shape["batch_size"],
            "vocabulary": max(257, config.vocab_size), "policy": config.recompute,
            "blocks": config.n_recomputed, "optimizer": shape["optimizer"],
            "precision": str(shape["precision"])[6:], "moments": str(shape["moments"])[6:],
            "dropout": "on" if config.dropout else "off",
            "head": "once" if config.loss_chunks == 1 else "chunks",
            "processes": 4 if ddp else shards, "trainer": "ddp" if ddp else "fsdp",
            "card": ["RTX 3060 12GB", "A100 40GB", "H100 PCIe"][i % 3],
        }  # fmt: skip
        found.append(state)
    return found


def check_means(args, shape: dict) -> None:
    """Flags mean what the page has computed."""
    config = model_config(args, vocabulary(args))
    its = {LETTERS[f.name]: getattr(config, f.name) for f in fields(config) if f.name in LETTERS}
    assert its.items() <= shape.items()
    assert config.n_recomputed == (shape["layers"] if shape["policy"] != "none" else 0)
    assert (config.dropout > 0) == shape["dropout"]
    assert (args.batch_size, args.seq_len) == (shape["B"], shape["T"])
    assert (args.optimizer, args.moments_dtype) == (shape["optimizer"], shape["moments"])
    precision = "float32" if args.no_amp else args.amp_dtype.replace("auto", "bfloat16")
    assert precision == shape["precision"]


def test_commands_are_what_the_trainers_take(request):
    asked = states(200)
    commands = "[shapeOf(s), runCommand(s), planCommand(s), seeCommand(s)]"
    answers = evaluate(f"x.map((s) => {commands})", asked, request)
    for state, (shape, run, plan, see) in zip(asked, answers, strict=True):
        words = shlex.split(run)
        if words[0] == "torchrun":
            words.pop(0)
            assert words[0] == f"--nproc-per-node={state['processes']}"
        trainer = words[1]
        assert (ROOT / trainer).exists() and (words[0] == "python") == (state["processes"] == 1)
        assert shape["ddp"] == (trainer == "train_ddp.py")
        assert (shape["shards"] > 1) == (trainer == "train_fsdp.py")
        args = fill_in(build_parser(trainer, "x.pt").parse_args(words[2:]))
        check_means(args, shape)

        words = shlex.split(plan)
        assert words[:3] == ["python", "-m", "scripts.plan_memory"]
        args = plan_memory.parse(words[3:])
        args.use_activation_checkpoint, args.recompute_layers = shape["policy"], shape["layers"]
        if shape["policy"] == "none":
            args.recompute_layers = None
        check_means(args, shape)
        assert args.card == state["card"] and args.fsdp == (shape["shards"] > 1)
        assert (args.nproc_per_node or 1) == state["processes"]

        words = shlex.split(see)
        assert words[:3] == ["python", "-m", "scripts.memory_page"]
        args = memory_page.parse(words[3:])
        check_means(args, shape)
        assert args.card == state["card"]


def test_the_first_command(request):
    run, plan = evaluate("[runCommand(SMALL), planCommand(SMALL)]", None, request)
    assert run == "python train_minimal.py"
    assert plan == "python -m scripts.plan_memory --card RTX-3060-12GB"
    args = fill_in(build_parser("test", "x.pt").parse_args([]))
    check_means(args, evaluate("shapeOf(SMALL)", None, request))
