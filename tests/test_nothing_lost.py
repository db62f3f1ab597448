"""What a run does when something goes wrong around it: no step is lost, no bad one is kept.

Data that go, a full disk, too little memory, an evaluation that dies; a signal, which saves. (A
loss that is not finite: test_skipped_updates.py. Several processes: test_reliability.py.
Faults: harness/faults.py, or here by hand.)
"""

import os
import re
import signal
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from harness.faults import broken
from harness.rows import row
from harness.runs import (
    FAULTS,
    ROOT,
    TINY,
    TINY_MODEL,
    metrics,
    run,
    same,
    snapshot,
    train,
    train_here,
)

import train_minimal
from data import find_dataset
from trainer.snapshot import beside

FP32 = "--no-amp"
slow = pytest.mark.slow


def steps_of(*paths) -> list[int]:
    return [snapshot(path)["step"] for path in paths if path.exists()]


# ---- Data that go


@pytest.mark.parametrize("what", ["training", "validation", "all of it"])
def test_a_token_file_that_shrinks(tmp_path, capsys, what):
    """The weights are those of the last step that was finished: they are saved."""
    path, whole = tmp_path / "run.pt", tmp_path / "whole.pt"
    files = {name: tmp_path / f"{name}.bin" for name in ("training", "validation")}
    for file in files.values():
        file.write_bytes(np.tile(np.arange(250, dtype=np.uint16), 3).tobytes())
    before = files["training"].read_bytes()
    flags = ("--tokenizer-name=byte", "--eval-interval=5", "--grad-accum-steps=2")
    flags += (f"--train-data={files['training']}", f"--val-data={files['validation']}")
    flags += ("--save-minutes=0", FP32)

    def shrink(run):
        for name, file in files.items():
            if what == name:
                file.write_bytes(b"\1\0")
            elif what not in files:
                file.unlink()

    assert train_here(whole, *flags, base=TINY_MODEL) == 0
    capsys.readouterr()
    assert broken(path, {8: shrink}, *flags, base=TINY_MODEL) == 3
    (line,) = capsys.readouterr().err.splitlines()
    done, name = (10, "validation") if what == "validation" else (7, "training")
    why = "No such file or directory; put it back" if what not in files else "has become shorter"
    assert f"{files[name]}" in line and why in line
    assert line.endswith(f"; then go on from {path}, step {done}, with --resume")
    assert steps_of(path, tmp_path / "run.prev.pt") == [done, 5]
    for file in files.values():
        file.write_bytes(before)
    assert train_minimal.main(["--resume", f"--checkpoint-path={path}"]) == 0
    for part in ("model", "optimizer", "step"):
        assert same(snapshot(path)[part], snapshot(whole)[part])


# ---- A full disk


@contextmanager
def largest_file(n_bytes: int):
    """RLIMIT_FSIZE is the full disk that needs no root."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@row("disk full while")
def test_disk_full_while_saving(tmp_path, capsys):
    path, previous = tmp_path / "run.pt", tmp_path / "run.prev.pt"
    flags = (FP32, "--save-interval=4", "--log-interval=0")
    with largest_file(20_000) as fill:
        assert broken(path, {10: fill}, *flags) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: cannot save {path}: disk full .*; it needs 0.1 MB, [0-9.,]+ MB", line)
    assert f"make room, then go on from {path}, step 8, with --resume" in line
    log = {"run.lock", "run.metrics.jsonl", "run.rank0.jsonl"}
    assert {p.name for p in tmp_path.iterdir()} == {"run.pt", "run.prev.pt", *log}
    assert steps_of(path, previous) == [8, 4]
    assert train_here(path, *flags, "--resume") == 0
    assert train_here(tmp_path / "whole.pt", *flags) == 0
    assert same(snapshot(path)["model"], snapshot(tmp_path / "whole.pt")["model"])


def test_disk_full_while_logging(tmp_path, capsys):
    with largest_file(3000) as fill:
        assert broken(tmp_path / "run.pt", {10: fill}, FP32) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert f"cannot save {tmp_path}/run.metrics.jsonl: disk full" in line
    assert "start again (nothing was saved yet)" in line


def test_disk_full_while_the_cache_is_built(tmp_path, cache, monkeypatch, capsys):
    monkeypatch.setitem(find_dataset.__kwdefaults__, "cache_dir", cache)
    with largest_file(100) as fill:
        fill()
        assert train_here(tmp_path / "run.pt") == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "File too large; the token cache needs room there" in line
    assert {path.name for path in cache.iterdir()} <= {".lock"}
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}


@slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
@pytest.mark.parametrize("end", ["> /dev/full", "| head -2; exit ${PIPESTATUS[0]}"])
def test_a_full_disk_or_a_broken_pipe_costs_only_the_output(tmp_path, end):
    path = tmp_path / "run.pt"
    words = ["bash", "-c", f'"$0" train_minimal.py "$@" {end}', sys.executable, *TINY]
    result = run([*words, "--checkpoint-path", str(path)])
    assert result.returncode == 0 and result.stderr == ""
    assert len(result.stdout.splitlines()) == (2 if "head" in end else 0)
    assert snapshot(path)["step"] == 20 and len(metrics(path)) == 20


# ---- Out of memory


OUT_OF_MEMORY = row("out of memory,")


@OUT_OF_MEMORY
@slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_out_of_memory_on_a_cpu(tmp_path):
    """A real failure of its allocator."""
    flags = ("--seq-len=512", "--max-tokens=9000", "--d-model=128", "--batch-size=8", FP32)
    script = {"script": f"{FAULTS} train_minimal", "FAULTS": "oom:0:2"}
    (line,) = train(tmp_path / "run.pt", *flags, expect=4, **script).stderr.splitlines()
    assert "--batch-size 8 --seq-len 512, recompute none; try --use-activation-checkpoint" in line


@OUT_OF_MEMORY
@pytest.mark.parametrize(
    ("flags", "knob"),
    {
        "--loss-chunks=1": "--loss-chunks 0 ",
        "": "--use-activation-checkpoint full (same results",
        "--use-activation-checkpoint=mlp": "--use-activation-checkpoint full",
        "--use-activation-checkpoint=mlp:1,cheap": "--use-activation-checkpoint full (same",
        "--use-activation-checkpoint --batch-size=6": "--batch-size 3 --grad-accum-steps 2",
        "--use-activation-checkpoint --batch-size=1": "a shorter --seq-len or a smaller model",
    }.items(),
)
def test_out_of_memory_names_what_helps_next(tmp_path, capsys, flags, knob):
    path = tmp_path / "run.pt"
    assert broken(path, "cuda-oom:0:7", "--save-interval=5", *flags.split()) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"error: out of memory with --batch-size \d --seq-len 16, recompute \S+;", line)
    assert f"; try {knob}" in line
    assert line.endswith(f"; go on from {path}, step 5, with --resume") == ("smaller" not in line)


@pytest.mark.parametrize(
    ("where", "error", "says"),
    [
        ("trainer.setup.make_optimizer", MemoryError(), "; try a smaller model (--n-layers"),
        ("train_minimal.evaluate", RuntimeError("can't allocate memory: .."), "step 20, with --re"),
        ("trainer.endings.sample_text", RuntimeError("not enough memory"), "step 20, with --re"),
        ("train_minimal.train_step", RuntimeError("shape mismatch"), None),  # that is a bug
    ],
)
def test_out_of_memory_before_and_after_the_steps(
    tmp_path, monkeypatch, capsys, where, error, says
):
    def fail(*_):
        raise error

    monkeypatch.setattr(where, fail)
    if says is None:
        with pytest.raises(RuntimeError, match="shape"):
            train_here(tmp_path / "run.pt")
    else:
        assert train_here(tmp_path / "run.pt") == 4
        assert says in capsys.readouterr().err
        assert steps_of(tmp_path / "run.pt") == [20] * ("20" in says)


# ---- Signals


@pytest.fixture(autouse=True)
def nohup_is_not_inherited():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


SIGNALS = row("Ctrl-C, SIGTERM, a")


@SIGNALS
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_signal_saves_and_stops(tmp_path, capsys, number, code):
    path, whole, before = tmp_path / "run.pt", tmp_path / "whole.pt", signal.getsignal(number)

    def send(run):
        for _ in range(1 + (number == signal.SIGHUP)):  # shell and system may both send it
            os.kill(os.getpid(), number)

    assert broken(path, {7: send}, FP32) == code
    assert signal.getsignal(number) is before
    assert f"{number.name} after step 7: saved" in capsys.readouterr().out
    assert steps_of(path) == [7] == [metrics(path)[-1]["step"]]
    assert not beside(path, ".prev.pt").exists()
    assert train_here(path, FP32, "--resume") == train_here(whole, FP32) == 0
    assert same(snapshot(path)["model"], snapshot(whole)["model"])
    assert [r["train_loss"] for r in metrics(path)] == [r["train_loss"] for r in metrics(whole)]


@SIGNALS
def test_second_signal_ends_at_once(tmp_path):
    path = tmp_path / "run.pt"
    faults = {"script": f"{FAULTS} train_minimal", "FAULTS": "term:0:7 again:0:7"}
    train(path, expect=-signal.SIGTERM, **faults)
    assert not path.exists()


def test_nohup_goes_on(tmp_path):
    """A closed terminal is nothing to a run that was told so."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert broken(tmp_path / "run.pt", "hup:0:5") == 0
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_sigusr1_before_training_ends_nothing(tmp_path, monkeypatch):
    """A text may take minutes to be encoded, and there is nothing to save yet."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def start(process):
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(train_minimal.OneProcess, "start", start)
    try:
        assert train_here(tmp_path / "run.pt", "--num-steps=2") == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


@slow
def test_a_terminal_that_is_closed(tmp_path):
    """SIGHUP comes from the system, perhaps twice, and nothing can be printed any more."""
    import pty

    path = tmp_path / "run.pt"
    words = [*TINY, "--num-steps=100000", f"--checkpoint-path={path}"]
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        signal.alarm(60)  # or it is ended
        os.execv(sys.executable, [sys.executable, "train_minimal.py", *words])
    said = b""
    while b"step      3/" not in said:  # (ends with an OSError if the program does)
        said += os.read(terminal, 1000)
    os.close(terminal)
    os.waitpid(child, 0)
    assert snapshot(path)["step"] == metrics(path)[-1]["step"] >= 3


# ---- When a save is due


@pytest.mark.parametrize(
    ("flags", "faults", "steps"),
    [
        ("--save-minutes=4", "", [4, 8]),  # a step takes a minute here
        ("--save-minutes=4 --save-interval=5", "", [4, 5, 9, 10]),  # whichever is first
        ("--save-minutes=0", "", []),
        ("--save-minutes=0 --eval-interval=4", "", [4]),  # the first evaluation saves, once
        ("--save-minutes=3 --eval-interval=4", "", [3, 6, 9]),
        ("--save-minutes=0", "usr1:0:7", [7]),  # a cluster's warning
        # Not while steps are skipped; then, at no evaluation and no multiple of anything.
        ("--save-minutes=0 --eval-interval=4", "nan:0:4", [5]),
        ("--save-interval=5", "nan:0:5 nan:0:6 nan:0:10", [7]),
        ("--save-interval=1 --log-interval=0", "nan:0:2 infinite-loss:0:3", [1, *range(4, 11)]),
    ],
)
def test_a_save_is_due(tmp_path, monkeypatch, capfd, flags, faults, steps):
    path, clock, saved = tmp_path / "run.pt", [0.0], []

    def note(file, state, **options):
        saved.extend([state["step"]] * (file == path))

    monkeypatch.setattr("time.sleep", lambda _: clock.append(clock[-1] + 60))  # (in each step)
    monkeypatch.setattr("trainer.run.monotonic", lambda: clock[-1])
    monkeypatch.setattr("trainer.run.save_snapshot", note)
    assert broken(path, f"{faults} error:0:11", FP32, *flags.split()) is None
    assert saved == steps
    assert ("saving   after this step, and going on" in capfd.readouterr().err) == (
        "usr1" in faults
    )
