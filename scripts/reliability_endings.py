"""Rows of scripts/reliability.py, first half: how runs end, and what they go on from.

Killed, stopped by a signal, one rank without the others; the newest snapshot whole or damaged.
"""

import concurrent.futures
import os
import random
import re
import shutil
import signal
import time
import zipfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from scripts.faults import SAVE_FAULTS, weights_hash
from scripts.trainer_process import (
    INTERVAL,
    STEPS,
    Bench,
    NotHeld,
    Trainer,
    check,
    history,
    kill_all,
    last_line,
    pids_of,
    row,
    wait_until,
)
from trainer.resume import load_newest
from trainer.snapshot import SnapshotError, beside, read_snapshot

# --------------------------------------------------------------------- killed, and resumed


@row(
    "kill",
    "`kill -9` at random points of training",
    "20 of 20 resume with the weights of an undisturbed run, at most one save interval lost",
)
def killed_in_training(bench: Bench, kills: int = 20, steps: int = 160, **world: Any) -> str:
    """A scheduler's or the kernel's kill leaves no time to save: what lies there must do.

    `world`: for Trainer, several processes, one of which is killed.
    """
    flags = (f"--num-steps={steps}",)
    path, undisturbed = bench.path(), history(bench.reference(*flags))
    rng, kept, lost = random.Random(0), 0, 0
    for number in range(kills):
        resume = ["--resume"] if kept else []
        run = Trainer(path, *flags, *resume, PAUSE="0.02", **world)
        run.wait_for_step(kept + rng.randint(1, 2 * INTERVAL))
        time.sleep(rng.uniform(0, 0.05))  # so that it also hits a step or a save half-way
        run.send(signal.SIGKILL, rank=number % 2 if world else None)
        run.end(1 if world else -signal.SIGKILL)
        if path.exists() or beside(path, ".prev.pt").exists():
            state = load_newest(path).state
            kept, weights = state["step"], weights_hash(state["model"])
            check(weights == undisturbed[kept]["weights"], f"kill {number}: other weights")
        lost = max(lost, run.last_step() - kept)
        check(lost <= INTERVAL, f"kill {number} lost {lost} steps")
    bench.train(path, *flags, "--resume", **world)
    bench.check_same(path, *flags)
    return f"{kills} of {kills} end bit-identical, at most {lost} steps of {INTERVAL} lost"


DEATHS_IN_A_SAVE = [fault for fault in SAVE_FAULTS if fault.startswith("die")]


@row("save", "`kill -9` at each point inside a save", "6 of 6 end bit-identical")
def killed_in_a_save(bench: Bench, points: Sequence[str] = DEATHS_IN_A_SAVE, **world: Any) -> str:
    """A snapshot that is overwritten in place is gone if the writer dies half-way."""
    kept = []
    for fault in points:
        path = bench.path()
        killed = 1 if world else -signal.SIGKILL
        bench.train(path, expect=killed, FAULTS=f"{fault}:0:{2 * INTERVAL}", **world)
        kept.append(load_newest(path).state["step"])
        bench.train(path, "--resume", **world)
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
def newest_damaged(bench: Bench, kinds: int = 5) -> str:
    """Disks lie; and a run that cannot go on from the file before has lost everything."""
    whole = bench.reference()
    places = stored_data(whole)
    content = whole.read_bytes()
    for kind, damaged in islice(damages(content, places[len(places) // 2]), kinds):
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
    all_of = f"{kinds} of {kinds}"
    return f"{all_of} resumed from the one before, {all_of} refused when named"


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
def signals(
    bench: Bench, numbers: Sequence[int] = (signal.SIGTERM, signal.SIGINT), limit: float = 5
) -> str:
    """A cluster gives a job some seconds before it takes the machine away."""
    targets = (("python", 1, None), ("torchrun", 2, None), ("rank", 2, 1))
    slowest = signal_each(bench, numbers, targets, limit)
    path = bench.path()
    run = Trainer(path, PAUSE="1")
    run.wait_for_step(1)
    run.send(signal.SIGTERM)
    time.sleep(0.1)  # two at the same instant would be one
    sent = run.send(signal.SIGTERM)
    run.end(-signal.SIGTERM)
    at_once = time.monotonic() - sent
    check(at_once < limit / 10, f"the second signal took {at_once:.1f} s")
    return f"6 of 6 saved within {slowest:.1f} s, end bit-identical; second: {at_once:.2f} s"


def signal_each(
    bench: Bench,
    numbers: Sequence[int],
    targets: Sequence[tuple[str, int, int | None]],
    limit: float,
    **env: str,
) -> float:
    """Stop runs by signals to (whom, how many processes, which of them), and go on with them.

    Returns the longest that one took to save and end, in seconds.
    """
    slowest = 0.0
    for number in numbers:
        for target, processes, rank in targets:
            path = bench.path()
            run = Trainer(path, "--save-interval=0", processes=processes, PAUSE="0.1", **env)
            run.wait_for_step(3)
            sent = run.send(number, rank)
            run.end(128 + number if processes == 1 else 1)
            seconds = time.monotonic() - sent
            slowest = max(slowest, seconds)
            case = f"{signal.Signals(number).name} to {target}"
            check(seconds < limit, f"{case}: {seconds:.1f} s")
            step = read_snapshot(path)["step"]
            check(3 <= step < STEPS and step == run.last_step(), f"{case}: saved step {step}")
            check(not beside(path, ".prev.pt").exists(), f"{case}: saved more than once")
            stops = [max(history(path, r)) for r in range(processes)]
            check(set(stops) == {step}, f"{case}: ranks stopped at {stops}")
            bench.train(path, "--resume")
            bench.check_same(path)
    return slowest


# ------------------------------------------------------------------------ several processes


@row(
    "restarts",
    "`torchrun --max-restarts=3`, a rank raising or killed",
    "10 of 10 resume by themselves and end with the single-process weights",
)
def restarts(bench: Bench, times: int = 10, **env: Any) -> str:
    """One bad node of many ends a job of days; torchrun starts it again, the rest is ours."""
    start = time.monotonic()
    for i in range(times):
        path, fault = bench.path(), ("error", "kill")[i % 2]
        # From the first step, before there is any snapshot, to the last.
        faults = f"{fault}:{i // 2 % 2}:{1 + i * (STEPS - 1) // max(times - 1, 1)}"
        bench.train(path, processes=2, torchrun="--max-restarts=3", FAULTS=faults, **env)
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
