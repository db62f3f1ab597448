"""What `auto` may take if nobody says: most of what is free, by the tightest limit there is."""

import math
import os

import pytest
import torch

from trainer.bootstrap import cpu_quota
from trainer.device import MemoryBudget, budget_on, free_memory, total_memory

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
OLD_CPU, OLD = "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/memory/slurm/memory"


@pytest.mark.parametrize(
    ("files", "free", "total"),
    [
        ({}, 2_048_000, 9_216_000),
        (IN_CONTAINER | {LIMIT: "1500000\n", USED: "500000\n"}, 1_000_000, 1_500_000),
        (IN_CONTAINER | {LIMIT: "1500000\n"}, 2_048_000, 1_500_000),
        (IN_CONTAINER | {LIMIT: "1500000", USED: "500000", STATISTICS: CACHED}, 1_200_000, 1500000),
        # swap is slow, but no reason to refuse a run
        ({"/proc/meminfo": MEMINFO + "SwapTotal: 1000 kB\n"}, 2_048_000, 10_240_000),
        # A limit of the address space
        (
            {"/proc/self/limits": "Limit Soft Hard\nMax address space 3000000 unlimited bytes\n"}
            | {"/proc/self/status": "VmSize:\t 1000 kB\n"},
            1_976_000,
            3_000_000,
        ),
        # The limit of a group above the process's own
        (
            {GROUPS: "0::/slurm/job/step\n", f"{JOB}/memory.max": "900000\n"}
            | {f"{JOB}/memory.current": "100000\n", f"{JOB}/step/memory.max": "max\n"},
            800_000,
            900_000,
        ),
        # Control groups of version 1, without a limit of the lowest one
        (
            {GROUPS: "3:cpu,cpuacct:/x\n2:memory:/slurm/job\n0::/\n", f"{OLD}.stat": "x 1\n"}
            | {f"{OLD}.limit_in_bytes": "700000\n", f"{OLD}.usage_in_bytes": "600000\n"}
            | {"/sys/fs/cgroup/memory/slurm/job/memory.limit_in_bytes": "9223372036854771712\n"},
            100_000,
            700_000,
        ),
    ],
)
def test_on_linux_the_tightest_limit_counts(machine, files, free, total):
    root = machine({"/proc/meminfo": MEMINFO} | files)
    assert (free_memory(CPU, root), total_memory(CPU, root)) == (free, total)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, math.inf),
        ({GROUPS: "0::/job\n", "/sys/fs/cgroup/job/cpu.max": "max 100000\n"}, math.inf),
        (
            {GROUPS: "0::/job/step\n", "/sys/fs/cgroup/job/cpu.max": "250000 100000\n"}
            | {"/sys/fs/cgroup/job/step/cpu.max": "400000 100000\n"},
            2.5,
        ),
        (
            {
                GROUPS: "4:cpu,cpuacct:/job\n",
                "/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "-1",
            }
            | {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n"}
            | {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
    ],
)
def test_a_quota_of_a_group_limits_the_threads(machine, files, cores):
    assert cpu_quota(machine(files)) == cores


def test_elsewhere_it_is_what_is_built_in_or_nobody_knows(machine, monkeypatch):
    known = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(os, "sysconf", known.__getitem__)
    root = machine({"/proc/meminfo": "MemTotal: 9000 kB\n"})  # an old kernel
    assert free_memory(CPU, root) == 4_096_000
    machine({"/proc/meminfo": ""})
    monkeypatch.delattr(os, "sysconf")
    assert free_memory(CPU, root) is None
    monkeypatch.setattr("trainer.device.free_memory", lambda device: None)
    assert budget_on(CPU).usable_bytes is None


def test_a_tenth_stays_free(monkeypatch):
    monkeypatch.setattr("trainer.device.free_memory", lambda device: 2_048_000)
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
