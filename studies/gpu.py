"""What this project does on a GPU, measured: each result is kept as it comes, in a file of lines.

    python -m studies.gpu                              # an hour at most
    python -m studies.gpu --only head peaks
    python -m studies.gpu --peer --nanogpt ../nanoGPT  # beside transformers' GPT-2 and nanoGPT's
    python -m studies.gpu --dry-run                    # all of it tiny, on the CPU: does it run?

Time on a GPU is short, and the machine may go at any moment. So a result is on the disk
(OUT/gpu.jsonl) before the next measurement begins, and the tables (OUT/gpu.md) are made anew with
each. The same command once more measures what is missing; what failed, or ended the process, comes
last then. For ten minutes: `timeout 600 python -m studies.gpu`.

Whether what a GPU computes is right is asked by `python -m pytest -m gpu`. To measure one thing
more: a section is a function that yields a name and a function that returns the values.
"""

import sys

if not __package__:  # python studies/gpu.py: the others lie one folder up
    sys.path[0] += "/.."
    import studies  # noqa: F401

import argparse
import gc
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

from memory.head import compiled_softmax, head_loss, softmax_in_place
from model import RECOMPUTE_POLICIES
from planner.cards import peak_flops
from planner.formulas import head_bytes
from scripts.benchmark import plan, utilization
from scripts.benchmark_worker import Job, config_of, cpu_allocator_peak, make_run
from studies.common import about, describe, table, tool
from train_minimal import train_step
from trainer.device import choose_precision
from trainer.endings import is_out_of_memory
from trainer.flags import OneLineParser, UsageError, build_parser, fill_in, output_folder
from trainer.metrics import format_bytes, read_metrics
from trainer.plan import vocabulary
from trainer.run import Run

Values = dict[str, Any]
Records = dict[tuple[str, str], Values]  # (section, name) -> {"values": ...} or {"error": ...}
Jobs = Iterator[tuple[str, Callable[[], Values]]]
REAL = "--model gpt2 --device cuda --dropout 0"  # GPT-2 small, 1,024 tokens a sequence
DRY = (
    "--n-layers 2 --n-heads 2 --d-model 16 --seq-len 16 --batch-size 2 --use-toy-data "
    "--vocab-size 64 --device cpu --amp-dtype bfloat16"
)
# What the four counts of CUDA's caching allocator are of: asked for by tensors; with each block
# rounded up; with blocks that another stream may still be using; with all that the cache holds.
PEAKS = ("requested", "allocated", "active", "reserved")
BYTES, SHARES = (*PEAKS, "predicted", "extra"), ("MFU", "busy")  # how a table shows these values
OTHERS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Bench:
    """Where it is measured, and how large. `dry`: everything small, on the CPU."""

    dry: bool = False
    peer: bool = False  # also transformers' GPT-2
    nanogpt: Path | None = None  # also the GPT of this checkout

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    def pick(self, real: Any, dry: Any) -> Any:
        return dry if self.dry else real

    def args(self, flags: str = "") -> argparse.Namespace:
        """The trainers' flags: GPT-2 small, or something tiny, and `flags` besides."""
        words = f"{self.pick(REAL, DRY)} {flags}".split()
        args = build_parser("gpu", "unused.pt").parse_args(words)
        args.use_activation_checkpoint = "full"  # a Job names the policy; for fill_in, any will do
        fill_in(args)
        args.vocab_size = vocabulary(args)
        return args

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Of one call. Nothing waits for the GPU between them."""
        for _ in range(self.pick(3, 1)):  # compiles, makes the optimizer's state
            call()
        self.wait()
        start, repeats = time.perf_counter(), self.pick(10, 2)
        for _ in range(repeats):
            call()
        self.wait()
        return 1000 * (time.perf_counter() - start) / repeats

    def peaks(self, call: Callable[[], object]) -> Values:
        """The allocator's four counts, at their most while `call` runs. (A CPU's has none.)"""
        if self.dry:
            call()
            return dict.fromkeys(PEAKS)
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        call()
        self.wait()
        stats = torch.cuda.memory_stats()
        return {kind: stats[f"{kind}_bytes.all.peak"] for kind in PEAKS}

    def kernels(self, call: Callable[[], object]) -> list[float]:
        """Milliseconds of each; on a CPU, of each operator that no other called. (Not every machine
        lets a profiler see its GPU's: [].)"""
        with profile(acc_events=True) as profiler:
            call()
            self.wait()
        where = self.pick(DeviceType.CUDA, DeviceType.CPU)
        return [
            event.time_range.elapsed_us() / 1000
            for event in profiler.events()
            if event.device_type == where and not event.cpu_parent and not event.is_user_annotation
        ]


# ------------------------------------------------------------------------------- copies, head


def copies(bench: Bench) -> Jobs:
    """To the card and back. (What it multiplies: plan_memory --card this-machine.)"""
    for pinned in (True, False):
        for name in ("to the card", "to the CPU"):
            pages = "pinned" if pinned else "pageable"
            yield f"{name}, {pages}", partial(time_copy, bench, name == "to the card", pinned)


def time_copy(bench: Bench, to_card: bool, pinned: bool) -> Values:
    size = bench.pick(2**28, 2**16)
    there = torch.ones(size, dtype=torch.uint8, device=bench.device)
    here = torch.ones(size, dtype=torch.uint8, pin_memory=pinned and not bench.dry)
    a, b = (here, there) if to_card else (there, here)
    ms = bench.milliseconds(lambda: b.copy_(a, non_blocking=pinned))
    return {"ms": ms, "GB/s": size / ms / 1e6}


def head(bench: Bench) -> Jobs:
    """The head alone, forward and backward: by itself (0 chunks asked), in a fixed number of
    chunks, and as plain cross-entropy (1)."""
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for chunks in bench.pick((0, 4, 8, 16, 32, 99, 1), (0, 2, 1)):  # (1 may not fit)
            yield f"{name}, {chunks} chunks", partial(time_head, bench, dtype, chunks)
    compiled = partial(time_head, bench, torch.bfloat16, 0, compiled=True)
    yield "bfloat16, 0 chunks, compiled softmax", compiled


def time_head(bench: Bench, dtype: torch.dtype, chunks: int, compiled: bool = False) -> Values:
    """`extra`: the most bytes at a time, beside what is there before."""
    args, N = bench.args(), bench.pick(16 * 1024, 32)
    V, C, make = args.vocab_size, args.d_model, partial(torch.randn, device=bench.device)
    x, weight = make(1, N, C).requires_grad_(), (0.02 * make(V, C)).requires_grad_()
    labels = torch.randint(V, (1, N), device=bench.device)
    softmax = compiled_softmax() if compiled else softmax_in_place

    def step() -> None:
        x.grad = weight.grad = None
        with torch.autocast(bench.device.type, dtype):
            loss = head_loss(x, weight, labels, chunks, softmax)
        loss.backward()

    ms = bench.milliseconds(step)
    x.grad = weight.grad = None
    before = 0 if bench.dry else torch.cuda.memory_allocated()
    allocated = bench.peaks(step)["allocated"]
    config = replace(config_of(args, Job("none", 1)), loss_chunks=chunks)
    values = {"ms": ms, "TFLOP/s": 6 * N * V * C / ms / 1e9}
    extra = allocated and allocated - before
    return values | {"predicted": head_bytes(config, N, dtype), "extra": extra}


# ------------------------------------------------------------------------------- whole steps


def next_step(run: Run) -> None:
    run.step += 1
    train_step(run)


def peaks(bench: Bench) -> Jobs:
    """The planner's prediction beside what the allocator counted."""
    for size in bench.pick((2, 16), (2,)):
        for policy in bench.pick(RECOMPUTE_POLICIES, ("none", "full")):
            yield f"{policy}, {size} sequences", partial(peak, bench, "", Job(policy, size))
    for name, flags in {"accumulated": "--grad-accum-steps 2", "dropout": "--dropout 0.1"}.items():
        yield f"full, 2 sequences, {name}", partial(peak, bench, flags, Job("full", 2))
    # (On H100, H200 and B200 torch takes cuDNN's from 2.11 on; the planner has FlashAttention's.)
    yield "none, 2 sequences, no cuDNN", partial(peak, bench, "", Job("none", 2), cudnn=False)
    for model in bench.pick(("gpt2-medium", "gpt2-xl"), ()):
        yield f"{model}, full", partial(peak, bench, f"--model {model}", Job("full", 4))


def peak(bench: Bench, flags: str, job: Job, cudnn: bool = True) -> Values:
    args = bench.args(flags)
    planner = plan(args, bench.device, choose_precision(args, bench.device))
    predicted = planner.step(job.batch_size, **asdict(config_of(args, job))).peak
    run = make_run(args, job, bench.device)
    with nullcontext() if cudnn else sdpa_kernel(OTHERS):
        for _ in range(2):  # the first makes the optimizer's state
            next_step(run)
        found = bench.peaks(partial(next_step, run))
        if bench.dry:
            found["allocated"] = cpu_allocator_peak(run)
    return {"predicted": predicted, **found, "ratio": predicted / found["allocated"]}


def speed(bench: Bench) -> Jobs:
    """Time, and what it uses of the card's peak. Busy: the GPU's own time in a step; for the rest
    of it the GPU waits for Python. (The dearest kernels: --profile of the trainers.)"""
    size, ways = bench.pick(16, 2), dict[str, tuple[str, Job]]()
    for compiled in (False, True):
        end = "compiled" if compiled else "eager"
        policies = bench.pick(("none", "cheap", "mlp", "sdpa", "full"), ("full",))
        jobs = {policy: Job(policy, size, compiled) for policy in policies}
        jobs["none, 2 sequences"] = Job("none", 2, compiled)
        for peer in ("transformers",) * bench.peer + ("nanoGPT",) * bool(bench.nanogpt):
            jobs[peer] = Job("none", size, compiled, peer=peer)
        ways |= {f"{name}, {end}": ("", job) for name, job in jobs.items()}
    return in_turns(bench, ways)


def offload(bench: Bench) -> Jobs:
    """What it costs, and what it saves."""
    thin = bench.pick("--n-layers 48 --d-model 512 --n-heads 8", "--n-layers 4")
    ways = {}
    for shape, flags in {"12 layers": "", "48 thin layers": thin}.items():
        for policy in bench.pick(("full", "mlp"), ("mlp",)):
            job = Job(policy, bench.pick(16, 2))
            ways[f"{policy}, {shape}"] = flags, job
            ways[f"{policy} + offload, {shape}"] = f"{flags} --offload-activations", job
    return in_turns(bench, ways)


def in_turns(bench: Bench, ways: dict[str, tuple[str, Job]]) -> Jobs:
    """So that a clock that drifts hits all alike."""
    for turn in range(1, bench.pick(4, 2)):
        for name, (flags, job) in ways.items():
            yield f"{name}, turn {turn}", partial(time_step, bench, flags, job)


def time_step(bench: Bench, flags: str, job: Job) -> Values:
    args = bench.args(flags)
    run = nanogpt_run(bench, job) if job.peer == "nanoGPT" else make_run(args, job, bench.device)
    ms = bench.milliseconds(partial(next_step, run))
    tokens_per_s = job.batch_size * args.seq_len / (ms / 1000)
    most = None
    if not bench.dry:
        most = peak_flops(torch.cuda.get_device_name(), run.precision, args.tf32)
    used = utilization(config_of(args, job), args.seq_len, tokens_per_s, most, job.compiled)
    values = {"ms": ms, "tokens/s": tokens_per_s, "MFU": used["mfu"]}
    values |= bench.peaks(partial(next_step, run))
    kernels = bench.kernels(partial(next_step, run))
    share = sum(kernels) / ms if kernels else None
    return values | {"kernels": len(kernels), "busy": share}


def nanogpt_run(bench: Bench, job: Job) -> Run:
    """nanoGPT's model in our loop, of the same shape but its vocabulary (rounded up to a multiple
    of 64), with its AdamW; all of the model compiled."""
    assert bench.nanogpt is not None
    name = "nanogpt_model"  # (of its own: we have a model.py, too)
    spec = importlib.util.spec_from_file_location(name, bench.nanogpt / "model.py")
    assert spec is not None and spec.loader is not None
    library = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    run = make_run(bench.args(), replace(job, peer=None, compiled=False), bench.device)
    args, V = run.args, run.args.vocab_size
    shape = {"n_layer": args.n_layers, "n_head": args.n_heads, "n_embd": args.d_model}
    shape |= {"block_size": args.seq_len, "vocab_size": V + -V % 64, "dropout": args.dropout}
    run.model = library.GPT(library.GPTConfig(**shape)).to(bench.device).train()
    model: Any = run.model
    kind = bench.device.type
    run.optimizer = model.configure_optimizers(args.weight_decay, args.lr, (0.9, 0.95), kind)
    called = torch.compile(model) if job.compiled else model
    run.wrapped = lambda ids, labels: called(ids, labels)[1]  # type: ignore[assignment]
    return run


SECTIONS: dict[str, Callable[[Bench], Jobs]] = {
    section.__name__: section for section in (copies, head, peaks, speed, offload)
}

# --------------------------------------------------------------------- results and their tables


def read(file: Path) -> tuple[Values, Records]:
    """What the file says of the machine, and its measurements: the last line of each counts."""
    what: Values = {}
    records: Records = {}
    for record in read_metrics(file):  # (a line that a crash cut short is left out)
        if "section" in record:
            records[record["section"], record["name"]] = record
        else:
            what = record
    return what, records


def append(file: Path, record: Values) -> None:
    """Written, and on the disk."""
    with open(file, "a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")
        lines.flush()
        os.fsync(lines.fileno())


def measure(bench: Bench, sections: list[str], file: Path) -> None:
    """Measure what the file has no values of; what was begun before, last. Raises SystemExit if the
    device is of no use to this process any more."""
    _, before = read(file)
    jobs = {(part, name): job for part in sections for name, job in SECTIONS[part](bench)}
    gc.freeze()  # what is there now stays
    missing = [key for key in jobs if "values" not in before.get(key, {})]
    for section, name in sorted(missing, key=lambda key: key in before):
        record: Values = {"section": section, "name": name}
        append(file, record | {"error": "it ended the process"})  # if no other line follows
        gc.collect()
        if not bench.dry:
            torch._dynamo.reset()  # each policy is compiled for itself
            torch.cuda.empty_cache()
        start = time.perf_counter()
        try:
            record["values"] = jobs[section, name]()
        except Exception as error:
            if is_out_of_memory(error):  # a result like any other
                record["values"] = {"out of memory": "yes"}
            else:
                record["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        append(file, record | {"seconds": round(time.perf_counter() - start, 3)})
        file.with_suffix(".md").write_text(report(*read(file)), encoding="utf-8")
        print(f"{section:8} {name}: {record.get('error', 'measured')}", flush=True)
        if "CUDA error" in record.get("error", ""):  # every call after it fails, too
            sys.exit(1)


def show(key: str, value: Any) -> str:
    """A cell: 12.3 MiB, 38.1%, 1,234.5."""
    if value is None or isinstance(value, str):
        return value or ""
    if key in BYTES:
        return format_bytes(value)
    if key in SHARES:
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{3 if value < 100 else 1}f}"


def merge_turns(turns: list[Values]) -> Values:
    """Of each number the median, and how far the times are apart."""
    if len(turns) == 1:
        return turns[0]
    found: dict[str, list] = {}
    for key in turns[0]:
        found[key] = [turn[key] for turn in turns if turn.get(key) is not None]
    medians = {key: statistics.median(values) for key, values in found.items() if values}
    return medians | {"turns": len(turns), "ms apart": max(found["ms"]) - min(found["ms"])}


def report(what: Values, records: Records) -> str:
    """In Markdown: a table for each section; of columns, those in which something stands."""
    sections: dict[str, dict[str, list[Values]]] = {}
    failed = []
    for (section, name), record in records.items():
        turns = sections.setdefault(section, {})
        if "values" in record:
            turns.setdefault(name.partition(", turn ")[0], []).append(record["values"])
        else:
            failed.append(f"- failed: {section}: {name}: {record['error']}")
    parts = ["# On a GPU\n", describe(what)]
    for section, turns in sections.items():
        rows = {name: merge_turns(values) for name, values in turns.items()}
        keys = dict.fromkeys(key for row in rows.values() for key in row if row[key] is not None)
        cells = ([name, *(show(key, row.get(key)) for key in keys)] for name, row in rows.items())
        what_for = " ".join((SECTIONS[section].__doc__ or "").split())
        parts += [f"\n## {section}\n", what_for, "", table(["", *keys], cells)]
    return "\n".join([*parts, "", *failed]) + "\n"


@tool
def main(argv: list[str]) -> None:
    parser = OneLineParser(prog="python -m studies.gpu", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    # fmt: off
    add("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION",
        help=f"some of: {' '.join(SECTIONS)} (default: all)")
    add("--out", type=output_folder, metavar="FOLDER", help="(default: out/gpu, or out/gpu_dry)")
    add("--peer", action="store_true", help="also transformers' GPT-2 (pip install transformers)")
    add("--nanogpt", type=Path, metavar="FOLDER", help="also the GPT of this nanoGPT checkout")
    add("--dry-run", action="store_true", help="all of it small, on the CPU")
    # fmt: on
    args = parser.parse_args(argv)
    if args.peer and importlib.util.find_spec("transformers") is None:
        raise UsageError("--peer: transformers is not installed: pip install transformers")
    if args.nanogpt and not (args.nanogpt / "model.py").is_file():
        raise UsageError(f"--nanogpt {args.nanogpt}: there is no model.py in it")
    if not args.dry_run and not torch.cuda.is_available():
        raise UsageError(f"torch {torch.__version__} finds no GPU here; --dry-run needs none")
    bench = Bench(args.dry_run, args.peer, args.nanogpt)
    file = (args.out or Path("out", bench.pick("gpu", "gpu_dry"))) / "gpu.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    before, now = read(file)[0], about("studies.gpu", argv, bench.device)
    for key in ("device", "torch"):
        if before and before[key] != now[key]:
            raise UsageError(f"--out {file.parent} has results of {before[key]}, this is "
                             f"{now[key]}: name another folder")  # fmt: skip
    append(file, now)
    # (To compile takes minutes: a dry run does without.)
    with torch.compiler.set_stance("force_eager" if bench.dry else "default"):
        measure(bench, args.only, file)
    print(f"tables: {file.with_suffix('.md')}, raw: {file}")


if __name__ == "__main__":
    sys.exit(main())
