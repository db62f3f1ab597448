"""Run a check in several processes. These tests use it: test_torchrun.py, test_sequence.py
and test_changed_model.py.

steps            train_fsdp.py trains the same weights as train_ddp.py, to the bit
together         train_sp.py trains the same weights as one process, up to rounding in float64; with
                 every policy it trains the same weights, to the bit
changed          with a changed model.py, all trainers for several processes train the same weights
                 as one process
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from data.errors import MiniGPTError

sys.path[:0] = map(str, Path(__file__).parents[1:3])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from harness.changed import put_in  # noqa: E402
from harness.runs import TINY, parse, same  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from memory import POLICY_NAMES, offload, policies  # noqa: E402
from model import MiniGPT, MiniGPTConfig  # noqa: E402
from train_ddp import DDPProcess  # noqa: E402
from train_fsdp import FSDPProcess  # noqa: E402
from train_sp import SPProcess  # noqa: E402
from trainer.check_model import check_model, make_model_on_meta  # noqa: E402
from trainer.optimizer import make_optimizer  # noqa: E402
from trainer.process import OneProcess  # noqa: E402
from trainer.reproducible_sums import GradientTree  # noqa: E402
from trainer.settings import ROWS  # noqa: E402
from trainer.torchrun import main_and_exit  # noqa: E402

SETTINGS = parse(*TINY, "--n-heads=4")
IN_TREE = SETTINGS.replace(reproducible_sums=True)


def new_model(
    process: OneProcess, config: MiniGPTConfig, dtype: torch.dtype = torch.float32
) -> MiniGPT:
    torch.manual_seed(0)
    model = make_model_on_meta(config, process.make_model).to(dtype)
    with (
        patch.object(OneProcess, "allocate_parameters", no_whole_model)
        if process.layout.shard_degree > 1
        else nullcontext()
    ):
        process.allocate_parameters(model)
    torch.manual_seed(0)
    model.init_weights(process.shard_like)
    return model


allocate_parameters = OneProcess.allocate_parameters


def no_whole_model(process: OneProcess, model: MiniGPT) -> None:
    """Allocate the model's memory as OneProcess does. Check that all weights are sharded before
    this call, and that the memory holds only the rows of this process."""
    assert all(isinstance(p, DTensor) for p in model.parameters())
    named = model.named_parameters()
    assert all(p.is_meta for name, p in named if not name.endswith("gain"))
    allocate_parameters(process, model)
    for p in model.parameters():
        rows = -(-len(p) // dist.get_world_size())
        most = p.element_size() * rows * (p.numel() // len(p))
        assert p.to_local().untyped_storage().nbytes() <= most, p.shape


def autocast(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16, cache_enabled=False)


def train_step(
    process: OneProcess,
    wrapper: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    tree: GradientTree,
    dtype: torch.dtype,
) -> list[float]:
    """Do a step as train_minimal.train_step does, with tree.n micro-batches. Return their losses
    and, as the last number, the norm of the gradients before clipping."""
    results = []
    for i in range(tree.n):
        ids, labels = next(batches)
        with process.gradient_sync(enabled=i == tree.n - 1), tree.micro_batch(i):
            with autocast(dtype):
                loss = wrapper(ids, labels)
            (loss / tree.n).backward()
        results.append(loss.item())
    del ids, labels, loss
    results.append(process.clip_gradients(wrapper.parameters(), 0.5).item())
    optimizer.step()
    process.clear_gradients(optimizer)
    return results


# ---- steps: three steps of each variant, with dropout and accumulation, by two trainers

# The token embedding has 61 rows: process 0 gets 31, and process 1 gets 30. The number of elements
# in each shard is a multiple of 16. Otherwise torch's AdamW on a CPU would round the last elements
# of a shard differently.
SHAPE = MiniGPTConfig(
    vocab_size=61, max_position_embeddings=16, n_layers=3, n_heads=2, d_model=32, d_ff=64,
    dropout=0.1, loss_chunks=4,
)  # fmt: skip
VARIANTS: list[dict] = [{"recompute": policy} for policy in POLICY_NAMES]
VARIANTS += [
    {"recompute": "mlp:1,full"},
    {"recompute": "full+offload"},
    {"recompute": "full/3+nested"},
    {"recompute": "full/2+nested+offload"},
    {"recompute": "cheap+offload"},
    {"loss_chunks": 1},
    {"recompute": "full:2,sdpa", "mlp_chunks": 2},
    {"recompute": "full/2+nested", "mlp_chunks": 2},
    # Uneven sizes: the number of rows is no multiple of the number of processes, and the number of
    # elements in a shard is no multiple of the length of a CPU's vectors.
    {"d_model": 36, "d_ff": 100, "optimizer": "muon", "moments_dtype": "bfloat16"},
    {"d_model": 36, "d_ff": 100, "optimizer": "adamw", "moments_dtype": "bfloat16"},
    {"d_model": 36, "d_ff": 100, "optimizer": "muon", "moments_dtype": "float32"},
]


def learn(process: OneProcess, variant: dict, dtype: torch.dtype, in_all: int = 4) -> dict:
    """Train a small model for three steps, each with `in_all` micro-batches in all processes
    together.

    Return a dict. "model", "optimizer": the whole weights and moments, complete only in process 0.
    "said": the losses and norms of this process. "logits": logits of the trained model.

    Labels that do not count (-100) are spread unevenly. If two processes share a sequence, then in
    every second micro-batch the second process has only labels that do not count.
    """

    def draw() -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(
            process.rank % process.layout.replicas, 3 * in_all, process.layout.replicas
        ):
            torch.manual_seed(number)
            ids = torch.randint(0, 61, (2, 15))
            left_out = slice(7, None) if number % 2 else slice(3, 13, 4)
            yield ids, ids.index_fill(1, torch.arange(15)[left_out], -100)

    shape = {name: value for name, value in variant.items() if name in vars(SHAPE)}
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    model, batches = new_model(process, replace(SHAPE, **shape), exact), draw()
    shared = {name: value for name, value in variant.items() if name in ROWS}
    settings = SETTINGS.replace(**shared)
    optimizer = make_optimizer(model, settings, process.device, dtype)
    if exact == torch.float64:  # use SGD: the trainers' own optimizers compute in float32
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapper = process.wrap(model, settings)
    tree = GradientTree((), in_all // process.layout.replicas)
    said = [train_step(process, wrapper, optimizer, batches, tree, dtype) for _ in range(3)]
    found = process.full_state_dicts(model, optimizer)
    with torch.no_grad(), autocast(dtype):
        logits = model.eval()(torch.arange(9)[None])  # without labels each process works alone
    return {
        "model": found["model"],
        "optimizer": found["optimizer"]["state"],
        "said": said,
        "logits": logits,
    }


def steps(fsdp: FSDPProcess, which: str) -> str:
    variants = VARIANTS if which == "all" else [VARIANTS[i] for i in (0, 1, -8, -7, -5, -3)]
    for dtype in (torch.float32, torch.bfloat16):
        for variant in variants:
            ddp = DDPProcess(SETTINGS)
            expected = learn(ddp, variant, dtype)
            del ddp.wrapper
            gc.collect()
            # --gather-dtype bfloat16 rounds only weights that autocast would round anyway. So all
            # results are equal to the bit. (Together with --mlp-chunks it is an error, because the
            # gradients of the chunks would be added up in bfloat16.)
            low = dtype == torch.bfloat16 and "mlp_chunks" not in variant
            for gather in ("float32", "bfloat16")[: 1 + low]:
                fsdp.gather_dtype = gather
                found = learn(fsdp, variant, dtype)
                assert ddp.rank or same(expected, found), f"{variant}, {dtype}, {gather}"
    return f"{2 * len(variants)} variants equal"


# ---- together: every process has some tokens of each sequence

UNEVEN = {"n_heads": 5, "d_model": 80}  # 2 or 4 processes get unequal numbers of the 5 heads
POLICIES_TOGETHER = [*POLICY_NAMES, "mlp:1,full", "full/3+nested", "full/2+nested"]
POLICIES_TOGETHER += ["full+offload", "cheap+offload", "full/2+nested+offload", "full", "none"]


def check_as_one(sp: SPProcess, policies: list[str], dtype: torch.dtype) -> None:
    """Check that all policies give the same bits in train_sp.py.

    In float64 also check that train_sp.py computes the same as one process, up to rounding, both
    with a head in chunks and with a head that computes all logits at once. (test_oracle.py compares
    one process with independent code.)
    """
    exact = dtype == torch.float64
    shape = UNEVEN | {"dropout": 0.0 if exact else 0.1}
    first = learn(sp, shape, dtype, in_all=2)
    for policy in policies:
        assert same(first, learn(sp, shape | {"recompute": policy}, dtype, in_all=2)), policy
    if exact:
        one = OneProcess(sp.device)
        alone = learn(one, shape, dtype, in_all=2)
        at_once = learn(sp, shape | {"loss_chunks": 1}, dtype, in_all=2)
        for found in (first, at_once) if sp.rank == 0 else ():
            torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-14)


def together(sp: SPProcess, which: str) -> str:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        check_as_one(sp, POLICIES_TOGETHER[0 if which == "all" else -3 :], dtype)
    return "as one"


# ---- changed: a model.py that its user has changed


def accepts(process: OneProcess, recompute: str) -> bool:
    """Return whether a trainer starts with this policy and the present MiniGPT."""
    config = replace(SHAPE, recompute=recompute)
    try:
        check_model(make_model_on_meta(config, process.make_model), process, torch.float32)
    except MiniGPTError:
        return False
    return True


# In these changes a gradient has three summands. FSDP adds those of a block first.
SUMS_OF_THREE = ["skips", "embedding_in_each_block", "first_stream"]


def changed(sp: SPProcess, *names: str) -> str:
    """Compare each change that `check_model` accepts with one process. Print what it refuses."""
    one, fsdp = OneProcess(sp.device), FSDPProcess(SETTINGS)
    for name in names:
        put_in(name)
        dtype = torch.float64 if name in SUMS_OF_THREE else torch.float32
        expected = learn(one, {}, dtype, in_all=2)
        for process in (DDPProcess(SETTINGS), fsdp, sp):
            if not accepts(process, "none"):
                if sp.rank == 0:
                    print(f"refused {name} {process.script}")
                continue
            if process is sp:
                policies = [policy for policy in ("cheap", "sdpa") if accepts(sp, policy)]
                check_as_one(sp, policies, torch.float64)
                continue
            found = learn(process, {}, dtype, in_all=2)
            if dtype == torch.float64 and sp.rank == 0:
                torch.testing.assert_close(
                    found["model"], expected["model"], rtol=1e-10, atol=1e-14
                )
            else:
                equal = (same(found[part], expected[part]) for part in ("model", "optimizer"))
                assert sp.rank or all(equal), f"{name}: {process.script}"
    return "as one"


def main() -> int:
    _, what, *words = sys.argv
    offload.MIN_OFFLOAD_BYTES = 1  # offload moves every tensor
    policies.CHUNK_MULTIPLE = 4  # tokens; small, because the sequences here are short
    torch.set_num_threads(1)
    act, kind = {
        "steps": (steps, FSDPProcess),
        "together": (together, SPProcess),
        "changed": (changed, SPProcess),
    }[what]
    process = kind(SETTINGS)
    process.init_process_group()
    print(act(process, *words) + "\n", end="")
    dist.barrier()  # no process may end while another process still gathers
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    main_and_exit(main)
