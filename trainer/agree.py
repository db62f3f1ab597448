"""Do all processes train the same? What each says of itself when they meet, and what differs.

Several machines are started by hand, each with a command line and a disk of its own. With another
--lr on one of them the weights would drift apart without a word.
"""

import argparse
from typing import Any

import torch

from data import Dataset

from .flags import UsageError, flag
from .pretrained import Origin, Pretrained
from .process import OneProcess
from .snapshot import Resumed

# Of these flags each process may have its own; all others decide what is trained, or when processes
# wait for each other. Paths are the machine's own, and "auto" may be what another machine types:
# what was found there and what was chosen is compared. By its budget each process may take a policy
# of its own; if all need the same, the smallest decides. What is logged and profiled is for process
# 0 alone.
OWN = set(
    "train_data val_data tokenizer_name checkpoint_path init_from device amp_dtype no_amp "
    "memory_budget log_to profile typed".split()
)
WAYS_OUT = {
    "--checkpoint-path": "all must see the same snapshot, on a disk that they share",
    "--init-from": "all must start from the same weights",
    "--device": "choose one that all have",
    "--amp-dtype": "choose one that all have",
    "--train-data": "all must have the same data and the same tokenizer",
    "torch": "install the same on all machines",
    "the trainer": "start the same on all machines",
}


# These may only follow from other flags, as the warm-up from --num-tokens: those are named first.
FOLLOW = "--data-seed --max-position-embeddings --num-steps --warmup-steps --lr --min-lr".split()
# What must be the same in all processes, under the name by which the user can change it.
Facts = dict[str, Any]


def facts(
    args: argparse.Namespace, process: OneProcess, precision: torch.dtype, origin: Origin
) -> Facts:
    """All but the data."""
    snapshot = "no snapshot to go on from"
    if isinstance(origin, Resumed):
        snapshot = f"step {origin.state['step']} of run {str(origin.state.get('run'))[:8]}"
    checksum = origin.checksum if isinstance(origin, Pretrained) else None
    return {
        "--checkpoint-path": snapshot,
        "--init-from": f"weights of checksum {checksum}",
        "torch": ".".join(torch.__version__.split(".")[:2]),
        "the trainer": process.script,
        "--device": process.device.type,
        "--amp-dtype": str(precision).removeprefix("torch."),
        **{flag(name): value for name, value in vars(args).items() if name not in OWN},
    }


def data_facts(data: Dataset) -> Facts:
    """What must be the same of the data."""
    prints = f"{data.fingerprint[:8]} {data.tokenizer.fingerprint[:8]}"
    return {"--train-data": f"{data.description}, fingerprint {prints}"}


def check_alike(of_each: list[Facts]) -> None:
    """Raise UsageError for the first thing in which the processes differ; `of_each`: by rank."""
    first = of_each[0]
    for name in sorted(first, key=FOLLOW.__contains__):
        for rank, facts in enumerate(of_each):
            if facts[name] != first[name]:
                way_out = WAYS_OUT.get(name, "start all with the same flags")
                has = f"rank 0 has {show(first[name])}, rank {rank} has {show(facts[name])}"
                raise UsageError(f"{name}: {has}: {way_out}")


def show(value: object) -> str:
    words = {True: "on", False: "off", None: "none"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
