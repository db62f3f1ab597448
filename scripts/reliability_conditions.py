"""Rows of scripts/reliability.py, second half: the conditions that runs meet with.

Numbers that are none, memory and disks that are full, other flags, bad data, no network.
"""

import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.faults import weights_hash
from scripts.trainer_process import (
    DEADLINE,
    INTERVAL,
    ROOT,
    STEPS,
    Bench,
    Trainer,
    check,
    history,
    row,
)
from trainer.snapshot import beside, read_snapshot

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
def out_of_memory(bench: Bench, faults: Sequence[str] = ("oom", "cuda-oom")) -> str:
    """Forty lines of allocator statistics do not say which flag to turn."""
    big = ("--seq-len=512", "--max-tokens=9000", "--d-model=128", "--save-interval=0")
    for fault in faults:
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
    n = 3 * len(faults)
    return f"{n} of {n} exit 4; first recompute, then a smaller micro-batch, then shorter sequences"


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
def other_flags(bench: Bench, refused: Sequence[str] = (*REFUSED,)) -> str:
    """A run that goes on as another one gives a result that belongs to no command line."""
    path = bench.path()
    bench.train(path, expect=-signal.SIGKILL, FAULTS="kill:0:12")
    before = path.read_bytes()
    for flags in refused:
        run = bench.train(path, "--resume", *flags.split(), expect=2)
        check(re.search(REFUSED[flags], run.errors()[0]), run.errors()[0])
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
    n = len(refused)
    return f"{n} of {n} refused, 4 changes logged, policy: bit-identical"


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
def cache_race(bench: Bench, at_once: Sequence[int] = (2, 4, 8)) -> str:
    """Half a cache, read as a whole one, trains on half the text and says nothing."""
    folder = bench.path().parent
    text, rng, caches = folder / "text.txt", random.Random(0), []
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 8))) for _ in range(20_000)]
    text.write_text(" ".join(rng.choices(words, k=600_000)))
    for count in at_once:
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
    n = len(caches)
    counts = ", ".join(map(str, at_once))
    return f"{counts}: built once; after a killed builder too; {n} of {n} byte-identical"


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
tokenizer.GPT2_PACKAGE = "none"  # as if it were not installed
sys.exit(train_minimal.main(sys.argv[1:]))
"""


@row("offline", "no network: `gpt2` where packets are dropped", "explains itself within 10 s")
def no_network(bench: Bench, limit: float = 10) -> str:
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
    check(seconds < limit, f"{seconds:.1f} s")
    return f"one line and exit 2 after {seconds:.1f} s"
