"""What `auto` may take if nobody says: most of what is free, by the tightest limit there is."""

import os
from pathlib import Path

import pytest
import torch

from trainer.flags import UsageError
from trainer.plan import default_budget, free_memory

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """machine({file: content}): nothing else is in /proc and /sys."""

    def make(files: dict[str, str]) -> None:
        for name, content in files.items():
            path = tmp_path / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    monkeypatch.setattr(
        "trainer.plan.Path", lambda *parts: tmp_path / Path(*parts).relative_to("/")
    )
    return make


MEMINFO = "MemTotal:  9000 kB\nMemFree: 1 kB\nMemAvailable:    2000 kB\nBuffers: 7 kB\n"
LIMIT, USED = "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"


@pytest.mark.parametrize(
    ("container", "free"),
    [
        ({}, 2_048_000),
        ({LIMIT: "max\n", USED: "500000\n"}, 2_048_000),
        ({LIMIT: "1500000\n", USED: "500000\n"}, 1_000_000),
        ({LIMIT: "9500000\n", USED: "500000\n"}, 2_048_000),
        ({LIMIT: "1500000\n"}, 2_048_000),
    ],
    ids=["none", "no limit", "tighter than the machine", "wider", "half of it"],
)
def test_free_on_linux(machine, container, free):
    machine({"/proc/meminfo": MEMINFO} | container)
    assert free_memory(CPU) == free


def test_free_elsewhere_is_at_most_what_is_built_in(machine, monkeypatch):
    known = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(os, "sysconf", known.__getitem__)
    assert free_memory(CPU) == 4_096_000
    machine({"/proc/meminfo": "MemTotal: 9000 kB\n"})  # an old kernel
    assert free_memory(CPU) == 4_096_000


def test_nobody_knows(machine, monkeypatch):
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(UsageError, match="--memory-budget: this system does not tell"):
        free_memory(CPU)


def test_free_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9))
    assert free_memory(torch.device("cuda", 0)) == 7
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 50)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 20)
    assert free_memory(torch.device("mps")) == 30


def test_a_tenth_stays_free_and_processes_share(machine):
    machine({"/proc/meminfo": MEMINFO})
    assert default_budget(CPU, processes=1) == 1_843_200
    assert default_budget(CPU, processes=2) == 921_600
