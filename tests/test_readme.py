"""What the README and docs/ say is so."""

import inspect
import json
import re
import shlex
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness.gpt2_folder import CONFIG, write_folder
from harness.runs import ROOT, run
from torch.distributed.run import get_args_parser

from model import RECOMPUTE_POLICIES, MiniGPT, MiniGPTConfig
from planner.formulas import count_parameters, step_flops
from scripts import plan_memory
from studies.ladder import TIMES
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


def test_commands_are_valid():
    for text in commands(r"train_\w+\.py (--[^\n`#]*)"):
        build_parser("test", "x.pt").parse_args(text.split())
    for text in commands(r"\n    python -m scripts\.plan_memory ([^\n#]*)"):
        plan_memory.parse(text.split())


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
    "scripts.export_hf": "",
    "scripts.evaluate": "",
    "scripts.plot_metrics": "",
    "scripts.kept_tensors": "--d-model 16 --n-heads 2 --seq-len 16",
    "scripts.checkpoint_from_scratch": "",
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


def test_every_command_is_run_somewhere():
    assert {program(command) for command in runnable()} <= SMALL.keys() | ELSEWHERE


TORCHRUNS = [command for command in runnable() if command.startswith("torchrun ")]


@pytest.mark.parametrize("command", TORCHRUNS)
def test_torchrun_knows_the_flags(command):
    args = get_args_parser().parse_args(shlex.split(command)[1:])
    build_parser(args.training_script, "x.pt").parse_args(args.training_script_args)


def made_small(command: str) -> str:
    words = f"{command} {SMALL[program(command)]}"
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


# ---- their figures


MIB = 2**20
GPT2_SMALL = MiniGPTConfig(dropout=0.0)


def plain(page: str) -> str:
    return " ".join(page.split())


def cells(text: str, head: str) -> list[list[str]]:
    """The rows of the table that begins with `head`, without bold type and what is in brackets."""
    rows = text.split(f"\n{head}")[1].split("\n\n")[0].splitlines()[2:]
    bare = (re.sub(r" \([^)]*\)|\*\*| MiB", "", row) for row in rows)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in bare]


def ladder_figures(column: str) -> dict[str, float]:
    figures = json.loads((ROOT / "studies/results/ladder.json").read_text())["figures"]
    return {figure["rung"]: figure["value"] for figure in figures if figure["column"] == column}


def relative_flops(**memory) -> str:
    needed, replayed = step_flops(replace(GPT2_SMALL, **memory), 1024)
    return f"{(needed + replayed) / needed:.2f}"


def test_the_first_table_is_what_was_predicted():
    rows = {"2": ladder_figures("124M, B=2"), "12": ladder_figures("124M, B=12")}
    for (_, *found), rung in zip(
        cells(README, "| | 2 seq"), ("plain", "none", "full"), strict=True
    ):
        assert found == [f"{figures[rung]:,.0f}" for figures in rows.values()]
    floor = 16 * count_parameters(GPT2_SMALL) / MIB
    assert f"\n{floor:,.0f} MiB of each are weights" in README
    assert f"[{relative_flops(recompute='full')} times the FLOPs]" in README


def test_the_ladder_is_what_was_predicted():
    rows = cells(DOCS["ladder.md"], "| policy | keeps")
    assert len(rows) == len(RECOMPUTE_POLICIES) + 1
    small, large = ladder_figures("124M, B=12"), ladder_figures("1.5B, B=4")
    for name, _, of_small, of_large, flops, *times in rows:
        policy, *group = re.findall(r"`([^`]*)`", name)
        rung = "full, groups of 2" if group else policy
        assert (of_small, of_large) == (f"{small[rung]:,.0f}", f"{large[rung]:,.0f}")
        assert flops == relative_flops(recompute=policy, recompute_group=2 if group else 1)
        assert times == [f"{ladder_figures(column)[rung]:.2f}" for column in TIMES]


def test_the_head_and_the_flops_of_full_are_explained():
    text = plain(DOCS["ladder.md"])
    peak, time = ladder_figures("124M, B=12"), ladder_figures("time, RTX 4090")
    assert (
        f"`full` takes the peak from {peak['plain']:,.0f} MiB to {peak['full, head at once']:,.0f} "
        f"and no further" in text
    )
    assert f"at once takes {time['plain']:.2f} times as long" in text
    needed, replayed = step_flops(replace(GPT2_SMALL, recompute="full"), 1024)
    last_matmuls = 12 * 2 * GPT2_SMALL.d_model * GPT2_SMALL.d_ff
    head = 2 * GPT2_SMALL.vocab_size * GPT2_SMALL.d_model
    assert replayed == needed / 3 - last_matmuls - head
    for flops in (needed, needed / 3, last_matmuls, head, replayed):
        assert f" {flops / 1e6:.1f}" in text
    assert f"or {100 * replayed / needed:.1f} %" in text


def test_the_clocks_table_is_what_was_measured():
    rows = cells(DOCS["evidence.md"], "| | GPT-2 small | predicted")
    files = (ROOT / f"studies/results/clock_cpu_{name}.json" for name in ("124m", "small"))
    measured = [json.loads(file.read_text())["rows"] for file in files]
    for (name, *found), *both in zip(rows, *measured, strict=True):
        wanted = []
        for row, digits in zip(both, (0, 1), strict=True):
            assert name == f"`{row['policy']}`"
            wanted += [f"{1000 * row[key]:,.{digits}f} ms" for key in ("step_s", "predicted_s")]
            wanted += [f"{100 * row[key]:+.1f} %" for key in ("over_none", "predicted_over_none")]
        assert found == wanted
    short = [100 - 100 * row["predicted_s"] / row["step_s"] for row in measured[0]]
    assert f"predicted {min(short):.0f} to {max(short):.0f} % too short" in plain(
        DOCS["evidence.md"]
    )
