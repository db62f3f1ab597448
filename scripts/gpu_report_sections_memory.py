"""Sections of scripts/gpu_report.py: is the planner right, and does offload save anything?"""

import math
from collections import Counter
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import planner.step
from model import RECOMPUTE_POLICIES
from planner.step import Planner
from planner.tracker import StorageTracker
from scripts.allocator_trace import DEVICE_TYPES, trace_events
from scripts.benchmark_worker import Job, config_of
from scripts.gpu_report_bench import Bench, Jobs, Values, measure_step, next_step
from scripts.gpu_report_sections_steps import short
from trainer.room import for_tensors, free_memory

# --------------------------------------------------------------------------------------- peaks


def peaks(bench: Bench) -> Jobs:
    """The planner's prediction beside what the allocator counted."""
    for size in bench.pick((2, 16), (2,)):
        for policy in bench.pick(RECOMPUTE_POLICIES, ("none", "full")):
            yield f"{policy}, {size} sequences", partial(peak, bench, "", Job(policy, size))
    size = bench.pick(2, 1)
    more = {"accumulated": "--grad-accum-steps 2", "dropout 0.1": "--dropout 0.1"}
    for name, flags in more.items():
        yield f"full, {size} sequences, {name}", partial(peak, bench, flags, Job("full", size))
    # (On H100, H200 and B200 torch takes cuDNN's from 2.11 on; the planner has FlashAttention's.)
    other = partial(peak_without_cudnn, bench, Job("none", size))
    yield f"none, {size} sequences, without cuDNN's attention", other
    for policy in ("none", "full"):
        yield f"history, {policy}, {size} sequences", partial(history, bench, Job(policy, size))
    for model in bench.pick(("gpt2-medium", "gpt2-xl"), ("larger",)):
        flags = bench.pick(f"--model {model}", "--n-layers 3")
        job = Job("full", bench.pick(4, 2))
        yield f"{model}, full, {job.batch_size} sequences", partial(peak, bench, flags, job)


def peak(bench: Bench, flags: str, job: Job) -> Values:
    predicted = bench.predicted(flags, job)
    room = free_memory(bench.device)
    if predicted > for_tensors(room, bench.device.type):
        return {"predicted": predicted, "skipped": f"{room} bytes are free"}
    before = torch.cuda.memory_allocated() if bench.on_gpu else None
    run = bench.run(flags, job)
    for _ in range(2):  # the first makes the optimizer's state
        next_step(run)
    return {"predicted": predicted, **bench.step_peaks(run), "before": before}


def peak_without_cudnn(bench: Bench, job: Job) -> Values:
    others = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    with sdpa_kernel([*others]):
        return peak(bench, "", job)


def history(bench: Bench, job: Job) -> Values:
    """What stands at the peak of a step: on the card, and in the plan; what has no partner."""
    run = bench.run("", job)
    for _ in range(2):
        next_step(run)
    if bench.on_gpu:
        state = [*run.model.parameters()]
        state += [t for moments in run.optimizer.state.values() for t in moments.values()]
        static = torch.cuda.memory_allocated() - sum(t.nbytes for t in state if t.is_cuda)
        memory: Any = torch.cuda.memory
        memory._record_memory_history(stacks="python", max_entries=10**6)
        try:
            next_step(run)
            torch.cuda.synchronize()
            trace = memory._snapshot()["device_traces"][torch.cuda.current_device()]
        finally:
            memory._record_memory_history(enabled=None)
    else:
        static = 0
        trace = cpu_trace(run)
    there = alive_at_peak(trace)
    planned = planned_at_peak(bench.planner(), job.batch_size, config_of(run.args, job))
    missing, superfluous = unmatched(there, planned)
    return {
        "static": static,  # before the step, beside weights and moments: workspaces
        "blocks": len(there),
        "allocated": sum(size for size, _ in there),
        "predicted": sum(size for size, _ in planned),
        "missing": sum(size for size, _ in missing),
        "planner_lacks": table(missing),
        "planner_has_more": table(superfluous),
    }


Blocks = list[tuple[int, str]]  # bytes, and who asked for them


def cpu_trace(run: Any) -> list[dict[str, Any]]:
    """A step's allocations on a CPU, in the form that CUDA's allocator gives them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        next_step(run)
    found = [event["args"] for event in trace_events(profiler) if event["name"] == "[memory]"]
    return [
        {
            "action": "alloc" if event["Bytes"] > 0 else "free_requested",
            "addr": event["Addr"],
            "size": abs(event["Bytes"]),
            "frames": [],
        }
        for event in found
        if event["Device Type"] == DEVICE_TYPES["cpu"]
    ]


def alive_at_peak(trace: list[dict[str, Any]]) -> Blocks:
    """Of the blocks that the trace saw come, those that are there when they are the most bytes."""
    alive: dict[int, tuple[int, str]] = {}
    now = most = 0
    at_peak: Blocks = []
    for entry in trace:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = entry["size"], place(entry.get("frames", []))
            now += entry["size"]
            if now > most:
                most, at_peak = now, []
        elif entry["action"] == "free_requested":
            if not at_peak:  # a fall from a new height
                at_peak = list(alive.values())
            size, _ = alive.pop(entry["addr"], (0, ""))
            now -= size  # (0: it was there before the step)
    return at_peak or list(alive.values())


def place(frames: list[dict[str, Any]]) -> str:
    """The innermost line of ours. The autograd engine runs operators' backwards without any."""
    lines = [f"{short(frame['filename'])}:{frame['line']} {frame['name']}" for frame in frames]
    ours = [line for line in lines if not line.startswith("/") and "site-packages" not in line
            and not line.startswith("torch/")]  # fmt: skip
    return next(iter(ours or lines), "no Python frame: the engine")


def planned_at_peak(planner_: Planner, batch_size: int, config: Any) -> Blocks:
    """What the planner's step has made, and still has, when that is the most bytes."""
    trackers: list[StorageTracker] = []
    summarize = planner.step.summarize

    def keep(tracker: StorageTracker, *rest: Any) -> Any:
        trackers.append(tracker)
        return summarize(tracker, *rest)

    with patch.object(planner.step, "summarize", keep):
        at = int(planner_.simulate(batch_size, config).total.argmax())
    return [
        (storage.bytes, f"{storage.module} {storage.operator} {storage.line}".strip())
        for storage in trackers[0].storages
        if 0 < storage.born <= at <= storage.died and storage.device.type == "cpu"
    ]


def unmatched(there: Blocks, planned: Blocks) -> tuple[Blocks, Blocks]:
    """What is left of both when blocks of the same size have been paired. (Sizes as the allocator
    rounds them: to 512 bytes.)"""

    def rounded(size: int) -> int:
        return 512 * math.ceil(size / 512)

    pairs = Counter(rounded(size) for size, _ in there) & Counter(
        rounded(size) for size, _ in planned
    )

    def rest(blocks: Blocks) -> Blocks:
        left, single = pairs.copy(), []
        for block in blocks:
            if left[rounded(block[0])]:
                left[rounded(block[0])] -= 1
            else:
                single.append(block)
        return single

    return rest(there), rest(planned)


def table(blocks: Blocks, rows: int = 12) -> list[dict[str, Any]]:
    """Equal ones together, the largest first."""
    counts = Counter(blocks).most_common()
    largest = sorted(counts, key=lambda item: -item[0][0] * item[1])[:rows]
    return [{"size": size, "times": n, "from": who[:120]} for (size, who), n in largest]


# ------------------------------------------------------------------------------------- offload


def offload(bench: Bench) -> Jobs:
    """What it costs and saves. (That all bits come back: `correctness`.)"""
    shapes = {
        "12 layers": "",
        "48 thin layers": bench.pick("--n-layers 48 --d-model 512 --n-heads 8", "--n-layers 4"),
    }
    size = bench.pick(16, 2)
    for turn in range(1, bench.pick(4, 2)):
        for shape, flags in shapes.items():
            for policy in ("full", "mlp"):
                for way in ("", " --offload-activations"):
                    name = f"{policy}{' + offload' * bool(way)}, {shape}, turn {turn}"
                    yield name, partial(measure_step, bench, flags + way, Job(policy, size))
