"""What the READMEs and docs/ say is so; and README.zh-CN.md says what README.md says."""

import inspect
import re
import shlex
import shutil
import sys
from collections import Counter
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

import pytest
from harness.gpt2_folder import write_folder
from harness.runs import ROOT, run
from torch.distributed.run import get_args_parser

import scripts
from model import MiniGPT
from scripts.lesson import EXERCISES
from trainer.flags import build_parser

README, CHINESE = ((ROOT / name).read_text("utf-8") for name in ("README.md", "README.zh-CN.md"))
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
TEXTS = [README, *DOCS.values()]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[!.]*/README.md"), *ROOT.glob("docs/*.md")])


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def test_the_two_commands():
    lines = re.findall(r"^    (pip install -r .*)$", README, re.M)
    assert lines == [
        "pip install -r requirements.txt && python train_minimal.py --use-activation-checkpoint",
        "pip install -r requirements-dev.txt && python -m pytest -n 2",
    ]
    for readme in (README, CHINESE):
        assert readme.index("whl/cpu") < readme.index(lines[0])  # too late behind it


def test_every_document_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\(docs/(\w+\.md)[)#]", README))
    assert linked == DOCS.keys() and linked


def test_counts_in_words():
    """Wherever the lesson's exercises are counted, the count is the same."""
    listing, lesson = scripts.LISTING, ROOT / "docs" / "lesson.md"
    texts = [listing, *(page.read_text("utf-8") for page in PAGES if page != lesson)]
    texts = [text for text in texts if not text.startswith("# Changelog")]  # as it was then
    counts = [n for text in texts for n in re.findall(r"(\w+)\s+exercises\b", text)]
    assert len(EXERCISES) == 12 and len(counts) >= 3 and {*counts} == {"twelve"}


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
def test_links_lead_somewhere_and_no_line_is_wide(page):
    """But for tables, commands and pictures. (The Chinese page has a line a paragraph.)"""
    text = page.read_text("utf-8")
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if target.startswith("https://"):
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"
    lines = without_blocks(text).splitlines()
    wide = [line for line in lines if len(line) > 100 and not line.startswith(("|", "    ", "!"))]
    assert not wide or page.name in ("README.zh-CN.md", "CHANGELOG.md"), wide


# ---- in both languages

HAN = "[\u4e00-\u9fff]"
CODE = re.compile(r"^```.*?^```$|^    .*?$", re.S | re.M)  # fenced or indented
FACT = re.compile(
    r"`[^`]+`"  # what is in backticks,
    r"|\]\([^)]*\)"  # where links lead,
    r"|(?:(?<!\w)[-+])?\d+(?:[.,]\d+)*(?: ?(?:%|[KMG]i?B\b))?"  # numbers in digits
)


def facts(line: str) -> list[str]:
    """What has no language. "1,000" equals "1000", and "15 %" equals "15%"."""
    found = (re.sub(r"README[\w.-]*\.md", "the other language", f) for f in FACT.findall(line))
    return [" ".join(f.split()) if f[0] in "`]" else re.sub("[ ,]", "", f) for f in found]


def things(section: str) -> Counter[str]:
    """Code and tables line by line; prose in any order, because Chinese has another."""
    found = Counter("\n".join(CODE.findall(section)).splitlines())
    lines = CODE.sub("", section).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    for i, row in enumerate(rows, 1):
        for cell, text in enumerate(row.split("|")):
            found.update(f"row {i}, cell {cell}: {fact}" for fact in ["", *facts(text)])
    found.update(facts(" ".join(line for line in lines if line not in rows)))
    found.update(re.findall("^##+ ", section))
    return found


def test_both_languages_say_the_same():
    """Section by section: what needs no translation is equal."""
    found = []
    by_section = (re.split(r"^(?=##+ )", page, flags=re.M) for page in (README, CHINESE))
    for one, other in zip_longest(*by_section, fillvalue="(none)"):
        where = f"{one.partition(chr(10))[0]!r}, {other.partition(chr(10))[0]!r}"
        found += [f"{where}: only English has {what}" for what in things(one) - things(other)]
        found += [f"{where}: only Chinese has {what}" for what in things(other) - things(one)]
    assert not found, f"{len(found)} differences\n" + "\n".join(found)


MISPRINTS = {
    "a line break is shown as a blank; one line a paragraph": rf"{HAN}.*\n(?!\n|- |\d+\. |#|\||\Z)",
    "no blank between Chinese and Latin": rf"{HAN}[\w`](?<!{HAN})|[a-zA-Z0-9`%]{HAN}",
    "half-width punctuation": rf"{HAN}[,;:!?()]|[,;:!?()]{HAN}",
    "检查点 alone means both (激活检查点, 快照)": "(?<!激活)检查点",
}


def test_no_misprints():
    """What makes Chinese text readable, on this page."""
    plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)|\*\*", r"\1", CODE.sub("", CHINESE))
    for what, pattern in MISPRINTS.items():
        found = re.search(pattern, plain)
        assert not found, f"{what}: {plain[found.start() - 10 : found.end() + 10]}"


# ---- their commands, run one after the other in a fresh copy, made small by flags at their end

# That of harness/gpt2_folder.py.
SHAPE = "--n-layers 2 --n-heads 2 --d-model 16 --d-ff 64 --seq-len 16 --max-position-embeddings 32"
TRAINING = f"{SHAPE} --num-steps 4 --eval-tokens 1 --sample-tokens 4"
SMALL = {
    "train_minimal.py": TRAINING,
    "train_ddp.py": TRAINING,
    "train_fsdp.py": TRAINING,
    "train_sp.py": TRAINING,
    "scripts.plan_memory": SHAPE,
    "scripts.memory_timeline": f"{SHAPE} --vocab-size 61",
    "scripts.memory_page": f"{SHAPE} --vocab-size 61",
    "scripts.benchmark": f"{SHAPE} --vocab-size 61 --policies full --repeats 1 --steps 1",
    "scripts.generate": "--max-new-tokens 5",
    "scripts.kept_tensors": "--d-model 16 --n-heads 2 --seq-len 16",
}
# They have tests of their own.
ELSEWHERE = {"studies.block_picture", "studies.gpu", "studies.tables", "scripts.lesson", "pytest"}


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
    found = re.search(r"train_\w+\.py|(?<=-m )\S+|(?<=python )-c", command)
    assert found, command
    return found[0]


TORCHRUNS = [command for command in runnable() if command.startswith("torchrun ")]


def test_flags_are_known():
    """Of trainers, in sentences, too; the slow test below runs the commands."""
    joined = "\n".join(TEXTS).replace("\\\n", " ")
    for flags in re.findall(r"train_\w+\.py (--[^\n`#]*)", joined):
        build_parser("test", "x.pt").parse_args(flags.split())
    for command in TORCHRUNS:
        get_args_parser().parse_args(shlex.split(command)[1:])


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
    write_folder(fresh / "gpt2")
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
