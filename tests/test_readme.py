"""What the README says is so."""

import json
import re
import shutil
import sys
from importlib.util import find_spec

import pytest
from runs import ROOT, run

from model import MiniGPT
from scripts.reliability import ROWS
from trainer.flags import build_parser

README = (ROOT / "README.md").read_text()


def commands(pattern: str) -> list[str]:
    joined = README.replace("\\\n", " ")
    return re.findall(pattern, joined)


def test_the_two_commands():
    lines = re.findall(r"^    (pip install -r .*)$", README, re.M)
    assert lines == [
        "pip install -r requirements.txt && python train_minimal.py --use-activation-checkpoint",
        "pip install -r requirements-dev.txt && python -m pytest -n 2",
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


# ---- its commands, run one after the other in a fresh copy, made small by flags at their end

SHAPE = "--n-layers 1 --n-heads 2 --d-model 16 --d-ff 32 --seq-len 16 --max-position-embeddings 16"
TRAINING = f"{SHAPE} --num-steps 4 --eval-batches 1 --sample-tokens 4"
SMALL = {
    "train_minimal.py": TRAINING,
    "train_ddp.py": TRAINING,
    "scripts.plan_memory": SHAPE,
    "scripts.memory_timeline": f"{SHAPE} --vocab-size 61",
    "scripts.benchmark": f"{SHAPE} --vocab-size 61 --policies none full --repeats 1 --steps 1",
    "scripts.generate": "--max-new-tokens 5",
    "scripts.plot_metrics": "",
    "scripts.kept_tensors": "--d-model 16 --n-heads 2 --seq-len 16",
    "scripts.checkpoint_from_scratch": "",
}
ELSEWHERE = {"scripts.ladder", "scripts.reliability", "pytest"}  # have tests of their own


def runnable() -> list[str]:
    text = README.replace("\\\n", " ")
    bash = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.S | re.M))
    indented = re.findall(r"^    (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    commands = []
    for line in [*bash.splitlines(), *indented]:
        command = line.split("#")[0].split("&&")[-1].strip()
        if command.startswith(("python ", "torchrun ")):
            commands.append(command)
    return commands


def program(command: str) -> str:
    found = re.search(r"train_\w+\.py|(?<=-m )\S+", command)
    assert found, command
    return found[0]


def test_every_command_is_run_somewhere():
    assert {program(command) for command in runnable()} <= SMALL.keys() | ELSEWHERE


@pytest.mark.slow
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws pictures")
def test_commands_run(tmp_path):
    made = shutil.ignore_patterns(".*", "__pycache__", "cache", "*.pt", "*.lock", "*.jsonl")
    fresh = shutil.copytree(ROOT, tmp_path / "fresh", ignore=made)
    (fresh / "data" / "train.txt").write_text("a line of text for a model to learn from\n" * 500)
    for command in runnable():
        name = program(command)
        if name in ELSEWHERE:
            continue
        words = f"{command} {SMALL[name]}"
        if "--train-data" in words:
            words += " --tokenizer-name byte"
        words = words.replace("torchrun", f"{sys.executable} -m torch.distributed.run --standalone")
        words = re.sub(r"^python", sys.executable, words)
        result = run(["bash", "-c", words], timeout=300, cwd=fresh)
        assert result.returncode == 0, f"{words}\n{result.stdout}\n{result.stderr}"


def test_the_reliability_table_is_what_was_measured():
    rows = json.loads((ROOT / "scripts/results/reliability.json").read_text())["rows"]
    assert {row["row"] for row in rows} == ROWS.keys()
    for row in rows:
        assert row["held"] and row["what"] == ROWS[row["row"]].what
        assert f"| {row['what']} | {row['measured']} |" in README
