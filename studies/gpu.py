"""Measure this project on a GPU. Each result is written to a JSON Lines file immediately.

    python -m studies.gpu                              # an hour at most
    python -m studies.gpu --only head
    python -m studies.gpu --only rescue                # steps that run out of memory
    python -m studies.gpu --peer                       # also transformers' GPT-2
    python -m studies.gpu --dry-run                    # tiny sizes on the CPU, to test this command

A machine with a GPU may be lost at any moment. So each result is on the disk (OUT/gpu.jsonl) before
the next measurement begins, and each result updates the tables (OUT/gpu.md). Run the command again
to measure what is missing. Measurements that failed before, or ended the process, then run last.

`python -m pytest -m gpu` tests that a GPU computes the right results.
"""

import argparse
import gc
import importlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import train_minimal
from memory import POLICY_NAMES
from memory.head import head_loss
from model import MiniGPT, MiniGPTConfig
from model import head_loss as plain_loss
from planner.formulas import head_bytes
from scripts import benchmark, cli_main
from scripts.benchmark import WARM_UP, ModelFactory, make_run, table, timed_step
from scripts.export_hf import their_sizes
from scripts.style import about, describe_about
from studies.common import study_parser
from trainer.flags import UsageError, model_config, with_flags
from trainer.metrics import read_metrics
from trainer.plan import PlanRequest, deeper_policies
from trainer.run import Run, is_out_of_memory

Values = dict[str, Any]
Records = dict[tuple[str, str], Values]  # (section, name) -> {"values": ...} or {"error": ...}
Jobs = Iterator[tuple[str, Callable[[], Values]]]
REAL = "--model gpt2 --device cuda --dropout 0"  # 1,024 tokens per sequence
DRY = (
    "--n-layers 2 --n-heads 2 --d-model 16 --seq-len 16 --batch-size 2 --use-toy-data "
    "--vocab-size 64 --device cpu --amp-dtype bfloat16"
)
SETTINGS = "--grad-accum-steps 2", "--dropout 0.1", "--model gpt2-medium", "--model gpt2-xl"
MIB = 2**20
# Column of the report -> (key of a benchmark row, factor from the row's unit to the column's)
COLUMNS = {
    "ms": ("step_s", 1000.0),
    "predicted ms": ("predicted_s", 1000.0),
    "tokens/s": ("tokens_per_s", 1.0),
    "MFU": ("mfu", 1.0),
    "HFU": ("hfu", 1.0),
    "MiB": ("peak_bytes", 1 / MIB),
    "predicted MiB": ("predicted_bytes", 1 / MIB),
}


@dataclass(frozen=True)
class Bench:
    """Device and sizes of the measurements: a GPU and GPT-2, or (`dry`) the CPU and small sizes."""

    dry: bool = False
    peers: Mapping[str, ModelFactory] = field(default_factory=dict)  # GPT-2 of other libraries

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    def pick(self, real: Any, dry: Any) -> Any:
        return dry if self.dry else real

    def args(self, flags: str = "", policy: str = "none") -> argparse.Namespace:
        """Return the benchmark's arguments: GPT-2 small (dry: a tiny model), with `flags` added."""
        words = f"{self.pick(REAL, DRY)} --steps {self.pick(10, 2)} {flags}".split()
        args = benchmark.build_parser().parse_args(words)
        benchmark.check(args)
        return benchmark.with_policy(args, policy)

    def ask(self, args: argparse.Namespace) -> PlanRequest:
        """Return the plan request. A dry run only tests this command, so its predictions need not
        be right: it predicts for a card with a data sheet and does not measure the CPU."""
        return benchmark.ask(with_flags(args, card=self.pick(None, "H100 PCIe")))


# ---- The head alone


def head(bench: Bench) -> Jobs:
    """Measure forward and backward of the head, with several numbers of chunks. 0: the head chooses
    the number. 1: plain cross-entropy on all logits at once."""
    all_chunks = bench.pick((0, 4, 8, 16, 32, 99, 1), (0, 2, 1))  # (1 is last: it may not fit)
    for dtype, chunks in product((torch.bfloat16, torch.float16), all_chunks):
        yield f"{dtype}, {chunks} chunks", partial(time_head, bench, dtype, chunks)


def time_head(bench: Bench, dtype: torch.dtype, chunks: int) -> Values:
    """Measure the head. "MiB" is the peak minus the memory in use before the step; 0 on a CPU."""
    args, N = bench.args(), bench.pick(16 * 1024, 32)
    V, C, make = args.vocab_size, args.d_model, partial(torch.randn, device=bench.device)
    x, weight = make(1, N, C).requires_grad_(), (0.02 * make(V, C)).requires_grad_()
    labels = torch.randint(V, (1, N), device=bench.device)

    def step() -> None:
        x.grad = weight.grad = None
        with torch.autocast(bench.device.type, dtype):
            loss = head_loss(x, weight, labels, chunks, plain_loss)
        loss.backward()

    step()
    x.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    if not bench.dry:
        torch.cuda.reset_peak_memory_stats()
    ms = 1000 * Timer("step()", globals={"step": step}).timeit(bench.pick(10, 2)).mean
    config = replace(model_config(args, V), loss_chunks=chunks)
    return {
        "ms": ms,
        "TFLOP/s": 6 * N * V * C / ms / 1e9,
        "MiB": (torch.cuda.max_memory_allocated() - before) / MIB,
        "predicted MiB": head_bytes(config, N, dtype) / MIB,
    }


# ---- Whole steps


def steps(bench: Bench) -> Jobs:
    """Measure steps as `python -m scripts.benchmark` does. A row is a policy, or another library's
    model, with some flags. All rows are measured in turns, so that a drift of the GPU's clock
    affects all of them alike."""
    eager = bench.pick("--batch-size 16", "--batch-size 2")
    compiled = f"{eager} --compile"
    sizes = bench.pick(["--batch-size 2", eager], [eager])
    jobs = [
        *product(bench.pick(POLICY_NAMES, ("none", "full")), sizes),
        *product(bench.pick(("none", "cheap", "mlp", "sdpa", "full"), ("full",)), [compiled]),
        *product(bench.peers, [eager, compiled]),
        ("full+offload", "--batch-size 4"),
        *(("full", f"--batch-size 4 {flags}") for flags in bench.pick(SETTINGS, SETTINGS[:2])),
    ]
    for turn, (name, flags) in product(range(1, bench.pick(4, 2)), jobs):
        yield f"{name} {flags}, turn {turn}", partial(measure_step, bench, name, flags)


def measure_step(bench: Bench, name: str, flags: str) -> Values:
    """Measure one step as the benchmark does, but in this process. A peer (another library's model)
    gets no prediction."""
    peer = bench.peers.get(name)
    args = bench.args(flags, "none" if peer else name)
    row = benchmark.make_row(bench.ask(args), benchmark.measure(args, peer or MiniGPT))
    if peer:
        row |= dict.fromkeys(("predicted_s", "predicted_bytes", "hfu"))
    values = {name: row[key] and unit * row[key] for name, (key, unit) in COLUMNS.items()}
    return values | {"reserved MiB": torch.cuda.max_memory_reserved() / MIB}


class Transformers(nn.Module):
    """Hugging Face's GPT-2 of the same shape, called like MiniGPT: (ids, labels) -> loss."""

    def __init__(self, config: MiniGPTConfig):
        super().__init__()
        library: Any = importlib.import_module("transformers.models.gpt2.modeling_gpt2")
        self.gpt2 = library.GPT2LMHeadModel(
            library.GPT2Config(
                **their_sizes(config),
                # The default, gelu_new, computes the same function. But it runs one operator per
                # step of the formula, which takes more time and memory. So set the faster form.
                activation_function="gelu_pytorch_tanh",
                attn_implementation="sdpa",
                use_cache=False,
                bos_token_id=None,  # (the default, 50256, may exceed the vocabulary)
                eos_token_id=None,
            )
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        # With `labels` alone, the library would shift the labels itself and lose one token per
        # sequence.
        return self.gpt2(ids, labels=labels, shift_labels=labels).loss


# ---- A step that runs out of memory


@contextmanager
def shortage(bench: Bench, step: int, free_bytes: int, in_holes: bool) -> Iterator[list[int]]:
    """Hold 1 GiB from step number `step` on, and leave `free_bytes` of the GPU to everything else.

    With `in_holes`, half of that GiB is freed again, in holes of 2 MiB. (On a CPU nothing is held;
    the first attempt of the step fails after its backward.) Yields a list. Each attempt of the step
    adds to it the bytes in use when the attempt begins (0 on a CPU).
    """
    real, begun, held = train_minimal.accumulate, list[int](), list[Tensor]()

    def attempt(run: Run, **how: Any) -> list[Tensor]:
        if run.step != step:
            return real(run, **how)
        if not bench.dry and not held:
            torch.cuda.empty_cache()
            n = 512 if in_holes else 1
            held.extend(torch.empty(2**30 // n, dtype=torch.uint8, device="cuda") for _ in range(n))
            del held[1::2]
            in_all = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction((free_bytes + 2**30) / in_all)
        begun.append(torch.cuda.memory_allocated())
        losses = real(run, **how)
        if bench.dry and len(begun) == 1:
            raise torch.OutOfMemoryError("played")
        return losses

    try:
        with mock.patch.object(train_minimal, "accumulate", attempt):
            yield begun
    finally:
        if not bench.dry:
            torch.cuda.set_per_process_memory_fraction(1.0)


def rescue(bench: Bench) -> Jobs:
    """Take memory away in the middle of training: the step fails, and is repeated with a policy
    that needs less memory. `ms` is the time of that step, with all attempts and plans. `MiB left`
    is the memory that the failed attempts did not free."""
    for policy, how in product(("none", "cheap"), ("", ", in holes")):
        yield f"{policy}{how}", partial(rescued_step, bench, policy, bool(how))


def rescued_step(bench: Bench, policy: str, in_holes: bool) -> Values:
    """Measure steps of 12 sequences (2 on a CPU). `shortage` leaves memory for a peak halfway
    between the peak of `policy` and the peak of the policy `full`."""
    args = bench.args(f"--batch-size {bench.pick(12, 2)}", policy)
    request = bench.ask(args)
    peaks = [
        request.planner.step(args.batch_size, recompute=name).peak for name in (policy, "full")
    ]
    run = make_run(args, bench.device)
    run.snapshot_metadata, run.policies = {"config": {}}, deeper_policies(request, policy)
    timed_step(run, WARM_UP)
    before = 1000 * timed_step(run, args.steps)
    with shortage(bench, run.step + 1, sum(peaks) // 2, in_holes) as begun:
        return {
            "ms before": before,
            "ms": 1000 * timed_step(run),
            "ms of plans": 1000 * run.clock.total["plan"],
            "ms after": 1000 * timed_step(run, args.steps),
            "rescues": len(run.policies_out_of_memory),
            "taken": run.model.config.recompute,
            "MiB left": (begun[-1] - begun[0]) / MIB,
            "MiB": torch.cuda.memory_allocated() / MIB,
            "reserved MiB": torch.cuda.memory_reserved() / MIB,
        }


SECTIONS: dict[str, Callable[[Bench], Jobs]] = {"head": head, "steps": steps, "rescue": rescue}

# ---- Results and their tables


def read(file: Path) -> tuple[Values, Records]:
    """Return the metadata of the machine, and the measurements. If the file has several lines for
    one measurement, the last line counts."""
    lines = read_metrics(file)  # (read_metrics leaves out a line that a crash cut short)
    metadata = [line for line in lines if "section" not in line] or [{}]
    return metadata[-1], {
        (line["section"], line["name"]): line for line in lines if "section" in line
    }


def append(file: Path, record: Values) -> None:
    """Append a record, and wait until it is on the disk."""
    with open(file, "a", encoding="utf-8") as lines:
        print(json.dumps(record), file=lines, flush=True)
        os.fsync(lines.fileno())


def measure(bench: Bench, sections: list[str], file: Path) -> None:
    """Run each measurement that has no values in the file. Measurements that an earlier run began
    come last. (After a CUDA error, all later measurements fail, too: run the command again.)"""
    _, before = read(file)
    jobs = {(part, name): job for part in sections for name, job in SECTIONS[part](bench)}
    gc.freeze()  # later collections skip the objects that exist now
    missing = [key for key in jobs if "values" not in before.get(key, {})]
    for section, name in sorted(missing, key=lambda key: key in before):
        record: Values = {"section": section, "name": name}
        append(file, record | {"error": "it ended the process"})  # counts only if this process ends
        gc.collect()
        torch._dynamo.reset()  # compile each policy separately
        torch.cuda.empty_cache()
        try:
            record["values"] = jobs[section, name]()
        except Exception as error:
            if is_out_of_memory(error):  # this is a result like any other
                record["values"] = {"out of memory": "yes"}
            else:
                record["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        append(file, record)
        file.with_suffix(".md").write_text(report(*read(file)), encoding="utf-8")
        print(f"{section}: {name}: {record.get('error', 'measured')}", flush=True)


def merge_turns(turns: list[Values]) -> Values:
    """Return the median of each value over the turns, and the spread of the times (maximum minus
    minimum). Values that are None are left out. (A turn that failed or ran out of memory has no
    times or bytes.)"""
    keys = dict.fromkeys(chain(*turns))
    found = {key: [turn[key] for turn in turns if turn.get(key) is not None] for key in keys}
    merged = {key: statistics.median_low(values) for key, values in found.items() if values}
    times = found.get("ms", [])
    return merged | ({"ms apart": max(times) - min(times)} if len(times) > 1 else {})


def report(metadata: Values, records: Records) -> str:
    """Return the results as Markdown: a table for each section, without empty columns."""
    parts, sections = (
        ["# On a GPU\n", describe_about(metadata)],
        dict[str, dict[str, list[Values]]](),
    )
    for (section, name), record in records.items():
        turns = sections.setdefault(section, {}).setdefault(name.partition(", turn ")[0], [])
        turns.append(record.get("values") or {"error": record["error"]})
    for section, turns_by_name in sections.items():
        rows = {name: merge_turns(turns) for name, turns in turns_by_name.items()}
        keys = dict.fromkeys(chain(*rows.values()))
        cells = [[name, *(digits(row.get(key, "")) for key in keys)] for name, row in rows.items()]
        description = " ".join((SECTIONS[section].__doc__ or "").split())
        parts += [f"\n## {section}\n", description, "", table(["", *keys], cells)]
    return "\n".join(parts) + "\n"


def digits(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.3f}"


@cli_main
def main(argv: list[str]) -> None:
    parser = study_parser("studies.gpu", __doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION",
        help=f"some of: {' '.join(SECTIONS)} (default: all)")  # fmt: skip
    add("--out", type=Path, metavar="FOLDER", help="(default: out/gpu, or out/gpu_dry)")
    add("--peer", action="store_true", help="also transformers' GPT-2 (pip install transformers)")
    add("--dry-run", action="store_true", help="small sizes on the CPU, to test this command")
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        raise UsageError(f"torch {torch.__version__} finds no GPU here; --dry-run needs none")
    peers: dict[str, ModelFactory] = {"transformers": Transformers} if args.peer else {}
    bench = Bench(args.dry_run, peers)
    file = (args.out or Path("out", bench.pick("gpu", "gpu_dry"))) / "gpu.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    before, now = read(file)[0], about("studies.gpu", argv, bench.device)
    machines = [(it["device"], it["torch"]) for it in (before, now) if it]
    if len({*machines}) > 1:
        raise UsageError(f"--out {file.parent} has results of {machines}: name another folder")
    append(file, now)
    # A dry run does not compile, because compiling takes minutes.
    with torch.compiler.set_stance("force_eager" if bench.dry else "default"):
        measure(bench, args.only, file)
    print(f"tables: {file.with_suffix('.md')}, raw: {file}")


if __name__ == "__main__":
    sys.exit(main())
