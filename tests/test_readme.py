"""What the README says is so."""

import re

import pytest
from runs import ROOT

from flags import build_parser
from model import MiniGPT

README = (ROOT / "README.md").read_text()


def commands(pattern: str) -> list[str]:
    joined = README.replace("\\\n", " ")
    return re.findall(pattern, joined)


def test_the_two_commands():
    lines = re.findall(r"^    (pip install -r .*)$", README, re.M)
    assert lines == [
        "pip install -r requirements.txt && python train_minimal.py --use-activation-checkpoint",
        "pip install -r requirements-dev.txt && python -m pytest",
    ]


def test_every_flag_is_there_and_no_other():
    table = README.split("## Flags")[1].split("Exit codes")[0]
    parser = build_parser("train_minimal.py", "x.pt")
    known = {action.option_strings[-1] for action in parser._actions} - {"--help"}
    assert set(re.findall(r"`(--[a-z-]+)", table)) == known


@pytest.mark.parametrize("text", commands(r"train_(?:minimal|ddp)\.py (--[^\n`#]*)"))
def test_commands_are_valid(text):
    build_parser("test", "x.pt").parse_args(text.split())


def test_the_shown_lines_are_in_the_model():
    """The README's excerpt, comments left out, is what MiniGPT.forward does."""
    import inspect

    source = inspect.getsource(MiniGPT.forward)
    excerpt = README.split("```python\n")[1].split("```")[0]
    assert "checkpoint(" in excerpt
    for line in excerpt.splitlines():
        assert line.strip() in source


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_no_other_documents_have_dead_links():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/README.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), (page, target)
