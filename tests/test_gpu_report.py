"""scripts/gpu_report.py without a GPU: what happens when something happens, and mistakes."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from harness.runs import ROOT, run

from scripts import gpu_report
from scripts.gpu_report_bench import Bench
from scripts.gpu_report_results import append, read_results, work
from scripts.trainer_process import pids_of, wait_until

# ---- In a worker


def test_a_worker_has_the_trainers_matmuls(tmp_path, monkeypatch):
    """Before its section asks for anything."""
    did = []
    monkeypatch.setattr(gpu_report.gc, "freeze", lambda: None)
    monkeypatch.setattr(gpu_report, "work", lambda *rest: did.append("work"))
    monkeypatch.setattr(
        gpu_report, "set_matmul_precision", lambda device, tf32: did.append((device.type, tf32))
    )
    for section in gpu_report.SECTIONS:
        if section not in ("speed", "correctness"):  # (they set what this process should not have)
            args = gpu_report.build_parser().parse_args(["--out", str(tmp_path)])
            gpu_report.measure_section(args, section, "run")
            assert did == [("cuda", False), "work"]
            did.clear()


def jobs(**measures):
    yield from measures.items()


def fail(error):
    raise error


def test_a_worker_goes_on_after_errors(tmp_path):
    file, bench = tmp_path / "results.jsonl", Bench(True, tmp_path)
    (tmp_path / "results.jsonl").touch()
    section = dict(
        good=lambda: {"ms": 1.5, "nothing": float("nan")},
        bad=lambda: fail(ValueError("a\nb")),
        large=lambda: fail(torch.OutOfMemoryError("CUDA out of memory. Tried ...")),
        last=lambda: {"ms": 2},
    )
    assert work(bench, "head", jobs(**section), file, "run 1") == 0
    records = read_results(file).records["head"]
    assert records["good"]["values"] == {"ms": 1.5, "nothing": None}
    assert records["good"]["units"] == {"ms": "ms"}
    assert records["bad"]["error"] == "ValueError: a b" and "values" not in records["bad"]
    assert records["large"]["values"] == {"out_of_memory": True}
    assert records["last"]["values"] == {"ms": 2}
    # Another run tries what failed, and nothing else.
    section |= {"good": None, "large": None, "last": None, "bad": lambda: {"ms": 3}}
    assert work(bench, "head", jobs(**section), file, "run 2") == 0
    records = read_results(file).records["head"]
    assert records["bad"]["values"] == {"ms": 3} and records["last"]["values"] == {"ms": 2}
    assert [record["run"] for record in records.values()] == ["run 1", "run 2", "run 1", "run 1"]


def test_a_lost_gpu_ends_the_worker(tmp_path):
    file = tmp_path / "results.jsonl"
    file.touch()
    lost = jobs(
        a=lambda: fail(RuntimeError("CUDA error: an illegal memory access was encountered")),
        b=lambda: {"ms": 1},
    )
    assert work(Bench(True, tmp_path), "head", lost, file, "run") == 1
    results = read_results(file)
    assert "illegal" in results.records["head"]["a"]["error"]
    assert results.missing("head") == ["b"]


# ---- Workers that end otherwise. This one stands in for `work`, and needs no torch.

WORKER = """
import json, os, signal, sys, time

out, section, run = sys.argv[1:]
if section == "machine":
    sys.exit("no section at all")
names = {"head": ["a", "crash", "error", "b"], "speed": ["a", "hang", "b"]}[section]

def append(**record):
    with open(out + "/results.jsonl", "a") as file:
        file.write(json.dumps({"section": section, "run": run, **record}) + "\\n")

append(names=names)
lines = [json.loads(line) for line in open(out + "/results.jsonl")]
settled = [r["name"] for r in lines if "values" in r or r.get("error") and r["run"] == run]
for name in names:
    if name in settled:
        continue
    append(name=name, begun="now")
    if name == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hang":
        time.sleep(1000)
    if name == "error":
        append(name=name, error="ValueError: a bug", seconds=1)
    else:
        append(name=name, values={"ms": 1.0}, units={}, seconds=1)
"""


def test_a_worker_that_hangs_ends_without_groups_of_processes(tmp_path, monkeypatch):
    """As on Windows."""
    monkeypatch.delattr(os, "killpg")
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    assert gpu_report.run_process(command, tmp_path / "log", 0.2).startswith("the deadline came")


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def command(args, section, name):
        return [sys.executable, str(script), str(args.out), section, name]

    monkeypatch.setattr(gpu_report, "worker_command", command)
    before = signal.getsignal(signal.SIGTERM)
    yield command
    signal.signal(signal.SIGTERM, before)


def flags(tmp_path, *more):
    return ["--dry-run", "--out", str(tmp_path / "out"), *more]


def test_a_crash_costs_one_measurement(stand_in, tmp_path, capsys):
    assert gpu_report.main(flags(tmp_path, "--only", "head")) == 0
    said = capsys.readouterr().out
    assert "head         2 measured, 2 failed" in said
    assert "failed       head: crash: its process ended with signal 9" in said
    assert "failed       head: error: ValueError: a bug" in said
    records = read_results(tmp_path / "out" / "results.jsonl").records["head"]
    assert [name for name in records if "values" in records[name]] == ["a", "b"]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "- failed: crash: its process ended with signal 9" in text
    assert "2 measured in" in text and "2 failed." in text and "## speed\n\nNot run." in text


def test_a_hang_ends_at_the_deadline(stand_in, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_report, "DRY_MINUTES", 3 / 60)
    assert gpu_report.main(flags(tmp_path, "--only", "speed")) == 0
    assert "speed        1 measured, 1 failed, 1 not reached" in capsys.readouterr().out
    text = (tmp_path / "out" / "report.md").read_text()
    assert "- failed: hang: the deadline came, after 3 s" in text
    assert "- not measured: b\n" in text
    assert pids_of(tmp_path / "out") == []


def test_a_worker_that_does_not_start(stand_in, tmp_path, capsys):
    assert gpu_report.main(flags(tmp_path, "--only", "machine")) == 0
    assert "its start: its process ended with exit code 1: no section at all" in (
        capsys.readouterr().out
    )


def test_again(stand_in, tmp_path):
    def measured():
        lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
        return [(r["section"], r["name"]) for r in map(json.loads, lines) if "values" in r]

    def kept():
        return len(list((tmp_path / "out").glob("results.*.jsonl")))

    only = ("--only", "head")
    assert gpu_report.main(flags(tmp_path, *only)) == 0
    append(tmp_path / "out/results.jsonl", {"section": "ddp", "name": "c", "values": {}, "run": ""})
    assert measured() == [("head", "a"), ("head", "b"), ("ddp", "c")] and kept() == 0
    assert gpu_report.main(flags(tmp_path, *only, "--again")) == 0
    assert measured() == [("ddp", "c"), ("head", "a"), ("head", "b")] and kept() == 1


def test_the_time_limit_names_what_is_left_out(stand_in, tmp_path, capsys):
    assert gpu_report.main(flags(tmp_path, "--time-limit", "1", "--skip", "ddp,oom")) == 0
    said = capsys.readouterr().out.splitlines()
    left_out = [line.split()[0] for line in said if "left out: 1 s left of --time-limit" in line]
    assert left_out == [name for name in gpu_report.SECTIONS if name not in ("ddp", "oom")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped(stand_in, tmp_path, number):
    """The worker goes too, and the report of what there is stays."""
    program = (
        "import sys; from scripts import gpu_report as g; "
        f"g.worker_command = lambda a, section, run: [sys.executable, {str(tmp_path)!r} + "
        "'/worker.py', str(a.out), section, run]; sys.exit(g.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *flags(tmp_path, "--only", "speed")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    file = tmp_path / "out" / "results.jsonl"
    try:
        wait_until(lambda: file.exists() and '"hang", "begun"' in file.read_text(), "no worker")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert err == (
        b"stopped early: the same command goes on from there\n" if number == signal.SIGINT else b""
    )
    assert b"report" in out and "- not finished: hang" in (tmp_path / "out/report.md").read_text()
    assert pids_of(tmp_path / "out") == []


# ---- Mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "haed"], "--only: there is no section 'haed', only machine, matmuls, head"),
        (["--skip", "head,"], ""),
        (["--skip", "all"], "--skip: there is no section 'all'"),
        (["--time-limit", "0"], "--time-limit: must be a number above 0"),
        (["--nanogpt", "nowhere"], "--nanogpt nowhere: there is no model.py in it"),
        (["--out", "/proc/x"], "--out"),
        (["--report", "nowhere.jsonl"], "--report nowhere.jsonl: No such file"),
        (["--dryrun"], "unrecognized arguments: --dryrun; did you mean --dry-run?"),
    ],
)
def test_mistakes(stand_in, tmp_path, capsys, words, message):
    if not message:  # nothing wrong with it
        assert gpu_report.main(flags(tmp_path, *words, "--time-limit", "1")) == 0
        return
    try:
        code = gpu_report.main(flags(tmp_path, *words))
    except SystemExit as stop:
        code = stop.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and line.startswith("error: ") and message in line
    assert "--report" not in line or "--report" in words
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(tmp_path, capsys):
    assert gpu_report.main(["--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "finds no GPU here; --dry-run" in line and not (tmp_path / "out").exists()


def test_no_transformers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_report, "find_spec", lambda name: None)
    assert gpu_report.main(flags(tmp_path, "--peer")) == 2
    assert "pip install transformers" in capsys.readouterr().err


def test_another_machines_results(stand_in, tmp_path, capsys):
    assert gpu_report.main(flags(tmp_path, "--only", "head")) == 0
    file = tmp_path / "out" / "results.jsonl"
    file.write_text(file.read_text().replace(torch.__version__, "1.0"))
    before = file.read_text()
    capsys.readouterr()
    assert gpu_report.main(flags(tmp_path, "--only", "head")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has the results of torch 1.0" in line and "name another folder" in line
    assert file.read_text() == before


def test_written_before_the_next_begins(tmp_path, monkeypatch):
    """Nothing is left in a buffer: the machine may go."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(number))
    file = tmp_path / "results.jsonl"
    file.touch()

    def second():
        assert '"first"' in file.read_text() and len(synced) == 4
        return {}

    assert work(Bench(True, tmp_path), "x", jobs(first=dict, second=second), file, "r") == 0
    assert "error" not in read_results(file).records["x"]["second"]


def test_importing_touches_no_gpu():
    program = "import torch, scripts.gpu_report; print(torch.cuda.is_initialized())"
    assert run([sys.executable, "-c", program]).stdout == "False\n"
