"""scripts.plan_model plans the model in a user's file, and ends in a line if it cannot."""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.plan_model import MODEL, OF_LIBRARIES, REFUSED
from harness.marks import rest_slow
from test_plan_step import measured
from torch import nn

from scripts.plan_model import main, parse, plan_of


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the user's files. What they import does not outlive the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(sys.modules)
    files = {"mine.py": MODEL, "broken.py": "def Model(:", "imports.py": "import no_such_module"}
    files |= {"notes.txt": "", "config.json": "{", "libraries.py": OF_LIBRARIES}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    sys.modules.clear()
    sys.modules.update(before)


@pytest.mark.parametrize(("command", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_planned_is_one_line(here, capfd, command, words):
    assert main(command.split()) == 2
    out, err = capfd.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err, err
    assert out == ""


def same_as_measured(args: argparse.Namespace, make: Callable[[], nn.Module]) -> None:
    """Each way of the plan is a real step, with its blocks changed by the line that is printed."""
    plan = plan_of(args)
    for way in plan.ways:
        model: Any = make()
        exec(plan.code(way), {"model": model, "torch": torch, "functools": functools})
        real = measured(model, plan.batch, plan.how["optimizer"])
        assert plan.step(way).peak == pytest.approx(real, rel=0.001), way


@pytest.mark.parametrize("sequences", [1, 3])
def test_the_largest_batch(here, sequences):
    plan = plan_of(parse(f"mine.py:Model --input {sequences}x8 --memory-budget 9MB".split()))
    for way in plan.ways:
        largest, usable = plan.largest_batch(way), plan.budget.bytes_within_margin
        assert plan.step(way, largest).peak <= usable < plan.step(way, largest + 1).peak


def test_a_users_model(here, capsys):
    """Its file is in a package, and imports a module that has the name of one of ours."""
    (here / "mine.py").rename(here / "model.py")
    (here / "pkg").mkdir()
    (here / "pkg/__init__.py").write_text("")
    (here / "pkg/start.py").write_text("from model import Model\nfrom .losses import loss")
    (here / "pkg/losses.py").write_text("from model import loss")
    flags = "--loss pkg/start.py:loss --with layers=6 --json plan.json --page page.html --at-peak"
    command = f"pkg/start.py:Model --input 3x8 --memory-budget 114KiB --device cpu {flags}"
    assert main(command.split()) == 0
    plan, out = json.loads((here / "plan.json").read_text()), capsys.readouterr().out
    names = ["none", "first 3 blocks", "every second block", "every block"]
    assert [row["name"] for row in plan["rows"]] == names and plan["takes"] == names[1]
    code = "for block in model.layers[:3]: block.forward = functools.partial("
    assert code in out and out.index("fits ") < out.index(code) < out.index("policy")
    assert "alive at the peak of first 3 blocks" in out and "model.py:" in out
    assert code in (here / "page.html").read_text("utf-8")


def test_a_loss_gets_what_forward_does_not_take(here, capsys):
    """Labels, in a tuple behind the images."""
    assert main("mine.py:wide --input mine.py:pair --loss mine.py:of_pair".split()) == 0
    assert "no list of equal blocks found" in capsys.readouterr().out


def test_notes_say_what_the_plan_cannot_know(here, capsys):
    assert main("libraries.py:Model --input libraries.py:batch --card L4 --compile".split()) == 0
    out = capsys.readouterr().out
    for words in (
        "the compiler may",
        "LSTM",
        "convolutions",
        "mine::scale",
        "in enc only, not in dec",
    ):
        assert words in out, words


FAMILIES = {
    "LlamaConfig": "--optimizer sgd",
    "MambaConfig": "--weights bfloat16",
    "GPTNeoXConfig": "--freeze *embed* --optimizer adamw-unfused",
}


@pytest.mark.parametrize(("family", "flags"), rest_slow(FAMILIES.items(), lambda _: False))
def test_families_of_transformers(here, family, flags):
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
    config = getattr(transformers, family)(vocab_size=211, **sizes)
    config.save_pretrained(here)
    assert main(". --input 2x48 --with num_layers=2".split()) == 2  # (not num_hidden_layers)
    args = parse(f". --input 2x48 {flags}".split())

    def make() -> nn.Module:
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not ("embed" in name and "--freeze" in flags))
        return model.to(torch.bfloat16 if "bfloat16" in flags else torch.float32)

    same_as_measured(args, make)
