"""A model.py that its user has changed: what asks the model follows it, and what takes it for GPT-2
says so. The changes: harness/changed.py."""

import random
import re
import shutil
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from cases.shapes import WIDE
from harness.changed import (
    CHANGES,
    FOLLOWED,
    REFUSED,
    changed_model,
    changed_source,
    changed_techniques,
    put_in,
)
from harness.gpt2_folder import write_folder
from harness.planned import measured_peak, planner
from harness.runs import (
    ROOT,
    contents,
    parse,
    run,
    same,
    snapshot,
    start_together,
    train_here,
)
from test_recompute import step

import train_minimal
from data.errors import MiniGPTError
from memory import POLICY_NAMES, MemorySavingGPT
from model import MiniGPT, MiniGPTConfig
from planner import Layout
from scripts import evaluate, export_hf, generate, plan_memory
from scripts.plans import plan_for_command
from trainer.check_model import (
    check_model,
    kv_cache_is_exact,
    small_model_and_batch,
    small_step,
)
from trainer.plan import plan_on_this_rank
from trainer.process import OneProcess
from trainer.snapshot import save_snapshot

ONE = OneProcess(torch.device("cpu"))
EQUAL = ["other_words", "norms_in_add", "asks_a_number", "shared"]  # compute GPT-2
FEW, slow = ["modern", "gated_attention", "layer_drop", "experts", "busy_experts"], pytest.mark.slow
# Change -> trainers that refuse it. (All others train as one process does.)
SHARDED, SP = "train_fsdp.py train_sp.py", "train_sp.py"
ALONE = dict.fromkeys(
    "gated_attention grouped modern alibi token_shift looped documents".split(), SP
)
ALONE |= dict.fromkeys(["layer_drop", "asks_a_number", "busy_experts"], f"train_ddp.py {SHARDED}")
ALONE |= {"scalar": SHARDED, "shared": SHARDED, "unused": "train_ddp.py"}
LOOPS = ["skips", "embedding_in_each_block", "depth_scale"]
REST = {*FOLLOWED, *ALONE, *LOOPS, "scaled_input", "first_stream"} - {*FEW}
# (In the kernel, a mask of bools becomes numbers. Fake tensors have no values to look at. torch's
# MemTracker cannot measure a model with frozen weights.)
PLANNED = {*FOLLOWED, *LOOPS} - {"documents", "looks", "experts", "busy_experts", "frozen"}


@pytest.fixture
def change(monkeypatch):
    """Makes this process have the model with that change."""
    return partial(put_in, setattr=monkeypatch.setattr)


# ---- policies follow the block

IN_CHUNKS = [f"{policy}:chunks" for policy in ("mlp", "full", "sdpa")]
WAYS = [*POLICY_NAMES[1:], "mlp:1,cheap", "full/2", "full/2+nested", "full+offload"]
WAYS += ["cheap+offload", *IN_CHUNKS]
FEW_WAYS = ["cheap", "selective", "sdpa", "full/2", "mlp:chunks"]
SHAPE = MiniGPTConfig(61, 16, n_layers=3, n_heads=2, d_model=16, d_ff=64, dropout=0.0)


def make(name: str, config: MiniGPTConfig) -> MiniGPT:
    """A model with random weights, of which none is 0 or 1."""
    return small_model_and_batch(changed_techniques(name).MemorySavingGPT, config)[0]


BLOCKS = [(name, FEW_WAYS, 0.1) for name in [*FOLLOWED, *REFUSED][::4]]
BLOCKS += [pytest.param(name, WAYS, 0.1, marks=slow) for name in [*FOLLOWED, *REFUSED]]
BLOCKS += [pytest.param(name, WAYS, 0.0, marks=slow) for name in REFUSED]


@pytest.mark.usefixtures("everything_travels")
@pytest.mark.parametrize(("name", "ways", "dropout"), BLOCKS)
def test_every_policy_follows_a_changed_model_or_is_refused(
    name, ways, dropout, change, monkeypatch
):
    """And what is not refused trains no other model: losses and gradients are equal to the bit.
    (But the MLP's, in chunks: they round otherwise.)"""
    monkeypatch.setattr("memory.policies.CHUNK_MULTIPLE", 8)
    change(name)
    none, refused = replace(SHAPE, dropout=dropout), set()
    expected = step(make(name, none), "fp32")
    for way in ways:
        policy = way.removesuffix(":chunks")
        model = make(name, replace(none, recompute=policy, mlp_chunks=1 + (way in IN_CHUNKS)))
        try:
            check_model(model, ONE, torch.float32)
        except MiniGPTError as error:
            assert len(str(error).splitlines()) == 1
            refused.add(way)
            continue
        found = step(model, "fp32")
        assert same(found[:2], expected[:2]), way  # the losses
        assert way in IN_CHUNKS or same(found, expected), way
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    wanted = {*REFUSED[name][dropout > 0].split()} if name in REFUSED else set()
    assert refused >= wanted & {*ways} and (name in REFUSED or not refused)


@pytest.mark.parametrize("policy", ["none", "sdpa"])
def test_a_short_sequence_is_no_difference_and_no_random_number_is_taken(policy, change):
    change("relu_squared")
    config = replace(SHAPE, max_position_embeddings=3, recompute=policy)
    model, states = make("relu_squared", config), (torch.get_rng_state(), random.getstate())
    check_model(model, ONE, torch.bfloat16)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()


def test_the_patch_makes_the_modern_block(tmp_path):
    shutil.copy(ROOT / "model.py", tmp_path)
    run(["git", "apply", str(ROOT / "docs/modern_block.patch")], timeout=30, cwd=tmp_path)
    assert (tmp_path / "model.py").read_text("utf-8") == changed_source("modern")


def test_a_policy_whose_last_bit_differs_is_refused(monkeypatch):
    """In a gradient so small that rounding to 1e-9 of the largest value hides it."""

    def nudged(make: object, config: MiniGPTConfig, **how: object) -> dict[str, torch.Tensor]:
        return {
            name: value.nextafter(torch.zeros_like(value))
            if config.recompute == "cheap" and "0.ln_1.bias" in name
            else value
            for name, value in small_step(make, config, **how).items()
        }

    monkeypatch.setattr("trainer.check_model.small_step", nudged)
    with pytest.raises(MiniGPTError, match="cheap: .*blocks.0.ln_1.bias differs"):
        check_model(MemorySavingGPT(replace(SHAPE, recompute="cheap")), ONE, torch.float32)


# ---- one model, by however many processes and in however many parts


@pytest.mark.parametrize("name", [*CHANGES, "token_shift"])
def test_a_text_is_written_as_the_long_way_writes_it(name, change):
    """With a KV cache, token by token, if the model can: the text of a forward of all of them, each
    time."""
    change(name)
    assert kv_cache_is_exact(SHAPE) == (name not in ("documents", "token_shift"))
    model = changed_model(name).MiniGPT(SHAPE).double().eval()
    text = prompt = torch.randint(61, (2, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        for _ in range(14):  # the window slides
            text = torch.cat([text, model(text[:, -16:])[:, -1:].argmax(-1)], dim=1)
    how = {"temperature": 0, "use_cache": kv_cache_is_exact(SHAPE)}
    assert torch.equal(model.generate(prompt, 14, **how), text)


@pytest.mark.parametrize("names", [FEW, pytest.param(sorted(REST), marks=slow)])
def test_processes_together_learn_what_one_does(names):
    """Or refuse in one line. train_ddp.py's and train_fsdp.py's as one that accumulates, to the
    bit; train_sp.py's up to 1e-10 in float64. See `changed` in sharded.py."""
    result = start_together(["tests/harness/sharded.py", "changed", *names]).end(timeout=400)
    assert result.stdout.count("as one") == 2, result.stdout + result.stderr
    refused = re.findall("^refused (.*)", result.stdout, re.M)
    expected = (f"{name} {script}" for name in names for script in ALONE.get(name, "").split())
    assert sorted(refused) == sorted(expected)


# ---- the planner runs the changed model itself


@pytest.mark.usefixtures("everything_travels")
@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("modern", ["cheap", "sdpa"]),
        ("wider_inside", ["mlp"]),
        ("shared", ["full"]),
        ("skips", ["cheap"]),
        *(pytest.param(name, ["none", "qkv", "full"], marks=slow) for name in sorted(PLANNED)),
    ],
)
def test_the_memory_of_a_changed_model_is_planned(name, ways, change):
    change(name)
    for policy in ways:
        config = replace(WIDE, recompute=policy, dropout=0.1 * (policy == "full"))
        measured = measured_peak(config, 16)
        assert planner(config).step(16).peak == pytest.approx(measured, rel=0.003), policy


@pytest.mark.parametrize("name", ["buffer", "attribute", "empty", "prelu", "tied"])
def test_a_tensor_that_would_be_lost_is_refused(name, tmp_path, change, capfd):
    """Models are made without memory."""
    change(name)
    assert re.search(
        "model.py: .*((angles|weight) would be lost|bias is in two modules)",
        refused(train_here(tmp_path / "run.pt"), capfd),
    )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "first"), [("gain", torch.linspace(1, 2, 64)), ("scalar", 0.5)])
def test_a_parameter_of_the_user_keeps_its_first_values(name, first, tmp_path, change):
    change(name)
    assert train_here(tmp_path / "run.pt", "--num-steps=1", "--lr=1e-6", "--min-lr=0") == 0
    gains = [w for name, w in snapshot(tmp_path / "run.pt")["model"].items() if "gain" in name]
    torch.testing.assert_close(gains, [torch.as_tensor(first)] * 2, rtol=0, atol=1e-5)  # blocks


def test_muon_is_for_the_weights_of_linear_layers(tmp_path, change):
    """A parameter of a block that is none gets AdamW."""
    change("row_gain")
    assert train_here(tmp_path / "run.pt", "--optimizer=muon", "--num-steps=2") == 0
    assert 2 * 4 == sum(  # blocks, layers
        "momentum_buffer" in state
        for state in snapshot(tmp_path / "run.pt")["optimizer"]["state"].values()
    )


def test_a_new_field_of_the_config_has_its_default(monkeypatch):
    @dataclass(frozen=True)
    class Wider(MiniGPTConfig):
        n_kv_heads: int = 2

    monkeypatch.setattr("trainer.settings.MiniGPTConfig", Wider)
    assert parse("--use-toy-data").model_config(31).n_kv_heads == 2


# ---- files


def refused(code: int, capfd) -> str:
    """The one line that it cost."""
    assert code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("name", ["modern", "exact_gelu", "scale", "two_tables", *EQUAL])
def test_what_is_not_gpt2_is_not_exported(name, change, tmp_path, capfd):
    """However its tensors are called, and wherever it differs; the same model in other words is."""
    path, out = tmp_path / "run.pt", tmp_path / "hf"
    change(name)
    assert train_here(path, "--num-steps=1") == 0
    state = snapshot(path)
    for weight in state["model"].values():  # all of them matter
        weight += 0.2 * torch.randn_like(weight)
    save_snapshot(path, state)
    capfd.readouterr()
    code = export_hf.main([f"--checkpoint-path={path}", f"--out={out}"])
    assert out.is_dir() == (code == 0) == (name in EQUAL)
    if code:
        assert re.search(f"{path}.* no GPT-2; .* not exported", refused(code, capfd))


def test_a_run_of_a_changed_model_resumes(tmp_path, change):
    """To the bits of the run that was not stopped. Its ln_f is frozen, and can be planned for FSDP
    and for sums in a tree, too."""
    change("modern", "frozen")
    flags = "--lr-scheduler=constant", "--use-activation-checkpoint=cheap", "--reproducible-sums"
    for name, *more in (["a", "--num-steps=4"], ["b", "--num-steps=2"], ["b", "--resume"]):
        assert train_here(tmp_path / f"{name}.pt", *flags, "--num-steps=4", *more) == 0
    assert planner(WIDE, layout=Layout("fsdp", world_size=2)).step(1).peak < (
        planner(WIDE, n_pending_sums=1).step(1).peak
    )
    assert same(*(snapshot(tmp_path / f"{name}.pt")["model"] for name in "ab"))


OTHER_TENSORS = {"gate": "c_gate.weight", "wide_positions": "position_emb"}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_a_snapshot_of_another_model_is_not_called_damaged(
    name, before, tmp_path, monkeypatch, capfd
):
    """Written `before` model.py was changed, or with a change that is gone. Whoever opens it tells
    the first tensor that is another one, and all that was there stays."""
    path, folder = tmp_path / "run.pt", write_folder(tmp_path / "gpt2")  # (of GPT-2 as it is)
    with monkeypatch.context() as patch:
        put_in(*[name] * (not before), setattr=patch.setattr)
        assert train_here(path, "--num-steps=2") == 0
    put_in(*[name] * before, setattr=monkeypatch.setattr)
    there = contents(tmp_path)
    flags, new = f"--checkpoint-path={path}", f"--checkpoint-path={tmp_path}/new.pt"
    commands = [
        (train_minimal.main, [flags, "--resume"]),
        (train_minimal.main, [new, f"--init-from={folder if before else path}"]),
        (generate.main, [flags]),
        (evaluate.main, [flags]),
    ]
    capfd.readouterr()
    for main, words in commands:
        line = refused(main([*words, "--device=cpu"]), capfd)
        assert re.search(f"holds .*{OTHER_TENSORS[name]}.*has model.py changed since", line)
        assert str(tmp_path) in line and contents(tmp_path) == there


@pytest.mark.usefixtures("plans_memory")
def test_a_prediction_that_fails_does_not_cost_the_run(tmp_path, change, capfd):
    change("asks_a_number")
    assert train_here(tmp_path / "run.pt", "--num-steps=1") == 0
    assert "could not be predicted: model.py cannot be planned: it" in capfd.readouterr().out
    auto = "--use-activation-checkpoint=auto", "--memory-budget=1GiB"
    planned = ["--use-toy-data", "--n-layers=1", "--d-model=16", "--n-heads=1", "--seq-len=16"]
    says = "model.py cannot be planned: it needs the value"
    assert says in refused(train_here(tmp_path / "new.pt", *auto), capfd)
    assert says in refused(plan_memory.main(planned), capfd)


@pytest.mark.usefixtures("plans_memory")
def test_a_plan_leaves_no_fake_tensor_in_a_cache(tmp_path, change):
    """Nor does it find a real one there: a run is planned, trains, and another one is planned."""
    change("cached")
    for steps in ("--num-steps=2", "--num-steps=3"):
        assert train_here(tmp_path / f"{steps}.pt", steps, "--use-activation-checkpoint=cheap") == 0


# ---- operators that are others on a GPU


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "mps"])
def test_a_plan_says_which_operators_are_others_on_the_device(device_type, change, capsys):
    change("rmsnorm")
    words = "--use-toy-data --n-layers=1 --d-model=16 --n-heads=1 --seq-len=16 "
    words += f"--device={device_type}"
    assert plan_memory.main(words.split()) == 0
    *_, told = plan_on_this_rank(plan_for_command(parse(words), Layout()), ONE)
    for said in (capsys.readouterr().out, told):
        notes = re.findall(f"^note     rms_norm .* on {device_type} ", said, re.M)
        assert len(notes) == (device_type != "cpu")
