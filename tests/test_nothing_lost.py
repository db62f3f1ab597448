"""What goes wrong in a run or around it: no step is lost, and no bad one is kept.

Data that go, a full disk, too little memory, losses that are not finite, other processes that are
gone, signals: each ends the run as the table says, and what it saved goes on to the bits of the run
that nothing happened to. (Real processes: test_reliability.py. Faults: harness/faults.py, or here.)
"""

import os
import re
import signal
import sys

import numpy as np
import pytest
import torch
from harness import runs
from harness.faults import broken, history, raising, undisturbed
from harness.rows import row
from harness.runs import (
    FAULTS,
    TINY,
    TINY_MODEL,
    contents,
    metrics,
    run,
    same,
    snapshot,
    train,
    train_here,
)
from torch.distributed import DistBackendError

import train_minimal
from trainer.process import OneProcess
from trainer.run import is_out_of_memory

FP32, FP16 = "--no-amp", "--amp-dtype=float16"
slow = pytest.mark.slow


# ---- What breaks a run, and what is left of it


resource = pytest.importorskip("resource")
_, MOST = resource.getrlimit(resource.RLIMIT_FSIZE)


def largest_file(n_bytes: int):
    """RLIMIT_FSIZE is the full disk that needs no root."""
    return lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, MOST))


@pytest.fixture(autouse=True)
def all_is_as_before():
    """The disk has room; a hangup is one, whatever shell has started the tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    largest_file(MOST)()


def evaluation_fails(run) -> None:
    fails = raising(RuntimeError("can't allocate memory: .."))
    run.model.register_forward_pre_hook(lambda model, _: None if model.training else fails())


def shrink(name: str, n_tokens: int):
    return lambda run: os.truncate(getattr(run.data, name).path, 2 * n_tokens)


def overwrite(run) -> None:
    run.data.train_tokens.path.write_bytes(b"\xff" * 1500)


def unlink(run) -> None:
    run.data.train_tokens.path.unlink()


NCCL = DistBackendError("ncclUnhandledCudaError: ...\nLast error:\nFailed to CUDA calloc 6 bytes")
GLOO = RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
LEAN = "--optimizer=muon --moments-dtype=bfloat16"
FULL, SILENT, FIVE = "--use-activation-checkpoint", "--log-interval=0", "--save-interval=5"
OOM, TWO, THREE = "cuda-oom:0:7", "nan:0:5 nan:0:6", "nan:0:12 nan:0:13 nan:0:14"
DISK = r"cannot save .*run.pt: disk full .*; it needs 0.\d MB, [0-9.,]+ MB are free; make room; "
ASK = "what fits: python -m scripts.plan_memory "
NONE = f"out of memory with --batch-size 2 --seq-len 16, recompute none; {ASK}"
TWELVE = "in 3 steps in a row, 12 to 14: try a lower --lr than 0.025; --detect-anomaly finds the op"
ASKED = "asked-in-evaluation:0:{}"
# What happens before which step; the run's flags; its exit code and what its last line says; the
# last step that it did; the steps that are saved, the newest first.
BREAKS = {
    "data: training": (
        *({8: shrink("train_tokens", 1)}, "--eval-interval=5"),
        *(3, "train.bin: it is shorter than it was, or was overwritten; ", 7, [5]),
    ),
    "data: other ids": (
        *({8: overwrite}, "--eval-interval=5"),
        *(3, "train.bin: it is shorter than it was, or was overwritten; ", 7, [5]),
    ),
    "data: gone": (
        {8: unlink},
        "--eval-interval=5",
        3,
        "cannot read .*train.bin: No such file",
        7,
        [5],
    ),
    "data: validation": (  # all but one token of the last window is gone
        *({8: shrink("val_tokens", 721)}, "--eval-interval=5"),
        *(3, "val.bin: it is shorter than it was, or was overwritten; ", 10, [5]),
    ),
    "disk: saving": ({10: largest_file(20_000)}, "--save-interval=4", 3, DISK, 12, [8, 4]),
    "disk: logging": ({10: largest_file(3000)}, "", 3, "save .*run.metrics.jsonl: disk", 10, []),
    "memory: a step": (OOM, f"{FIVE} --loss-chunks=1", 4, NONE, 6, [5]),
    "memory: of full": (
        OOM,
        f"{FIVE} {FULL} --batch-size=1",
        4,
        f"recompute full; {ASK}",
        6,
        [5],
    ),
    "memory: of an evaluation": ({20: evaluation_fails}, "", 4, NONE, 20, []),
    "memory: of NCCL": ({7: raising(NCCL)}, FIVE, 4, NONE, 6, [5]),
    "others: gone": ({7: raising(GLOO)}, FIVE, 3, "rank 0 lost the connection to an", 6, [5]),
    "NaN: none is saved": (
        *(f"{THREE} nan:0:15", f"{SILENT} {FIVE}"),
        *(3, "in 4 steps in a row, 12 to 15: try a lower --lr than 0.025; --det", 15, [10, 5]),
    ),
    "NaN: a save asks": (THREE, f"{SILENT} --save-interval=7", 3, TWELVE, 14, [7]),
    "NaN: an evaluation asks": (THREE, f"{SILENT} --eval-interval=14", 3, TWELVE, 14, []),
    "NaN: at the end": (
        *("nan:0:18 nan:0:19 nan:0:20", f"{SILENT} --save-interval=9"),
        *(3, "in a row, 18 to 20", 20, [9]),
    ),
    "NaN: and a signal": (f"{TWO} nan:0:7 term:0:7", SILENT, 3, "in a row, 5 to 7", 7, []),
    # Two in a row do not end it; and if each step is logged, each is known at once.
    "NaN: logged": (f"{THREE} {TWO} nan:0:8", "--save-interval=1", 3, TWELVE, 14, [11, 10]),
    "NaN: float16": (
        *(
            " ".join(f"nan:0:{step}" for step in range(2, 30)),
            f"--log-interval=21 {FP16} --num-steps=40",
        ),
        *(3, "in 20 steps in a row, 2 to 21: .* --no-amp;", 21, []),
    ),
    "signal: SIGTERM": ("term:0:7", "", 143, "SIGTERM after step 7: saved", 7, [7]),
    "signal: and a copy": ("term:0:7 term:0:7", "", 143, "SIGTERM after step 7: s", 7, [7]),
    "signal: evaluating": (ASKED.format(10), "--eval-interval=5", 143, "step 10:", 10, [10, 5]),
    "signal: at the end": (ASKED.format(20), FIVE, 143, "TERM after step 20: saved", 20, [20, 15]),
    "signal: SIGINT": ("int:0:7", "", 130, "SIGINT after step 7: saved", 7, [7]),
    # (Shell and system may both send it.)
    "signal: SIGHUP": ("hup:0:7 hup:0:7", "", 129, "SIGHUP after step 7", 7, [7]),
}
SIGNALS = row("Ctrl-C, SIGTERM, a")
ROWS = {"memory": [row("out of memory,")], "signal": [SIGNALS], "disk": [row("disk full while")]}
FAST = {"data: gone", "disk: saving", "memory: a step", "NaN: none is saved", "NaN: float16"}
FAST |= {"signal: SIGTERM", "signal: evaluating", "others: gone"}
CASES = [
    pytest.param(name, marks=[*ROWS.get(name.split(":")[0], ()), *[slow] * (name not in FAST)])
    for name in BREAKS
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags; and what (re)writes the files that they name."""
    files = [tmp_path_factory.mktemp("data") / name for name in ("train.bin", "val.bin")]

    def write() -> None:
        for file, ids in zip(files, (range(250), range(250, 0, -1)), strict=True):
            file.write_bytes(np.tile(np.array(ids, dtype=np.uint16), 3).tobytes())

    return ["--tokenizer-name=byte", f"--train-data={files[0]}", f"--val-data={files[1]}"], write


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("name", CASES)
def test_what_was_saved_is_there_and_goes_on(tmp_path, monkeypatch, capsys, data, name):
    faults, flags, expected, says, done, saved = BREAKS[name]
    monkeypatch.setenv("RANK", "0")  # as if torchrun had started it
    path, previous = tmp_path / "run.pt", tmp_path / "run.prev.pt"
    files, write = data
    write()
    flags = [*files, *([] if FP16 in flags else [FP32]), *flags.split()]
    assert broken(path, faults, *flags, base=TINY_MODEL) == expected
    largest_file(MOST)()

    out, err = capsys.readouterr()
    (line,) = re.findall("^stopped .*", out, re.M) if expected > 128 else err.splitlines()
    assert re.search(says, line)
    command = f"python train_minimal.py --resume --checkpoint-path {path}"
    if saved or expected != 4:
        assert line.endswith(f"with --resume: {command}" if saved else "(nothing was saved yet)")
        if saved and expected < 128:
            assert f"go on from {path}, step {saved[0]}, " in line
    assert max(history(path)) == done
    assert [snapshot(file)["step"] for file in (path, previous) if file.exists()] == saved
    assert not list(tmp_path.glob(".*"))  # nothing half-written
    if last := re.search(r"in a row, .* to (\d+):", line):
        assert all(record["step"] < int(last[1]) for record in metrics(path))

    write()
    if saved and "nan:0:5" not in str(faults):
        assert train_minimal.main([*command.split()[2:], "--log-interval=1"]) == 0
        decide = [flag for flag in flags if flag.startswith(("--batch", "--loss"))]
        whole = snapshot(undisturbed(*files, FP32, *decide, base=tuple(TINY_MODEL)))
        for part in ("model", "optimizer", "step"):
            assert same(snapshot(path)[part], whole[part])
        steps = [record["step"] for record in metrics(path)]
        assert steps == sorted(set(steps)) and steps[-1] == 20


# ---- Other disks, other memory, other signals


@pytest.mark.usefixtures("cache")
def test_disk_full_while_the_cache_is_built(tmp_path, capsys):
    largest_file(100)()
    assert train_here(tmp_path / "run.pt") == 3
    assert "File too large; MINIGPT_CACHE names another folder" in capsys.readouterr().err
    assert [name[:11] for name in contents(tmp_path)] == ["cache", "cache/.lock"]


@pytest.mark.parametrize(
    ("where", "lines"),
    [pytest.param(*to, marks=slow) for to in ((">&- 2>&-", 0), ("2>&-", 34), ("| head -2", 2))],
)
def test_a_stream_that_is_closed_costs_only_the_output(path, where, lines):
    """From the start, or later; as a full disk does."""
    shell = f'"$0" train_minimal.py "$@" {where}; exit ${{PIPESTATUS[0]}}'
    result = run(["bash", "-c", shell, sys.executable, *TINY, "--checkpoint-path", str(path)])
    assert (result.returncode, result.stderr, result.stdout.count("\n")) == (0, "", lines)
    assert snapshot(path)["step"] == 20 and len(metrics(path)) == 20


NO_MEMORY = (
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "HIP out of memory. Tried to allocate 2.00 GiB.",
    "MPS backend out of memory (MPS allocated: 9.00 GB)",
    "cuda runtime error: CUDA_ERROR_OUT_OF_MEMORY",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(&handle)`",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.",
    "Last error:\nFailed to CUDA calloc async 608 bytes",
)
ANOTHER_ERROR = (
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx(handle, opa, opb)`",
    "CUDA error: device-side assert triggered",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
)


@pytest.mark.parametrize("message", NO_MEMORY + ANOTHER_ERROR)
def test_which_messages_say_that_there_is_no_memory_left(message):
    assert is_out_of_memory(RuntimeError(message)) == (message in NO_MEMORY)
    assert not is_out_of_memory(ValueError(message))  # a file may be called anything


@SIGNALS
def test_second_ctrl_c_ends_at_once(path):
    faults = {"script": f"{FAULTS} train_minimal", "FAULTS": "int:0:7 int:0:7"}
    train(path, expect=-signal.SIGINT, **faults)
    assert not path.exists()


@pytest.mark.parametrize("name", ["hup", "int"])  # of nohup, and of a script's `&`
def test_a_signal_that_is_ignored_stays_ignored(name, path):
    number = getattr(signal, f"SIG{name.upper()}")
    signal.signal(number, signal.SIG_IGN)
    assert broken(path, f"{name}:0:5") == 0 and signal.getsignal(number) == signal.SIG_IGN


# ---- When a save is due


@pytest.mark.parametrize(
    ("flags", "faults", "steps"),
    [
        ("--save-minutes=4", "", [4, 8]),  # a step takes a minute here
        ("--save-minutes=4 --save-interval=5", "", [4, 5, 9, 10]),  # whichever is first
        ("--save-minutes=0", "", []),
        ("--save-minutes=0 --eval-interval=4", "", [4]),  # the first evaluation saves, once
        ("--save-minutes=3 --eval-interval=4", "", [3, 6, 9]),
        # Not while steps are skipped; then, at no evaluation and no multiple of anything.
        ("--save-minutes=0 --eval-interval=4", "nan:0:4", [5]),
        ("--save-interval=5", "nan:0:5 nan:0:6 nan:0:10", [7]),
        ("--save-interval=1 --log-interval=0", "nan:0:2 infinite-loss:0:3", [1, *range(4, 11)]),
    ],
)
def test_a_save_is_due(tmp_path, monkeypatch, flags, faults, steps):
    path, clock, saved = tmp_path / "run.pt", [0.0], []

    def note(file, state, **options):
        saved.extend([state["step"]] * (file == path))

    monkeypatch.setattr("time.sleep", lambda _: clock.append(clock[-1] + 60))  # (in each step)
    monkeypatch.setattr("trainer.run.monotonic", lambda: clock[-1])
    monkeypatch.setattr("trainer.run.save_snapshot", note)
    assert broken(path, f"{faults} error:0:11", FP32, *flags.split()) is None
    assert saved == steps


# ---- Steps that are not finite


class OnMPS(torch.Tensor):
    """A CPU's tensor in the part of one on MPS."""

    device = torch.device("mps")


@pytest.mark.parametrize(
    ("flags", "device"),
    [
        (FP32, "cpu"),
        (FP32, "mps"),
        pytest.param(FP16, "cpu", marks=row("float16 overflows")),
        (LEAN, "cpu"),
        (LEAN, "mps"),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing(tmp_path, monkeypatch, capsys, flags, device):
    """Neither weights nor moments, by a kernel that can skip a step and by one that cannot (MPS's);
    and how many is said with the next line."""
    clip = OneProcess.clip_gradients
    if device == "mps":
        on_mps = lambda *how: clip(*how).as_subclass(OnMPS)  # noqa: E731
        monkeypatch.setattr(OneProcess, "clip_gradients", on_mps)
    quiet, logged = tmp_path / "quiet.pt", tmp_path / "logged.pt"
    # ("huge" is finite in each number, and in no sum of their squares.)
    faults = "nan:0:4 nan:0:5 overflow:0:9 huge:0:12 infinite-loss:0:19 nan:0:20"
    bad = [4, 5, 9, 12, 19, 20]
    for path, interval in ((quiet, 0), (logged, 1)):
        how = (*flags.split(), f"--log-interval={interval}", "--grad-accum-steps=2")
        assert broken(path, faults, *how) == 0
        said = re.findall(r"warning  step (\d+): .*, (\d) updates? ski", capsys.readouterr().out)
        assert said == ([(str(step), "1") for step in bad] if interval else [("20", "6")])
    after = history(quiet)
    for step in range(2, 21):
        now, before = (after[i]["weights"] + after[i]["moments"] for i in (step, step - 1))
        assert (now == before) == (step in bad), step
        if flags == FP16 and step != 12:
            assert after[step]["scale"] == after[step - 1]["scale"] / (1 + (step in bad))
    assert history(logged) == after and max(after) == 20
    assert [r["step"] for r in metrics(logged) if r["grad_norm"] is None] == bad


@pytest.mark.parametrize(
    ("flags", "faults", "says"),
    [
        ("--lr=1e30", "", "validation loss is not finite after the last step, 2: try a lower --lr"),
        ("--weight-decay=1e300", "", "validation loss is not finite after the last step, 2: try"),
        ("", "nan:0:1 infinite-loss:0:2", "not finite in 2 steps in a row, 1 to 2: try a lower"),
    ],
)
def test_a_run_that_trains_nothing_is_no_success(flags, faults, says, path, capsys):
    assert broken(path, faults, FP32, "--num-steps=2", *flags.split()) == 3
    assert says in capsys.readouterr().err


# ---- Nobody waits for the device


@pytest.mark.parametrize(
    "flags",
    [
        f"{FP32} --use-activation-checkpoint=full",
        f"{FP16} --use-activation-checkpoint=cheap",
        "--amp-dtype=bfloat16 --optimizer=muon --moments-dtype=bfloat16",
    ],
)
def test_a_step_reads_no_number_from_a_tensor(tmp_path, monkeypatch, flags):
    """Which on a GPU would wait for all before it."""
    run = runs.ready(tmp_path, "--grad-accum-steps=2", *flags.split())
    for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, raising(AssertionError(name)))
    for run.step in (1, 2):
        train_minimal.train_step(run)
