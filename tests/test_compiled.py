"""Recompute of compiled blocks."""

import math

import pytest
import torch
from test_model import random_ids, tiny

from planner.formulas import step_flops


def mix(first: str, n: int, rest: str) -> dict:
    return {"recompute": f"{first}:{n},{rest}"}


@pytest.mark.parametrize(
    ("memory", "n_full"),
    [
        ({"recompute": "full"}, 3),
        ({"recompute": "full/3"}, 3),
        ({"recompute": "full/2"}, 3),
        (mix("full", 1, "full"), 3),
        (mix("full", 2, "mlp"), 2),
        (mix("mlp", 1, "full"), 2),
    ],
    ids=str,
)
def test_compiled_blocks_replay_their_last_matmul_too(memory, n_full):
    """Early stop cannot end compiled code half-way; step_flops knows."""
    model = tiny(**memory, n_layers=3, dropout=0.0).train()
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


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("everything_travels")
@pytest.mark.parametrize(
    "memory",
    [mix("full", 1, "cheap"), mix("mlp", 1, "sdpa"), mix("selective", 1, "attn")],  # all of them
    ids=str,
)
def test_compiled_policies_have_the_same_losses_and_offload_changes_no_bit(memory):
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def steps(**memory) -> list[torch.Tensor]:
        """Losses; and the weights, at the end."""
        model = tiny(n_layers=3, **memory).to(device).train()
        model.compile_blocks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            ids = random_ids(2, 16).to(device)
            losses.append(model(ids, ids))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert bool(model.host_memory.made) == ("offload" in model.config.recompute)
        return [torch.stack(losses).detach(), *(p.detach() for p in model.parameters())]

    found = steps(**memory)
    assert found[0].tolist() == pytest.approx(steps()[0].tolist(), rel=1e-5)
    if memory["recompute"] != "selective":  # (which says that it does not go with offload)
        moved = memory | {"recompute": memory["recompute"] + "+offload"}
        assert all(map(torch.equal, steps(**moved), found))
