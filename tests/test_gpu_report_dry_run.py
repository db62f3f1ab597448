"""A dry run of scripts/gpu_report.py: all of it small, on the CPU."""

import json
import sys

import pytest
import torch
from harness.runs import run

from scripts import gpu_report
from scripts.gpu_report_markdown import show
from scripts.gpu_report_results import read_results

# A GPT with the names that nanoGPT's has.
NANOGPT = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.vocab_size % 64 == 0 and config.bias
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, idx, targets=None):
        assert torch.get_float32_matmul_precision() == "high"  # as its train.py has it
        logits = self.head(self.embed(idx))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        assert device_type == "cpu"
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""
REPORTED = {name: section.about for name, section in gpu_report.SECTIONS.items()}
# To import torch ten times takes longer than all measurements: here every worker runs in the
# process that would start it.
IN_ONE_PROCESS = """
import sys
from scripts import gpu_report

def here(command, log, seconds):
    code = gpu_report.main(command[3:])
    return f"exit code {code}" if code else None

gpu_report.run_process = here
sys.exit(gpu_report.main(sys.argv[1:]))
"""
TRUE_RUNS = ("oom", "ddp")  # which start trainers


@pytest.fixture(scope="module", params=["quick", pytest.param("all", marks=pytest.mark.slow)])
def dry(request, tmp_path_factory):
    """A dry run: its folder, and what it printed. `all`: as users start it, with all sections."""
    folder = tmp_path_factory.mktemp("dry")
    (folder / "nanoGPT").mkdir()
    (folder / "nanoGPT" / "model.py").write_text(NANOGPT)
    program, skip = ["-m", "scripts.gpu_report"], []
    if request.param == "quick":
        program, skip = ["-c", IN_ONE_PROCESS], ["--skip", *TRUE_RUNS]
    words = ["--dry-run", "--out", str(folder), "--nanogpt", str(folder / "nanoGPT"), *skip]
    done = run([sys.executable, *program, *words], timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    if request.param == "all":  # (what workers say goes into their logs)
        assert done.stderr == ""
    return folder, done.stdout


def test_a_dry_run_measures_everything(dry, request):
    folder, said = dry
    results = read_results(folder / "results.jsonl")
    left_out = TRUE_RUNS if "quick" in request.node.name else ()
    assert list(results.names) == [name for name in gpu_report.SECTIONS if name not in left_out]
    for section, names in results.names.items():
        records = results.records[section]
        errors = {name: record["error"] for name, record in records.items() if "error" in record}
        assert errors == {} and names and set(records) == set(names)
        for record in records.values():
            assert record["values"] and record["seconds"] >= 0 and "units" in record
        assert f"{section:<12} {len(names)} measured, " in said
    assert "failed" not in said


def test_what_a_dry_run_finds_is_right(dry):
    records = read_results(dry[0] / "results.jsonl").records
    if "oom" in records:
        for record in [*records["oom"].values(), *records["ddp"].values()]:
            assert record["values"]["as_wanted"], record
        assert {r["values"].get("exit") for r in records["oom"].values()} == {0, 4}
    for name, record in records["correctness"].items():
        assert record["values"].get("bit_equal", True), name
    recovered = records["correctness"]["float16 from a loss scale of 2^24"]["values"]
    assert recovered["recovered"] and recovered["skipped"] > 0 and recovered["finite"]
    for name, record in records["head"].items():
        for key, value in record["values"].items():
            if key.endswith("_error"):
                assert 0 < value < 0.01, name
    for name, record in records["peaks"].items():
        values = record["values"]
        # (A CPU's bfloat16 kernels have scratch memory, which counts in a model this small.)
        assert 0.5 < values["predicted"] / values["allocated"] < 1.1, name
    assert records["speed"]["nanoGPT, compiled, turn 1"]["values"]["tokens/s"] > 0
    assert records["matmuls"]["V=61 n=4 logits"]["units"] == {"ms": "ms", "TFLOP/s": "TFLOP/s"}


def test_its_report(dry, capsys):
    folder, _ = dry
    text = (folder / "report.md").read_text()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [*REPORTED]
    assert "gpu_report --dry-run --out" in text and torch.__version__ in text
    # From the raw numbers alone, wherever they lie.
    assert gpu_report.main(["--report", str(folder / "results.jsonl")]) == 0
    assert capsys.readouterr().out == text
    # The tables' numbers are those of the file.
    records = read_results(folder / "results.jsonl").records
    for section in {"matmuls", "ddp"} & {*records}:
        for name, record in records[section].items():
            (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} |"))
            cells = line.strip("| ").split(" | ")
            for key, value in record["values"].items():
                shown = show(value, record["units"].get(key))
                assert shown == "" or shown in cells, (name, key)


def test_once_more_measures_nothing(dry):
    """In a process of its own, here too."""
    folder, _ = dry
    before = (folder / "results.jsonl").read_text()
    flags = ["--dry-run", "--out", str(folder), "--only", "matmuls"]
    assert gpu_report.main(flags) == 0
    new = (folder / "results.jsonl").read_text().removeprefix(before).splitlines()
    assert [[*json.loads(line)][0] for line in new] == ["about", "section"]
    assert all("names" in json.loads(line) for line in new[1:])


def test_traces_are_kept(dry):
    assert (dry[0] / "trace_none_2.json.gz").stat().st_size > 0
    assert not list(dry[0].glob("*.npy"))
