"""What the README and docs/ say is so."""

import inspect
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness.gpt2_folder import CONFIG, write_folder
from harness.runs import ROOT, run
from torch.distributed.run import get_args_parser

from model import MiniGPT
from scripts import plan_memory
from trainer.flags import build_parser

README = (ROOT / "README.md").read_text("utf-8")
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
TEXTS = [README, *DOCS.values()]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[!.]*/README.md"), *ROOT.glob("docs/*.md")])


def commands(pattern: str) -> list[str]:
    joined = "\n".join(TEXTS).replace("\\\n", " ")
    return list(dict.fromkeys(re.findall(pattern, joined)))


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def test_the_two_commands():
    lines = re.findall(r"^    (pip install -r .*)$", README, re.M)
    assert lines == [
        "pip install -r requirements.txt && python train_minimal.py --use-activation-checkpoint",
        "pip install -r requirements-dev.txt && python -m pytest -n 2",
    ]
    for readme in (README, (ROOT / "README.zh-CN.md").read_text("utf-8")):
        assert readme.index("whl/cpu") < readme.index(lines[0])  # too late behind it


def test_every_document_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\(docs/(\w+\.md)[)#]", README))
    assert linked == DOCS.keys() and linked


def test_every_flag_is_there_and_no_other():
    table = DOCS["flags.md"].split("## Flags")[1].split("## Exit codes")[0]
    table = "\n".join(line for line in table.splitlines() if line.startswith("|"))
    parser = build_parser("train_minimal.py", "x.pt")
    known = {action.option_strings[0] for action in parser._actions} - {"-h"}
    assert set(re.findall(r"`(--[a-z0-9-]+)", table)) == known


def test_the_shown_lines_are_in_the_model():
    """The README's excerpt, comments left out, is what MiniGPT.forward does."""
    source = inspect.getsource(MiniGPT.forward)
    excerpt = README.split("```python\n")[1].split("```")[0]
    assert "checkpoint(" in excerpt
    for line in excerpt.splitlines():
        assert line.strip() in source


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings: lower case, no punctuation, a hyphen for a space."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_is_wide(page):
    """But for tables, commands and pictures. (The Chinese page has a line a paragraph.)"""
    lines = without_blocks(page.read_text("utf-8")).splitlines()
    wide = [line for line in lines if len(line) > 100 and not line.startswith(("|", "    ", "!"))]
    assert not wide or page.name in ("README.zh-CN.md", "CHANGELOG.md"), wide


# ---- their commands, run one after the other in a fresh copy, made small by flags at their end

SHAPE = "--n-layers 1 --n-heads 2 --d-model 16 --d-ff 32 --seq-len 16 --max-position-embeddings 16"
TRAINING = f"{SHAPE} --num-steps 4 --eval-batches 1 --sample-tokens 4"
SMALL = {
    "train_minimal.py": TRAINING,
    "train_ddp.py": TRAINING,
    "train_fsdp.py": TRAINING,
    "scripts.plan_memory": SHAPE,
    "scripts.memory_timeline": f"{SHAPE} --vocab-size 61",
    "scripts.memory_page": f"{SHAPE} --vocab-size 61",
    "scripts.benchmark": f"{SHAPE} --vocab-size 61 --policies full --repeats 1 --steps 1",
    "scripts.generate": "--max-new-tokens 5",
    "scripts.kept_tensors": "--d-model 16 --n-heads 2 --seq-len 16",
}
ELSEWHERE = {  # have tests of their own
    "studies.block_picture",
    "studies.gpu",
    "studies.ladder",
    "scripts.lesson",
    "pytest",
}


def runnable() -> list[str]:
    """The commands in blocks and in cells, as a reader would copy them; each once."""
    commands = []
    for page in TEXTS:
        text = page.replace("\\\n", " ")
        bash = "".join(re.findall(r"^```bash\n(.*?)^```", text, re.S | re.M))
        others = re.findall(r"^    .*$|(?<=\| `)python [^`]*(?=` \|$)", without_blocks(text), re.M)
        for line in [*bash.splitlines(), *others]:
            command = line.split("#")[0].split("&&")[-1].strip().removesuffix(" &")
            command = command.removeprefix("OMP_NUM_THREADS=1 ")
            if command.startswith(("python ", "torchrun ")):
                commands.append(command)
    return list(dict.fromkeys(commands))


def program(command: str) -> str:
    found = re.search(r"train_\w+\.py|(?<=-m )\S+", command)
    assert found, command
    return found[0]


TORCHRUNS = [command for command in runnable() if command.startswith("torchrun ")]


def test_commands_are_valid():
    for text in commands(r"train_\w+\.py (--[^\n`#]*)"):
        build_parser("test", "x.pt").parse_args(text.split())
    for text in commands(r"\n    python -m scripts\.plan_memory ([^\n#]*)"):
        plan_memory.parse(text.split())
    for command in TORCHRUNS:
        args = get_args_parser().parse_args(shlex.split(command)[1:])
        build_parser(args.training_script, "x.pt").parse_args(args.training_script_args)


def made_small(command: str) -> str:
    words = f"{command} {SMALL.get(program(command), '')}"
    if "--train-data" in words and "--init-from" not in words:
        words += " --tokenizer-name byte"
    return words.replace("torchrun", "python -m torch.distributed.run --standalone")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws pictures")
def test_commands_run(tmp_path):
    """Each in a process of its own. Of torchrun's, the last one of each trainer."""
    made = shutil.ignore_patterns(".*", "__pycache__", "cache", "*.pt", "*.lock", "*.jsonl")
    fresh = shutil.copytree(ROOT, tmp_path / "fresh", ignore=made)
    for name in ("train.txt", "val.txt"):
        (fresh / "data" / name).write_text("a line of text for a model to learn from\n" * 500)
    shape = dict(n_layer=1, n_embd=16, n_inner=32, n_positions=16)
    write_folder(fresh / "gpt2", CONFIG | shape)
    last = {program(command): command for command in TORCHRUNS}.values()
    left_out = set(TORCHRUNS) - set(last)
    lines = [
        made_small(command)
        for command in runnable()
        if program(command) not in ELSEWHERE and command not in left_out
    ]
    for line in lines:
        _, *words = shlex.split(line)
        result = run([sys.executable, *words], timeout=300, cwd=fresh)
        assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"


# ---- their tables, for tests of what stands in them


def cells(text: str, head: str) -> list[list[str]]:
    """The rows of the table that begins with `head`, without bold type and what is in brackets."""
    rows = text.split(f"\n{head}")[1].split("\n\n")[0].splitlines()[2:]
    bare = (re.sub(r" \([^)]*\)|\*\*| MiB", "", row) for row in rows)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in bare]
