"""Processes that were started differently do not train: one line says in what, nothing is written.

And what process 0 alone finds ends all of them.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from harness.runs import TINY, errors, snapshot, together, torchrun

from trainer import agree
from trainer.agree import OWN, WAYS_OUT, Facts, check_alike, data_facts, facts
from trainer.flags import UsageError, build_parser, fill_in, model_config
from trainer.plan import TooLarge, plan_memory
from trainer.process import OneProcess
from trainer.setup import find_data
from trainer.snapshot import Resumed

CPU = torch.device("cpu")
BY_RANK = "tests/harness/ddp_by_rank.py"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_other_flags(tmp_path):
    """--min-lr follows --lr, and is not to blame. The paths may differ: they are the machines'."""
    own = {f"FLAGS_{r}": f"--checkpoint-path={tmp_path}/{r}/run.pt" for r in (0, 1)}
    own["FLAGS_1"] += " --lr=0.001 --seed=3"
    result = torchrun(tmp_path / "run.pt", "--lr=0.003", script=BY_RANK, expect=2, **own)
    assert set(errors(result)) == {
        "error: --lr: rank 0 has 0.003, rank 1 has 0.001: start all with the same flags"
    }
    assert list(tmp_path.iterdir()) == []  # no folder, no lock


def test_other_data(tmp_path):
    """Read by each process before they meet; nothing is written."""
    for name, seed in (("a", 1), ("b", 2)):
        tokens = np.random.default_rng(seed).integers(0, 30, 400).astype(np.uint16)
        np.save(tmp_path / f"{name}.npy", tokens)
    before = contents(tmp_path)
    words = [*TINY[TINY.index("--n-layers") :], f"--checkpoint-path={tmp_path}/run.pt"]
    own = {f"FLAGS_{r}": f"--train-data {tmp_path}/{'ab'[r]}.npy" for r in (0, 1)}
    result = together([BY_RANK, *words], **own)
    (line,) = set(errors(result))
    assert line.startswith("error: --train-data: rank 0 has ") and result.returncode == 2
    assert "fingerprint" in line and ", rank 1 has " in line and "the same data" in line
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_auto_takes_what_fits_everywhere(tmp_path):
    """The memory of process 1, the smaller one, is a flag here."""
    path, small = tmp_path / "run.pt", "--memory-budget=500KiB"
    auto = ("--use-activation-checkpoint=auto", "--batch-size=8", "--num-steps=1", "--no-amp")
    result = torchrun(path, *auto, script=BY_RANK, FLAGS_0="--memory-budget=1GiB", FLAGS_1=small)
    assert "that fits in 450.0 KiB (500.0 KiB less a margin of a tenth)" in result.stdout
    assert snapshot(path)["config"]["recompute"] != "none"


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


def of(*flags: str, precision=torch.float32, process=None, resumed=None) -> Facts:
    args = parse(*flags)
    return facts(args, process or OneProcess(CPU), precision, resumed)


def told(*of_each: Facts) -> str:
    with pytest.raises(UsageError) as error:
        check_alike(list(of_each))
    return str(error.value)


def test_what_differs_is_named(monkeypatch):
    here = of()
    own = ("--device=auto", "--no-amp", "--checkpoint-path=/other/disk.pt")
    check_alike([here, of(), of(*own)])
    assert told(here, of("--compile")).startswith("--compile: rank 0 has off, rank 1 has on:")
    assert told(here, here, of("--num-steps=30")) == (
        "--num-steps: rank 0 has 20, rank 2 has 30: start all with the same flags"
    )
    assert told(here, of("--seq-len=8")).startswith("--seq-len: ")  # positions follow from it
    line = told(here, of(precision=torch.bfloat16))
    assert line == "--amp-dtype: rank 0 has float32, rank 1 has bfloat16: choose one that all have"
    line = told(of(process=OneProcess(torch.device("cuda", 0))), here)
    assert line.startswith("--device: rank 0 has cuda, rank 1 has cpu")
    saved = [Resumed({"step": step, "run": "0123456789"}, Path("run.pt")) for step in (2, 3)]
    assert told(*(of(resumed=one) for one in saved)) == (
        "--checkpoint-path: rank 0 has step 2 of run 01234567, rank 1 has step 3 of run 01234567: "
        "all must see the same snapshot, on a disk that they share"
    )
    monkeypatch.setattr(OneProcess, "script", "train_fsdp.py")
    assert told(here, of()) == (
        "the trainer: rank 0 has train_minimal.py, rank 1 has train_fsdp.py: "
        "start the same on all machines"
    )
    monkeypatch.undo()
    monkeypatch.setattr(agree.torch, "__version__", "9.8.7+cu1")
    assert told(here, of()).endswith("rank 1 has 9.8: install the same on all machines")


def test_every_flag_is_compared_or_has_a_reason():
    args = parse()
    names = {"--" + name.replace("_", "-") for name in vars(args).keys() - OWN}
    known = of().shown | data_facts(find_data(args, OneProcess(CPU)).load()).shown
    assert names <= known.keys() and OWN <= vars(args).keys()
    assert WAYS_OUT.keys() <= known.keys()
