"""What each rung of the recompute ladder costs: the peak of a whole step, and its time.

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
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from model import MiniGPT, MiniGPTConfig
from planner import CARDS, Planner
from scripts import tool
from scripts.benchmark import about, describe, table, write_json
from scripts.style import POLICIES
from studies.common import add_json, study_parser
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
    "plain": POLICIES["plain"],  # first
    "full, head at once": {"recompute": "full", "loss_chunks": 1},
    **POLICIES,
}
# The planner's prediction for a card, of GPT-2 small with 12 sequences.
TIMES = {"time, H100": "H100", "time, RTX 4090": "RTX 4090"}


def adamw(model: MiniGPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def step_peak(config: MiniGPTConfig, batch: int, seq_len: int) -> int:
    """Most bytes alive at once in the second step: weights, gradients, AdamW, and all the rest."""
    with FakeTensorMode(), LiveStorages() as storages:
        model = MiniGPT(config).train()
        optimizer = adamw(model)
        ids = torch.randint(config.vocab_size, (batch, seq_len + 1))
        for _ in range(2):
            storages.peak = storages.now  # forget the step before
            # Each weight is used once a forward: autocast's cache of casts would only hold memory.
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return storages.peak


def peaks() -> Iterator[dict[str, Any]]:
    """In bytes (`raw`) and MiB."""
    for column, (config, batch) in CONFIGURATIONS.items():
        for rung, changes in RUNGS.items():
            peak = step_peak(replace(config, **changes), batch, SEQ_LEN)
            yield {"column": column, "rung": rung, "value": peak / 2**20, "raw": peak}


def times() -> Iterator[dict[str, Any]]:
    """In seconds (`raw`), and relative to `none` on the same card."""
    config, batch = TIMED
    planner = Planner(
        config, SEQ_LEN, precision=torch.bfloat16, make_optimizer=adamw, device_type="cuda"
    )
    for column, card in TIMES.items():
        steps = {rung: planner.step(batch, **changes) for rung, changes in RUNGS.items()}
        seconds = {rung: step.seconds(CARDS[card]) for rung, step in steps.items()}
        for rung, raw in seconds.items():
            yield {"column": column, "rung": rung, "value": raw / seconds["none"], "raw": raw}


def report(figures: list[dict[str, Any]]) -> str:
    """A row for each rung, a column for each configuration."""
    rows = {rung: [rung] for rung in RUNGS}
    for figure in figures:  # column by column
        digits = 0 if figure["column"] in CONFIGURATIONS else 3
        rows[figure["rung"]].append(f"{figure['value']:.{digits}f}")
    return table(["", *CONFIGURATIONS, *TIMES], rows.values())


FOOTNOTE = """
Peaks in MiB, of a second training step, with all that is there; times as the planner predicts them,
in units of `none`'s: see docs/ladder.md.
"""


@tool
def main(argv: list[str]) -> None:
    parser = study_parser("studies.ladder", __doc__)
    add_json(parser)
    args = parser.parse_args(argv)
    start, total = time.perf_counter(), len(RUNGS) * (len(CONFIGURATIONS) + len(TIMES))
    every = tqdm(chain(peaks(), times()), total=total, unit="figure", leave=False, disable=None)
    figures = list(every)
    found = about("studies.ladder", argv) | {"seconds": round(time.perf_counter() - start)}
    print(report(figures), FOOTNOTE, describe(found), sep="\n")
    write_json(args.json, found | {"figures": figures})


if __name__ == "__main__":
    sys.exit(main())
