"""What all tools share: they are listed, start by any name, and end in a line. What each of them
does is tested by its name; here are the recipes and kept_tensors."""

import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.runs import ROOT, run

import studies
from memory import POLICY_NAMES
from scripts import LISTING, kept_tensors, plan_memory
from trainer.bootstrap import SPIN_COUNT
from trainer.settings import Settings


def table(text: str) -> dict[str, list[str]]:
    """What is listed: command -> the question that it answers, what it takes."""
    rows = (re.split(r"  +", line) for line in text.splitlines())
    return {row[0]: row[1:] for row in rows if len(row) == 3 and row[2] != "takes"}


def startable(room: str) -> set[str]:
    files = (path for path in (ROOT / room).glob("*.py") if "\nif __name__ ==" in path.read_text())
    return {path.stem for path in files} | {path.name for path in (ROOT / room).glob("*.sh")}


@pytest.mark.parametrize(
    ("room", "text", "most"),
    [("scripts", LISTING, 24), ("studies", studies.__doc__, 10)],
)
def test_a_rooms_table_is_the_room(room, text, most):
    listed = table(text)
    typed = {words.split()[0] for words in listed} - {"train_minimal.py"}
    ours = {name.removeprefix("scripts/") for name in typed}
    assert ours == startable(room) and len(listed) <= most
    for question, takes in listed.values():
        assert "?" in question and takes


def start_python(*words: str) -> subprocess.CompletedProcess:
    """Python itself. (`run` forks one that has imported all this before.)"""
    how = {"capture_output": True, "text": True, "timeout": 60, "cwd": ROOT}
    return subprocess.run([sys.executable, *words], **how)


def test_python_m_scripts_answers_a_newcomer():
    """At once, without torch; and what it says to type is known to what it names."""
    result = start_python("-X", "importtime", "-m", "scripts")
    assert (result.returncode, result.stdout) == (0, LISTING) and " torch\n" not in result.stderr
    for name, *flags in map(shlex.split, table(result.stdout)):
        if name == "train_minimal.py":
            Settings.parse(flags, name)
        elif name == "plan_memory":
            plan_memory.parse(flags)


# ---- What comes before `import torch`


def start(words: str, stand_ins: Path, **env: str) -> subprocess.CompletedProcess:
    """Python with these words, and modules of `stand_ins` in the place of the true ones."""
    how = {"capture_output": True, "text": True, "timeout": 60, "cwd": ROOT}
    env = os.environ | env | {"PYTHONPATH": str(stand_ins)}
    return subprocess.run([sys.executable, *words.split()], env=env, **how)


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("-m studies.tables", "torch"),
        ("-m scripts.generate", "torch"),
        ("train_minimal.py", "torch"),
        ("train_fsdp.py", "torch"),
        ("train_minimal.py", "enum"),  # which much of the standard library needs
    ],
)
def test_signals_during_imports(tmp_path, words, module):
    """Ctrl-C ends the program, though a library may make something else of it."""
    (tmp_path / f"{module}.py").write_text(
        "import os, _signal as signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('half of it is missing')\n"
    )
    result = start(words, tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "stopped\n")


SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    ("given", "system", "added"),
    [
        ({}, "linux 6.8.0-88-generic", SEGMENTS | {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"GOMP_SPINCOUNT": "7", "PYTORCH_ALLOC_CONF": ""}, "linux 6.8.0", {}),
        ({"OMP_WAIT_POLICY": "PASSIVE", "PYTORCH_CUDA_ALLOC_CONF": "x"}, "linux 6.8.0", {}),
        ({"OMP_WAIT_POLICY": "ACTIVE", "PYTORCH_HIP_ALLOC_CONF": "x"}, "linux 6.8.0", {}),
        ({"OMP_WAIT_POLICY": ""}, "linux 5.15.90.1-microsoft-standard-WSL2", {}),
        ({"OMP_WAIT_POLICY": ""}, "linux 5.15.136-tegra", {}),
        ({"OMP_WAIT_POLICY": ""}, "win32 10", {}),
    ],
)
def test_what_is_set_where_the_user_has_set_nothing(monkeypatch, given, system, added):
    """Threads that wait soon sleep; and a GPU's allocator leaves no gaps, where it can do that."""
    environment, (platform, release) = dict(given), system.split()
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    monkeypatch.setattr(sys, "platform", platform)
    runpy.run_path(str(ROOT / "trainer/bootstrap.py"))
    assert environment == given | added


def tool(does: str) -> subprocess.Popen:
    """One that does this, started by -m."""
    code = (
        "import sys, time; sys.argv[0] = '-m'; import scripts\n"
        f"sys.exit(scripts.cli_main(lambda argv: {does})())"
    )
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"PYTHONUNBUFFERED": "", "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-c", code]
    return subprocess.Popen(words, text=True, cwd=ROOT, env=environment, **how)


def test_ctrl_c_and_a_reader_who_goes_are_no_bugs():
    writing = tool("print('W\\xf6rter', flush=True) or time.sleep(60)")
    assert writing.stdout.readline() == "W?rter\n"  # what stdout cannot spell is none, either
    writing.send_signal(signal.SIGINT)
    assert (writing.communicate(timeout=60)[1], writing.returncode) == ("stopped\n", 130)
    # Much is noticed when it is written; a few lines leave the buffer at the very end.
    for does, code in (("print('much ' * 10**6)", 141), ("print('little')", 0)):
        written = tool(f"sys.stdin.read() or {does}")
        written.stdout.close()
        written.stdin.close()
        assert written.stderr.read() == "" and written.wait(60) == code, does


@pytest.mark.parametrize(
    ("recipe", "program", "sequences"),
    [("gpt2_small", "python", 480), ("gpt2_small_ddp", "torchrun", 512)],
)
def test_recipes_run_and_know_their_flags(tmp_path, recipe, program, sequences):
    """With a stand-in for python and torchrun that only shows what it was started with."""
    stand_in = tmp_path / program
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = ["bash", f"{ROOT}/scripts/{recipe}.sh"]
    assert run(command).returncode == 2
    # It may be started from where the text lies.
    result = run([*command, "my text.txt", "--lr", "1"], cwd=tmp_path, PATH=path, GPUS="4")
    words = result.stdout.splitlines()
    args = Settings.parse(words[words.index("--train-data") :], "test")
    assert args.train_data == (f"{tmp_path}/my text.txt",) and args.lr == 1
    processes = 4 if program == "torchrun" else 1
    assert args.batch_size * args.grad_accum_steps * processes == sequences


def test_kept_tensors_lists_every_policy(capsys):
    """Below a header, the block's input first; why each is kept; they add up to the title."""
    flags = ["--batch-size", "1", "--seq-len", "64"]
    assert kept_tensors.main(flags) == 0
    tables = [table.splitlines() for table in capsys.readouterr().out.strip().split("\n\n")]
    assert [title.split(":")[0] for title, *_ in tables] == list(POLICY_NAMES)
    for title, _, *lines in tables:
        rows = [re.split("  +", line.strip()) for line in lines]
        assert rows[0][2] == "x: the block's input"
        assert all(re.search(r"backward|gradient|replay", row[-2]) for row in rows)
        total = float(re.search(r"\((.*) BTC\)", title)[1])
        assert sum(float(row[1]) for row in rows) == pytest.approx(total, abs=0.006 * len(rows))
    gelu = r" gelu +1x64x3072 bfloat16 +the gradient of mlp.c_proj.s weight .* model.py:\d+ .*gelu"
    none, cheap = ("\n".join(table) for table in tables[:2])
    assert re.search(gelu, none) and not re.search(gelu, cheap)  # which replays it
