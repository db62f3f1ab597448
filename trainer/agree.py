"""Do all processes train the same? What each says of itself when they meet, and what differs.

Several machines are started by hand, each with a command line and a disk of its own. With another
--lr on one of them the weights would drift apart without a word.
"""

import argparse
from typing import NamedTuple

import torch

from data import Dataset

from .flags import UsageError
from .pretrained import Pretrained
from .process import OneProcess
from .resume import flag
from .snapshot import Resumed

# Of these flags each process may have its own. All others must be the same: they decide what is
# trained, or when processes wait for each other.
OWN = {
    "train_data": "a path of this machine; what was read there is compared",
    "val_data": "a path of this machine; what was read there is compared",
    "tokenizer_name": "it may be a file; the vocabulary is compared, with the data",
    "checkpoint_path": "a path of this machine; the snapshot that was found there is compared",
    "init_from": "a path of this machine; the weights are compared",
    "device": "auto may be what another machine calls cuda; what was chosen is compared",
    "amp_dtype": "auto may be what another machine types; what was chosen is compared",
    "no_amp": "it may be what another machine's auto comes to; what was chosen is compared",
    "memory_budget": "all take the smallest",
    "log_to": "process 0 alone does it",
    "profile": "process 0 alone does it",
    "typed": "no flag",
}
WAYS_OUT = {
    "--checkpoint-path": "all must see the same snapshot, on a disk that they share",
    "--init-from": "all must start from the same weights",
    "--device": "choose one that all have",
    "--amp-dtype": "choose one that all have",
    "--train-data": "all must have the same data and the same tokenizer",
    "torch": "install the same on all machines",
    "the trainer": "start the same on all machines",
}


class Fact(NamedTuple):
    """Something that must be the same in all processes."""

    value: object
    shown: str
    typed: bool = False


def facts(
    args: argparse.Namespace,
    process: OneProcess,
    precision: torch.dtype,
    resumed: Resumed | None,
    source: Pretrained | None = None,
) -> dict[str, Fact]:
    """What must be the same, under the name by which the user can change it; but for the data."""

    def fact(name: str, value: object, shown: str) -> Fact:
        return Fact(value, shown, typed=name in args.typed)

    found = None if resumed is None else (resumed.state["step"], resumed.state.get("run"))
    snapshot = "no snapshot to go on from"
    if found is not None:
        snapshot = f"step {found[0]} of run {str(found[1])[:8]}"
    weights = source and source.checksum
    device, dtype = process.device.type, str(precision).removeprefix("torch.")
    version = ".".join(torch.__version__.split(".")[:2])
    return {
        "--checkpoint-path": fact("checkpoint_path", found, snapshot),
        "--init-from": fact("init_from", weights, f"weights of checksum {weights}"),
        "torch": fact("torch", version, version),
        "the trainer": fact("script", process.script, process.script),
        "--device": fact("device", device, device),
        "--amp-dtype": fact("amp_dtype", dtype, dtype),
        **{flag(n): fact(n, v, show(v)) for n, v in vars(args).items() if n not in OWN},
    }


def data_facts(data: Dataset) -> dict[str, Fact]:
    """What must be the same of the data."""
    fingerprint = f"{data.fingerprint} {data.tokenizer.fingerprint}"
    shown = f"{data.description}, fingerprint {data.fingerprint[:8]}"
    return {"--train-data": Fact(fingerprint, shown)}


def show(value: object) -> str:
    words = {True: "on", False: "off", None: "none"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def check_alike(of_each: list[dict[str, Fact]]) -> None:
    """Raise UsageError if the processes differ in something; `of_each`: their facts, by rank.

    One line for all that was typed: other flags may only follow from it, as --min-lr from --lr.
    """
    rows = {name: [facts[name] for facts in of_each] for name in of_each[0]}
    different = {name: row for name, row in rows.items() if len({f.value for f in row}) > 1}
    typed = [name for name, row in different.items() if any(fact.typed for fact in row)]
    named = typed or list(different)[:1]
    if named:
        way_out = WAYS_OUT.get(named[0], "start all with the same flags")
        told = "; ".join(f"{name}: {who_has(different[name])}" for name in named)
        raise UsageError(f"{told}: {way_out}")


def who_has(row: list[Fact]) -> str:
    """ "rank 0 has 0.003, ranks 1 to 3 have 0.001" """
    ranks: dict[object, list[int]] = {}
    for rank, fact in enumerate(row):
        ranks.setdefault(fact.value, []).append(rank)
    return ", ".join(f"{name_ranks(some)} {row[some[0]].shown}" for some in ranks.values())


def name_ranks(ranks: list[int]) -> str:
    """ "rank 0 has", "ranks 1 and 3 have", "ranks 2 to 7 have" """
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]} have"
    last = str(ranks[-1]) if len(ranks) <= 4 else f"{len(ranks) - 3} more"
    return f"ranks {', '.join(map(str, ranks[:-1][:3]))} and {last} have"
