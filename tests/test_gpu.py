"""What a GPU does is right.

`python -m pytest -m gpu` asks a GPU. Without one the same lines run small, on the CPU. Do not use
`-n` with a GPU: its processes would share the GPU's memory, and some tests fill it.
"""

from contextlib import nullcontext
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.fake_cuda import CUDA, fake_cuda
from harness.on_gpu import DEVICE, ON_GPU, SHAPE, bench_settings, pick, shortage
from harness.runs import metrics, parse, same, snapshot, torchrun, train, train_here
from harness.shortage import running_out
from test_model import tiny
from torch.nn.attention import SDPBackend, sdpa_kernel

import model
import train_minimal
from memory import POLICY_NAMES
from planner import Planner
from scripts import generate
from scripts.benchmark import make_run, mean_step_seconds
from scripts.plans import CommandPlan
from trainer.clocks import make_clock
from trainer.device import MemoryBudget, choose_precision
from trainer.process import OneProcess
from trainer.reproducible_sums import pairwise_all_reduce_hook
from trainer.run import Run

gpu = pytest.mark.gpu
FUSED_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
KERNELS = [SDPBackend.MATH] + FUSED_KERNELS * ON_GPU
RUN = (
    "--use-toy-data --log-interval 1 --eval-interval 0 --eval-tokens 1 --sample-tokens 0 "
    "--dropout 0.1 --lr-scheduler constant --warmup-steps 0 --num-steps 3"
).split()


@pytest.fixture(params=KERNELS, ids=str)
def in_order(request):
    """One kernel for attention, and every kernel in a fixed order of sums."""
    torch.use_deterministic_algorithms(True)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    with sdpa_kernel(request.param):
        x = torch.ones(1, 1, 64, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        try:
            F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
        except RuntimeError as error:
            pytest.skip(f"{request.param} has no such kernel for this GPU: {error}")
        yield


def train_on_it(path: Path, *flags: str) -> int:
    # (Without fused attention the scores of 12 x 1,024 tokens and their masks take 16 to 21 GiB.)
    needed = 10 if torch.backends.cuda.flash_sdp_enabled() else 32
    if ON_GPU and torch.cuda.mem_get_info()[0] < needed * 2**30:
        pytest.skip(f"needs {needed} GiB of free memory on the GPU")
    words = f"{SHAPE} {pick('--vocab-size 50257', '')}".split()
    torch.rand(len(flags) + 1, device=DEVICE)  # the random state is somewhere else each time
    return train_minimal.main([*words, *RUN, "--checkpoint-path", str(path), *flags])


def plan_of(flags: str) -> Planner:
    asked = bench_settings(flags)
    return CommandPlan(asked, asked.vocab_size, DEVICE, choose_precision(asked, DEVICE)).planner


def after(steps: int, flags: str = "", policy: str = "full", device: torch.device = DEVICE) -> Run:
    run = make_run(bench_settings(f"{flags} --batch-size 2", policy), device)
    for _ in range(steps):
        mean_step_seconds(run)
    return run


def weights(policy: str, flags: str = "") -> dict[str, torch.Tensor]:
    """After three steps: what one of them left behind, the next one meets."""
    small = pick("--n-layers 3 --seq-len 512", "")
    return after(3, f"{small} --dropout 0.1 {flags}", policy).model.state_dict()


@gpu
@pytest.mark.usefixtures("in_order", "everything_travels")
def test_policies_give_the_same_bits():
    """With masks of dropout that the GPU's own kernels draw."""
    plain = weights("none")
    assert not same(weights("none", "--seed 2"), plain)
    for policy in POLICY_NAMES[1:]:
        for way in (policy, f"{policy}+offload"):
            assert same(weights(way), plain), way


@gpu
@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("in_holes", [False, True])
def test_a_run_ends_with_the_same_bits(in_holes, tmp_path, capsys):
    """Resumed; and with less memory from its second step on, which is whole, or partly in holes
    between others'."""
    full, none, resumed, less = paths = [
        tmp_path / f"{name}.pt" for name in ("full", "none", "resumed", "less")
    ]
    for path in (full, none):
        if ON_GPU:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        assert train_on_it(path, f"--use-activation-checkpoint={path.stem}") == 0
    assert train_on_it(resumed, "--num-steps=1") == train_on_it(resumed, "--resume") == 0
    room = sum(metrics(path)[-1]["peak_memory_bytes"] for path in (full, none)) // 2
    with shortage(2, room, in_holes) as begun:
        assert train_on_it(less) == 0
    assert "warning  step 2: out of memory with recompute none; " in capsys.readouterr().out
    first, *others = (record["recompute"] for record in metrics(less))
    assert first == "none" and "none" not in others and len({*others}) == 1
    assert len(begun) > 1 and max(begun) - min(begun) <= 512  # the failed attempts left nothing
    assert len({tuple(record["train_loss"] for record in metrics(path)) for path in paths}) == 1
    for path, key in product(paths, ("model", "optimizer", "step")):
        assert same(snapshot(path)[key], snapshot(none)[key]), (path, key)


@gpu
@pytest.mark.slow
@pytest.mark.usefixtures("in_order")
def test_compiled_code_draws_the_same_masks_from_the_same_seed():
    """In forward and in the replay, whatever was drawn before."""
    flags = "--dropout 0.1 --batch-size 2 --compile"
    run = make_run(bench_settings(flags, "selective:1,attn"), DEVICE)

    def step(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        batch = run.training_batches[0]
        run.model.zero_grad()
        with run.autocast():
            loss = run.model(*batch)
        loss.backward()
        return [loss.detach(), *(p.grad for p in run.model.parameters())]

    first, other, again = (step(seed) for seed in (1, 2, 1))
    assert same(again, first) and not torch.equal(other[0], first[0])


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_head_beside_float64(dtype):
    shape = bench_settings()
    V, C, N = shape.vocab_size, shape.d_model, pick(1024, 16)
    x, weight = torch.randn(1, N, C, device=DEVICE), 0.02 * torch.randn(V, C, device=DEVICE)
    labels = torch.randint(V, (1, N), device=DEVICE)

    def step(kind: torch.dtype, chunks: int) -> list[torch.Tensor]:
        inputs = [tensor.to(kind).requires_grad_() for tensor in (x, weight)]
        with torch.autocast(DEVICE.type, dtype, enabled=kind == torch.float32):
            head_loss = tiny(DEVICE.type, loss_chunks=chunks).head_loss
            loss = head_loss(*inputs, labels) * 2.0**16  # (or float16 has no room)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    exact = step(torch.float64, 1)
    in_float32 = 2.0**16 * F.cross_entropy((x @ weight.T)[0], labels[0]).item()
    assert exact[0].item() == pytest.approx(in_float32, rel=1e-4)
    for chunks in (0, 8, 1):
        for a, b in zip(step(torch.float32, chunks), exact, strict=True):
            assert 0 < (a.double() - b).norm() / b.norm() < 0.01


@gpu
@pytest.mark.parametrize("policy", pick(["none", "full"], ["full"]))
def test_what_fits_runs_and_what_does_not_says_the_way_out(policy, tmp_path, capsys, request):
    """On a GPU of which torch may have as much as a small card has; on a CPU it is played."""
    planner, path = plan_of("--dropout 0.1"), tmp_path / "run.pt"
    limit = pick(5 * 2**30, planner.step(4).peak)
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
        request.addfinalizer(lambda: torch.cuda.set_per_process_memory_fraction(1.0))
    fits = planner.largest_batch(
        MemoryBudget(limit, DEVICE.type).bytes_within_margin, 1, recompute=policy
    )
    flags = f"--batch-size={fits}", f"--use-activation-checkpoint={policy}"
    assert fits > 0 and train_on_it(path, *flags) == 0
    more = f"--batch-size={2 * fits + 2}", "--on-out-of-memory=stop"
    with nullcontext() if ON_GPU else running_out(1, (9, False)):
        assert train_on_it(path, *flags, *more) == 4
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ") and "--batch-size" in line


def alone(flags: str) -> Any:
    skip = pytest.mark.skipif(ON_GPU, reason="a real GPU is here; the stand-in would hide it")
    return pytest.param(flags, marks=skip)


@pytest.mark.usefixtures("everything_travels")
@pytest.mark.parametrize(
    "flags",
    [
        *(pytest.param(flags, marks=gpu) for flags in ("", "--amp-dtype float16")),
        pytest.param("--grad-accum-steps 2", marks=gpu),
        pytest.param("--grad-accum-steps 4 --reproducible-sums", marks=gpu),
        alone("--amp-dtype bfloat16 --use-activation-checkpoint full/2+nested+offload"),
        alone("--optimizer muon --use-activation-checkpoint selective:1,mlp --profile 1"),
        alone("--no-amp --moments-dtype bfloat16"),  # memory runs out in its second step
    ],
)
def test_a_run_mixes_no_devices_and_waits_for_no_step(flags, path, monkeypatch):
    """On a GPU or, without one, on the stand-in of a GPU: every phase of a run, a step repeated
    after memory ran out, and resume."""
    step, sample = train_minimal.train_step, "--eval-interval=1 --sample-tokens=3".split()
    runs_out, kernels = "--no-amp" in flags, set()

    def without_waiting(run: Run) -> Any:
        # (On a GPU the first steps load kernels.)
        may_wait = runs_out or ON_GPU and run.step <= 2
        torch.cuda.set_sync_debug_mode("default" if may_wait else "error")
        try:
            losses = step(run)
            if not may_wait:
                with pytest.raises(RuntimeError, match="called a synchronizing"):
                    losses[0][0].item()  # this waits
            return losses
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def draw_and_look(*given: Any, **how: Any) -> torch.Tensor:
        backends = torch.backends.cuda
        kernels.add((backends.cudnn_sdp_enabled(), backends.flash_sdp_enabled()))
        return draw(*given, **how)

    draw = model.sample_next_ids
    monkeypatch.setattr(train_minimal, "train_step", without_waiting)
    monkeypatch.setattr(model, "sample_next_ids", draw_and_look)
    monkeypatch.setattr(
        "trainer.run.plans_to_try", lambda *question: [SimpleNamespace(policy="full", peak=2**20)]
    )
    on_it = nullcontext() if ON_GPU else fake_cuda()
    with on_it, running_out(2, *[(60, False)] * runs_out):
        for more in (["--num-steps=4"], ["--num-steps=5", "--resume"]):
            assert train_here(path, "--device=cuda", *flags.split(), *sample, *more) == 0
        assert generate.main(["--checkpoint-path", str(path), "--max-new-tokens=3"]) == 0
    assert kernels == {(False, True)}  # cuDNN's is off, fused attention is on
    records = metrics(path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert runs_out == (records[0]["recompute"] != records[3]["recompute"] == "full")


@pytest.mark.skipif(ON_GPU, reason="a real GPU is here; the stand-in would hide it")
def test_the_measured_peak_is_that_of_one_step(capsys):
    """Not of the setup, which needed more here."""
    with fake_cuda():
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters())
        clock = make_clock(parse(), OneProcess(CUDA), model, optimizer, (2**30, 2**30))
        for _ in range(3):
            with clock.step():
                clock.begin_phase("forward")
    assert "measured peak 1.0 GiB of tensors; predicted 1.0 GiB" in capsys.readouterr().out


@gpu
@pytest.mark.usefixtures("everything_travels")
def test_offload_pins_what_was_planned():
    run = after(2, "", "full+offload")
    made, config = run.model.offload_pool.buffers, run.model.config
    assert sum(b.nbytes for b in made) == plan_of("").step(2, **asdict(config)).host_bytes > 0
    assert all(block.is_pinned() == ON_GPU for block in made)


@gpu
def test_a_bucket_is_summed_in_a_stream_of_its_own(tmp_path):
    """Of one process: its sum is the bucket itself, and whoever waits for the future finds it."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl" if ON_GPU else "gloo", store=store, rank=0, world_size=1)
    try:
        bucket = SimpleNamespace(buffer=lambda: buffer)
        buffer = torch.randn(2**20 + 3, device=DEVICE)
        expected, stream = buffer.clone(), torch.cuda.Stream() if ON_GPU else None
        for _ in range(3):
            buffer.mul_(2)
            assert torch.equal(
                pairwise_all_reduce_hook((None, stream), bucket).wait(), 2 * expected
            )
            buffer.copy_(expected)
    finally:
        dist.destroy_process_group()


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("script", "more"),
    [
        *product(["train_ddp.py", "train_fsdp.py"], ["", "--reproducible-sums"]),
        ("train_sp.py", ""),
    ],
)
def test_two_gpus_train_as_one_does(script, more, tmp_path):
    # (Processes that share a sequence draw masks of their own, and add up in another order.)
    flags = f"--device={DEVICE.type}", "--dropout=0", "--no-amp", *more.split()
    accumulated = "--grad-accum-steps=2"
    shared = [accumulated] * (script == "train_sp.py")
    torchrun(tmp_path / "two.pt", *flags, *shared, script=script)
    train(tmp_path / "one.pt", *flags, accumulated)
    one, two = (metrics(tmp_path / name) for name in ("one.pt", "two.pt"))
    losses = [[record["train_loss"] for record in records] for records in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
