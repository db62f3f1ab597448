"""What `auto` may take if nobody says: most of what is free, by the tightest limit there is."""

import pytest
import torch

from trainer.device import MemoryBudget, budget_on, free_and_total_memory

CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path):
    """machine({file: content}): nothing else is in proc and sys of the folder that it returns."""

    def make(files: dict[str, str]) -> str:
        for name, content in files.items():
            file = tmp_path / name.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        return str(tmp_path)

    return make


MEMINFO = "MemTotal:  9000 kB\nMemFree: 1 kB\nMemAvailable:    2000 kB\nBuffers: 7 kB\n"
CACHED = "anon 300000\nfile 0\ninactive_file 200000\nactive_file 1\n"
GROUPS, IN_CONTAINER = "/proc/self/cgroup", {"/proc/self/cgroup": "0::/\n"}
STATISTICS = "/sys/fs/cgroup/memory.stat"
LIMIT, USED = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"
JOB = "/sys/fs/cgroup/slurm/job"


@pytest.mark.parametrize(
    ("files", "free", "total"),
    [
        ({}, 2_048_000, 9_216_000),
        (IN_CONTAINER | {LIMIT: "1500000\n", USED: "500000\n"}, 1_000_000, 1_500_000),
        (IN_CONTAINER | {LIMIT: "1500000", USED: "500000", STATISTICS: CACHED}, 1_200_000, 1500000),
        # The limit of a group above the process's own
        (
            {GROUPS: "0::/slurm/job/step\n", f"{JOB}/memory.max": "900000\n"}
            | {f"{JOB}/memory.current": "100000\n", f"{JOB}/step/memory.max": "max\n"},
            800_000,
            900_000,
        ),
    ],
)
def test_on_linux_the_tightest_limit_counts(machine, files, free, total):
    root = machine({"/proc/meminfo": MEMINFO} | files)
    assert free_and_total_memory(CPU, root) == (free, total)


def test_elsewhere_it_is_unknown(machine, monkeypatch):
    assert free_and_total_memory(CPU, machine({})) == (None, None)
    monkeypatch.setattr("trainer.device.free_and_total_memory", lambda device: (None, None))
    assert budget_on(CPU).usable_bytes is None


def test_a_tenth_stays_free(monkeypatch):
    known = (2_048_000, 9_216_000)
    monkeypatch.setattr("trainer.device.free_and_total_memory", lambda device: known)
    assert budget_on(CPU).usable_bytes == 1_843_200
    assert budget_on(CPU, processes=2).usable_bytes == 921_600  # they share
    # As somebody says.
    assert budget_on(CPU, 5000, processes=2) == MemoryBudget(5000, "cpu")


def test_both_numbers_are_said():
    """On a GPU 1 GiB stays free: a tenth of a small card is little; of a tiny one, a quarter."""
    for room, words in {
        MemoryBudget(60 << 20, "cpu"): "54.0 MiB (60.0 MiB less a margin of a tenth)",
        MemoryBudget(2 << 30, "cuda"): "1.5 GiB (2.0 GiB less a margin of a quarter)",
        MemoryBudget(8 << 30, "cuda"): "7.0 GiB (8.0 GiB less a margin of 1 GiB)",
        MemoryBudget(20 << 30, "cuda", True): "18.0 GiB (20.0 GiB free, less a margin of a tenth)",
    }.items():
        assert str(room) == words
