"""What `auto` may take if nobody says: most of what is free, by the tightest limit there is."""

import pytest
import torch

from trainer.device import MemoryBudget, budget_on, free_and_total_memory

CPU = torch.device("cpu")
MEMINFO = {
    "/proc/meminfo": "MemTotal:  9000 kB\nMemFree: 1 kB\nMemAvailable:    2000 kB\nBuffers: 7 kB\n"
}
JOB = "/sys/fs/cgroup/slurm/job"
LIMITED = MEMINFO | {
    "/proc/self/cgroup": "0::/slurm/job/step\n",
    f"{JOB}/memory.max": "1500000\n",
    f"{JOB}/memory.current": "500000\n",
    f"{JOB}/step/memory.max": "max\n",
}
CACHED = {f"{JOB}/memory.stat": "anon 300000\nfile 0\ninactive_file 200000\nactive_file 1\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (None, None)),  # not Linux
        (MEMINFO, (2_048_000, 9_216_000)),
        (LIMITED, (1_000_000, 1_500_000)),
        (LIMITED | CACHED, (1_200_000, 1_500_000)),
    ],
)
def test_the_tightest_limit_counts_and_a_tenth_stays_free(files, expected, tmp_path, monkeypatch):
    for name, content in files.items():
        file = tmp_path / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert free_and_total_memory(CPU, str(tmp_path)) == expected
    monkeypatch.setattr("trainer.device.free_and_total_memory", lambda device: expected)
    free = expected[0]
    assert budget_on(CPU).bytes_within_margin == (free and 0.9 * free)
    assert budget_on(CPU, processes=2).bytes_within_margin == (free and 0.45 * free)  # they share
    assert budget_on(CPU, 5000, processes=2) == MemoryBudget(5000, "cpu")  # as somebody says


@pytest.mark.parametrize(
    ("room", "words"),
    [
        (MemoryBudget(60 << 20, "cpu"), "54.0 MiB (60.0 MiB less a margin of 6.0 MiB)"),
        (MemoryBudget(2 << 30, "cuda"), "1.5 GiB (2.0 GiB less a margin of 0.5 GiB)"),
        (MemoryBudget(8 << 30, "cuda"), "7.0 GiB (8.0 GiB less a margin of 1.0 GiB)"),
        (
            MemoryBudget(20 << 30, "cuda", True),
            "18.0 GiB (20.0 GiB free, less a margin of 2.0 GiB)",
        ),
    ],
)
def test_both_numbers_are_said(room, words):
    """On a GPU 1 GiB stays free: a tenth of a small card is little; of a tiny one, a quarter."""
    assert str(room) == words
