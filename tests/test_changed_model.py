"""A model.py that its user has changed: what asks the model follows it, and what takes it for GPT-2
says so. The changes: harness/changed.py."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torchgen
from cases.shapes import WIDE
from harness.changed import CHANGES, changed_model, put_in
from harness.gpt2_folder import write_folder
from harness.planned import planner
from harness.runs import (
    ROOT,
    contents,
    metrics,
    parse,
    same,
    snapshot,
    start_together,
    torchrun,
    train_here,
)

import train_minimal
from memory import Past
from model import MiniGPTConfig
from planner.operators import COMPOSED_ON_CPU
from scripts import evaluate, export_hf, generate, plan_memory
from trainer.plan import ask, predict
from trainer.process import OneProcess

CHANGED = "tests/harness/changed.py"
EQUAL = ["other_words", "asks_a_number"]  # computes the same
TABLES = ["rotary", "two_tables"]  # no table of positions; and another one beside it
LESS_OFTEN = ["rotary", pytest.param("two_tables", marks=pytest.mark.slow)]


@pytest.fixture
def change(monkeypatch):
    """Makes this process have the model with that change."""
    return partial(put_in, setattr=monkeypatch.setattr)


# ---- positions


@pytest.mark.parametrize("name", TABLES)
def test_with_a_past_each_block_sees_the_same_positions(name):
    """Token by token behind a prompt: the logits of one forward of all of them."""
    model, past = changed_model(name).MiniGPT(MiniGPTConfig(61, 16, 3, 2, 16, 64)).eval(), Past()
    ids = torch.randint(61, (2, 16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        with past.before(model):
            found = [model(part) for part in ids.split([5, *[1] * 11], dim=1)]
        torch.testing.assert_close(torch.cat(found, dim=1), model(ids))


@pytest.mark.parametrize("name", LESS_OFTEN)
def test_processes_that_share_a_model_or_a_sequence_learn_what_one_does(name, tmp_path, change):
    """train_fsdp.py to the bit, of two processes; train_sp.py up to the order of sums."""
    flags = "--no-amp --dropout=0 --seq-len=15 --num-steps=4 --eval-interval=2".split()
    change(name)
    one = tmp_path / "one.pt"
    assert train_here(one, *flags, "--grad-accum-steps=2") == 0
    for script, *more in (["train_fsdp"], ["train_sp", "--grad-accum-steps=2"]):
        path = tmp_path / f"{script}.pt"
        how = {"script": f"{CHANGED} {name} {script}.py"}
        torchrun(path, *flags, *more, **how)
        for ours, theirs in zip(metrics(path), metrics(one), strict=True):
            for key in ("train_loss", "grad_norm", "val_loss"):
                assert ours.get(key, 0) == pytest.approx(theirs.get(key, 0), rel=1e-5), script
    assert same(*(snapshot(tmp_path / f"{run}.pt")["model"] for run in ("one", "train_fsdp")))


@pytest.mark.parametrize("name", LESS_OFTEN)
def test_the_memory_of_shards_is_planned(name, tmp_path, change):
    change(name)
    path = tmp_path / "bytes.json"
    words = [CHANGED, name, "tests/harness/sharded.py", "memory", str(path), "full"]
    result = start_together(words).end()
    assert result.returncode == 0, result.stdout + result.stderr
    step = planner(replace(WIDE, recompute="full"), shards=2).step(24)
    assert 0.99 < step.peak / json.loads(path.read_text())["full"]["peak"] < 1.005


def test_a_table_in_a_buffer_is_refused(tmp_path, change, monkeypatch, capfd):
    """Models are made without memory, and what is computed then is lost."""
    register = "        self.register_buffer('angles', torch.ones(3), persistent=False)\n"
    edit = ("        self.init_weights()\n", register + "        self.init_weights()\n")
    monkeypatch.setitem(CHANGES, "buffer", [edit])
    change("buffer")
    line = refused(train_here(tmp_path / "run.pt"), capfd)
    assert re.search("model.py: .*buffer angles.* in forward", line)
    assert not any(tmp_path.iterdir())


# ---- files


@pytest.fixture
def trained(tmp_path, change):
    """A snapshot of the model with a change, all of whose weights matter."""

    def train(*names: str) -> Path:
        change(*names)
        path = tmp_path / "run.pt"
        assert train_here(path, "--num-steps=2") == 0
        state = snapshot(path)
        state["model"] = {
            name: weight + 0.2 * torch.randn_like(weight) for name, weight in state["model"].items()
        }
        torch.save(state, path)
        return path

    return train


def refused(code: int, capfd) -> str:
    """The one line that it cost."""
    assert code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_gpt2_is_not_exported(name, trained, tmp_path, capfd):
    """However its tensors are called, and wherever it differs; the same model in other words is."""
    path, out = trained(name), tmp_path / "hf"
    capfd.readouterr()
    code = export_hf.main([f"--checkpoint-path={path}", f"--out={out}"])
    if name in EQUAL:
        assert code == 0 and out.is_dir()
    else:
        assert re.search(f"{path}.* no GPT-2; .* not exported", refused(code, capfd))
        assert not out.exists()


OTHER_TENSORS = {"rms_norm": "ln_1.bias", "gate": "c_gate.weight", "wide_positions": "position_emb"}


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_a_snapshot_of_another_model_is_not_called_damaged(
    name, before, tmp_path, monkeypatch, capfd
):
    """Written `before` model.py was changed, or with a change that is gone. Whoever opens it tells
    the first tensor that is another one, and all that was there stays."""
    path = tmp_path / "run.pt"
    with monkeypatch.context() as patch:
        put_in(*[name] * (not before), setattr=patch.setattr)
        assert train_here(path, "--num-steps=2") == 0
    put_in(*[name] * before, setattr=monkeypatch.setattr)
    there = contents(tmp_path)
    says = f"model.py has changed since {path} was written: .*{OTHER_TENSORS[name]}"
    flags = [f"--checkpoint-path={path}", "--device=cpu"]
    init = [f"--checkpoint-path={tmp_path}/new.pt", f"--init-from={path}", "--device=cpu"]
    capfd.readouterr()
    for main, words in (
        *((train_minimal.main, words) for words in ([*flags, "--resume"], init)),
        *((tool.main, flags) for tool in (generate, evaluate)),
    ):
        assert re.search(says, refused(main(words), capfd))
        assert contents(tmp_path) == there


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_weights_of_gpt2_do_not_fit_another_model(name, tmp_path, change, capfd):
    folder = write_folder(tmp_path / "gpt2")
    change(name)
    words = [f"--init-from={folder}", f"--checkpoint-path={tmp_path}/run.pt", "--device=cpu"]
    code = train_minimal.main(words)
    says = f"{folder} holds .*{OTHER_TENSORS[name]}.*or is model.py no GPT-2 any more"
    assert re.search(says, refused(code, capfd))


@pytest.mark.usefixtures("plans_memory")
def test_a_prediction_that_fails_names_the_line(tmp_path, change, capfd):
    """The innermost that is not torch's."""
    change("asks_a_number")
    assert train_here(tmp_path / "run.pt", "--num-steps=1") == 0
    lines = (ROOT / "model.py").read_text("utf-8").splitlines()
    number = lines.index("        x = self.dropout(x)") + 1
    says = rf"could not be predicted \(DataDependent\w+ at model.py:{number}\)"
    assert re.search(says, capfd.readouterr().out)


# ---- operators that are others on a GPU


def test_a_plan_says_which_operators_are_others_on_the_device(change, capsys):
    for device_type in ("cpu", "cuda", "mps"):
        plan = planner(WIDE, device_type=device_type)
        assert plan.step(1) and not plan.note
    change("rms_norm")
    for device_type in ("cpu", "cuda", "mps"):
        plan = planner(WIDE, device_type=device_type)
        assert plan.step(1) and ("rms_norm" in plan.note) == (device_type != "cpu")

    words = "--use-toy-data --n-layers=1 --d-model=16 --n-heads=1 --seq-len=16 --device=cuda"
    assert plan_memory.main(words.split()) == 0
    asked = ask(parse(words))
    words, _ = predict(asked, OneProcess(torch.device("cpu")), asked.config, 0)
    for said in (capsys.readouterr().out, words):
        assert len(re.findall("^note     rms_norm .* on cuda ", said, re.M)) == 1


def test_these_operators_are_those_of_torchs_own_list():
    """With a kernel on CUDA, and composed of others on a CPU before the planner sees them."""
    yaml = pytest.importorskip("yaml")
    functions = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    found = set()
    for function in yaml.safe_load(functions.read_text()):
        keys = {key.strip() for some in function.get("dispatch", {}) for key in some.split(",")}
        if keys >= {"CompositeImplicitAutograd", "CUDA"} and "CPU" not in keys:
            found.add(function["func"].partition("(")[0].removeprefix("_fused_"))
    assert found <= set(COMPOSED_ON_CPU)
