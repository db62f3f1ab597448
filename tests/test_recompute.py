"""Recompute changes what is kept, and nothing else: not one bit of the result, whoever draws the
masks, and compiled as well. (How policies are spelled: test_flags.py.)"""

import copy
import gc
import pickle
from functools import cache, partial
from weakref import ref

import pytest
import torch
from cases.shapes import PRECISIONS, ways
from harness import gpu_operators
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from test_model import random_ids, tiny
from torch import Tensor

from memory import RECOMPUTE_POLICIES
from memory.policies import POLICIES
from model import MiniGPT
from planner.formulas import step_flops
from planner.log import kept_for_backward
from trainer.clocks import LiveStorages
from trainer.device import compile_blocks

pytestmark = pytest.mark.usefixtures("everything_travels")


MEMORY = [
    *(policy + end for policy in RECOMPUTE_POLICIES[1:] for end in ("", "+offload")),
    *("selective:1,sdpa", "full:1,attn", "full/2", "full/2+offload", "full/2+nested"),
]


def autocast(precision: str):
    dtype = PRECISIONS[precision]
    return torch.autocast("cpu", dtype, enabled=precision == "bf16", cache_enabled=False)


@cache
def train(way: str, dropout: float, precision: str):
    return learn(tiny(recompute=way, n_layers=4, dropout=dropout, loss_chunks=4), precision)


def learn(model: MiniGPT, precision: str = "fp32") -> tuple[list[float], list[Tensor]]:
    """Losses, gradients of the last of two steps, and the weights then."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        for micro_batch in range(2):
            torch.manual_seed(100 * step + micro_batch)
            ids = random_ids(2, 16)
            with autocast(precision):
                loss = model(ids, ids.roll(-1, 1))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    gradients = [p.grad for p in model.parameters()]
    return losses, [*gradients, *model.parameters()]


law = partial(settings, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("first", RECOMPUTE_POLICIES[1:])
@law(max_examples=8)
@given(some.data(), some.sampled_from([0.0, 0.1]), some.sampled_from([*PRECISIONS]))
def test_every_way_equals_none(first, data, dropout, precision):
    way = data.draw(ways(4, first))
    losses, tensors = train(way, dropout, precision)
    none, expected = train("none", dropout, precision)
    assert losses == none
    assert all(map(torch.equal, tensors, expected))


# ---- what is kept

B, T, C = 3, 16, 32  # 48 tokens: no weight has a shape like that


def kept(policy: str, n_layers: int) -> int:
    """Bytes that blocks keep for backward."""
    model, ids = tiny(n_layers=n_layers, d_ff=4 * C, recompute=policy), random_ids(B, T)
    return sum(it.bytes for it in kept_for_backward(model.train(), lambda: model(ids, ids)))


@pytest.mark.parametrize("size", [2, 3])
def test_of_a_nested_group_only_inputs_are_kept(size):
    """While one of its blocks is replayed, all that lives besides is an input of each block: those
    of the group up to this one, and the first of each group before it."""
    begun: list[tuple[int, int]] = []  # whenever a block begins: which, and the bytes then
    with LiveStorages() as storages:
        model, ids = tiny(recompute=f"full/{size}+nested", n_layers=6), random_ids(B, T)
        model.train()(ids, ids).backward()
        model.zero_grad(set_to_none=False)
        for i, block in enumerate(model.blocks):
            note = lambda *_, i=i: begun.append((i, storages.now))  # noqa: E731
            block.ln_1.register_forward_pre_hook(note)
        loss = model(ids, ids)
        begun.clear()
        loss.backward()
    inputs = []
    for first in reversed(range(0, 6, size)):
        group = [*range(size), *reversed(range(size - 1))]  # the group's replay; then each block's
        inputs += [(first + i, first // size + 1 + i) for i in group]
    assert [block for block, _ in begun] == [block for block, _ in inputs]
    besides = {bytes - n * 4 * B * T * C for (_, bytes), (_, n) in zip(begun, inputs, strict=True)}
    assert len(besides) == 1


# ---- offload


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES[1:])
def test_what_travels_is_what_the_policy_keeps(policy):
    """Of all blocks but the last, each storage once: q, k and v are one, and attention's output is
    kept by two operators. The results that selective policies keep are no saved tensors: theirs is
    the block's input alone."""
    model = tiny(recompute=f"{policy}+offload", n_layers=4, d_ff=4 * C).train()
    for _ in range(2):  # the same blocks, step after step
        model(ids := random_ids(B, T), ids).backward()
        gc.collect()
    host, seen = model.schedule.host, "full" if POLICIES[policy].by_operator else policy
    assert sum(map(len, host.unused.values())) == len(host.made)
    travelled = sum(block.nbytes for block in host.made)
    assert travelled == 3 * (kept(seen, 2) - kept(seen, 1))


# ---- a model is an object like others

SOME = ["none", "cheap+offload", "selective", "qkv", "full/2+offload", "full/2+nested"]


@pytest.mark.parametrize("way", SOME)
def test_a_copy_of_a_model_learns_the_same_and_shares_no_tensor(way):
    """By pickle and by deepcopy, of one that has trained: offload has its buffers then."""
    model = tiny(recompute=way, n_layers=3, dropout=0.1)
    learn(model)
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    storages = [
        {t.untyped_storage().data_ptr() for t in (*m.parameters(), *m.schedule.host.made)}
        for m in (model, *copies)
    ]
    assert len(set.union(*storages)) == 3 * len(storages[0])
    assert ("offload" in way) == (len(storages[0]) > len([*model.parameters()]))
    losses, tensors = learn(model)
    for other in copies:
        others_losses, others_tensors = learn(other)
        assert others_losses == losses and all(map(torch.equal, others_tensors, tensors))


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("way", SOME)
def test_a_model_is_freed_without_the_garbage_collector(way, steps):
    """Before a step and after it: no cycle of references holds its weights or buffers."""
    train("full", 0.1, "fp32")  # (torch's first replay in a process makes a cycle of its own)
    gc.disable()
    try:
        model, ids = tiny(recompute=way, n_layers=3, dropout=0.1).train(), random_ids(2, 16)
        for _ in range(steps):
            model(ids, ids).backward()
        held = [ref(it) for it in (*model.parameters(), model.schedule.host)]
        del model
        assert {it() for it in held} == {None}
    finally:
        gc.enable()


# ---- masks: a replay draws those of forward, whoever draws them


def step(generator: torch.Generator, precision: str, compiler: str = "", **changes) -> list[Tensor]:
    """Losses of two micro-batches, all gradients, and what is drawn next."""
    model, ids = tiny(n_layers=3, **changes).train(), random_ids(2, 16)
    if compiler:
        torch._dynamo.reset()
        for module in model.blocks:
            module.compile(backend=compiler)
    generator.manual_seed(7)
    losses = []
    for _ in range(2):
        with autocast(precision):
            losses.append(model(ids, ids.roll(-1, 1)))
        losses[-1].backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*losses, *gradients, torch.rand(1, generator=generator)]


@pytest.mark.parametrize(
    ("device", "precision", "dropout"),
    [("cuda", "fp32", 0.1), ("cuda", "bf16", 0.1), ("cuda", "bf16", 0.0), ("mps", "fp32", 0.1)],
)
def test_no_policy_changes_a_bit(device, precision, dropout):
    with getattr(gpu_operators, device)() as generator:
        none = step(generator, precision, dropout=dropout)
        for way in MEMORY:
            same = step(generator, precision, dropout=dropout, recompute=way)
            assert all(map(torch.equal, none, same)), way


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["selective", "sdpa", "attn", "qkv"])  # in the compiled code
def test_no_policy_changes_a_bit_of_what_is_compiled(policy):
    """By the compiler's own rules for what is drawn in a replay."""
    run = partial(step, precision="fp32", compiler="aot_eager_decomp_partition", dropout=0.1)
    with gpu_operators.cuda() as generator:
        assert all(map(torch.equal, run(generator), run(generator, recompute=policy)))


# ---- compiled


MATMULS = ("aten::mm", "aten::addmm")


@pytest.mark.parametrize("policy", [*RECOMPUTE_POLICIES[1:], "full/2", "full/3+nested"])
def test_compiled_blocks_multiply_no_more_than_they_say(policy):
    """Early stop cannot end compiled code half-way, so `full` replays its last matmul too; but the
    result of a region that ends in a matmul is kept."""

    def multiplied(policy: str) -> int:
        """FLOPs of the linear layers in a step."""
        torch._dynamo.reset()
        model, ids = tiny(recompute=policy, n_layers=3).train(), random_ids(2, 16)
        for block in model.blocks:
            block.compile(backend="aot_eager_decomp_partition")
        model(ids, ids).backward()
        with torch.profiler.profile(record_shapes=True, with_flops=True) as profiler:
            model(ids, ids).backward()
        return sum(event.flops for event in profiler.events() if event.name in MATMULS)

    config = tiny(recompute=policy, n_layers=3).config
    runs = 5 if "nested" in policy else 3 if policy[:4] in ("full", "attn") else 0
    replayed = step_flops(config, 16, compiled=True)[1] - runs * 2 * 16 * config.d_model
    assert multiplied(policy) - multiplied("none") == 2 * 16 * replayed


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("way", ["full:1,cheap", "mlp:1,sdpa", "selective:1,attn", "qkv"])
def test_compiled_policies_have_the_same_losses_and_offload_changes_no_bit(way):
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def steps(way: str) -> list[Tensor]:
        """Losses; and the weights, at the end."""
        model = tiny(n_layers=3, recompute=way).to(device).train()
        compile_blocks(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            ids = random_ids(2, 16).to(device)
            losses.append(model(ids, ids))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert bool(model.schedule.host.made) == ("offload" in way)
        return [torch.stack(losses).detach(), *(p.detach() for p in model.parameters())]

    found = steps(way)
    assert found[0].tolist() == pytest.approx(steps("none")[0].tolist(), rel=1e-5)
    assert all(map(torch.equal, steps(f"{way}+offload"), found))
