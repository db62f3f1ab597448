"""What a GPU does is right, and `python -m studies.gpu` measures it.

`python -m pytest -m gpu` asks a GPU. Without one the same lines run small, on the CPU.
"""

import os
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.runs import metrics, same, snapshot, torchrun, train
from torch.nn.attention import SDPBackend, sdpa_kernel

import train_minimal
from data import TokenFile, TrainBatches
from memory.head import head_loss
from model import RECOMPUTE_POLICIES
from planner import Planner
from scripts.benchmark import plan
from scripts.benchmark_worker import Job, config_of, make_run
from studies import gpu
from studies.gpu import Bench, next_step
from trainer.device import choose_precision
from trainer.room import for_tensors

ON_GPU = torch.cuda.is_available()
if ON_GPU:  # before any file's first product: or cuBLAS may add as it likes
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
KERNELS = [SDPBackend.MATH] + [SDPBackend.FLASH_ATTENTION] * ON_GPU
RUN = (
    "--use-toy-data --log-interval 1 --eval-interval 0 --eval-batches 1 --sample-tokens 0 "
    "--dropout 0.1 --lr-scheduler constant --warmup-steps 0 --num-steps 3"
).split()
BENCH = Bench(dry=not ON_GPU)
DEVICE = BENCH.device


@pytest.fixture(params=KERNELS, ids=str)
def in_order(request):
    """One kernel for attention, and every kernel in a fixed order of sums."""
    torch.use_deterministic_algorithms(True)
    with sdpa_kernel(request.param):
        yield
    torch.use_deterministic_algorithms(False)


def train_on_it(path: Path, *flags: str) -> int:
    words = BENCH.pick(f"{gpu.REAL} --vocab-size 50257", gpu.DRY).split()
    torch.rand(len(flags) + 1, device=DEVICE)  # the random state is somewhere else each time
    return train_minimal.main([*words, *RUN, "--checkpoint-path", str(path), *flags])


def plan_of(flags: str) -> Planner:
    args = BENCH.args(flags)
    return plan(args, DEVICE, choose_precision(args, DEVICE))


def weights(policy: str, flags: str = "") -> dict[str, torch.Tensor]:
    """After three steps: what one of them left behind, the next one meets."""
    small = BENCH.pick("--n-layers 3 --seq-len 512 --batch-size 2", "")
    run = make_run(BENCH.args(f"{small} --dropout 0.1 {flags}"), Job(policy, 2), DEVICE)
    for _ in range(3):
        next_step(run)
    return {name: p.detach() for name, p in run.model.named_parameters()}


@pytest.mark.gpu
@pytest.mark.usefixtures("in_order", "everything_travels")
def test_policies_give_the_same_bits():
    """With masks of dropout that the GPU's own kernels draw."""
    plain = weights("none")
    assert not same(weights("none", "--seed 2"), plain)
    for policy in RECOMPUTE_POLICIES[1:]:
        for flags in ("", "--offload-activations"):
            assert same(weights(policy, flags), plain), f"{policy} {flags}"


@pytest.mark.gpu
@pytest.mark.usefixtures("in_order")
def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(tmp_path):
    whole, half = tmp_path / "whole.pt", tmp_path / "half.pt"
    assert train_on_it(whole) == 0
    assert train_on_it(half, "--num-steps=1") == 0
    assert train_on_it(half, "--resume", "--num-steps=3") == 0
    for key in ("model", "optimizer", "step"):
        assert same(snapshot(whole)[key], snapshot(half)[key]), key


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_head_beside_float64(dtype):
    args = BENCH.args()
    V, C, N = args.vocab_size, args.d_model, BENCH.pick(1024, 16)
    x, weight = torch.randn(1, N, C, device=DEVICE), 0.02 * torch.randn(V, C, device=DEVICE)
    labels = torch.randint(V, (1, N), device=DEVICE)

    def step(kind: torch.dtype, chunks: int) -> list[torch.Tensor]:
        inputs = [tensor.to(kind).requires_grad_() for tensor in (x, weight)]
        with torch.autocast(DEVICE.type, dtype, enabled=kind == torch.float32):
            loss = head_loss(*inputs, labels, chunks) * 2.0**16  # (or float16 has no room)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    exact = step(torch.float64, 1)
    assert exact[0] == pytest.approx(2.0**16 * F.cross_entropy((x @ weight.T)[0], labels[0]).item())
    for chunks in (0, 8, 1):
        for a, b in zip(step(torch.float32, chunks), exact, strict=True):
            assert 0 < (a.double() - b).norm() / b.norm() < 0.01


@pytest.mark.gpu
def test_float16_recovers_from_a_loss_scale_that_is_too_large():
    run = make_run(BENCH.args("--amp-dtype float16"), Job("full", 2), DEVICE)
    run.scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**24)
    for _ in range(20):
        next_step(run)
    assert 1 < run.scaler.get_scale() < 2**24
    assert all(p.isfinite().all() for p in run.model.parameters())


@pytest.fixture
def limit():
    """Bytes of a GPU that torch may have: of a small card. On a CPU, where nobody holds it to that,
    what four sequences take."""
    if not ON_GPU:
        yield plan_of("--dropout 0.1").step(4).peak
        return
    torch.cuda.empty_cache()
    card = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(5 * 2**30 / card, 1.0))
    yield min(5 * 2**30, card)
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", BENCH.pick(["none", "full"], ["full"]))
def test_what_fits_runs_and_what_does_not_says_the_way_out(
    limit, policy, tmp_path, capsys, monkeypatch
):
    planner, path = plan_of("--dropout 0.1"), tmp_path / "run.pt"
    fits = planner.largest_batch(for_tensors(limit, DEVICE.type), 1, recompute=policy)
    flags = f"--batch-size={fits}", f"--use-activation-checkpoint={policy}"
    assert fits > 0 and train_on_it(path, *flags) == 0
    capsys.readouterr()
    if not ON_GPU:  # then it is played
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        monkeypatch.setattr(train_minimal, "train_step", lambda run: (_ for _ in ()).throw(error))
    assert train_on_it(path, *flags, f"--batch-size={2 * fits + 2}") == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "--batch-size" in line


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["", "--amp-dtype float16", "--grad-accum-steps 2"])
def test_python_does_not_wait_in_a_step(flags, tmp_path):
    run = make_run(BENCH.args(flags), Job("full", 2), DEVICE)
    file, length = tmp_path / "ids.npy", run.args.seq_len
    np.save(file, np.arange(50 * length, dtype=np.uint16) % 64)  # from a file, as in a true run
    run.train_batches = TrainBatches([TokenFile.open(file)], 2, length, 0, DEVICE)
    for _ in range(2):
        next_step(run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("warn")
        next_step(run)
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{one.filename}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]
    assert not waits


def pinned_bytes() -> int:
    """Those in use, by torch's own count; older versions have another name for it."""
    stats = torch.cuda.host_memory_stats() if ON_GPU else {}
    return stats.get("active_bytes.current", stats.get("allocated_bytes.current", 0))


@pytest.mark.gpu
@pytest.mark.usefixtures("everything_travels")
def test_offload_pins_what_was_planned():
    args = BENCH.args("--offload-activations")
    before = pinned_bytes()
    run = make_run(args, Job("full", 2), DEVICE)
    for _ in range(2):
        next_step(run)
    made = run.model.host_memory.made
    planned = plan_of("").step(2, **asdict(config_of(args, Job("full", 2)))).host
    assert sum(block.nbytes for block in made) == planned > 0
    if ON_GPU:
        assert all(block.is_pinned() for block in made) and pinned_bytes() - before == planned


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs (gloo: test_train_ddp)")
@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_two_gpus_train_as_one_does(script, tmp_path):
    torchrun(tmp_path / "two.pt", "--device=cuda", script=script)
    train(tmp_path / "one.pt", "--device=cuda", "--grad-accum-steps=2")
    two, one = ([r["train_loss"] for r in metrics(tmp_path / f"{n}.pt")] for n in ("two", "one"))
    assert two == pytest.approx(one, rel=1e-3)


# ---- The study

NANOGPT = """
from types import SimpleNamespace as GPTConfig
import torch

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.vocab_size % 64 == 0 and config.block_size == 16
        self.embed = torch.nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, ids, targets):
        logits = self.embed(ids) @ self.embed.weight.T
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas)
"""


def start(folder: Path, *more: str) -> int:
    return gpu.main(["--dry-run", "--out", str(folder), *more])


def test_a_dry_run_measures_everything(tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT)
    assert start(tmp_path, "--nanogpt", str(tmp_path)) == 0
    records, bench = gpu.read(tmp_path / "gpu.jsonl")[1], Bench(True, nanogpt=tmp_path)
    assert [*records] == [
        (part, name) for part, of in gpu.SECTIONS.items() for name, _ in of(bench)
    ]
    found = {key: record["values"] for key, record in records.items()}  # and no error
    assert all(0.5 < found[key]["ratio"] < 1.1 for key in found if key[0] == "peaks")
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("\n## ") == len(gpu.SECTIONS) and "\n| nanoGPT, compiled | " in text
    assert start(tmp_path) == 0 and gpu.read(tmp_path / "gpu.jsonl")[1] == records  # once is enough


def test_a_table_has_the_medians_of_turns_and_no_empty_column():
    def record(ms: float, **more) -> dict:
        return {"values": {"ms": ms, "MFU": None, "allocated": 3 * 2**20, **more}}

    turns = {("speed", f"full, turn {i}"): record(ms) for i, ms in enumerate((3.0, 1.0, 2.5))}
    text = gpu.report({"torch": "2"}, turns | {("speed", "none"): record(1234.56, busy=0.381)})
    head, _, *rows = [line for line in text.splitlines() if line[:1] == "|"]
    assert head == "|  | ms | allocated | turns | ms apart | busy |"
    assert rows[0] == "| full | 2.500 | 3.0 MiB | 3 | 2.000 |  |"
    assert rows[1] == "| none | 1,234.6 | 3.0 MiB |  |  | 38.1% |"


def test_what_is_measured_at_full_size():
    """The names are there before anything is measured."""
    names = {f"{part}: {name}" for part, of in gpu.SECTIONS.items() for name, _ in of(Bench())}
    assert {"head: bfloat16, 99 chunks", "peaks: gpt2-xl, full"} <= names
    assert {"speed: full, compiled, turn 3", "copies: to the CPU, pinned"} <= names
    args = Bench().args("--grad-accum-steps 2")
    assert (args.vocab_size, args.n_layers, args.seq_len, args.device) == (50257, 12, 1024, "cuda")


@pytest.fixture
def stand_in(monkeypatch):
    """stand_in(a=..., b=...): one section that measures these values, or fails with these errors;
    returns the names of what was tried."""
    calls: list[str] = []

    def measure(name, result):
        calls.append(name)
        if isinstance(result, BaseException):
            raise result
        return result

    def use(**results) -> list[str]:
        jobs = [(name, lambda n=name, r=result: measure(n, r)) for name, result in results.items()]
        monkeypatch.setattr(gpu, "SECTIONS", {"tried": lambda bench: jobs})
        return calls

    return use


def test_what_failed_is_tried_again_and_last(stand_in, tmp_path):
    good, full = {"ms": 1.5}, torch.OutOfMemoryError("CUDA out of memory.")
    calls = stand_in(a=good, bad=ValueError("a\nbug"), full=full, dies=KeyboardInterrupt(), b=good)
    assert start(tmp_path) == 130 and calls == ["a", "bad", "full", "dies"]
    file = tmp_path / "gpu.jsonl"
    file.write_text(file.read_text() + '{"section": "tried", "na')  # cut short
    text = (tmp_path / "gpu.md").read_text()
    assert "- failed: tried: bad: ValueError: a bug\n" in text and "| a | 1.500 |" in text
    calls.clear()
    assert start(tmp_path) == 130 and calls == ["b", "bad", "dies"]
    assert "- failed: tried: dies: it ended the process" in gpu.report(*gpu.read(file))
    stand_in(a=None, bad=good, full=None, dies=good, b=None)
    assert start(tmp_path) == 0
    found = {name: record["values"] for (_, name), record in gpu.read(file)[1].items()}
    assert found == {
        **dict.fromkeys(("a", "bad", "dies", "b"), good),
        "full": {"out of memory": "yes"},
    }


def test_a_lost_gpu_ends_the_process(stand_in, tmp_path):
    calls = stand_in(a=RuntimeError("CUDA error: an illegal memory access"), b={"ms": 1.0})
    with pytest.raises(SystemExit, match="1"):
        start(tmp_path)
    assert calls == ["a"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nanogpt", "nowhere"], "--nanogpt nowhere: there is no model.py in it"),
        (["--peer"], "pip install transformers"),
        ([], "has results of 1.0"),
    ],
)
def test_mistakes(words, message, stand_in, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    with monkeypatch.context() as other:  # another machine's results
        other.setattr(torch, "__version__", "1.0")
        assert start(tmp_path, *stand_in()) == 0
    before = (tmp_path / "gpu.jsonl").read_text()
    assert start(tmp_path, *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line
    assert (tmp_path / "gpu.jsonl").read_text() == before


@pytest.mark.skipif(ON_GPU, reason="needs a machine without a GPU")
def test_no_gpu(tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path / "new")]) == 2 and not (tmp_path / "new").exists()
    assert "finds no GPU here; --dry-run" in capsys.readouterr().err
