"""Recompute changes what is kept, and nothing else: not one bit of the result, whoever draws the
masks, and compiled as well. (How policies are spelled: test_flags.py.)"""

import copy
import gc
import pickle
import random
from functools import cache, partial
from weakref import ref

import pytest
import torch
from cases.shapes import PRECISIONS, ways
from harness import gpu_operators
from harness.marks import rest_slow
from harness.planned import planner
from harness.runs import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from test_model import random_ids, tiny
from torch import Generator, Tensor

from memory import POLICY_NAMES
from model import MiniGPT
from trainer.device import compile_blocks

pytestmark = pytest.mark.usefixtures("everything_travels")


MEMORY = [
    *(policy + end for policy in POLICY_NAMES[1:] for end in ("", "+offload")),
    *("selective:1,sdpa", "full:1,attn", "full/2", "full/2+offload", "full/2+nested"),
]


def step(
    model: MiniGPT, precision: str = "fp32", generator: Generator = torch.default_generator
) -> list[Tensor]:
    """Return the losses of two micro-batches, all gradients, and the next random number."""
    random.seed(0)
    torch.manual_seed(0)
    ids, losses = random_ids(2, 16).to(model.ln_f.weight.device), []
    generator.manual_seed(7)
    model.train().zero_grad()
    for _ in range(2):
        with torch.autocast("cpu", PRECISIONS[precision], precision == "bf16", cache_enabled=False):
            losses.append(model(ids, ids.roll(-1, 1)))
        losses[-1].backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*losses, *gradients, torch.rand(1, generator=generator)]


@cache
def step_of(way: str, dropout: float, precision: str) -> list[Tensor]:
    return step(tiny(recompute=way, n_layers=4, dropout=dropout, loss_chunks=4), precision)


law = partial(settings, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("first", POLICY_NAMES[1:])
@law(max_examples=8)
@given(some.data(), some.sampled_from([0.0, 0.1]), some.sampled_from([*PRECISIONS]))
def test_every_way_equals_none(first, data, dropout, precision):
    way = data.draw(ways(4, first))
    assert same(step_of(way, dropout, precision), step_of("none", dropout, precision))


# ---- a model is an object like others

SOME = ["none", "cheap+offload", "selective", "qkv", "full/2+offload", "full/2+nested"]


@pytest.mark.parametrize("way", SOME)
def test_a_copy_of_a_model_learns_the_same_and_shares_no_tensor(way):
    """By pickle and by deepcopy, of one that has trained: offload has its buffers then."""
    model = tiny(recompute=way, n_layers=3, dropout=0.1)
    expected, models = step(model), [model]
    models += [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    addresses = set()
    for one in models:
        assert same(step(one), expected)
        addresses |= {t.data_ptr() for t in (*one.parameters(), *one.offload_pool.buffers)}
    assert len(addresses) == 3 * (len([*model.parameters()]) + len(model.offload_pool.buffers))


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("way", SOME)
def test_a_model_is_freed_without_the_garbage_collector(way, steps):
    """Before a step and after it: no cycle of references holds its weights or buffers."""
    step_of("full", 0.1, "fp32")  # (torch's first replay in a process makes a cycle of its own)
    gc.disable()
    try:
        model, ids = tiny(recompute=way, n_layers=3, dropout=0.1).train(), random_ids(2, 16)
        for _ in range(steps):
            model(ids, ids).backward()
        held = [ref(it) for it in (*model.parameters(), model.offload_pool)]
        del model
        assert {it() for it in held} == {None}
    finally:
        gc.enable()


# ---- masks: a replay draws those of forward, whoever draws them


@pytest.mark.parametrize(
    ("device", "precision", "dropout"),
    [("cuda", "fp32", 0.1), ("cuda", "bf16", 0.1), ("cuda", "bf16", 0.0), ("mps", "fp32", 0.1)],
)
def test_no_policy_changes_a_bit(device, precision, dropout):
    with getattr(gpu_operators, device)() as generator:
        none = step(tiny(n_layers=3, dropout=dropout), precision, generator)
        for way in MEMORY:
            model = tiny(n_layers=3, dropout=dropout, recompute=way)
            assert same(step(model, precision, generator), none), way


def compiled(model: MiniGPT) -> MiniGPT:
    """Compile the blocks by the compiler's rules for replays, without its kernels."""
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager_decomp_partition")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["selective", "sdpa", "attn", "qkv"])  # in the compiled code
def test_no_policy_changes_a_bit_of_what_is_compiled(policy):
    with gpu_operators.cuda() as generator:
        none, found = (
            step(compiled(tiny(n_layers=3, dropout=0.1, recompute=way)), "fp32", generator)
            for way in ("none", policy)
        )
    assert same(found, none)


# ---- compiled


MATMULS = ("aten::mm", "aten::addmm")


@pytest.mark.parametrize(
    "policy",
    rest_slow([*POLICY_NAMES[1:], "full/2", "full/3+nested"], "full".__eq__),
)
def test_compiled_blocks_multiply_no_more_than_they_say(policy):
    """Early stop cannot end compiled code half-way, so `full` and `attn` replay their last matmul
    too; but `cheap` and `qkv` keep the result of a region that ends in a matmul."""

    def multiplied(policy: str) -> int:
        """FLOPs of the linear layers in a step."""
        model, ids = compiled(tiny(recompute=policy, n_layers=3).train()), random_ids(2, 16)
        model(ids, ids).backward()
        with torch.profiler.profile(record_shapes=True, with_flops=True) as profiler:
            model(ids, ids).backward()
        return sum(event.flops for event in profiler.events() if event.name in MATMULS)

    config = tiny(recompute=policy, n_layers=3).config
    work = planner(config, seq_len=16).step(2).flops_and_bytes_by_op
    eager = (work.flops * work.times)[work.replayed & (work.attention == 0)].sum()
    stops, width = {
        "full": (3, config.d_ff),
        "full/2": (2, config.d_ff),
        "full/3+nested": (3, config.d_ff),
        "attn": (3, config.d_model),
    }.get(policy, (0, 0))
    last_matmuls = stops * 2 * 2 * 16 * width * config.d_model
    assert multiplied(policy) - multiplied("none") == eager + last_matmuls


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("way", ["full:1,cheap", "mlp:1,sdpa", "selective:1,attn", "qkv"])
def test_compiled_policies_have_the_same_losses_and_offload_changes_no_bit(way, request):
    device, found = "cuda" if torch.cuda.is_available() else "cpu", []
    torch.use_deterministic_algorithms(device == "cuda")
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    for recompute in ("none", way, f"{way}+offload"):
        model = tiny(n_layers=3, recompute=recompute).to(device)
        compile_blocks(model)
        found.append(step(model))
    none, plain, moved = found
    torch.testing.assert_close(plain[:2], none[:2], rtol=1e-5, atol=0)  # the losses
    assert same(moved, plain)
