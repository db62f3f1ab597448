"""What several processes do when something goes wrong with one: no step is lost, nobody hangs.

All skip a step or none does, torchrun's restart goes on by itself, nobody waits or lives on in
vain, and one line says it for all. (In one process: test_nothing_lost.py.)
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness.faults import history, weights_hash
from harness.rows import row
from harness.runs import (
    FAULTS,
    ROOT,
    by_torchrun,
    errors,
    metrics,
    run,
    same,
    snapshot,
    torchrun,
    train_here,
)

import train_minimal
from train_ddp import DDPProcess
from train_fsdp import FSDPProcess
from trainer.claim import replaced_runs
from trainer.flags import UsageError, build_parser
from trainer.process import OneProcess
from trainer.torchrun import Torchrun, common_name, lost_others

FP32 = "--no-amp"
slow = pytest.mark.slow


def faulty(path, faults: str, *flags: str, script: str = "train_ddp", **options):
    return torchrun(path, *flags, script=f"{FAULTS} {script}", FAULTS=faults, **options)


@row(
    "NaN or Inf in loss or gradients of one of two processes",
    "step skipped by both, with a warning; several in a row: exit 3, the last good snapshot intact",
)
def test_all_processes_skip_or_none(tmp_path):
    """A gradient, then a loss, of process 1 alone; then three of them.

    And all have the same weights after each step, though they average gradients only in the second
    micro-batch: one that steps on gradients of its own drifts at once. No step is logged, so each
    process learns one step late that it has skipped one.
    """
    path = tmp_path / "run.pt"
    result = faulty(
        path, "nan:1:4 infinite-loss:1:7 nan:1:11 infinite-loss:0:12 nan:1:13", FP32,
        "--save-interval=5", "--grad-accum-steps=2", "--log-interval=0", expect=3,
    )  # fmt: skip
    steps = re.findall(r"warning  step (\d+): .* skipped", result.stdout)
    assert steps == ["4", "7", "11", "12"]
    assert "in a row, 11 to 13" in errors(result)[0]
    after = history(path, rank=0)
    assert after == history(path, rank=1) and max(after) == 14
    assert len({after[step]["weights"] for step in (10, 11, 12, 13)}) == 1
    state = snapshot(path)
    assert state["step"] == 10 and weights_hash(state["model"]) == after[13]["weights"]


# ---- Several processes


RESTARTS = ("--save-interval=5", "--no-amp", "--grad-accum-steps=1")
DDP = row(
    "`torchrun --max-restarts`, a process raising or killed: before there is a snapshot, after it, "
    "in the last step",
    "goes on by itself, to the single process's weights",
)
FSDP = row(
    "`train_fsdp.py` with `torchrun --max-restarts`, a process raising or killed",
    "goes on by itself, to the single process's weights",
)


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        pytest.param("train_ddp", "kill:0:9", marks=DDP),
        pytest.param("train_ddp", "error:1:3", marks=[DDP, slow]),
        pytest.param("train_ddp", "kill:1:20", marks=[DDP, slow]),
        pytest.param("train_fsdp", "kill:1:9", marks=[FSDP, slow]),
        pytest.param("train_fsdp", "error:0:3", marks=[FSDP, slow]),
    ],
)
def test_restarted_by_torchrun(tmp_path, script, fault):
    """Though nobody said --resume. Not from the snapshot of another run that it was about to
    replace, and that is further on."""
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    assert train_here(whole, *RESTARTS[:2], "--grad-accum-steps=2") == 0
    assert train_here(path, *RESTARTS[:2], "--grad-accum-steps=2", "--lr=0.001") == 0
    how = {"script": f"{FAULTS} {script}", "launch": "--max-restarts=1"}
    result = run(by_torchrun(path, *RESTARTS, **how), timeout=400, FAULTS=fault)
    assert result.returncode == 0, result.stderr
    assert same(snapshot(path)["model"], snapshot(whole)["model"])
    assert [r["step"] for r in metrics(path)] == list(range(1, 21))
    old = snapshot(replaced_runs(path)[-1])
    assert (old["step"], old["args"]["lr"]) == (20, 0.001)
    saved = (int(fault.split(":")[2]) - 1) // 5 * 5
    resumed = re.findall(r"^resume   .*run.pt, step (\d+)$", result.stdout, re.MULTILINE)
    assert resumed == ([str(saved)] if saved else [])


def test_each_attempt_meets_under_a_name_of_its_own():
    """Whoever comes first finds what the attempt before has left, and must not take it."""
    store, names = dist.HashStore(), set()
    for attempt in range(1, 4):
        with ThreadPoolExecutor(2) as pool:
            arguments = 2, timedelta(seconds=30)
            first = pool.submit(common_name, store, attempt % 2, *arguments)
            time.sleep(0.2)
            second = pool.submit(common_name, store, 1 - attempt % 2, *arguments)
            assert first.result() == second.result()
            names.add(first.result())
        assert len(names) == attempt
    with pytest.raises(TimeoutError):  # the other one never comes
        common_name(store, 0, 2, timedelta(seconds=0.2))


@slow  # it waits
@row("a process that hangs", "the job ends within its timeout, with a line that says so")
def test_a_process_that_hangs_ends_the_job(tmp_path):
    """One stuck in a driver or a file system would keep all the others waiting for ever."""
    path = tmp_path / "run.pt"
    result = faulty(path, "hang:1:7", "--save-interval=5", expect=3, MINIGPT_TIMEOUT_S="20")
    waited = "error: rank 0 waited 20 s for the others in vain (MINIGPT_TIMEOUT_S): one hangs; "
    assert errors(result) == [f"{waited}go on from {path}, step 5, with --resume"]
    assert "Traceback" not in result.stderr
    assert snapshot(path)["step"] == 5


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@row("torchrun killed with -9 (Linux)", "no process of it lives on")
def test_nobody_outlives_torchrun(tmp_path):
    """It has no time to end those that it started. They would hold the GPU, and write to the files
    of the next run."""
    command = by_torchrun(tmp_path / "run.pt", "--num-steps=100000", script="train_ddp.py")
    launcher = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert any(line.startswith("step") for line in launcher.stdout)  # both are training
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        assert len(children) == 2
    finally:
        launcher.kill()
        launcher.wait(10)
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    survivors = [int(pid) for pid in children if alive(pid)]
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    assert not survivors


def alive(pid: str) -> bool:
    """And no zombie, which only waits for a parent to ask about it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@slow
def test_one_line_of_a_process_that_is_alone_with_it(tmp_path):
    result = faulty(tmp_path / "run.pt", "cuda-oom:1:3", expect=4)
    assert sum("out of memory with --batch-size 2" in line for line in errors(result)) == 1


# ---- What NCCL says, which no CPU does


NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, "
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, "
    "Timeout(ms)=5000) ran for 5008 milliseconds before timing out."
)
LATE = [
    WATCHDOG,
    "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value "
    "store by key '0', but store->get('0') got error: wait timeout after 5000ms, keys: /0//cuda//0",
    "NCCL communicator was aborted on rank 0. Original reason for failure was: " + WATCHDOG,
]
GONE = [
    NCCL + "remote process exited or there was a network error, NCCL version 2.27.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\nLast error:\nsocketProgress: Connection closed by remote peer node1<4242>",
    "NCCL communicator was aborted on rank 1.",
]
FULL = NCCL + "unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n"
FULL += "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
OUT_OF_MEMORY = [
    FULL + "Failed to CUDA calloc async 4 bytes",
    FULL + "Failed to CUDA calloc 6291456 bytes",
    FULL + "Cuda failure 2 'out of memory'",
]


IN_VAIN, ENDED = (
    "waited 5 s for the others in vain",
    "lost the connection to another process, which",
)
OF_THIS_MACHINE = NCCL + "invalid usage, NCCL version 2.27.5\nncclInvalidUsage: ...\nLast error:\n"
OF_THIS_MACHINE += "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        *((dist.DistBackendError(text), IN_VAIN) for text in LATE),
        *((dist.DistBackendError(text), f"{ENDED} ended ({text.splitlines()[-1].rstrip('.')}")
          for text in GONE),
        (dist.DistNetworkError("recv failed"), ENDED),
        (dist.DistBackendError(OF_THIS_MACHINE), None),  # keeps its traceback
        (RuntimeError("timeout"), None),  # not of this world
    ],
)  # fmt: skip
def test_what_nccl_says_of_the_others(error, says, monkeypatch):
    monkeypatch.setenv("MINIGPT_TIMEOUT_S", "5")
    line = lost_others(error)
    assert says in line if says else line is None


GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
    "[127.0.0.1]:51234: Connection reset by peer. This may indicate a bug in the application, or "
    "that the other process has ended; consider to look at its log, or to set GLOO_SOCKET_IFNAME"
)


def test_a_lost_process_costs_one_line_that_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    """No place in C++, no half of a word; and it is no bug."""
    path, real = tmp_path / "run.pt", train_minimal.train_step

    def train_step(run):
        if run.step == 7:
            raise RuntimeError(GLOO)
        return real(run)

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    monkeypatch.setattr(OneProcess, "world_size", 2)
    monkeypatch.setenv("RANK", "0")
    assert train_here(path, "--save-interval=5") == 3
    assert capsys.readouterr().err == (
        "error: rank 0 lost the connection to another process, which ended (Read error "
        f"[127.0.0.1]:51234: Connection reset by peer); go on from {path}, step 5, with --resume\n"
    )


@pytest.mark.parametrize("text", OUT_OF_MEMORY)
def test_nccl_runs_out_of_memory(text, tmp_path, monkeypatch, capsys):
    def train_step(run):
        raise dist.DistBackendError(text)

    monkeypatch.setattr(train_minimal, "train_step", train_step)
    assert train_here(tmp_path / "run.pt") == 4
    assert "out of memory with --batch-size 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/transport/tcp/pair.cc:152] "
        "timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:4242",
        "[enforce fail at gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address "
        "for: eth7",
    ],
)
def test_gloo_finds_no_way(text, monkeypatch):
    def init_process_group(*_, **__):
        raise RuntimeError(text)

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    with pytest.raises(UsageError, match="rank 1 cannot .* by gloo .*: set GLOO_SOCKET_IFNAME"):
        second_of_two(monkeypatch).meet()


def test_a_port_that_is_in_use(monkeypatch):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        torchrun = second_of_two(monkeypatch, RANK=0, LOCAL_RANK=0, MASTER_PORT=port)
        with pytest.raises(UsageError, match=f"MASTER_PORT={port}: another program has this port"):
            torchrun.meet()


def second_of_two(monkeypatch, **other: int) -> Torchrun:
    environment = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "MASTER_PORT": 4242} | other
    for name, value in (environment | {"MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, str(value))
    return Torchrun("train_ddp.py")


def test_each_process_connects_its_own_gpu(monkeypatch):
    asked = []
    monkeypatch.setattr(dist, "new_group", lambda **how: asked.append(how))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    torchrun, gpu = second_of_two(monkeypatch), torch.device("cuda", 1)
    assert torchrun.connect(torch.device("cpu")) is None and not asked  # the CPUs have met
    torchrun.connect(gpu)
    assert asked == [{"backend": "nccl", "timeout": torchrun.timeout, "device_id": gpu}]


def test_gpus_without_nccl(monkeypatch):
    """As on Windows: gloo averages gradients there, but cannot deal out a model."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(dist, "new_group", None)
    torchrun, gpu = second_of_two(monkeypatch), torch.device("cuda", 1)
    assert torchrun.connect(gpu) is None
    monkeypatch.setattr(Torchrun, "device", lambda *_: gpu)
    args = build_parser("test", "x.pt").parse_args([])
    assert DDPProcess(args).device == gpu
    with pytest.raises(UsageError, match="needs NCCL on GPUs.*: train_ddp.py"):
        FSDPProcess(args)


def test_a_network_interface_that_is_not_there(tmp_path):
    result = torchrun(tmp_path / "run.pt", expect=2, GLOO_SOCKET_IFNAME="eth99")
    (line,) = errors(result)
    assert "set GLOO_SOCKET_IFNAME" in line
    assert list(tmp_path.iterdir()) == []
