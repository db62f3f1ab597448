"""The parts of scripts/gpu_report_sections_*.py that a dry run cannot check, or only a GPU runs."""

import os
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from scripts import gpu_report_bench as bench_module
from scripts import gpu_report_sections_kernels as kernels
from scripts import gpu_report_sections_memory as memory
from scripts import gpu_report_sections_runs as runs
from scripts import gpu_report_sections_steps as steps
from scripts.benchmark_worker import Job, config_of
from scripts.gpu_report import SECTIONS
from scripts.gpu_report_bench import Bench, idle_share
from trainer.flags import build_parser, fill_in
from trainer.plan import vocabulary


@pytest.fixture
def dry(tmp_path):
    return Bench(True, tmp_path)


@pytest.fixture
def gpu(tmp_path):
    """Of a GPU that is not there: for what does not touch it."""
    return Bench(False, tmp_path)


def names(section, bench) -> list[str]:
    return [name for name, _ in section(bench)]


# (pytest's monkeypatch would delete what it sets there, instead of setting it back.)
@torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False)
def test_a_section_has_a_name_for_each_measurement(gpu, monkeypatch):
    """Also at full size, and before anything is measured."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "mine")
    modules = {"kernels": kernels, "steps": steps, "memory": memory, "runs": runs}
    found = {}
    for name, section in SECTIONS.items():
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
        found[name] = names(getattr(modules[section.module], name), gpu)
        assert len(set(found[name])) == len(found[name]) > 0
        # Other workspaces than a training run's: where nothing is timed.
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == (name == "correctness")
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "mine")
    assert torch._dynamo.config.fail_on_recompile_limit_hit
    assert not torch.cuda.is_initialized()
    assert "V=50304 n=2048 weight, addmm" in found["matmuls"] and len(found["matmuls"]) == 40
    assert {"none, eager, turn 1", "full, compiled, turn 3"} <= set(found["speed"])
    assert {"mlp, 16 sequences", "gpt2-xl, full, 4 sequences"} <= set(found["peaks"])
    assert "none, 2 sequences, without cuDNN's attention" in found["peaks"]
    assert "bfloat16 loss_chunks=0, compiled softmax" in found["head"]
    assert "full + offload, 48 thin layers, turn 2" in found["offload"]
    # All ways once, then all of them again: a clock that drifts hits all alike.
    turns = [name[-1] for name in found["speed"]]
    assert turns == sorted(turns) and len(set(turns)) == 3


def test_the_flags_of_full_size(gpu):
    args = gpu.args("--grad-accum-steps 2")
    config = config_of(args, Job("full", 16))
    assert asdict(config) | {"vocab_size": 50257, "n_layers": 12, "d_model": 768} == asdict(config)
    assert (args.device, args.seq_len, args.dropout, args.grad_accum_steps) == ("cuda", 1024, 0, 2)
    thin = gpu.args("--n-layers 48 --d-model 512 --n-heads 8 --offload-activations")
    config = config_of(thin, Job("full", 16))
    assert (config.n_layers, config.d_ff, config.offload_activations) == (48, 2048, True)
    assert config_of(gpu.args("--model gpt2-xl"), Job("full", 4)).d_model == 1600
    # And of a true run: no text, no tokenizer to download.
    args = fill_in(build_parser("x", "x.pt").parse_args(runs.flags(gpu, "--batch-size 3")))
    assert args.use_toy_data and args.tokenizer_name is None and args.batch_size == 3
    assert (vocabulary(args), args.n_layers, args.device) == (50257, 12, "cuda")


def test_kernels_of_a_gpus_trace(gpu, dry):
    def event(name, cat, ts, dur):
        return {"name": name, "cat": cat, "ts": ts, "dur": dur}

    trace = [
        event("second", "kernel", 20, 5),
        event("copy", "gpu_memcpy", 10, 4),
        event("aten::mm", "cpu_op", 0, 9),
        event("aten::inner", "cpu_op", 1, 2),
        event("aten::add", "cpu_op", 9, 1),
        {"name": "meta"},
    ]
    assert gpu.kernels(trace) == [("copy", 10, 4), ("second", 20, 5)]
    assert dry.kernels(trace) == [("aten::mm", 0, 9), ("aten::add", 9, 1)]


@pytest.mark.parametrize(
    ("kernels", "idle"),
    [
        ([("a", 0, 5), ("b", 5, 5)], 0.0),
        ([("a", 0, 5), ("b", 15, 5)], 0.5),
        ([("a", 0, 10), ("b", 2, 2), ("c", 15, 5)], 0.25),  # two streams
        ([("a", 0, 10), ("b", 5, 15)], 0.0),
    ],
)
def test_idle_share(kernels, idle):
    assert idle_share(kernels) == pytest.approx(idle)


def test_a_profile_without_kernels(dry, monkeypatch):
    """As where a profiler may not see a GPU's."""
    monkeypatch.setattr(Bench, "kernels", lambda self, events: [])
    values = steps.profile_step(dry, "none", 2)
    assert (values["step_ms"], values["idle"], values["kernels"]) == (None, None, 0)
    assert values["dearest"] == [] and (dry.out / values["trace"]).exists()
    assert kernels.head_kernels(dry, torch.bfloat16, 2)["idle"] is None


def test_a_heads_times_need_no_profile(dry, monkeypatch):
    monkeypatch.setattr(Bench, "profile", lambda self: pytest.fail("profiled"))
    assert kernels.time_head(dry, torch.bfloat16, 2)["ms"] > 0


def test_a_heads_softmax_is_compiled_if_asked(dry, monkeypatch):
    used, real = [], kernels.softmax_in_place
    compiled = lambda *args: used.append(1) or real(*args)  # noqa: E731
    monkeypatch.setattr(kernels, "compiled_softmax", lambda: compiled)
    assert kernels.time_head(dry, torch.bfloat16, 2)["ms"] > 0 and not used
    assert kernels.time_head(dry, torch.bfloat16, 2, compiled=True)["ms"] > 0 and used


def test_mfu_is_of_the_jobs_precision(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)

    def mfu(flags):
        return bench_module.step_values(gpu, gpu.args(flags), Job("full", 16), [100.0])["mfu"]

    assert 0 < mfu("") < 1 and mfu("--no-amp") is None
    assert mfu("--no-amp --tf32") == 2 * mfu("")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert mfu("") is None and mfu("--amp-dtype float16") > 0


def matmul_settings():
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )


def test_nanogpts_matmuls_end_with_its_turn():
    before = matmul_settings()
    matmul = torch.backends.cuda.matmul
    try:
        torch.set_float32_matmul_precision("highest")
        matmul.allow_bf16_reduced_precision_reduction = False
        with pytest.raises(ValueError), steps.nanogpt_matmuls():
            assert matmul_settings() == ("high", True, True)
            raise ValueError
        assert matmul_settings() == ("highest", False, before[2])
    finally:
        torch.set_float32_matmul_precision(before[0])
        matmul.allow_bf16_reduced_precision_reduction = before[1]


class Event:
    """Of a GPU's clock: each mark is 2 ms after the one before."""

    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.clock += 2
        self.at = Event.clock

    def elapsed_time(self, end):
        return end.at - self.at


def test_times_by_events(gpu, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    assert gpu.times(lambda: calls.append("call"), 3, warm_up=1) == [2.0, 2.0, 2.0]
    assert calls == ["call"] * 4 + ["wait"]  # it does not wait in between


def test_the_four_peaks(gpu, monkeypatch):
    done = []
    stats = {f"{kind}_bytes.all.peak": i for i, kind in enumerate(bench_module.PEAKS)}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: done.append("reset"))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)
    monkeypatch.setattr(bench_module, "next_step", lambda run: done.append("step"))
    peaks = gpu.step_peaks(None)
    assert peaks == {"requested": 0, "allocated": 1, "active": 2, "reserved": 3}
    assert done == ["reset", "step"]


# ---- What stands at the peak


def entry(action, addr, size, *lines):
    frames = [{"filename": f, "line": n, "name": "f"} for f, n in lines]
    return {"action": action, "addr": addr, "size": size, "frames": frames}


def test_alive_at_the_peak():
    ours = (str(steps.ROOT / "memory" / "head.py"), 7)
    torchs = (f"{torch.__path__[0]}/nn/functional.py", 1)
    trace = [
        entry("free_requested", 99, 1000),  # it was there before the step
        entry("alloc", 1, 100, torchs, ours),
        entry("segment_alloc", 0, 10**6),
        entry("alloc", 2, 300),
        entry("free_requested", 1, 100),
        entry("free_completed", 1, 100),
        entry("alloc", 3, 150, torchs),
        entry("alloc", 1, 50, ours),
        entry("free_requested", 2, 300),
        entry("alloc", 2, 200),
    ]
    at_peak = memory.alive_at_peak(trace)
    assert sorted(size for size, _ in at_peak) == [50, 150, 300]  # 500; 400 before, and after
    places = dict(at_peak)
    assert places[50] == "memory/head.py:7 f" and "no Python frame" in places[300]
    assert "nn/functional.py:1 f" in places[150]
    first = memory.alive_at_peak(trace[:4])
    assert first[0] == (100, "memory/head.py:7 f") and len(first) == 2


def test_what_has_no_partner():
    """Sizes are rounded up to 512 bytes: 1000, 1020 and 1024 are one, 5000 and 5100 another."""
    there = [(1000, "a"), (1024, "b"), (5000, "c"), (8, "d")]
    planned = [(1020, "x"), (5100, "y"), (6000, "z")]
    assert memory.unmatched(there, planned) == ([(1024, "b"), (8, "d")], [(6000, "z")])
    assert memory.table([(8, "d"), (8, "d"), (9, "e")]) == [
        {"size": 8, "times": 2, "from": "d"},
        {"size": 9, "times": 1, "from": "e"},
    ]


def test_what_the_planner_has_at_the_peak(dry):
    """Beside what was there before the step: as many bytes as its own peak."""
    planner = dry.planner()
    for policy in ("none", "full"):
        config = config_of(dry.args(), Job(policy, 2))
        blocks = memory.planned_at_peak(planner, 2, config)
        step = planner.step(2, **asdict(config))
        always = step.at_peak["parameters"] + step.at_peak["optimizer"]
        ids = 2 * 2 * 16 * 8
        assert sum(size for size, _ in blocks) == step.peak - always - ids


def test_a_cpus_allocations(dry):
    """The same form as CUDA's, and as many bytes as the profiler's record has."""
    run = dry.run("", Job("full", 2))
    for _ in range(2):
        steps.next_step(run)
    trace = memory.cpu_trace(run)
    assert {e["action"] for e in trace} == {"alloc", "free_requested"}
    largest = max(size for size, _ in memory.alive_at_peak(trace))
    assert largest >= run.args.vocab_size * run.args.d_model * 4  # the embedding's gradient


def test_too_large_for_the_card(dry, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    values = memory.peak(dry, "", Job("none", 2))
    assert values["skipped"] == "1000 bytes are free" and values["predicted"] > 1000
    assert "allocated" not in values


# ---- Correctness


def test_differences():
    ours = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([4.0, 0.0]), "c": torch.ones(1)}
    theirs = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([5.0, 0.0]), "c": torch.ones(1)}
    found = steps.differences(ours, theirs)
    assert found["difference"] == pytest.approx(0.2) and found["where"] == "b"
    assert (found["bit_equal"], found["differing"], found["tensors"]) == (False, 1, 3)
    assert steps.differences(theirs, theirs)["bit_equal"]


def test_another_way_is_seen(dry, monkeypatch):
    """The comparison can fail: with other dropout masks."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "unchanged")
    theirs = steps.gradients(dry, steps.MATH, False, 0.1, recompute="none")
    real = torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: real(seed + (seed == 1)))
    ours = steps.gradients(dry, steps.MATH, False, 0.1, recompute="full")
    found = steps.differences(ours, theirs)
    assert not found["bit_equal"] and found["difference"] > 0.01
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.filterwarnings("ignore")
def test_waits_are_named(dry, monkeypatch):
    """With a step that warns as CUDA does."""
    import warnings

    def step(run):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    monkeypatch.setattr(steps, "next_step", step)
    values = steps.waits(dry, "")
    assert values["waits"] == 1
    (place,) = values["places"]
    assert place.startswith("1 x tests/test_gpu_report_sections.py:")


# ---- Runs


def test_the_exit_codes_that_torchrun_tells(tmp_path):
    log = tmp_path / "run.log"
    log.write_text("  exitcode  : 143 (pid: 7)\n  exitcode  : -9 (pid: 8)\nexitcode: none\n")
    assert runs.Torchrun.worker_codes(SimpleNamespace(out=log)) == [143, -9]


def test_each_start_has_its_own_log(dry, tmp_path, monkeypatch):
    """The codes of the run before are not this one's."""

    def start(command, **how):
        how["stdout"].write(f"exitcode  : {143 if '--resume' not in command else -9}")

    monkeypatch.setattr(runs.subprocess, "Popen", start)
    path = tmp_path / "run.pt"
    first, second = (runs.Torchrun(dry, path, more) for more in ("", "--resume"))
    assert first.worker_codes() == [143] and second.worker_codes() == [-9]


def test_a_small_card(gpu, monkeypatch):
    """A tenth of the card, but as much as GPT-2 small needs."""
    monkeypatch.setattr(runs, "total_memory", lambda device: 80 * 2**30)
    assert runs.memory_limit(gpu) == (0.1, 8 * 2**30)
    monkeypatch.setattr(runs, "total_memory", lambda device: 10 * 2**30)
    assert runs.memory_limit(gpu) == (0.5, 5 * 2**30)


def test_a_limited_run_on_a_gpu(gpu, monkeypatch):
    """What would be started; and its end, read."""
    started = []

    def start(command, **how):
        started.append(command)
        return SimpleNamespace(returncode=4, stdout="", stderr="x\nerror: out of memory; try\n")

    planner = SimpleNamespace(largest_batch=lambda budget, size, recompute: budget // 2**30)
    monkeypatch.setattr(runs, "total_memory", lambda device: 80 * 2**30)
    monkeypatch.setattr(runs.subprocess, "run", start)
    monkeypatch.setattr(Bench, "planner", lambda self: planner)
    monkeypatch.setattr(Bench, "predicted", lambda self, flags, job: job.batch_size)
    values = runs.limited(gpu, "full", more=1, margin=False, ends_with=4)
    assert (values["batch"], values["predicted"], values["as_wanted"]) == (9, 9, True)
    assert values["said"] == "error: out of memory; try"
    (command,) = started
    assert command[1] == "-c" and command[3] == "0.1"
    compile(command[2], "limited", "exec")
    assert "set_per_process_memory_fraction" in command[2]
    assert command[command.index("--batch-size") + 1] == "9" and "cuda" in command
