"""Recompute changes what is kept, and nothing else: not one bit of the result, whoever draws the
masks, and compiled as well. (How policies are spelled: test_flags.py.)"""

import copy
import gc
import math
import pickle
from functools import cache, partial
from weakref import ref

import pytest
import torch
from cases.shapes import PRECISIONS, ways
from harness import gpu_operators
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as some
from test_model import random_ids, tiny
from torch import Tensor

from memory import RECOMPUTE_POLICIES
from memory.policies import POLICIES, expand
from model import MiniGPT
from planner.formulas import step_flops
from planner.log import Storage, kept_for_backward
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


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("end", ["", "+offload"])
@pytest.mark.parametrize("size", [2, 3, 4, 9])
def test_groups_of_any_size_can_be_nested(size, end, precision):
    losses, tensors = train(f"full/{size}+nested{end}", 0.1, precision)
    none, expected = train("none", 0.1, precision)
    assert losses == none and all(map(torch.equal, tensors, expected))


LAST = {"full": "mlp.c_proj", "mlp": "mlp.c_proj", "attn": "attn.c_proj"}
LAST |= {"cheap": "attn.c_attn mlp.c_fc mlp.c_proj", "qkv": "attn.c_attn mlp.c_proj"}
LAST |= {"sdpa": "mlp.c_proj"}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("policy", "last"), LAST.items())
def test_a_replay_ends_before_the_last_matmul(policy, last, dropout):
    """Early stop: its result is not needed. A mask that dropout makes of it is: then the replays
    that go so far multiply once more."""
    model, ids, ran = tiny(recompute=policy, dropout=dropout).train(), random_ids(2, 16), []
    for block in model.blocks:
        for name in last.split():
            block.get_submodule(name).register_forward_hook(lambda *_, it=name: ran.append(it))
    model(ids, ids).backward()
    masked = ["mlp.c_proj"] * (dropout > 0 and policy in ("full", "qkv", "sdpa"))
    assert sorted(ran) == sorted([*last.split(), *masked] * len(model.blocks))


# ---- what is kept

B, T, C = 3, 16, 32  # 48 tokens: no weight has a shape like that


def keep(policy: str, precision: str = "bf16", mode: str = "train", **changes) -> list[Storage]:
    config = dict(n_layers=3, d_ff=4 * C, loss_chunks=1, recompute=policy)
    model, ids = tiny(**config | changes), random_ids(B, T)
    model.train(mode == "train")
    with autocast(precision):
        return kept_for_backward(model, lambda: model(ids, ids))


def total(*args, **kwargs) -> int:
    return sum(kept.bytes for kept in keep(*args, **kwargs))


@law(max_examples=20)
@example("full/3")
@example("full:3,mlp/2")
@example("full/3+nested")
@given(ways(5, ends=("",)))
def test_a_way_keeps_what_its_policies_keep(way):
    """One after the other; a group of blocks what one of them does. And nothing in evaluation."""
    policies = [policy for policy, _ in expand(way, 5).calls]
    last = of_blocks(policies[-1], 1)
    others = sum(of_blocks(policy, 2) - of_blocks(policy, 1) for policy in policies[:-1])
    assert total(way, n_layers=5) == others + last
    for end in ("", "+offload"):
        assert total(way + end, n_layers=5, mode="eval") == of_blocks("none", 5, mode="eval")


@cache
def of_blocks(policy: str, n_layers: int, **how) -> int:
    return total(policy, n_layers=n_layers, **how)


def test_of_a_nested_group_only_inputs_are_kept():
    """In forward one for each group; in backward also those of the group that is replayed, as far
    as it has come. That replay ends when it has the last block's input; then each block has its
    own, the last one first."""
    x, layers, besides = 4 * B * T * C, 6, set()
    begun: list[tuple[int, int]] = []  # whenever a block begins: which, and the bytes then
    for size in (2, 3, 4, 6):
        with LiveStorages() as storages:
            model, ids = tiny(recompute=f"full/{size}+nested", n_layers=layers), random_ids(B, T)
            model.train()(ids, ids).backward()
            model.zero_grad(set_to_none=False)
            for i, block in enumerate(model.blocks):
                note = lambda *_, i=i: begun.append((i, storages.now))  # noqa: E731
                block.ln_1.register_forward_pre_hook(note)
            loss = model(ids, ids)
            begun[:] = [(-1, storages.now)]
            loss.backward()
        firsts = range(0, layers, size)
        inputs = [(-1, len(firsts))]
        for before, first in reversed([*enumerate(firsts)]):
            n = min(size, layers - first)
            inputs += [(first + i, before + 1 + i) for i in (*range(n), *reversed(range(n - 1)))]
        assert [block for block, _ in begun] == [block for block, _ in inputs]
        for (block, there), (_, n) in zip(begun, inputs, strict=True):
            besides.add((block < 0, there - n * x))
    assert len(besides) == 2  # between forward and backward; in backward


# ---- offload


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES[1:])
def test_what_travels_is_what_the_policy_keeps(policy):
    """Of all blocks but the last, each storage once: q, k and v are one, and attention's output is
    kept by two operators. The results that selective policies keep are no saved tensors: theirs is
    the block's input alone."""
    model, ids = (
        tiny(recompute=f"{policy}+offload", n_layers=4, d_ff=4 * C).train(),
        random_ids(B, T),
    )
    for _ in range(2):  # the same blocks, step after step
        model(ids, ids).backward()
        gc.collect()
    assert sum(map(len, model.schedule.host.unused.values())) == len(model.schedule.host.made)
    by_operator = POLICIES[policy].by_operator
    kept = of_blocks("full" if by_operator else policy, 2, precision="fp32")
    kept -= of_blocks("full" if by_operator else policy, 1, precision="fp32")
    assert sum(block.nbytes for block in model.schedule.host.made) == 3 * kept


# ---- a model is an object like others


@pytest.mark.parametrize("way", ["none", *MEMORY])
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
@pytest.mark.parametrize("way", ["none", *MEMORY])
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


REPLAYS = {"full": 3, "full/3": 3, "full/2": 3, "full/3+nested": 5}
REPLAYS |= {"full:2,mlp": 2, "mlp:1,full": 2}


@pytest.mark.parametrize(("way", "n_full"), REPLAYS.items())  # replays of a whole block
def test_compiled_blocks_replay_their_last_matmul_too(way, n_full):
    """Early stop cannot end compiled code half-way; step_flops knows."""
    model = tiny(recompute=way, n_layers=3).train()
    config, ids = model.config, random_ids(2, 16)

    def flops_replayed() -> int:
        loss = model(ids, ids)
        with torch.profiler.profile(record_shapes=True) as profile:
            loss.backward()
        # (One that early stop ends as it begins does not get as far as to copy its bias.)
        ran = [
            event
            for event in profile.events()
            if event.name == "aten::addmm" and "aten::copy_" in [e.name for e in event.cpu_children]
        ]
        return sum(2 * ids.numel() * math.prod(event.input_shapes[2]) for event in ran)

    def expected(compiled: bool) -> float:
        attention = n_full * 2 * ids.size(1) * config.d_model
        return ids.numel() * (step_flops(config, ids.size(1), compiled)[1] - attention)

    assert flops_replayed() == expected(False)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    assert flops_replayed() == expected(True) > expected(False)


@pytest.mark.slow
def test_compiled_policies_multiply_no_more_than_they_say():
    """The result of a region that ends in a matmul is kept: a compiler knows no early stop."""

    def multiplied(policy: str) -> int:
        """FLOPs of matmuls of a second step."""
        model = tiny(recompute=policy).train()
        compile_blocks(model)
        ids = random_ids(2, 16)
        model(ids, ids).backward()
        with torch.profiler.profile(record_shapes=True, with_flops=True) as profiler:
            model(ids, ids).backward()
        return sum(event.flops for event in profiler.events() if event.flops)

    config, without = tiny().config, multiplied("none")
    C, wide = config.d_model, config.d_ff
    weights = {"c_attn": 3 * C * C, "c_proj": C * C, "c_fc": C * wide, "attention": 0}
    for policy in RECOMPUTE_POLICIES[1:-1]:  # `full` has no early stop when it is compiled
        twice = sum(weights[name] for name in POLICIES[policy].twice.split())
        assert multiplied(policy) - without == 2 * 2 * 16 * config.n_layers * twice, policy


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
