"""The planner is right: about real steps, about formulas, and about what fits."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cases.shapes import CONFIG, MEMORY, MIXES, PRECISIONS, WIDE, T
from harness.answers import question
from harness.marks import rest_slow
from harness.planned import measured_peak, planner
from harness.runs import parse
from test_model import random_ids
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from memory import MemorySavingGPT
from model import MiniGPTConfig
from planner import Layout
from planner.formulas import closed_form_bytes_by_part
from planner.operators import cublas_workspace_bytes
from planner.timeline import KINDS
from trainer.optimizer import make_optimizer

pytestmark = pytest.mark.usefixtures("everything_travels")

CPU = torch.device("cpu")
MODES = [("adamw", "bfloat16"), ("muon", "float32"), ("muon", "bfloat16"), ("adamw", "float32")]
FULL = {"recompute": "full"}
LONG = replace(CONFIG, max_position_embeddings=321, vocab_size=61, d_ff=512)


FULL_WIDE, BF16 = replace(WIDE, recompute="full"), {"precision": "bf16"}
MPS = {"device_type": "mps"}  # a CPU's real step keeps attention's scores without fused attention
MEASURED: list[tuple[MiniGPTConfig, int, dict]] = [
    *((replace(CONFIG, **memory), 16, {}) for memory in [*MEMORY, *MIXES]),
    *((replace(CONFIG, **memory), 16, BF16) for memory in (MIXES[0], MIXES[4])),
    *((replace(WIDE, recompute=way), 4, BF16) for way in ("none", "mlp", "sdpa")),
    (replace(WIDE, dropout=0.1), 8, {}),  # which no kernel fuses here
    # Ids and labels of one sequence share their memory.
    *((replace(CONFIG, recompute=way), n, {}) for way in ("none", "full") for n in (1, 2)),
    # The MLP in chunks: of 321 tokens five, and one token more.
    (replace(LONG, recompute="mlp", mlp_chunks=5), 2, {}),
    (replace(LONG, recompute="sdpa", mlp_chunks=5), 2, BF16),
    (replace(LONG, recompute="full/2+nested", mlp_chunks=4), 2, BF16),
    (replace(LONG, recompute="full+offload", mlp_chunks=3), 2, {}),
    # Other optimizers; one that copies a matrix or less at a time
    *((FULL_WIDE, 1, {"mode": mode}) for mode in MODES[:2]),
    (FULL_WIDE, 16, {"mode": MODES[1], **BF16}),
    (FULL_WIDE, 16, {"mode": MODES[2], "at_a_time": 2**12}),
    (FULL_WIDE, 1, {"mode": MODES[0], "at_a_time": 2**12, **BF16}),
    # Of few tokens the gradients' norm is the peak, or what Muon makes of odd matrices.
    (MiniGPTConfig(1024, 16, 4, 1, 128, 512, 0.0), 1, {}),
    (MiniGPTConfig(1024, 31, 4, 1, 31, 124, 0.0), 1, {"mode": MODES[1]}),
    # Gradients of earlier micro-batches; sums of --reproducible-sums; DDP's buckets
    (CONFIG, 16, {"accumulate": 2}),
    *(
        (config, 4, {"accumulate": n, "in_tree": True})
        for n in (1, 2, 4, 8)
        for config in (CONFIG, WIDE, FULL_WIDE)
    ),
    *(
        (CONFIG, 16, {"accumulate": n, "in_tree": n > 2, "layout": Layout("ddp")})
        for n in (1, 2, 4)
    ),
    *((replace(WIDE, n_heads=8, dropout=p), 40, MPS) for p in (0.0, 0.1)),
    (replace(WIDE, n_heads=8, dropout=0.1, recompute="full"), 40, MPS),
]
FAST = [*MEASURED[::6], *MEASURED[-4:-2]]


@cache
def maker(mode: tuple[str, str], precision: str = "fp32"):
    """Makes the optimizer that the trainers make."""
    args = parse(f"--optimizer={mode[0]} --moments-dtype={mode[1]}")
    return lambda model: make_optimizer(model, args, CPU, PRECISIONS[precision])


@pytest.fixture
def lone_process(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Expected a tensor")  # MemTracker's, at each `.grad = None`
@pytest.mark.parametrize(
    ("config", "batch_size", "how"), rest_slow(MEASURED, FAST.__contains__), ids=str
)
def test_predicted_peak_is_that_of_a_real_step(config, batch_size, how, lone_process, monkeypatch):
    """To the byte, by torch's MemTracker. (The trainers free the loss, 4 bytes, later.) It does not
    see DDP's buckets, which our own meter counts, but only after each operator."""
    how = {"precision": "fp32", "accumulate": 1, "in_tree": False} | how
    mode, accumulate, in_tree = (
        how.pop("mode", MODES[-1]),
        how.pop("accumulate"),
        how.pop("in_tree"),
    )
    monkeypatch.setattr("trainer.optimizer.UPDATE_CHUNK_ELEMENTS", how.pop("at_a_time", 2**22))
    how["make_optimizer"] = maker(mode, how["precision"])
    how["seq_len"] = config.max_position_embeddings
    # Of --reproducible-sums, one sum is in `.grad`.
    waiting = max(0, accumulate.bit_length() - 2) * in_tree
    sums = {"accumulates_gradients": accumulate > 1, "n_pending_sums": waiting}
    predicted = planner(config, **how, **sums).step(batch_size).peak
    fused = how.pop("device_type", "cpu") == "cpu"
    how |= {"accumulate": accumulate, "in_tree": in_tree, "ddp": bool(how.pop("layout", None))}
    with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
        measured = measured_peak(config, batch_size, **how)
    assert predicted - measured in (0, 4) or how["ddp"]
    assert predicted == pytest.approx(measured, rel=0.003)


# ---- a GPU is planned for with what a GPU has


@pytest.mark.parametrize(("precision", "each"), [("bf16", 5 * 2 * 128 * (32 + 1) * 4), ("fp32", 0)])
def test_inside_of_a_gpus_kernels(precision, each, monkeypatch):
    """While attention's backward runs: dq_accum and softmax_d; T = 32 and D = 16 are rounded up."""
    monkeypatch.setattr("planner.simulate.cublas_workspace_bytes", lambda card: 1000)
    with_kernels = (
        planner(CONFIG, precision, device_type="cuda").step(5, **FULL).bytes_after_each_op
    )
    monkeypatch.setattr("planner.simulate.kernel_workspace_bytes", lambda operator, args: 0)
    monkeypatch.setattr("planner.simulate.cublas_workspace_bytes", lambda card: 0)
    without = planner(CONFIG, precision, device_type="cuda").step(5, **FULL)
    more = with_kernels - without.bytes_after_each_op - 1000
    assert sorted(more)[-CONFIG.n_layers - 1 :] == [0] + [each] * CONFIG.n_layers
    assert not more[: without.phase_slice("backward").start].any()


@pytest.mark.parametrize(
    ("major", "hip", "mib"),
    [(8, None, 16.25), (9, None, 64), (12, None, 64), (None, None, 16.25), (9, "7.0", 2 * 108)],
)
def test_what_a_gpus_matmuls_work_in(major, hip, mib, monkeypatch):
    """None: no GPU is here. The workspaces of a planned card do not depend on it."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", hip)
        patch.setattr(torch.cuda, "is_available", lambda: major is not None)
        there = SimpleNamespace(major=major)
        patch.setattr(torch.cuda, "get_device_properties", lambda: there)
        assert cublas_workspace_bytes() == mib * 2**20
        cards = {"H100": 64, "RTX 5090": 64, "RTX 5000 Ada": 16.25, "A100": 16.25, "MI300X": 408}
        assert {card: cublas_workspace_bytes(card) / 2**20 for card in cards} == cards
    asked = question("--card A100").planner
    assert asked.step(1).timeline[0, -1] == 16.25 * 2**20


# ---- offload on a GPU


def on_the_gpu(phase: str, n_layers: int = 8) -> int:
    """The most bytes beside weights, gradients and moments, with offload."""
    plan = planner(replace(WIDE, n_layers=n_layers), device_type="cuda")
    step = plan.step(24, recompute="full+offload")
    assert KINDS[:3] == ("parameters", "gradients", "optimizer")
    return step.timeline[step.phase_slice(phase), 3:].sum(axis=1).max()


def test_what_is_on_its_way_counts(monkeypatch):
    """And what has left a GPU does not: a model of any depth takes as much."""
    x, backward, forward = 24 * T * WIDE.d_model * 4, on_the_gpu("backward"), []
    assert backward == on_the_gpu("backward", n_layers=5)
    for n in (1, 3):  # tensors may be on their way out
        monkeypatch.setattr("memory.offload.MAX_COPIES_IN_FLIGHT", n)
        forward.append(on_the_gpu("forward"))
    assert forward[1] - forward[0] == 2 * x
    monkeypatch.setattr("memory.offload.prefetch_all", lambda tickets: None)  # not ahead of its use
    assert backward - on_the_gpu("backward") == x


def test_the_head_runs_the_operators_of_the_planned_device():
    """CUDA adds a chunk's part of the weight's gradient in one operator, a CPU in several."""
    wide = replace(WIDE, vocab_size=2**17, loss_chunks=2)  # two parts of the weight
    for kind in ("cuda", "cpu"):
        record = planner(wide, "bf16", device_type=kind).record(1)
        head = record.operator_names[record.step_memory.phase_slice("head")]
        assert [head.count("addmm"), "exp" in head] == ([2, True] if kind == "cuda" else [0, False])


# ---- formulas


@pytest.mark.parametrize(
    ("config", "precision", "dropout", "mode"),
    [(CONFIG, "fp32", 0.1, ("adamw", "float32")), (WIDE, "bf16", 0.0, ("muon", "bfloat16"))],
)
def test_closed_form_equals_the_simulation(config, precision, dropout, mode):
    config, make = replace(config, dropout=dropout), maker(mode, precision)
    plan = planner(config, precision, device_type="cuda", make_optimizer=make)
    for memory in [*MEMORY[:-2], MEMORY[-1], *MIXES[:-1]]:  # offload changes where, not what
        step = plan.step(5, **memory)
        form = closed_form_bytes_by_part(step.config, 5, T, PRECISIONS[precision])
        kinds = dict(zip(KINDS, step.timeline.T, strict=True))
        begin, end = step.phase_slice("forward").start, step.phase_slice("optimizer").start
        assert (kinds["recomputed"].max() > 0) == (step.config.recompute != "none")
        assert not kinds["gradients"][begin] and kinds["activations"][end] <= 5 * T * 8 * 2
        assert form["parameters"] == kinds["parameters"][0]
        assert form["gradients"] == kinds["gradients"][end]
        assert form["blocks"] == step.kept_per_block * config.n_layers, memory
        head = (kinds["head"] + kinds["gradients"])[step.phase_slice("head")].max()
        assert form["head"] == pytest.approx(head, abs=64), memory


CHUNKS = {"mlp_chunks": 5, "max_position_embeddings": 330}
IN_CHUNKS = [
    {"recompute": way, **CHUNKS} for way in ("mlp:1,sdpa", "full", "full/2", "full/3+nested")
]


FEW = [*MEMORY[:-2:3], *MIXES[:1], *IN_CHUNKS[:1]]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "memory",
    rest_slow([*MEMORY[:-2], *MIXES[:-1], *IN_CHUNKS], FEW.__contains__),
    ids=str,
)
def test_flops_are_those_that_torch_counts(memory, dropout):
    """All matrix products; those of a policy beyond those of `none` are its replays."""
    T = replace(CONFIG, **memory).max_position_embeddings
    counted, planned, attention = [], [], []
    for recompute in (memory.get("recompute", "none"), "none"):
        config = replace(CONFIG, dropout=dropout, **memory | {"recompute": recompute})
        model, ids = MemorySavingGPT(config).train(), random_ids(2, T)
        with FlopCounterMode(display=False) as counter:
            model(ids, ids).backward()
        flops = counter.get_flop_counts()["Global"].items()
        # (A CPU's fused attention is counted since torch 2.15, in full square.)
        counted.append(sum(n for op, n in flops if "flash_attention_for_cpu" not in str(op)))
        step = planner(config, seq_len=T).step(2)
        work = step.flops_and_bytes_by_op
        flops = work.flops * work.times
        planned.append(flops[work.attention == 0].sum())
        attention.append(flops[(work.attention > 0) & work.replayed].sum())
        products = {n: {*(work.flops[work.attention == n])} for n in (1, 2)}
        fused = 2 * T * 2 * T * config.d_model  # two products of half a square, of 2 sequences
        assert products == ({1: set(), 2: set()} if dropout else {1: {fused}, 2: {2.5 * fused}})
    # It leaves out a product that adds in place to what is there: the head's weight gradient.
    assert counted == [n - 2 * 2 * T * CONFIG.vocab_size * CONFIG.d_model for n in planned]
    _, replayed = (
        planner(replace(CONFIG, dropout=dropout, **memory), seq_len=T)
        .step(2)
        .needed_and_replayed_flops
    )
    assert replayed == counted[0] - counted[1] + attention[0]


# ---- batches


TWO_SHARDS = Layout("fsdp", world_size=2)
OFFLOAD, GPU = {"recompute": "mlp+offload"}, {"device_type": "cuda"}


LARGEST = [
    (0, {}, {}, 1, 2**22, None),
    (0, {}, {}, 1, 2**23, None),
    (1, FULL, {}, 12, 2**22, None),
    (1, FULL, {}, 12, 2**23, None),
    (0, FULL, {"layout": TWO_SHARDS, "accumulates_gradients": True}, 8, 2**22, None),
    (0, FULL, {"layout": TWO_SHARDS, "accumulates_gradients": True}, 8, 2**23, None),
    # A batch of one has no tensor that is large enough to move.
    (4, {"recompute": "full+offload"}, GPU, 1, 2**25, None),
    # Where a CPU is the device, blocks are in the peak; beside a GPU they have their own room.
    (4, OFFLOAD, {}, 9, 2**23, None),
    (4, OFFLOAD, GPU, 9, 2**26, 2**23),
]


@pytest.mark.parametrize(
    ("chunks", "memory", "settings", "asked", "budget", "host"),
    rest_slow(LARGEST, LARGEST[1::3].__contains__),
)
def test_largest_batch_is_the_largest(chunks, memory, settings, asked, budget, host, monkeypatch):
    monkeypatch.setattr("memory.head.LOGITS_CHUNK_BYTES", 2**15)
    monkeypatch.setattr("memory.offload.MIN_OFFLOAD_BYTES", 2**14)
    plan = planner(replace(CONFIG, loss_chunks=chunks), **settings)

    def fits(sequences: int) -> bool:
        step = plan.step(sequences, **memory)
        return step.peak <= budget and step.host_bytes <= (host or step.host_bytes)

    most = plan.largest_batch(budget, asked, host, **memory)
    assert most > 3 and fits(most) and not fits(most + 1)
    assert plan.largest_batch(2**20, asked, host, **memory) == 0  # the weights alone are more
