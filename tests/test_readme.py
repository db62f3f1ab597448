"""The commands, flags, links and code of README.md and docs/ are right."""

import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness.gpt2_folder import write_folder
from harness.runs import ROOT, run, typed
from torch.distributed.run import get_args_parser

from trainer.flags import flag
from trainer.settings import ROWS

README = (ROOT / "README.md").read_text("utf-8")
DOCS = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
TEXT = "\n".join([README, *DOCS.values()]).replace("\\\n", " ")  # commands are one line each
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[!.]*/README.md"), *ROOT.glob("docs/*.md")])


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def cells(text: str, head: str) -> list[list[str]]:
    """The rows of the table that begins with `head`, without bold type and what is in brackets."""
    rows = text.split(f"\n{head}")[1].split("\n\n")[0].splitlines()[2:]
    bare = (re.sub(r" \([^)]*\)|\*\*| MiB", "", row) for row in rows)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in bare]


# ---- nothing is missing, nothing leads nowhere


def test_every_document_is_linked_from_the_readme():
    assert set(re.findall(r"\]\(docs/(\w+\.md)[)#]", README)) == DOCS.keys() != set()


def test_every_flag_is_there_and_no_other():
    table = DOCS["flags.md"].split("## Flags")[1].split("## Exit codes")[0]
    found = re.findall(r"`(--[a-z0-9-]+)", "".join(re.findall(r"^\|.*", table, re.M)))
    assert {*found} == {*map(flag, ROWS)}


@pytest.mark.parametrize(
    ("text", "begin", "file"),
    [
        (README, "```python\n", "model.py"),
        (DOCS["ladder.md"], "def cheap(block, x):\n", "memory/policies.py"),
    ],
)
def test_shown_code_is_the_code(text, begin, file):
    """Lines without a comment, in the same order."""
    shown = text.partition(begin)[2].partition("```")[0].splitlines()
    shown = [line.partition("  #")[0].strip() for line in shown]
    lines = (ROOT / file).read_text("utf-8").splitlines()
    code = iter(line.partition("  #")[0].strip() for line in lines)
    assert len(shown) > 1 and all(line in code for line in shown)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings: lower case, no punctuation, a hyphen for a space."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text("utf-8")
    for target, anchor in re.findall(r"\]\((?!https://)([^)#]*)#?([^)]*)\)", text):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


# ---- their commands, run one after the other in a fresh copy, made small by flags at their end

# That of harness/gpt2_folder.py.
SHAPE = "--n-layers 2 --n-heads 2 --d-model 16 --d-ff 64 --seq-len 16 --max-position-embeddings 32"
SMALL = {
    "train": f"{SHAPE} --num-steps 4 --eval-tokens 1 --sample-tokens 4",
    "scripts.plan_memory": SHAPE,
    "scripts.memory_timeline": f"{SHAPE} --vocab-size 61",
    "scripts.memory_page": f"{SHAPE} --vocab-size 61",
    "scripts.benchmark": f"{SHAPE} --vocab-size 61 --policies full --steps 1",
    "scripts.generate": "--max-new-tokens 5",
    "scripts.kept_tensors": "--seq-len 16",
    "scripts.plan_model": "--input 1x16",
}
# They have tests of their own.
ELSEWHERE = {"studies.tables", "scripts.lesson", "pytest"}


def find_commands() -> dict[str, str]:
    """command -> its program: those in blocks and in cells, as a reader would copy them."""
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", TEXT, re.S | re.M))
    others = re.findall(r"^    .*$|(?<=\| `)python [^`]*(?=` \|$)", without_blocks(TEXT), re.M)
    begin = r"(?m)(?:^ *|&& )(?:OMP_NUM_THREADS=1 )?"
    found = re.findall(begin + "((?:python|torchrun) [^#&\n]+)", "\n".join([blocks, *others]))
    program = re.compile(r"train_\w+\.py|(?<=-m )\S+|(?<=python )-c")
    return {command.strip(): program.findall(command)[0] for command in found}


COMMANDS = find_commands()
TORCHRUNS = [command for command in COMMANDS if command.startswith("torchrun ")]


def test_flags_are_known():
    """Of trainers, in sentences, too; the slow test below runs the commands."""
    for flags in re.findall(r"train_\w+\.py (--[^\n`#]*)", TEXT):
        typed(*flags.split())
    for command in TORCHRUNS:
        get_args_parser().parse_args(shlex.split(command)[1:])


def made_small(command: str) -> list[str]:
    name = COMMANDS[command]
    words = f"{command} {SMALL.get('train' if name.startswith('train_') else name, '')}"
    if "--train-data" in words and "--init-from" not in words:
        words += " --tokenizer-name byte"
    return shlex.split(words.replace("torchrun", "python -m torch.distributed.run --standalone"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws pictures")
@pytest.mark.skipif(find_spec("transformers") is None, reason="plans a model of transformers")
def test_commands_run(tmp_path):
    """Each in a process of its own. Of torchrun's, the last one of each trainer. (lora.py needs
    the package peft.)"""
    made = shutil.ignore_patterns(".*", "__pycache__", "cache", "*.pt", "*.lock", "*.jsonl")
    fresh = shutil.copytree(ROOT, tmp_path / "fresh", ignore=made)
    for name in ("train.txt", "val.txt"):
        (fresh / "data" / name).write_text("a line of text for a model to learn from\n" * 500)
    write_folder(fresh / "gpt2")
    (fresh / "my_model.py").write_text(DOCS["seeing.md"].split("```python\n")[1].split("```")[0])
    (fresh / "llama").mkdir()
    (fresh / "llama/config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    left_out = {*TORCHRUNS} - {*{COMMANDS[command]: command for command in TORCHRUNS}.values()}
    for command, program in COMMANDS.items():
        if program not in ELSEWHERE and command not in left_out and "lora.py" not in command:
            _, *words = made_small(command)
            result = run([sys.executable, *words], timeout=300, cwd=fresh)
            assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux limits a process's data")
def test_the_example_runs_out_of_memory(tmp_path):
    """That of docs/reliability.md, for any build of torch."""
    example = DOCS["reliability.md"].partition("```sh\n")[2].partition("```")[0]
    words = ["bash", "-c", f'python() {{ {shlex.quote(sys.executable)} "$@"; }}\n{example}']
    result = run(words, timeout=300, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr
    assert re.search("^warning  step .*: same results$", result.stdout, re.M)
