"""Processes that were started differently do not train: one line says in what, nothing is written.

And what process 0 alone finds ends all of them.
"""

import fcntl
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.runs import ROOT, TINY, TORCHRUN, run, snapshot, torchrun, train_here

from trainer import agree
from trainer.agree import OWN, WAYS_OUT, check_alike, data_facts, facts, name_ranks
from trainer.flags import UsageError, build_parser, fill_in, model_config
from trainer.plan import TooLarge, plan_memory
from trainer.process import OneProcess
from trainer.setup import find_data

CPU = torch.device("cpu")


def errors(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def two_machines(*flags: str, rank_1: tuple[str, ...], trainer_1: str = "train_ddp.py") -> str:
    """One process on each of two "machines", started by hand; the one line that both say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank, (own, trainer) in enumerate((((), "train_ddp.py"), (rank_1, trainer_1))):
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MINIGPT_TIMEOUT_S": "60"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = ["/usr/bin/env", *(f"{name}={value}" for name, value in env.items())]
        command += [sys.executable, trainer, *TINY, *flags, *own]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, cwd=ROOT, **pipes))
    lines = []
    for process in processes:
        _, stderr = process.communicate(timeout=100)
        assert process.returncode == 2, stderr
        (line,) = errors(stderr)
        lines.append(line)
    assert lines[0] == lines[1]
    return lines[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_other_flags(tmp_path):
    """--min-lr follows --lr, and is not to blame. The paths may differ: they are the machines'."""
    line = two_machines(
        "--lr=0.003",
        f"--checkpoint-path={tmp_path}/new/run.pt",
        rank_1=("--lr=0.001", "--seed=3", f"--checkpoint-path={tmp_path}/other/run.pt"),
    )
    assert line == (
        "error: --lr: rank 0 has 0.003, rank 1 has 0.001; --seed: rank 0 has 1337, rank 1 has 3: "
        "start all with the same flags"
    )
    assert list(tmp_path.iterdir()) == []  # no folder, no lock


def test_another_trainer(tmp_path):
    """They would wait for each other for ever, in collectives of two kinds."""
    path = f"--checkpoint-path={tmp_path}/run.pt"
    line = two_machines(path, rank_1=(), trainer_1="train_fsdp.py")
    assert line == (
        "error: the trainer: rank 0 has train_ddp.py, rank 1 has train_fsdp.py: "
        "start the same on all machines"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_other_snapshots(tmp_path):
    """--resume, where each machine has a disk of its own; and the snapshots stay as they were."""
    paths = tmp_path / "a.pt", tmp_path / "b.pt"
    for path, steps in zip(paths, (2, 3), strict=True):
        assert train_here(path, f"--num-steps={steps}", "--grad-accum-steps=2") == 0
    before = contents(tmp_path)
    both = ("--resume", "--num-steps=5", f"--checkpoint-path={paths[0]}")
    line = two_machines(*both, rank_1=(f"--checkpoint-path={paths[1]}",))
    assert line.startswith("error: --checkpoint-path: rank 0 has step 2 of run ")
    assert "rank 1 has step 3 of run " in line and "must see the same snapshot" in line
    assert contents(tmp_path) == before


def test_other_data_and_no_hang_in_any_attempt(tmp_path):
    """One line an attempt, of all processes."""
    for name, seed in (("a", 1), ("b", 2)):
        tokens = np.random.default_rng(seed).integers(0, 30, 400).astype(np.uint16)
        np.save(tmp_path / f"{name}.npy", tokens)
    before = contents(tmp_path)
    command = [*TORCHRUN, "--nproc-per-node=2", "--max-restarts=1", "tests/harness/ddp_by_rank.py"]
    command += [*TINY[TINY.index("--n-layers") :], f"--checkpoint-path={tmp_path}/run.pt"]
    own = {f"FLAGS_{r}": f"--train-data {tmp_path}/{'ab'[r]}.npy" for r in (0, 1)}
    result = run(command, MINIGPT_TIMEOUT_S="60", **own)
    first, second = errors(result.stderr)
    assert first == second and first.startswith("error: --train-data: rank 0 has ")
    assert "fingerprint" in first and ", rank 1 has " in first and "the same data" in first
    assert "exitcode  : 2" in result.stderr
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_auto_takes_what_fits_everywhere(tmp_path):
    """The memory of process 1, the smaller one, is a flag here."""
    path, small = tmp_path / "run.pt", "--memory-budget=500KiB"
    auto = ("--use-activation-checkpoint=auto", "--batch-size=8", "--num-steps=1", "--no-amp")
    result = torchrun(
        path,
        *auto,
        script="tests/harness/ddp_by_rank.py",
        FLAGS_0="--memory-budget=1GiB",
        FLAGS_1=small,
    )
    assert "that fits in 450.0 KiB (500.0 KiB less a margin of a tenth)" in result.stdout
    assert snapshot(path)["config"]["recompute"] != "none"


@pytest.mark.slow
def test_what_process_0_alone_finds_ends_all(tmp_path):
    """With the same words: process 1 does not speak of a lost connection."""
    with open(tmp_path / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = two_machines(f"--checkpoint-path={tmp_path}/run.pt", rank_1=())
    assert "another run is writing to" in line


# ---- The same without processes


class Other(OneProcess):
    """Process 1 of two that does what process 0 has told it."""

    rank, world_size = 1, 2

    def __init__(self, told):
        super().__init__(CPU)
        self.told = told

    def exchange(self, mine):
        return [self.told, mine]


def test_by_first():
    assert OneProcess(CPU).by_first(lambda: 3) == 3
    assert Other(None).by_first(lambda: 1 / 0) is None  # it is not for process 1 to do
    with pytest.raises(TooLarge, match="out of memory"):
        Other(TooLarge("out of memory")).by_first(lambda: 1 / 0)
    with pytest.raises(UsageError, match="mine"):
        OneProcess(CPU).by_first(lambda: (_ for _ in ()).throw(UsageError("mine")))


@pytest.mark.parametrize(("theirs", "chosen"), [(1 << 30, "none"), (400_000, "less")])
def test_the_smallest_budget_counts(monkeypatch, theirs, chosen):
    monkeypatch.setattr("trainer.room.free_memory", lambda device: 1 << 30)
    args = parse("--use-activation-checkpoint=auto", "--batch-size=8", "--no-amp")
    process = Other(None)
    process.exchange = lambda mine: [theirs if isinstance(mine, int) else None, mine]
    config, *_ = plan_memory(args, process, model_config(args, 31), torch.float32)
    assert (config.recompute == "none") == (chosen == "none")


def parse(*flags: str):
    return fill_in(build_parser("test", "x.pt").parse_args([*TINY, *flags]))


def of(*flags: str, precision=torch.float32, process=None) -> dict:
    args, process = parse(*flags), process or OneProcess(CPU)
    return facts(args, process, precision, None) | data_facts(find_data(args, process).load())


def told(*of_each: dict) -> str:
    with pytest.raises(UsageError) as error:
        check_alike(list(of_each))
    return str(error.value)


def test_what_differs_is_named(monkeypatch):
    here = of()
    own = ("--device=auto", "--no-amp", "--checkpoint-path=/other/disk.pt")
    check_alike([here, of(), of(*own)])
    assert told(here, of("--compile")).startswith("--compile: rank 0 has off, rank 1 has on:")
    assert told(here, here, of("--num-steps=30")) == (
        "--num-steps: ranks 0 and 1 have 20, rank 2 has 30: start all with the same flags"
    )
    line = told(here, of(precision=torch.bfloat16))
    assert line == "--amp-dtype: rank 0 has float32, rank 1 has bfloat16: choose one that all have"
    line = told(of(process=OneProcess(torch.device("cuda", 0))), here)
    assert line.startswith("--device: rank 0 has cuda, rank 1 has cpu")
    monkeypatch.setattr(agree.torch, "__version__", "9.8.7+cu1")
    assert told(here, of()).endswith("rank 1 has 9.8: install the same on all machines")


def test_every_flag_is_compared_or_has_a_reason():
    args = parse()
    names = {"--" + name.replace("_", "-") for name in vars(args).keys() - OWN.keys()}
    assert names <= of().keys() and OWN.keys() <= vars(args).keys()
    assert WAYS_OUT.keys() <= of().keys()


def test_names_of_ranks():
    cases = {(0,): "rank 0 has", (1, 3): "ranks 1 and 3 have", (2, 3, 4): "ranks 2 to 4 have"}
    cases |= {
        (0, 2, 4): "ranks 0, 2 and 4 have",
        (1, 3, 5, 7, 9, 11): "ranks 1, 3, 5 and 3 more have",
    }
    for ranks, words in cases.items():
        assert name_ranks(list(ranks)) == words
