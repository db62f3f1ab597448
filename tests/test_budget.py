"""What `auto` may take if nobody says: most of what is free, by the tightest limit there is."""

import os
from pathlib import Path

import pytest
import torch

from trainer.device import MemoryBudget, budget_on, free_memory, total_memory

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine({file: content}): nothing else is in /proc and /sys."""

    def there(*parts: str) -> Path:
        return tmp_path / Path(*parts).relative_to("/")

    def make(files: dict[str, str]) -> None:
        for name, content in files.items():
            there(name).parent.mkdir(parents=True, exist_ok=True)
            there(name).write_text(content)

    monkeypatch.setattr("trainer.device.Path", there)
    return make


MEMINFO = "MemTotal:  9000 kB\nMemFree: 1 kB\nMemAvailable:    2000 kB\nBuffers: 7 kB\n"
CACHED = "anon 300000\nfile 0\ninactive_file 200000\nactive_file 1\n"
STATISTICS = "/sys/fs/cgroup/memory.stat"
LIMIT, USED = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"


@pytest.mark.parametrize(
    ("files", "free", "total"),
    [
        ({}, 2_048_000, 9_216_000),
        ({LIMIT: "1500000\n", USED: "500000\n"}, 1_000_000, 1_500_000),
        ({LIMIT: "1500000\n"}, 2_048_000, 1_500_000),
        ({LIMIT: "1500000\n", USED: "500000\n", STATISTICS: CACHED}, 1_200_000, 1_500_000),
        # swap is slow, but no reason to refuse a run
        ({"/proc/meminfo": MEMINFO + "SwapTotal: 1000 kB\n"}, 2_048_000, 10_240_000),
    ],
)
def test_on_linux_the_tightest_limit_counts(machine, files, free, total):
    machine({"/proc/meminfo": MEMINFO} | files)
    assert (free_memory(CPU), total_memory(CPU)) == (free, total)


def test_elsewhere_it_is_what_is_built_in_or_nobody_knows(machine, monkeypatch):
    known = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(os, "sysconf", known.__getitem__)
    machine({"/proc/meminfo": "MemTotal: 9000 kB\n"})  # an old kernel
    assert free_memory(CPU) == 4_096_000
    machine({"/proc/meminfo": ""})
    monkeypatch.delattr(os, "sysconf")
    assert free_memory(CPU) is None and budget_on(CPU).usable_bytes is None


def test_a_tenth_stays_free(machine):
    machine({"/proc/meminfo": MEMINFO})
    assert budget_on(CPU).usable_bytes == 1_843_200
    assert budget_on(CPU, processes=2, held=1000).usable_bytes == 922_500  # they share
    # As somebody says.
    assert budget_on(CPU, 5000, processes=2, held=1000) == MemoryBudget(5000, "cpu")


def test_both_numbers_are_said():
    """On a GPU 1 GiB stays free: a tenth of a small card is little; of a tiny one, a quarter."""
    for room, words in {
        MemoryBudget(60 << 20, "cpu"): "54.0 MiB (60.0 MiB less a margin of a tenth)",
        MemoryBudget(2 << 30, "cuda"): "1.5 GiB (2.0 GiB less a margin of a quarter)",
        MemoryBudget(8 << 30, "cuda"): "7.0 GiB (8.0 GiB less a margin of 1 GiB)",
        MemoryBudget(20 << 30, "cuda", True): "18.0 GiB (20.0 GiB free, less a margin of a tenth)",
    }.items():
        assert str(room) == words
