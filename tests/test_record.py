"""A step's storages by name: all of them, to the byte, and what is said of them is so. And what a
step tells of blocks that were not simulated is what they do."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import PurePosixPath, PureWindowsPath

import numpy as np
import pytest
from cases.shapes import CONFIG, SETTINGS, mix
from harness.marks import as_slow, rest_slow
from harness.planned import CARD, planner
from harness.records import KINDS_OF_STEPS, WAYS, B, plan, record

from memory import POLICIES
from memory.head import chunk_starts
from planner import CARDS
from planner.op_recorder import name_in_sources
from planner.record import read_source_line
from planner.shards import GATHERED_REASON
from planner.timeline import KINDS

pytestmark = pytest.mark.usefixtures("everything_travels")


@pytest.mark.parametrize(
    ("way", "setting", "dropout"),
    [
        *((way, setting, 0.0) for way, setting in KINDS_OF_STEPS),
        *((way, "cuda", 0.1) for way in ("cheap", "selective")),
        *(as_slow((way, "cuda", 0.1)) for way in ("none", "plain", "groups")),
        *(as_slow((way, "cpu", 0.1)) for way in ("none", "selective", "offload")),
    ],
)
def test_storages_are_the_step(way, setting, dropout):
    found = record(way, setting, dropout=dropout)
    step = plan(setting, dropout).step(B, **WAYS[way])
    np.testing.assert_array_equal(found.step_memory.timeline, step.timeline)
    assert found.step_memory.phase_marks == step.phase_marks
    added_up = np.zeros_like(step.timeline)
    for storage in found.storages:  # each from its birth to its death
        last = int(min(storage.died, len(added_up)))
        added_up[storage.born : last + 1, KINDS.index(storage.kind)] += storage.nbytes
    np.testing.assert_array_equal(added_up, step.timeline)
    assert len(found.operator_names) == len(found.replay_mask) == len(step.timeline)
    assert sum(storage.nbytes for storage in found.at_peak) == step.peak
    assert all(storage.name and storage.reason_alive for storage in found.storages)
    assert (
        found.step_memory.flops_and_bytes_by_op.times.sum()
        == step.flops_and_bytes_by_op.times.sum()
    )


# ---- names and reasons

FP32, BF16 = ("cpu", {}), ("cpu", {"precision": "bf16"})
ACCUMULATE, DROPOUT = ("cpu", {"accumulates_gradients": True}), ("cpu", {"dropout": 0.1})
GPU, SHARDS = ("cuda", {}), ("shards", {})


@pytest.mark.parametrize(
    ("way", "of", "name", "code", "why", "until"),
    [
        ("none", GPU, "blocks.1.mlp.c_fc: output", "self.c_fc(",
         "GELU's backward needs its input", "gelu_backward"),
        ("none", GPU, "bfloat16 copy of blocks.1.mlp.c_proj.weight", "self.c_proj(",
         "the gradient of blocks.1.mlp.c_proj's input needs its weight", ""),
        ("none", GPU, "blocks.1: gelu", "F.gelu(",
         "the gradient of blocks.1.mlp.c_proj's weight needs its input", ""),
        ("none", GPU, "blocks.1.mlp.c_proj: output", "self.c_proj(", "on its way to add", ""),
        ("none", GPU, "blocks.1: x + attention", "self.dropout(self.attention(x, kv_cache))",
         "blocks.1.ln_2's backward needs its input", "native_layer_norm_backward"),
        ("none", GPU, "blocks.1: x + feed_forward", "self.dropout(self.feed_forward(x))",
         "blocks.2.ln_1's backward needs its input", "native_layer_norm_backward"),
        ("none", GPU, "rows of token_embedding.weight", "F.embedding(", "on its way to add", "add"),
        ("plain", FP32, "head: logits", "F.linear(", "on its way to _log_softmax", ""),
        ("plain", FP32, "ln_f: output", "self.ln_f(x)",
         "the gradient of head's weight needs its input", "mm"),
        ("none", ACCUMULATE, "head: gradient of the weight", "torch.zeros_like(weight)",
         "backward multiplies it by the loss's gradient", "add_"),
        ("cheap", BF16, "blocks.1: attention", "F.scaled_dot_product_attention(",
         "attention's backward needs its output", "attention_backward"),
        ("none", DROPOUT, "blocks.1.dropout of feed_forward: mask",
         "self.dropout(self.feed_forward(x))", "dropout's backward needs its mask", "mul"),
        ("selective", BF16, "blocks.1.mlp.c_proj: output", "self.c_proj(",
         "its policy keeps it, though backward does not read it", ""),
        ("full", GPU, "blocks.1: x + feed_forward", "self.dropout(self.feed_forward(x))",
         "a replay begins with it: native_layer_norm of blocks.2.ln_1", ""),
        ("full", SHARDS, "gathered weights", "", GATHERED_REASON, ""),
    ],
)  # fmt: skip
def test_names_and_reasons(way, of, name, code, why, until):
    """And with which operator it goes. Of a block it is told which."""
    setting, more = of
    step = record(way, setting, **more)
    found = [s for s in step.storages if s.name == name]
    assert found and all(code in read_source_line(s.line) for s in found)
    assert {s.reason_alive for s in found} == {why}
    if until:
        assert {step.operator_names[int(s.died)] for s in found} == {until}
    if name.startswith("blocks.1"):
        assert {s.block_index for s in found} == {1}


@pytest.mark.parametrize("path", [PurePosixPath, PureWindowsPath])
def test_a_line_is_named_alike_on_each_system(path):
    folder, names = path("/a/mini"), ("model.py", "memory/head.py")
    sources = folder / "model.py", folder / "memory"
    assert tuple(name_in_sources(str(folder / name), sources) for name in names) == names
    for other in (folder / "train_ddp.py", path("/a/memory/x.py"), path("<string>")):
        assert name_in_sources(str(other), sources) == ""


@pytest.mark.parametrize(  # (a CPU does not fuse attention)
    "setting", rest_slow(["cuda", "cpu"], "cuda".__eq__)
)
@pytest.mark.parametrize("way", [*POLICIES, "groups"])
def test_each_storage_of_a_block_has_a_name_of_its_own(way, setting):
    """In forward, in backward, and replayed: the same name as in forward."""
    storages = record(way, setting, dropout=0.1).storages
    made = [s for s in storages if s.block_index == 1 and s.born and s.name != "inside of a kernel"]
    names = Counter((s.phase, s.replayed, s.name) for s in made)
    assert set(names.values()) == {1}
    assert all(re.search(r"\bblocks\.", s.name) for s in made)
    forward = {s.name for s in made if s.phase == "forward"}
    replayed = {s.name for s in made if s.replayed}
    assert replayed <= forward and bool(replayed) == (way != "none")


# ---- of blocks, groups of them, or chunks of the head, that do the same, a few are simulated


FEW = [
    ("cuda", {"recompute": "none"}, 9, 4),
    ("accumulate", {"recompute": "full"}, 9, 3),
    ("ddp", {"recompute": "cheap"}, 9, 4),
    ("cuda", {"recompute": "full:3"}, 9, 4),
    ("cpu", mix("full", 5, "selective"), 9, 3),
    ("ddp", mix("attn", 1, "cheap"), 9, 4),
    ("shards", mix("mlp", 4, "cheap"), 9, 3),
    ("ddp", {}, 2, 2),
    ("cuda", {}, 2, 31),  # the last one is smaller
    ("cuda", {"recompute": "full+offload"}, 2, 23),
    ("cuda", {"recompute": "full/2"}, 11, 3),
    ("shards", {"recompute": "full/2+nested"}, 9, 4),
    ("shards", {"recompute": "full/3+nested"}, 9, 4),
    ("rounded shards", {"recompute": "full"}, 9, 4),
    ("accumulate", mix("full", 12, "mlp/3+nested"), 17, 3),
    ("cpu", {"recompute": "full+offload"}, 9, 3),
    ("cuda", mix("cheap", 6, "selective+offload"), 12, 4),
    ("cuda", mix("full", 10, "attn/2+offload"), 16, 4),
]


@pytest.mark.parametrize(
    ("setting", "memory", "n_layers", "chunks"), rest_slow(FEW, FEW[1::4].__contains__), ids=str
)
def test_few_tell_what_all_do(setting, memory, n_layers, chunks, monkeypatch):
    """To the byte, of blocks and of chunks, and the seconds; without chunks, by operators."""
    settings = dict(SETTINGS[setting])
    dropout = settings.pop("dropout", 0.0)
    config = replace(CONFIG, n_layers=n_layers, loss_chunks=chunks, dropout=dropout)
    plan = planner(config, **settings)
    plan.step(8, recompute="sdpa")
    few = plan.step(8, **memory)
    monkeypatch.setattr(
        "planner.step.make_chunk_starts_replacement", lambda log, known: chunk_starts
    )
    _, every = planner(config, **settings).simulate_whole_step(8, few.config)
    assert (few.peak, few.peak_location, few.kept) == (every.peak, every.peak_location, every.kept)
    assert few.bytes_by_kind_at_peak == every.bytes_by_kind_at_peak
    assert sorted(few.offloaded_sizes) == sorted(every.offloaded_sizes)
    assert few.kept_per_block == pytest.approx(every.kept_per_block, rel=1e-12)
    if chunks <= 3:
        np.testing.assert_array_equal(few.timeline, every.timeline)
        assert few.phase_marks == every.phase_marks
    for what in ("flops", "bytes"):
        assert (
            few.flops_and_bytes_by_op.times @ few.flops_and_bytes_by_op[what]
            == every.flops_and_bytes_by_op.times @ every.flops_and_bytes_by_op[what]
        )
    for card in (CARD, CARDS["H100"]):
        assert few.seconds(card) == pytest.approx(every.seconds(card), rel=1e-9)
