"""Does a run survive what happens to runs? Breaks real ones on purpose, and prints what was left.

python -m scripts.reliability                       # every row: some 10 minutes on two CPU cores
python -m scripts.reliability --only save damage    # some rows
python -m scripts.reliability --json scripts/results/reliability.json

Each row of the table is one function below: its docstring names the failure that it guards
against, and it raises NotHeld if the figure wanted is not reached (then the exit code is 1). The
trainers run in processes of their own, most of them through scripts/faults.py, which makes things
go wrong at a chosen step. What is killed is killed on progress, never on the wall clock: a delay
after the start would mostly hit `import torch`. Linux is needed (/proc, SIGKILL), a GPU is not.

Not covered: power loss (SIGKILL loses no page that the kernel holds), network file systems,
Windows, several machines.
"""

import concurrent.futures
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from scripts.faults import SAVE_FAULTS, weights_hash
from scripts.trainer_process import (
    DEADLINE,
    INTERVAL,
    ROOT,
    STEPS,
    Bench,
    NotHeld,
    Trainer,
    check,
    history,
    kill_all,
    last_line,
    pids_of,
    wait_until,
)
from trainer.flags import OneLineParser, output_file
from trainer.snapshot import SnapshotError, beside, load_newest, read_snapshot


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    what: str
    wanted: str
    measure: Callable[[Bench], str]  # returns what was measured, or raises NotHeld


ROWS: dict[str, Row] = {}


def row(name: str, what: str, wanted: str) -> Callable:
    def add(function: Callable) -> Callable:
        ROWS[name] = Row(name, what, wanted, function)
        return function

    return add


# --------------------------------------------------------------------- killed, and resumed


@row(
    "kill",
    "`kill -9` at random points of training",
    "20 of 20 resume with the weights of an undisturbed run, at most one save interval lost",
)
def killed_in_training(bench: Bench, kills: int = 20, steps: int = 160) -> str:
    """A scheduler's or the kernel's kill leaves no time to save: what lies there must do."""
    flags = (f"--num-steps={steps}",)
    path, undisturbed = bench.path(), history(bench.reference(*flags))
    rng, kept, lost = random.Random(0), 0, 0
    for number in range(kills):
        resume = ["--resume"] if kept else []
        run = Trainer(path, *flags, *resume, PAUSE="0.02")
        run.wait_for_step(kept + rng.randint(1, 2 * INTERVAL))
        time.sleep(rng.uniform(0, 0.05))  # so that it also hits a step or a save half-way
        run.send(signal.SIGKILL)
        run.end(-signal.SIGKILL)
        if path.exists() or beside(path, ".prev.pt").exists():
            state = load_newest(path).state
            kept, weights = state["step"], weights_hash(state["model"])
            check(weights == undisturbed[kept]["weights"], f"kill {number}: other weights")
        lost = max(lost, run.last_step() - kept)
        check(lost <= INTERVAL, f"kill {number} lost {lost} steps")
    bench.train(path, *flags, "--resume")
    bench.check_same(path, *flags)
    return f"{kills} of {kills} end bit-identical, at most {lost} steps of {INTERVAL} lost"


DEATHS_IN_A_SAVE = [fault for fault in SAVE_FAULTS if fault.startswith("die")]


@row("save", "`kill -9` at each point inside a save", "6 of 6 end bit-identical")
def killed_in_a_save(bench: Bench, points: Sequence[str] = DEATHS_IN_A_SAVE) -> str:
    """A snapshot that is overwritten in place is gone if the writer dies half-way."""
    kept = []
    for fault in points:
        path = bench.path()
        bench.train(path, expect=-signal.SIGKILL, FAULTS=f"{fault}:0:{2 * INTERVAL}")
        kept.append(load_newest(path).state["step"])
        bench.train(path, "--resume")
        bench.check_same(path)
        left = [p.name for p in path.parent.glob(".*.tmp")]
        check(not left, f"{fault} left {left}")
    check(set(kept) <= {INTERVAL, 2 * INTERVAL}, f"resumed from steps {kept}")
    steps = ", ".join(map(str, kept))
    return f"{len(points)} of {len(points)} end bit-identical, from steps {steps}"


# -------------------------------------------------------------------- damaged, or dangerous


def damages(content: bytes, weights: int) -> Iterator[tuple[str, bytes]]:
    """What can become of a file; `weights` is a place in it where a weight is stored."""
    yield "one bit", content[:weights] + bytes([content[weights] ^ 1]) + content[weights + 1 :]
    yield "truncated", content[: len(content) // 2]
    yield "empty", b""
    yield "zeroed block", content[:weights] + bytes(4096) + content[weights + 4096 :]
    yield "no snapshot", b"It was a dark and stormy night.\n" * 99


def stored_data(path: Path) -> list[int]:
    """The places of all bytes that are data, not padding or directory, of a snapshot."""
    places: list[int] = []
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            header = entry.header_offset
            names = sum(int.from_bytes(content[header + i : header + i + 2], "little")
                        for i in (26, 28))  # fmt: skip
            places += range(header + 30 + names, header + 30 + names + entry.file_size)
    return places


@row(
    "damage",
    "newest snapshot damaged in 5 ways; named by itself",
    "one line with file and reason, the one before taken, same weights; named: exit 2",
)
def newest_damaged(bench: Bench) -> str:
    """Disks lie; and a run that cannot go on from the file before has lost everything."""
    whole = bench.reference()
    places = stored_data(whole)
    content = whole.read_bytes()
    for kind, damaged in damages(content, places[len(places) // 2]):
        path = bench.path()
        shutil.copy(beside(whole, ".prev.pt"), beside(path, ".prev.pt"))
        path.write_bytes(damaged)
        run = bench.train(path, "--resume")
        lines = [line for line in run.out.read_text().splitlines() if "run.pt" in line]
        said = [line for line in lines if re.search("damaged|no snapshot", line)]
        check(len(said) == 1, f"{kind}: {said or lines}")
        check(f"step {STEPS - INTERVAL}" in run.out.read_text(), f"{kind}: resumed elsewhere")
        bench.check_same(path)
        alone = path.with_name("alone.pt")
        alone.write_bytes(damaged)
        named = bench.train(alone, "--resume", expect=2)
        check(len(named.errors()) == 1 and "alone.pt" in named.errors()[0], f"{kind}: named")
    return "5 of 5 resumed from the one before, 5 of 5 refused when named"


@row("bits", "random single-bit flips in the stored data", "200 of 200 noticed")
def flipped_bits(bench: Bench, flips: int = 200) -> str:
    """torch.load takes a flipped bit for a weight, and training goes on with it."""
    whole = bench.reference()
    path, content, rng = bench.path(), whole.read_bytes(), random.Random(0)
    places, noticed, accepted = stored_data(whole), 0, 0
    for _ in range(flips):
        damaged = bytearray(content)
        damaged[rng.choice(places)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            read_snapshot(path)
        except SnapshotError:
            noticed += 1
        try:
            torch.load(path, weights_only=True)
            accepted += 1
        except Exception:  # whatever it stumbles over
            pass
    figure = f"{noticed} of {flips} noticed (torch.load by itself accepts {accepted})"
    check(noticed == flips, figure)
    return figure


class Bomb:
    """Pickled, it is an order to make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.folder),)


@row("code", "a snapshot that carries code", "refused, nothing executed")
def code_in_a_snapshot(bench: Bench) -> str:
    """A snapshot is a pickle, and a pickle is a program: a stranger's file may do anything."""
    path = bench.path()
    exploded = path.with_name("exploded")
    torch.save(read_snapshot(bench.reference()) | {"extra": Bomb(exploded)}, path)
    run = bench.train(path, "--resume", expect=2)
    check("refused" in run.errors()[0], run.errors()[0])
    check(not exploded.exists(), "the code ran")
    return "refused, exit 2, nothing executed"


# ------------------------------------------------------------------------------- signals


@row(
    "signals",
    "SIGTERM and SIGINT to python, to torchrun, to one rank; a second signal",
    "step finished, one save, all ranks stop at the same step within 5 s, exit 143 / 130; "
    "a second signal ends at once",
)
def signals(bench: Bench, numbers: Sequence[int] = (signal.SIGTERM, signal.SIGINT)) -> str:
    """A cluster gives a job some seconds before it takes the machine away."""
    slowest = 0.0
    for number in numbers:
        for target, processes, rank in (("python", 1, None), ("torchrun", 2, None), ("rank", 2, 1)):
            path = bench.path()
            run = Trainer(path, "--save-interval=0", processes=processes, PAUSE="0.1")
            run.wait_for_step(3)
            sent = run.send(number, rank)
            run.end(128 + number if processes == 1 else 1)
            seconds = time.monotonic() - sent
            slowest = max(slowest, seconds)
            case = f"{signal.Signals(number).name} to {target}"
            check(seconds < 5, f"{case}: {seconds:.1f} s")
            step = read_snapshot(path)["step"]
            check(3 <= step < STEPS and step == run.last_step(), f"{case}: saved step {step}")
            check(not beside(path, ".prev.pt").exists(), f"{case}: saved more than once")
            stops = [max(history(path, r)) for r in range(processes)]
            check(set(stops) == {step}, f"{case}: ranks stopped at {stops}")
            bench.train(path, "--resume")
            bench.check_same(path)
    path = bench.path()
    run = Trainer(path, PAUSE="1")
    run.wait_for_step(1)
    run.send(signal.SIGTERM)
    time.sleep(0.1)  # two at the same instant would be one
    sent = run.send(signal.SIGTERM)
    run.end(-signal.SIGTERM)
    at_once = time.monotonic() - sent
    check(at_once < 0.5, f"the second signal took {at_once:.1f} s")
    return f"6 of 6 saved within {slowest:.1f} s, end bit-identical; second: {at_once:.2f} s"


# ------------------------------------------------------------------------ several processes


@row(
    "restarts",
    "`torchrun --max-restarts=3`, a rank raising or killed",
    "10 of 10 resume by themselves and end with the single-process weights",
)
def restarts(bench: Bench, times: int = 10) -> str:
    """One bad node of many ends a job of days; torchrun starts it again, the rest is ours."""
    start = time.monotonic()
    for i in range(times):
        path, fault = bench.path(), ("error", "kill")[i % 2]
        # From the first step, before there is any snapshot, to the last.
        faults = f"{fault}:{i // 2 % 2}:{1 + i * (STEPS - 1) // max(times - 1, 1)}"
        bench.train(path, processes=2, torchrun="--max-restarts=3", FAULTS=faults)
        bench.check_same(path)
    seconds = (time.monotonic() - start) / times
    return f"{times} of {times} end with the single-process weights, {seconds:.1f} s each"


@row(
    "elastic",
    "1 -> 2 -> 1 processes across resumes",
    "same global batch: bit-identical; another: exit 2 with the --grad-accum-steps that fits",
)
def elastic(bench: Bench) -> str:
    """The machine that is free tomorrow has another number of GPUs than today's."""
    path = bench.path()
    for processes, step, resume in ((1, 7, []), (2, 14, ["--resume"])):
        run = Trainer(path, *resume, processes=processes, PAUSE="0.1")
        run.wait_for_step(step)
        run.send(signal.SIGTERM)
        run.end(143 if processes == 1 else 1)
    bench.train(path, "--resume")
    bench.check_same(path)
    other = bench.train(path, "--resume", "--num-steps=25", "--grad-accum-steps=1", expect=2)
    check("--grad-accum-steps 2 fits" in other.errors()[0], other.errors()[0])
    return "ends bit-identical; another batch: exit 2, `--grad-accum-steps 2 fits`"


@row("hang", "a rank that hangs", "the job ends within its timeout, with a line that says so")
def hung_rank(bench: Bench, timeout: int = 8) -> str:
    """A rank stuck in a driver or a file system would keep all the others waiting for ever."""
    path = bench.path()
    run = Trainer(path, processes=2, FAULTS="hang:1:7", MINIGPT_TIMEOUT_S=str(timeout))
    run.wait_for_step(6)
    start = time.monotonic()
    run.end(1)
    seconds = time.monotonic() - start
    # torchrun gives the hung one 30 s to answer its SIGTERM before it kills it.
    check(seconds < timeout + 45, f"ended after {seconds:.0f} s")
    check(any(re.search("waited|timeout", line) for line in run.errors()), last_line(run.err))
    bench.train(path, "--resume")
    bench.check_same(path)
    return f"ended after {seconds:.0f} s (timeout {timeout} s): {run.errors()[0][:80]}"


@row("exit", "finished runs that exit 0, both cores loaded", "20 of 20")
def exit_codes(bench: Bench, times: int = 20, at_once: int = 4) -> str:
    """A run that has finished can still abort while it takes its connections down."""

    def run(_: int) -> str:
        try:
            bench.train(path := bench.path(), "--num-steps=5", processes=2)
            return "" if read_snapshot(path)["step"] == 5 else "no snapshot"
        except NotHeld as failure:
            return str(failure)

    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:  # they are each other's load
        failures = [failure for failure in pool.map(run, range(times)) if failure]
    figure = f"{times - len(failures)} of {times} exit 0, {2 * at_once} processes at a time"
    check(not failures, f"{figure}: {failures[:1]}")
    return figure


@row("orphans", "torchrun killed with -9 (Linux)", "no worker lives on after 5 s")
def killed_torchrun(bench: Bench) -> str:
    """Workers that outlive their torchrun hold the GPU, and write to the files of the next run."""
    path = bench.path()
    run = Trainer(path, "--num-steps=2000", processes=2, PAUSE="0.1")
    run.wait_for_step(3)
    check(len(pids_of(path)) == 3, f"{len(pids_of(path))} processes, not 3")
    run.send(signal.SIGKILL)
    run.end(-signal.SIGKILL)
    try:
        seconds = wait_until(lambda: not pids_of(path), "workers did not end", 5)
    finally:
        kill_all(path)
    return f"all gone after {seconds:.1f} s"


@row("second", "a second run on the same --checkpoint-path", "refused, exit 2, the first unharmed")
def second_run(bench: Bench) -> str:
    """Two runs that write the same files by turns leave the snapshot of neither."""
    path = bench.path()
    first = Trainer(path, PAUSE="1")  # slow enough to outlive the other's start
    first.wait_for_step(1)
    second = bench.train(path, "--seed=5", expect=2)
    check("another run" in second.errors()[0], second.errors()[0])
    check(first.process.poll() is None, "the first had ended already")
    first.end(0)
    bench.check_same(path)
    return "refused, exit 2, the first bit-identical"


# ------------------------------------------------------------------------ numbers and memory


@row(
    "nan",
    "NaN or Inf in loss or gradients of one rank",
    "step skipped on all ranks with a warning; several in a row: exit 3, last snapshot intact",
)
def not_finite(bench: Bench) -> str:
    """One NaN is in all weights after one step, and in the snapshot after the next save."""
    path = bench.path()
    run = bench.train(path, processes=2, FAULTS="nan:1:7 overflow:0:12 infinite-loss:1:16")
    skipped = re.findall(r"warning\s+step (\d+)", run.out.read_text())
    check(skipped == ["7", "12", "16"], f"warned of steps {skipped}")
    for rank in (0, 1):
        after = history(path, rank)
        for step in (7, 12, 16):
            check(after[step]["weights"] == after[step - 1]["weights"], f"step {step} not skipped")
    check(history(path, 0) == history(path, 1), "the ranks differ")
    path = bench.path()
    run = bench.train(path, expect=3, FAULTS=" ".join(f"nan:0:{s}" for s in range(9, 20)))
    check(len(run.errors()) == 1, f"{run.errors()}")
    state = read_snapshot(path)
    check(state["step"] == INTERVAL, f"the snapshot is of step {state['step']}")
    same = weights_hash(state["model"]) == history(bench.reference())[INTERVAL]["weights"]
    check(same, "the snapshot is not the last good one")
    return f"skipped on both ranks; {run.last_step() + 1 - 9 + 1} in a row: exit 3, snapshot intact"


@row("fp16", "fp16 overflow", "weights unchanged, scale halved, state survives resume")
def float16_overflow(bench: Bench) -> str:
    """A loss scale that starts anew at every resume overflows, skips steps, bends the curve."""
    flags = ("--amp-dtype=float16", "--save-interval=4")
    Trainer(whole := bench.path(), *flags, FAULTS="overflow:0:6").end(0)
    after = history(whole)
    check(after[6]["weights"] == after[5]["weights"], "the weights changed")
    check(after[7]["weights"] != after[6]["weights"], "the next step changed nothing")
    scales = [after[step]["scale"] for step in (5, 6)]
    check(scales[1] == scales[0] / 2, f"the scale went from {scales[0]:g} to {scales[1]:g}")
    path = bench.path()
    bench.train(path, *flags, expect=-signal.SIGKILL, FAULTS="overflow:0:6 kill:0:10")
    bench.train(path, *flags, "--resume")
    check(history(path)[STEPS] == after[STEPS], "the resumed run ended elsewhere")
    return f"weights unchanged, scale {scales[0]:g} -> {scales[1]:g}, resumed bit-identical"


@row(
    "disk",
    "disk full while saving",
    "older snapshots intact, no temporary file, the message says disk full and what is needed",
)
def disk_full(bench: Bench) -> str:
    """Snapshots fill disks; and torch.save's own message speaks of an unexpected position."""
    path = bench.path()
    run = bench.train(path, expect=3, FAULTS=f"disk-full:0:{3 * INTERVAL}")
    (line,) = run.errors()
    check(re.search(r"disk (is )?full.*[\d.,]+ \w?i?B", line), line)
    kept = [read_snapshot(p)["step"] for p in (path, beside(path, ".prev.pt"))]
    check(kept == [2 * INTERVAL, INTERVAL], f"left are the snapshots of steps {kept}")
    left = [p.name for p in path.parent.glob(".*.tmp")]
    check(not left, f"left is {left}")
    bench.train(path, "--resume")
    bench.check_same(path)
    return f"older ones intact, nothing left over, exit 3: {line.split(': ', 2)[2][:60]} ..."


@row(
    "oom",
    "out of memory, CPU and (by injection) CUDA",
    "exit 4, one line with batch, sequence, policy and the next knob, the best one first",
)
def out_of_memory(bench: Bench) -> str:
    """Forty lines of allocator statistics do not say which flag to turn."""
    big = ("--seq-len=512", "--max-tokens=9000", "--d-model=128", "--save-interval=0")
    for fault in ("oom", "cuda-oom"):
        found = []
        for policy, batch in (("none", 8), ("full", 8), ("full", 1)):
            run = bench.train(
                bench.path(), *big, f"--use-activation-checkpoint={policy}",
                f"--batch-size={batch}", expect=4, FAULTS=f"{fault}:0:2",
            )  # fmt: skip
            (line,) = run.errors()
            for words in (f"--batch-size {batch}", "--seq-len 512", policy):
                check(words in line, line)
            found.append(line)
        for line, knob in zip(
            found, ("--use-activation-checkpoint", "--grad-accum-steps 4", "--seq-len"), strict=True
        ):
            check(knob in line.split("try", 1)[-1], line)
    return "6 of 6 exit 4; first recompute, then a smaller micro-batch, then shorter sequences"


# ---------------------------------------------------------------------------- bad input, data


REFUSED = {
    "--n-layers=3": "--n-layers: .* with 2, this run has 3",
    "--d-model=32": "--d-model: .* with 16, this run has 32",
    "--vocab-size=32": "--vocab-size: .* with 31, this run has 32",
    "--seq-len=8 --max-position-embeddings=16": "--seq-len: .* with 16, this run has 8",
    "--seed=5": "--seed: .* with 1337, this run has 5",
    "--dropout=0": "--dropout: .* with 0.1, this run has 0",
    "--max-tokens=100": "--train-data: .* was trained on .*, this run has",
}


@row(
    "resume",
    "resume with other flags",
    "shape, data, seed, ...: exit 2 with flag, old and new value; lr, steps, intervals may change; "
    "the policy too, bit-identical; a finished run says so, exit 0",
)
def other_flags(bench: Bench) -> str:
    """A run that goes on as another one gives a result that belongs to no command line."""
    path = bench.path()
    bench.train(path, expect=-signal.SIGKILL, FAULTS="kill:0:12")
    before = path.read_bytes()
    for flags, words in REFUSED.items():
        run = bench.train(path, "--resume", *flags.split(), expect=2)
        check(re.search(words, run.errors()[0]), run.errors()[0])
        check(path.read_bytes() == before, f"{flags}: the snapshot was touched")
    changed = path.with_name("changed.pt")
    changed.write_bytes(before)
    free = ("--lr=1e-4", "--num-steps=22", "--save-interval=3", "--log-interval=2")
    run = bench.train(changed, "--resume", *free)
    said = run.out.read_text()
    check(read_snapshot(changed)["step"] == 22, "--num-steps did not change")
    for change in (
        "--lr 0.025 -> 0.0001",
        "--num-steps 20 -> 22",
        "--save-interval 5 -> 3",
        "--log-interval 1 -> 2",
    ):
        check(change in said, f"{change} is not logged")
    bench.train(path, "--resume", "--use-activation-checkpoint")
    bench.check_same(path)
    finished = bench.train(path, "--resume")
    check(f"already at step {STEPS}" in finished.out.read_text(), "a finished run did not say so")
    return f"{len(REFUSED)} of {len(REFUSED)} refused, 4 changes logged, policy: bit-identical"


BUILD_CACHE = """
import os, signal, sys
from pathlib import Path
from data import Tokenizer, load_dataset
real, calls = Tokenizer.encode, []
def encode(self, text):
    calls.append(text)
    if sys.argv[3] == "die" and len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, text)
Tokenizer.encode = encode
load_dataset([sys.argv[1]], None, tokenizer_name="bpe", cache_dir=Path(sys.argv[2]))
"""


def build_cache(text: Path, cache: Path, fate: str = "live") -> subprocess.Popen:
    command = [sys.executable, "-c", BUILD_CACHE, str(text), str(cache), fate]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def files_below(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@row(
    "cache",
    "2 to 8 processes on an empty token cache; the builder killed half-way",
    "built once, byte-identical, nothing poisonous left",
)
def cache_race(bench: Bench) -> str:
    """Half a cache, read as a whole one, trains on half the text and says nothing."""
    folder = bench.path().parent
    text, rng, caches = folder / "text.txt", random.Random(0), []
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 8))) for _ in range(20_000)]
    text.write_text(" ".join(rng.choices(words, k=600_000)))
    for count in (2, 4, 8):
        cache = folder / f"cache{count}"
        builders = [build_cache(text, cache) for _ in range(count)]
        said = [builder.communicate(timeout=DEADLINE)[0] for builder in builders]
        check(all(builder.returncode == 0 for builder in builders), f"{count}: not all exit 0")
        times = sum("encoding" in out for out in said)
        check(times == 1, f"{count} processes built it {times} times")
        caches.append(files_below(cache))
    cache = folder / "killed"
    killed = build_cache(text, cache, "die")
    killed.communicate(timeout=DEADLINE)
    check(killed.returncode == -signal.SIGKILL, "the builder did not die")
    build_cache(text, cache).communicate(timeout=DEADLINE)
    caches.append(files_below(cache))
    check(all(found == caches[0] for found in caches), "the caches differ")
    return "2, 4, 8: built once; after a killed builder too; 4 of 4 byte-identical"


@row(
    "input",
    "malformed input, at least 40 cases",
    "each: one line, exit 2, every existing file unchanged, no traceback",
)
def malformed_input(bench: Bench) -> str:
    """What a mistake costs its user: a line, and never a file. The cases are the tests' table."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_bad_input.py"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * DEADLINE)
    last = (result.stdout.strip().splitlines() or result.stderr.strip().splitlines() or [""])[-1]
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (\w+)", last)}
    passed, other = counts.pop("passed", 0), {k: n for k, n in counts.items() if "fail" in k}
    check(result.returncode == 0 and passed >= 40 and not other, last)
    return f"{passed} of {passed}: one line, exit 2, no file changed"


@row("flat", "memory and file descriptors over 2,000 steps", "flat")
def flat(bench: Bench, steps: int = 2000) -> str:
    """A little more at each step is nothing in a test, and the machine's memory in a week."""
    path = bench.path()
    flags = ("--log-interval=100", "--save-interval=100", "--eval-interval=100")
    run = Trainer(path, f"--num-steps={steps + 600}", *flags)
    pid, found = run.process.pid, []
    for step in (500, 500 + steps):
        run.wait_for_step(step)
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found.append((pages * resource.getpagesize() / 2**20, len(os.listdir(f"/proc/{pid}/fd"))))
    run.end(0)
    (before, open_before), (after, open_after) = found
    figure = f"{after - before:+.1f} MiB of {before:.0f}, {open_after - open_before:+} descriptors"
    check(after - before < 4 and open_after <= open_before, figure)
    return figure


@contextmanager
def black_hole() -> Iterator[str]:
    """The address of a proxy that takes every connection, and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


OFFLINE = """
import sys, train_minimal
from data import tokenizer
tokenizer.GPT2_PACKAGES = []  # as if none of them were installed
sys.exit(train_minimal.main(sys.argv[1:]))
"""


@row("offline", "no network: `gpt2` where packets are dropped", "explains itself within 10 s")
def no_network(bench: Bench) -> str:
    """tiktoken sets no timeout: behind a firewall that drops packets it waits for ever."""
    path = bench.path()
    text = path.with_name("x.txt")
    text.write_text("some words\n" * 1000)
    argv = [f"--train-data={text}", "--tokenizer-name=gpt2", f"--checkpoint-path={path}"]
    with black_hole() as proxy:
        env = dict.fromkeys(("https_proxy", "HTTPS_PROXY"), proxy) | {
            "NO_PROXY": "",
            "no_proxy": "",
        }
        start = time.monotonic()
        result = subprocess.run(
            [sys.executable, "-c", OFFLINE, *argv], cwd=ROOT, capture_output=True, text=True,
            env=os.environ | env | {"TIKTOKEN_CACHE_DIR": str(path.parent)}, timeout=DEADLINE,
        )  # fmt: skip
        seconds = time.monotonic() - start
    check(result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr[-200:])
    for way_out in ("gpt2", "pip install", "TIKTOKEN_CACHE_DIR", "byte"):
        check(way_out in result.stderr, result.stderr)
    check(seconds < 10, f"{seconds:.1f} s")
    return f"one line and exit 2 after {seconds:.1f} s"


# ------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Result:
    """What became of a row."""

    row: str
    what: str
    wanted: str
    measured: str
    held: bool
    seconds: float


def measure(one: Row, bench: Bench) -> Result:
    start = time.monotonic()
    try:
        measured, held = one.measure(bench), True
    except Exception as failure:  # a row that breaks is a row that is not held
        name = "" if isinstance(failure, NotHeld) else f"{type(failure).__name__}: "
        measured, held = f"{name}{failure}", False
    seconds = round(time.monotonic() - start, 1)
    print(f"{'held' if held else 'NOT HELD':8} {one.name:9} {seconds:5.0f} s  {measured}",
          file=sys.stderr)  # fmt: skip
    return Result(one.name, one.what, one.wanted, measured, held, seconds)


def measure_all(names: list[str], bench: Bench) -> list[Result]:
    """Two rows at a time; but the one that loads the machine by itself, and those with a clock."""
    alone = [name for name in names if name in ("exit", "signals", "offline")]
    pool = concurrent.futures.ThreadPoolExecutor(2)  # no `with`: Ctrl-C is not to wait for it
    together = [ROWS[name] for name in names if name not in alone]
    results = list(pool.map(lambda one: measure(one, bench), together))
    results += [measure(ROWS[name], bench) for name in alone]
    return sorted(results, key=lambda result: names.index(result.row))


def table(results: list[Result]) -> str:
    """Markdown."""
    lines = ["| what | wanted | measured | |", "|---|---|---|---|"]
    for one in results:
        verdict = "held" if one.held else "**not held**"
        measured = one.measured.replace("|", "/").replace("\n", " ")
        lines.append(f"| {one.what} | {one.wanted} | {measured} | {verdict} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m scripts.reliability", description=__doc__)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results there")
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", default=list(ROWS),
                        help=f"some rows: {' '.join(ROWS)}")  # fmt: skip
    args = parser.parse_args(argv)
    if sys.platform != "linux":
        parser.error("scripts.reliability needs Linux: it looks at processes through /proc")

    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="reliability-"))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = measure_all(args.only, Bench(folder))
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)  # first: nothing can be started in it any more
        kill_all(folder)
        os._exit(130)  # without waiting for the threads that wait for what was killed
    finally:
        signal.signal(signal.SIGTERM, before)
        kill_all(folder)
        shutil.rmtree(folder, ignore_errors=True)
    about = {
        "command": " ".join(["python -m scripts.reliability", *(argv or sys.argv[1:])]),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cores": os.cpu_count(),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.monotonic() - start),
    }
    print(table(results))
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if args.json:
        rows = [asdict(result) for result in results]
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 0 if all(result.held for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
