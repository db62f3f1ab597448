"""What each rung of the recompute ladder costs: the peak of a whole step, its FLOPs, its time.

python -m studies.ladder

Two training steps of the real model, optimizer included, run on *fake* tensors, which have shapes
and storages but no memory; what is reported is the second, when AdamW's state is there. The
tracker counts every storage that an operator returns and knows nothing of this project: it can
disagree with the planner. (But time is the planner's word, for cards that it has a table of.)
Nothing here depends on the speed of the machine, or on its memory.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from model import MiniGPT, MiniGPTConfig
from planner import CARDS, Planner
from planner.choose import RUNGS as ALL_ALIKE
from studies.common import about, add_json, describe, study_parser, table, tool, write_json
from trainer.measured import LiveStorages

SEQ_LEN = 1024
GPT2_SMALL = MiniGPTConfig(dropout=0.0)
GPT2_XL = replace(GPT2_SMALL, n_layers=48, n_heads=25, d_model=1600, d_ff=6400)
CONFIGURATIONS = {  # name -> (model, sequences a batch)
    "124M, B=2": (GPT2_SMALL, 2),
    "124M, B=12": (GPT2_SMALL, 12),
    "1.5B, B=4": (GPT2_XL, 4),
}
TIMED = CONFIGURATIONS["124M, B=12"]
RUNGS: dict[str, dict[str, Any]] = {
    "plain": {"recompute": "none", "loss_chunks": 1},  # what every tutorial does: whole logits
    "full, head at once": {"recompute": "full", "loss_chunks": 1},
    **{rung: {"recompute": rung} for rung in ALL_ALIKE},
}
# What FlopCounterMode sees of attention on a CPU -> dropout that has it seen that way.
FLOPS = {"FLOPs, attention not counted": 0.0, "FLOPs, attention in full square": 0.1}
# The planner's prediction for a card, of GPT-2 small with 12 sequences -> with --compile?
TIMES = {
    "time, H100": ("H100", False),
    "time, RTX 4090": ("RTX 4090", False),
    "time, RTX 4090, compiled": ("RTX 4090", True),
}


def adamw(model: MiniGPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def train(config: MiniGPTConfig, batch: int, seq_len: int, steps: int) -> Iterator[int]:
    """Whole steps, as the trainers do them; yields before each."""
    model = MiniGPT(config).train()
    optimizer = adamw(model)
    ids = torch.randint(config.vocab_size, (batch, seq_len + 1))
    for step in range(steps):
        yield step
        # Each weight is used once a forward: autocast's cache of casts would only hold memory.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def step_peak(config: MiniGPTConfig, batch: int, seq_len: int, *, fake: bool = True) -> int:
    """Most bytes alive at once in the second step: weights, gradients, AdamW, and all the rest."""
    with FakeTensorMode() if fake else nullcontext(), LiveStorages() as storages:
        for _ in train(config, batch, seq_len, steps=2):
            storages.peak = storages.now  # forget the step before
    return storages.peak


def step_flops(config: MiniGPTConfig, batch: int, seq_len: int) -> int:
    """FLOPs of one step: forward, replay and backward."""
    # One mode around all of it: torch 2.13's selective checkpoint refuses to replay under other
    # modes than it ran under.
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        for _ in train(config, batch, seq_len, steps=1):
            pass
    return of_products(counter)


def of_products(counter: FlopCounterMode) -> int:
    """Without those of a CPU's fused attention, which torch counts since 2.15, in full square."""
    flops = counter.get_flop_counts()["Global"].items()
    return sum(n for operator, n in flops if "flash_attention_for_cpu" not in str(operator))


@dataclass(frozen=True)
class Figure:
    column: str
    rung: str
    value: float  # MiB; or FLOPs or seconds in units of those of `none`
    raw: float  # bytes, FLOPs or seconds


def peaks() -> Iterator[Figure]:
    for column, (config, batch) in CONFIGURATIONS.items():
        for rung, changes in RUNGS.items():
            peak = step_peak(replace(config, **changes), batch, SEQ_LEN)
            yield Figure(column, rung, peak / 2**20, peak)


def flops() -> Iterator[Figure]:
    """Relative to `none` with the same dropout."""
    for column, dropout in FLOPS.items():
        base = step_flops(replace(GPT2_SMALL, dropout=dropout), 2, SEQ_LEN)
        for rung, changes in RUNGS.items():
            count = step_flops(replace(GPT2_SMALL, dropout=dropout, **changes), 2, SEQ_LEN)
            yield Figure(column, rung, count / base, count)


def times() -> Iterator[Figure]:
    """Relative to `none` on the same card."""
    config, batch = TIMED
    planner = Planner(
        config, SEQ_LEN, precision=torch.bfloat16, make_optimizer=adamw, device_type="cuda"
    )
    for column, (card, compiled) in TIMES.items():
        steps = {rung: planner.step(batch, **changes) for rung, changes in RUNGS.items()}
        seconds = {rung: step.seconds(CARDS[card], compiled) for rung, step in steps.items()}
        for rung, raw in seconds.items():
            yield Figure(column, rung, raw / seconds["none"], raw)


def report(figures: list[Figure]) -> str:
    """A row for each rung, a column for each configuration."""
    columns = list(dict.fromkeys(figure.column for figure in figures))
    cells = {
        (f.column, f.rung): f"{f.value:.{0 if f.column in CONFIGURATIONS else 3}f}" for f in figures
    }
    rows = [[rung, *(cells[column, rung] for column in columns)] for rung in RUNGS]
    return table(["", *columns], rows)


FOOTNOTE = """
Peaks in MiB, of a second training step, with all that is there; FLOPs as torch's FlopCounterMode
counts them, and times as the planner predicts them, in units of `none`'s: see docs/ladder.md.
"""


@tool
def main(argv: list[str]) -> None:
    parser = study_parser("studies.ladder", __doc__)
    add_json(parser)
    args = parser.parse_args(argv)
    start, figures = time.perf_counter(), []
    total = len(RUNGS) * (len(CONFIGURATIONS) + len(FLOPS) + len(TIMES))
    with tqdm(total=total, unit="figure", leave=False, disable=None) as bar:
        for figure in chain(peaks(), flops(), times()):
            bar.set_postfix_str(f"{figure.column}: {figure.rung}")
            bar.update()
            figures.append(figure)
    found: dict[str, Any] = about("studies.ladder", argv)
    found["seconds"] = round(time.perf_counter() - start)
    print(report(figures), FOOTNOTE, describe(found), sep="\n")
    write_json(args.json, found | {"figures": [asdict(figure) for figure in figures]})


if __name__ == "__main__":
    sys.exit(main())
