"""Does the compiler choose better than a policy? (torch's own: activation_memory_budget.)

python -m studies.compiler

torch.compile may itself decide what backward keeps: between the least that it needs (budget 0) and
what is fastest (1), by solving a knapsack over each graph. Here each block is such a graph, as with
--compile. Beside it stand our policies, compiled, too. Counted are, in a step that really runs:
every byte that torch allocates (the peak above weights and moments), every FLOP of matrix products
and of attention, and the gradients' bits. Nothing here depends on the speed of the machine.
"""

import sys
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch._functorch.config as partitioner
from torch.profiler import profile
from tqdm import tqdm

from memory import RECOMPUTE_POLICIES
from model import MiniGPT, MiniGPTConfig
from scripts import tool
from scripts.benchmark import about, describe, table, write_json
from scripts.benchmark_worker import allocations
from studies.common import add_json, study_parser
from trainer.device import compile_blocks

CONFIG = MiniGPTConfig(512, 1024, n_layers=6, n_heads=4, d_model=256, d_ff=1024, dropout=0.0)
BATCH = 2
POLICIES = RECOMPUTE_POLICIES
BUDGETS = (0.9, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


class Counted(NamedTuple):
    name: str
    peak: int  # bytes above weights
    flops: float
    same_bits: bool  # of all gradients, as without recomputing


def count(policy: str, budget: float, gradients: list[torch.Tensor]) -> Counted:
    """One of the choices. The first call fills `gradients`, with which later ones are compared."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MiniGPT(replace(CONFIG, recompute=policy)).train()
    compile_blocks(model)
    ids = torch.randint(CONFIG.vocab_size, (BATCH, CONFIG.max_position_embeddings + 1))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        loss.backward()

    with partitioner.patch(activation_memory_budget=budget):
        step()  # compiles
        model.zero_grad(set_to_none=True)
        with profile(profile_memory=True, record_shapes=True, with_flops=True) as profiler:
            step()
    _, sizes, events = allocations(profiler, "cpu")
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    gradients[:] = gradients or found
    return Counted(
        name=policy if budget == 1 else f"budget {budget}",
        peak=int(sizes.max()),
        flops=sum(event.flops() for event in events) + attention_flops(events),
        same_bits=all(map(torch.equal, found, gradients)),
    )


def attention_flops(events: Any) -> float:
    """The profiler does not count these: two products forward, five backward, each half masked."""
    T, ops = CONFIG.max_position_embeddings, "aten::_scaled_dot_product_flash_attention_for_cpu"
    names = [event.name() for event in events]
    products = 2 * names.count(ops) + 5 * names.count(f"{ops}_backward")
    return products * 2 * BATCH * T * T * CONFIG.d_model / 2


def ours_at(peak: int, ours: list[Counted]) -> float | None:
    """Fewest FLOPs of a mix that needs at most `peak`: POLICY:N,POLICY lies on the line between
    its two policies."""
    found = [policy.flops for policy in ours if policy.peak <= peak]
    for small, large in combinations(sorted(ours, key=lambda policy: policy.peak), 2):
        if small.peak <= peak < large.peak:
            share = (peak - small.peak) / (large.peak - small.peak)
            found.append(small.flops + share * (large.flops - small.flops))
    return min(found, default=None)


def report(ours: list[Counted], compilers: list[Counted]) -> str:
    least, rows = ours[0].flops, []
    for each in ours + compilers:
        mix = ours_at(each.peak, ours) if each in compilers else None
        flops = [f"{n / least - 1:.1%}" if n else "" for n in (each.flops, mix)]
        peak, bits = f"{each.peak / 2**20:.1f}", "yes" if each.same_bits else "no"
        rows.append([each.name, peak, *flops, bits])
    return table(["", "peak, MiB", "replayed", "ours at that peak", "bits of `none`"], rows)


@tool
def main(argv: list[str]) -> None:
    parser = study_parser("studies.compiler", __doc__)
    add_json(parser)
    args = parser.parse_args(argv)
    first = list[torch.Tensor]()
    choices = [(policy, 1.0) for policy in POLICIES] + [("none", budget) for budget in BUDGETS]
    progress = tqdm(choices, leave=False, disable=None)
    counted = [count(policy, budget, first) for policy, budget in progress]
    n = len(POLICIES)
    found = about("studies.compiler", argv, torch.device("cpu"))
    print(report(counted[:n], counted[n:]), "", describe(found), sep="\n")
    write_json(args.json, found | {"counted": [each._asdict() for each in counted]})


if __name__ == "__main__":
    sys.exit(main())
