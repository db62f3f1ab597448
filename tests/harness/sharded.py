"""Started in several processes, by test_torchrun.py and test_shards.py.

steps    a model that is dealt out learns what DDP learns, to the bit; each policy what none learns
memory   process 0 writes what CASES take to a file
buckets  train_ddp.py, watched: its gradients live in DDP's buckets
memory_together  the same of LONG_CASES, by train_sp.py's processes
together train_sp.py's processes compute what one does, and send what they have to
changed  all of them, of a model.py with changes, compute what one does
"""

import gc
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

sys.path[:0] = map(str, Path(__file__).parents[1:3])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from cases.shapes import CONFIG, WIDE, T  # noqa: E402
from harness.changed import put_in  # noqa: E402
from harness.runs import TINY, same  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import train_ddp  # noqa: E402
from memory import (  # noqa: E402
    RECOMPUTE_POLICIES,  # noqa: E402
    offload,
    policies,
)
from model import MiniGPT, MiniGPTConfig  # noqa: E402
from train_ddp import DDPProcess  # noqa: E402
from train_fsdp import FSDPProcess  # noqa: E402
from train_sp import SPProcess  # noqa: E402
from trainer.clocks import LiveStorages  # noqa: E402
from trainer.flags import build_parser, fill_in  # noqa: E402
from trainer.optimizer import make_optimizer  # noqa: E402
from trainer.process import OneProcess  # noqa: E402
from trainer.torchrun import main_and_exit  # noqa: E402


def new_model(process: OneProcess, config: MiniGPTConfig) -> MiniGPT:
    with torch.device("meta"):
        model = MiniGPT(config)
    with patch.object(MiniGPT, "to_empty", no_whole_model) if process.shards > 1 else nullcontext():
        process.place(model)
    torch.manual_seed(0)
    model.init_weights(process.part)
    return model


to_empty = MiniGPT.to_empty


def no_whole_model(model: MiniGPT, *, device: torch.device) -> None:
    """Memory comes when all is dealt out, and is for a process's rows."""
    assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
    to_empty(model, device=device)
    for p in model.parameters():
        rows = -(-len(p) // dist.get_world_size())
        assert p.to_local().untyped_storage().nbytes() <= 4 * rows * (p.numel() // len(p)), p.shape


def train_step(
    process: OneProcess,
    wrapper: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    n: int,
    dtype: torch.dtype,
) -> None:
    """As train_minimal.train_step, of n micro-batches."""
    low = torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16, cache_enabled=False)
    for i in range(n):
        ids, labels = next(batches)
        with process.sync_gradients(now=i == n - 1):
            with low:
                loss = wrapper(ids, labels)
            (loss / n).backward()
    del ids, labels, loss
    process.clip_gradients(wrapper.parameters(), 0.5)
    optimizer.step()
    process.clear_gradients(optimizer)


# ---- steps: three of each variant, with dropout and accumulation, in both trainers' processes

# (Of 61 rows process 0 gets 31, process 1 gets 30. But every shard is a multiple of 16 numbers:
# what is left of a tensor beyond that, torch's own AdamW rounds otherwise on a CPU.)
SHAPE = MiniGPTConfig(
    vocab_size=61, max_position_embeddings=16, n_layers=3, n_heads=2, d_model=32, d_ff=64,
    dropout=0.1, loss_chunks=4,
)  # fmt: skip
VARIANTS: list[dict] = [{"recompute": policy} for policy in RECOMPUTE_POLICIES]
VARIANTS += [
    {"recompute": "mlp:1,full"},
    {"recompute": "full+offload"},
    {"recompute": "full/2+offload"},
    {"recompute": "full/3+nested"},
    {"recompute": "full/2+nested+offload"},
    {"recompute": "cheap+offload"},
    {"loss_chunks": 1},
    {"recompute": "full:2,sdpa", "mlp_chunks": 2},
    {"recompute": "full/2+nested", "mlp_chunks": 2},
    # Nothing divides evenly: rows over processes, elements over a CPU's vectors.
    {"d_model": 36, "d_ff": 100, "optimizer": "muon", "moments_dtype": "bfloat16"},
    {"d_model": 36, "d_ff": 100, "optimizer": "adamw", "moments_dtype": "bfloat16"},
    {"d_model": 36, "d_ff": 100, "optimizer": "muon", "moments_dtype": "float32"},
]


GATHERED = "float32", "bfloat16"  # --gather-dtype


def learn(process: OneProcess, variant: dict, dtype: torch.dtype, in_all: int = 4) -> dict:
    """Weights and moments, whole, after three steps of so many micro-batches of all processes
    together (on process 0; others have less)."""

    def draw() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(process.rank, 3 * in_all, process.world_size):
            torch.manual_seed(number)
            ids = torch.randint(0, 61, (2, 16))
            yield ids, ids

    shape = {name: value for name, value in variant.items() if name in vars(SHAPE)}
    model, batches = new_model(process, replace(SHAPE, **shape)), draw()
    flags = Namespace(**vars(process.args) | variant)
    optimizer = make_optimizer(model, flags, process.device, dtype)
    wrapper = process.wrap(model)
    for _ in range(3):
        train_step(process, wrapper, optimizer, batches, in_all // process.world_size, dtype)
    found = process.gather(model, optimizer)
    found["optimizer"] = found["optimizer"]["state"]
    # What was in CPU memory: weights do not go there, also not those that were gathered.
    found["moved"] = {kind: len(some) for kind, some in model.schedule.host.unused.items()}
    return found


def steps(fsdp: FSDPProcess, which: str) -> str:
    ddp = DDPProcess(fsdp.args)
    variants = VARIANTS if which == "all" else [VARIANTS[i] for i in (0, 1, -8, -7, -5, -3)]
    for dtype in (torch.float32, torch.bfloat16):
        without = None
        for variant in variants:
            ddp.buckets_are_final = False
            expected = learn(ddp, variant, dtype)
            del ddp.wrapper
            gc.collect()
            policy = variant.get("recompute", "")
            groups = "/" in policy and "nested" not in policy  # (FSDP gathers block by block)
            # In bfloat16 what autocast would round to it travels; so no bit is another one.
            # (--mlp-chunks would add up in bfloat16, and is refused.)
            low = dtype == torch.bfloat16 and "mlp_chunks" not in variant
            for gather in GATHERED[: 0 if groups else 1 + low]:
                fsdp.args.gather_dtype = gather
                found = learn(fsdp, variant, dtype)
                if gather == "bfloat16":  # (there are no copies of weights that could travel)
                    found["moved"] = expected["moved"]
                assert ddp.rank or same(expected, found), f"{variant}, {dtype}, {gather}"
            if "recompute" in variant and "mlp_chunks" not in variant:  # (others round otherwise)
                without = without or expected
                for part in ("model", "optimizer"):
                    assert same(without[part], expected[part]), f"{variant}, {dtype}: not as none"
    return f"{2 * len(variants)} variants equal"


# ---- memory


def settings_of(optimizer: str, moments: str) -> Namespace:
    return Namespace(optimizer=optimizer, moments_dtype=moments, lr=1e-3, weight_decay=0.1)


class Case(NamedTuple):
    config: MiniGPTConfig
    batch_size: int
    dtype: torch.dtype = torch.float32
    micro_batches: int = 1
    flags: Namespace = settings_of("adamw", "float32")  # of the optimizer
    seq_len: int = T
    gather: str = "float32"


FULL, CHEAP = (replace(WIDE, recompute=policy) for policy in ("full", "cheap"))
CASES = {
    "full, large head": Case(replace(CONFIG, recompute="full"), 16),
    "full": Case(FULL, 24),
    "cheap, bfloat16": Case(CHEAP, 24, torch.bfloat16),
    "none, accumulated": Case(WIDE, 4, micro_batches=2),
    "little but weights": Case(FULL, 1),
    "dropout": Case(replace(WIDE, dropout=0.1), 8),
    "offloaded": Case(replace(FULL, recompute="full+offload"), 24),
    "Muon": Case(WIDE, 8, flags=settings_of("muon", "float32")),
    "bfloat16 moments": Case(WIDE, 8, flags=settings_of("adamw", "bfloat16")),
    "nested": Case(replace(WIDE, n_layers=5, recompute="full/2+nested"), 24),
    "many positions": Case(replace(CHEAP, max_position_embeddings=4096), 8),
    "rounded": Case(
        replace(WIDE, max_position_embeddings=64), 24, torch.bfloat16, gather="bfloat16"
    ),
    "little but weights, rounded": Case(FULL, 1, torch.bfloat16, gather="bfloat16"),
    "cheap, rounded, accumulated": Case(CHEAP, 8, torch.bfloat16, 2, gather="bfloat16"),
    "nested, rounded": Case(
        replace(WIDE, recompute="full/3+nested"), 24, torch.bfloat16, gather="bfloat16"
    ),
    "one block": Case(replace(WIDE, n_layers=1), 16),
}


def long_case(seq_len: int, recompute: str, **changes: int) -> Case:
    long: dict = {"max_position_embeddings": seq_len, "n_heads": 4, "recompute": recompute}
    return Case(replace(WIDE, **long | changes), 1, torch.bfloat16, seq_len=seq_len)


# Of train_sp.py, which deals tokens and heads out as well: those of UNEVEN not evenly.
UNEVEN = {"n_heads": 5, "d_model": 80}
LONG_CASES = {
    "once": long_case(512, "full"),
    "twice": long_case(1024, "full"),
    "none": long_case(501, "none", **UNEVEN)._replace(batch_size=4),
    "sdpa": long_case(501, "sdpa", **UNEVEN),
    "nested": long_case(501, "full/2+nested", **UNEVEN),
}


class Storages(LiveStorages):
    """A storage can also be freed and made anew without an operator (fully_shard does that to the
    weights), so each is asked for its size again and again."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensor will be seen
        self.look_at()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def look_at(self, *tensors: object) -> None:
        for leaf in tree_leaves(tensors):
            if isinstance(leaf, Tensor):
                self.add(leaf.untyped_storage())
        storages = [reference() for reference in list(self.alive.values())]
        now = sum(storage.nbytes() for storage in storages if storage is not None)
        self.peak = max(self.peak, now)


def measure(process: FSDPProcess, case: Case) -> dict[str, int]:
    """Bytes: what a process has between two steps, and at the peak of one."""

    def draw() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield tuple(torch.randint(case.config.vocab_size, (2, case.batch_size, case.seq_len)))

    process.args.gather_dtype = case.gather
    model, batches = new_model(process, case.config), draw()
    optimizer = make_optimizer(model, case.flags, process.device, torch.float32)
    process.wrap(model)

    def step() -> None:
        train_step(process, model, optimizer, batches, case.micro_batches, case.dtype)

    step()
    step()
    state = [p.detach() for p in model.parameters()]
    state += [moment for moments in optimizer.state.values() for moment in moments.values()]
    there = [t.to_local() if isinstance(t, DTensor) else t for t in state]
    peaks = []
    for _ in range(5):  # a thread of gloo's may hold a buffer a moment longer, or may not
        storages = Storages()
        storages.look_at(there)
        with storages:
            step()
        peaks.append(storages.peak)
    alive = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there}
    return {"peak": min(peaks), "state": sum(alive.values())}


def memory(process: FSDPProcess, path: str, *names: str) -> str:
    cases = LONG_CASES if process.script == "train_sp.py" else CASES
    measured = {name: measure(process, cases[name]) for name in names}
    if process.rank == 0:
        Path(path).write_text(json.dumps(measured))
    dist.barrier()
    os._exit(0)


# ---- buckets


def buckets(words: list[str]) -> int:
    """Three steps of two micro-batches: after each of these, gradients lie in one set of storages.
    After the one that averages, these are DDP's buckets: so no gradients lie beside them.

    The first two steps are rehearsed (trainer/run.py), and DDP makes its final buckets in the
    first forward of the second.
    """
    before: list[dict[int, int]] = []  # each micro-batch: bytes of the gradients' storages, by
    after: list[dict[int, int]] = []  # their addresses
    n_bytes = 0
    sync_gradients = DDPProcess.sync_gradients

    def storages(parameters: list[Tensor]) -> dict[int, int]:
        found = (p.grad.untyped_storage() for p in parameters if p.grad is not None)
        return {storage.data_ptr(): storage.nbytes() for storage in found}

    @contextmanager
    def watched(process, now):
        nonlocal n_bytes
        parameters = [*process.wrapper.parameters()]
        n_bytes = sum(parameter.nbytes for parameter in parameters)
        with sync_gradients(process, now):
            before.append(storages(parameters))
            yield
            after.append(storages(parameters))

    with patch.object(DDPProcess, "sync_gradients", watched):
        code = train_ddp.main(words)
    first, final = after[:4], after[4:]
    assert first == 4 * first[:1] and final == 6 * final[:1], "gradients beside DDP's buckets"
    assert sum(first[0].values()) == sum(final[0].values()) == n_bytes
    assert sum(before[4].values()) < n_bytes / 10, "the first buckets are there beside the final"
    print(f"{n_bytes} bytes, from the first on")
    return code


# ---- together: of each sequence, every process has some tokens

# Of 2 or 4 processes, none has as many tokens and heads as the others.
LONG = MiniGPTConfig(
    vocab_size=61, max_position_embeddings=40, n_layers=3, n_heads=5, d_model=20, d_ff=48,
    dropout=0.0,
)  # fmt: skip
POLICIES_TOGETHER = [*RECOMPUTE_POLICIES, "mlp:1,full", "full/3+nested", "full/2+nested"]
POLICIES_TOGETHER += ["full+offload", "cheap+offload", "full/2+nested+offload", "full", "none"]


def batches_together() -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches, the same in all processes. Labels that do not count are dealt unevenly: in
    the first the last process has no others."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for some in (slice(18, None), slice(3, 30, 4)):
        ids, labels = torch.randint(0, 61, (2, 3, 35), generator=generator)
        labels[:, some] = -100
        batches.append((ids, labels))
    return batches


def gradients_together(process: SPProcess, dtype: torch.dtype) -> dict:
    """Losses of the micro-batches; the gradient of their mean and its norm; bytes sent."""
    model, swap, losses, sent = process.wrapper, process.swap, [], []

    def count(numbers: Tensor, send: list[int], take: list[int]) -> Tensor:
        sent.append(numbers.nbytes)
        return swap(numbers, send, take)

    process.sequence.exchange = count
    for i, (ids, labels) in enumerate(batches_together()):
        torch.manual_seed(10 * i + process.rank)
        low = dtype == torch.bfloat16
        with process.sync_gradients(now=i == 1), torch.autocast("cpu", dtype, enabled=low):
            loss = model(ids, labels)
        losses.append(loss.item())
        (loss / 2).backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    norm = process.norm([p.grad for p in model.parameters()]).item()
    model.zero_grad()
    return {"losses": losses, "gradients": found, "norm": norm, "sent": sum(sent)}


def learn_together(
    process: SPProcess, dtype: torch.dtype, policies: list[str], gather: str = "float32"
) -> dict:
    """What each policy gives, to the bit; in float64 it is what one process computes."""
    exact, process.args.gather_dtype = dtype == torch.float64, gather
    weights = torch.float64 if exact else torch.float32
    config = replace(LONG, dropout=0.0 if exact else 0.1)
    with torch.device("meta"):
        model = MiniGPT(config).to(weights)
    process.place(model)
    alone = MiniGPT(config).to(weights).train()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight, whole in zip(model.parameters(), alone.parameters(), strict=True):
            weight.copy_(process.part(whole.normal_(std=0.3), weight))
    process.wrap(model.train())
    every = []
    for policy in policies:
        model.config = replace(config, recompute=policy)
        every.append(gradients_together(process, dtype))
        sent = every[-1].pop("sent")
        if policy in ("none", "full"):
            assert sent == sent_together(process, policy) * dtype.itemsize, "what is sent"
        assert same(every[0], every[-1]), f"{policy} differs, {dtype}"
    if exact:
        model.config = replace(config, loss_chunks=1)
        check_exact(model, alone, [every[0], gradients_together(process, dtype)])
    return every[0]


def sent_together(process: SPProcess, policy: str) -> int:
    """Numbers of LONG's two micro-batches: q, k and v go there and attention's result comes back,
    in forward and, if that is replayed, once more; then the gradients of all that."""
    n, later = process.world_size, process.world_size - 1 - process.rank
    (T, t), h, C, D = (35, (35 + later) // n), (5 + later) // n, 20, 4
    there = 1 + (policy == "full")
    numbers = there * (3 * C * t + h * D * T) + C * t + 3 * h * D * T
    return 2 * 3 * 3 * numbers  # micro-batches, sequences, blocks


def check_exact(model: MiniGPT, alone: MiniGPT, each: list[dict]) -> None:
    """Against the model in one process (which test_oracle.py compares with no line of ours): loss,
    gradients, norm; and logits of another length, as sampling wants."""
    losses = [alone(*batch) for batch in batches_together()]
    (sum(losses) / 2).backward()
    norm = sum(p.grad.square().sum() for p in alone.parameters()).sqrt().item()
    for found in each:
        expected = [*(loss.item() for loss in losses), norm]
        torch.testing.assert_close([*found["losses"], found["norm"]], expected, rtol=1e-12, atol=0)
        for name, p in alone.named_parameters():
            error = (found["gradients"][name] - p.grad).abs().max() / p.grad.abs().max()
            assert error < 1e-10, f"{name}: {error}"
    ids = torch.arange(9)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids), alone(ids))


def together(process: SPProcess, which: str) -> str:
    policies = POLICIES_TOGETHER[0 if which == "all" else -3 :]
    for dtype in (torch.float64, torch.float32):
        learn_together(process, dtype, policies)
    if which == "all":
        low = [learn_together(process, torch.bfloat16, policies, it) for it in GATHERED]
        # (More than two add up in another order, as LayerNorms lie in another buffer.)
        assert process.world_size > 2 or same(*low), "what is gathered in bfloat16"
    return "as one"


# ---- changed: a model.py that its user has changed


def changed(sp: SPProcess, *names: str) -> str:
    one, ddp, fsdp = OneProcess(sp.device), DDPProcess(sp.args), FSDPProcess(sp.args)
    one.args = sp.args
    for name in names:
        put_in(name)
        ddp.buckets_are_final = False
        expected = learn(one, {}, torch.float32, in_all=2)
        for process in (ddp, fsdp):
            found = learn(process, {}, torch.float32, in_all=2)
            assert sp.rank or same(found, expected), f"{name}: {process.script}"
        learn_together(sp, torch.float64, ["none", "cheap", "sdpa"])
    return "as one"


def main() -> int:
    _, what, *words = sys.argv
    if what == "buckets":
        return buckets(words)
    offload.SMALL = 1  # everything travels
    policies.ROWS_ALIKE = 8  # of 16 tokens there are two chunks
    torch.set_num_threads(1)
    acts = {"steps": steps, "memory": memory, "together": together, "memory_together": memory}
    acts["changed"], sharing = changed, "together" in what or what == "changed"
    act, kind = acts[what], SPProcess if sharing else FSDPProcess
    args = build_parser("test", "x.pt").parse_args([*TINY, "--n-heads=4"])
    process = kind(fill_in(args))
    process.start()
    print(act(process, *words) + "\n", end="")
    dist.barrier()  # nobody leaves while another still gathers
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    main_and_exit(main)
