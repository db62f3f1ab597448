"""Each storage of a simulated step by name: what it is, who made it, why it is there, when it goes.

A StorageTracker sees bytes come and go. A Witness looks on beside it, and notes for each operator
the module and the line of the model that asked for it, and what it reads. Backward's operators have
no line: autograd runs them. But autograd numbers what it notes in forward, and a node of its graph
still has that number in backward; so the line is the one that ran when the number was given.

Why a storage is there is told by who reads it: what waits in forward until backward's
`gelu_backward` asks for it was kept because "GELU's backward needs its input".
"""

import linecache
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from .timeline import StepMemory
from .tracker import ROOT, Modules, Storage, StorageTracker, line_of_the_model
from .work import ATTENTION, Operation, fuse, is_view, parameters, tensors_in

# What an operator's results are, in forward
MADE = {
    "addmm": ("output",),
    "embedding": ("rows",),
    "gelu": ("gelu",),
    "native_layer_norm": ("output", "mean", "1 / deviation"),
    "native_dropout": ("output", "mask"),
    "attention": ("attention", "logsumexp"),
    "_safe_softmax": ("softmax",),
    "_log_softmax": ("log-softmax",),
    "nll_loss_forward": ("loss", "tokens that count"),
    "ones_like": ("gradient of the loss",),
}
# and in backward.
GRADIENTS = {
    "nll_loss_backward": ("gradient of log-softmax",),
    "_log_softmax_backward_data": ("gradient of logits",),
    "native_layer_norm_backward": ("gradient of input", "gradient of gain", "gradient of shift"),
    "native_dropout_backward": ("gradient of input",),
    "gelu_backward": ("gradient of gelu's input",),
    "attention_backward": ("gradient of q", "gradient of k", "gradient of v"),
    "_softmax_backward_data": ("gradient of scores",),
    "embedding_dense_backward": ("gradient of weight",),
    "cat": ("gradient of q, k and v",),
    "sum": ("gradient of bias",),
    "add": ("sum of gradients",),
}
# Some lines of model.py and memory/head.py, by what they assign to or by a part of them.
LINES = {
    ("x", "add"): "x, the sum of both embeddings",
    ("buffer", "new_empty"): "logits of a chunk, then their gradient",
    ("copy", "new_zeros"): "low-precision copy of the weight, padded",
    ("gradients", "empty_like"): "gradient of its input",
    ("gradients", "zeros_like"): "gradient of the weight",
    ("F.linear(", "mm"): "logits",
    ("padded @ cast_weight", "mm"): "gradient of a chunk's input",
    ("a_part @ b", "mm"): "a part of the weight's gradient",
}
# Dropout without a kernel of its own
DROPOUT = {"empty_like": "mask", "mul": "output"}
# (operator of backward, what it is given) -> why that had to be kept. {}: its module.
NEEDED = {
    ("gelu_backward", "self"): "GELU's backward needs its input",
    ("native_layer_norm_backward", "input"): "{}'s backward needs its input",
    ("native_layer_norm_backward", "mean"): "{}'s backward needs the mean of its input",
    ("native_layer_norm_backward", "rstd"): "{}'s backward needs the deviation of its input",
    ("native_dropout_backward", "mask"): "dropout's backward needs its mask",
    ("embedding_dense_backward", "indices"): "{}'s gradient is added up by id",
    ("mul_", "self"): "backward multiplies it by the loss's gradient",
    ("index_add_", "index"): "the embeddings' gradient is added up by id",
    ("attention_backward", "query"): "attention's backward needs q, k and v",
    ("attention_backward", "out"): "attention's backward needs its output",
    ("attention_backward", "logsumexp"): "attention's backward needs the softmax's normaliser",
    ("_softmax_backward_data", "output"): "softmax's backward needs its output",
    ("_log_softmax_backward_data", "output"): "log-softmax's backward needs its output",
}
RUNS_AGAIN = ("model.py", "memory/policies.py")  # in backward: their lines are a replay's
ALWAYS = {
    "parameters": "a weight: there all the time",
    "gradients": "waits for the optimizer",
    "optimizer": "what the optimizer keeps from step to step",
}
# What all of a kind are called in a list
ALIKE = {"parameters": "weight", "gradients": "gradient", "optimizer": "optimizer state"}


class Source(NamedTuple):
    """Who asked for an operator."""

    module: str  # "blocks.0.mlp.c_fc"; "": the model itself, or nothing in it
    line: str  # "model.py:106"
    is_backward: bool = False  # then they are those of its forward


class Read(NamedTuple):
    """An operator reads a storage."""

    operator: str
    argument: str
    module: str  # whose forward or backward it is part of
    in_backward: bool
    replays: bool  # forward, in backward


@dataclass(frozen=True)
class Record:
    """One step, storage by storage."""

    step: StepMemory
    storages: list[Storage]  # in order of birth
    operators: list[str]  # (operators + 1,) what ran; "" before the step, and for views
    replays: np.ndarray  # (operators + 1,) bool: in backward, forward done again
    begun: list[int]  # where each operator of `step.work` begins
    compiled_begun: list[int]  # and each of `step.compiled_work`

    def alive(self, at: int) -> list[Storage]:
        """What is there after operator `at`, in the order of birth."""
        return [s for s in self.storages if s.born <= at <= s.died]

    @property
    def at_peak(self) -> list[Storage]:
        return self.alive(int(self.step.total.argmax()))


class Witness:
    """Told by a StorageTracker of each operator, it names what comes to be."""

    def __init__(self, model: nn.Module):
        self.modules = Modules(model)
        self.sources: dict[int, Source] = {}  # by autograd's number of an operator of forward
        self.reads: dict[Storage, list[Read]] = defaultdict(list)
        self.gradients: set[Storage] = set()  # what backward makes
        self.restart()

    def restart(self) -> None:
        """The step begins."""
        self.operators, self.replays = [""], [False]
        self.reads.clear()
        self.gradients.clear()

    def __call__(
        self, tracker: StorageTracker, operator: Any, args: tuple, kwargs: dict, results: list
    ) -> None:
        """After `operator` ran, and its results were added to the tracker."""
        name = short(operator.__name__.split(".")[0])
        source = self.source(tracker.phase)
        replays = tracker.phase == "backward" and not source.is_backward
        # (Views do nothing, nor do the marks of a profiler's ranges.)
        self.operators.append("" if is_view(operator) or name.startswith("_record") else name)
        self.replays.append(replays)
        if is_view(operator):
            return
        given = dict(zip(parameters(operator), args, strict=False)) | kwargs
        read = [
            (argument, tracker.find(tensor))
            for argument, value in given.items()
            for tensor in tensors_in(value)
        ]
        for argument, storage in read:
            in_backward = source.is_backward or tracker.phase == "backward"
            seen = Read(name, argument, source.module, in_backward, replays)
            self.reads[storage].append(seen)
        for i, tensor in enumerate(results):
            storage = tracker.find(tensor)
            if storage.born == tracker.now and not storage.name:
                storage.line = source.line
                if source.is_backward:
                    self.gradients.add(storage)
                storage.name = describe(name, i, source, tensor.dtype, [s for _, s in read])

    def source(self, phase: str) -> Source:
        """Of the operator that runs."""
        module, line = self.modules.innermost, line_of_the_model()
        node = torch._C._current_autograd_node()  # None in forward, and in an optimizer's step
        if node is None or line.startswith(RUNS_AGAIN):
            source = Source("head" if phase == "head" else module, line)
            # Autograd has just given a number to this operator, if it noted it at all.
            self.sources.setdefault(torch._C._autograd._get_sequence_nr() - 1, source)
            return source
        source = self.sources.get(node._sequence_nr(), Source("", ""))
        return Source(source.module, line or source.line, is_backward=True)

    def record(
        self, step: StepMemory, tracker: StorageTracker, operations: list[Operation]
    ) -> Record:
        """Of the step that was watched, when it is over."""
        storages = []
        for seen in tracker.storages:
            if seen.device.type != "cpu" or not seen.bytes:
                continue  # offloaded, or nothing (a weight that shards leave)
            storage = replace(seen)  # (it is noted when weights die, which is with their planner)
            storages.append(storage)
            storage.why = storage.why or why(storage, self.reads[seen], seen in self.gradients)
            if storage.block is None and (found := re.search(r"\bblocks\.(\d+)\b", storage.name)):
                storage.block = int(found[1])  # its weights and their gradients
        begun, compiled = ([op.first for op in done] for done in (operations, fuse(operations)))
        return Record(step, storages, self.operators, np.array(self.replays), begun, compiled)


def group_of(storage: Storage) -> tuple[str, str]:
    """(name, kind): of what is the same but for its block; all weights are one group, say."""
    return ALIKE.get(storage.kind) or any_block(storage.name), storage.kind


def any_block(words: str) -> str:
    """ "blocks.*.ln_1: output" """
    return re.sub(r"\bblocks\.\d+\b", "blocks.*", words)


def short(operator: str) -> str:
    """Attention has another name on each device."""
    if operator.startswith(ATTENTION):
        return "attention_backward" if "backward" in operator else "attention"
    return operator


def describe(operator: str, i: int, source: Source, dtype: torch.dtype, read: list[Storage]) -> str:
    """What result `i` of an operator is: "blocks.0.mlp.c_fc: output"."""
    if operator == "_to_copy" and read:
        return f"{str(dtype).removeprefix('torch.')} copy of {read[0].name}"
    results = (GRADIENTS if source.is_backward else MADE).get(operator, ())
    what = results[i] if i < len(results) else operator
    if source.module.endswith("dropout"):
        what = DROPOUT.get(operator, what)
        if source.is_backward:
            what = "gradient of input"
    elif source.is_backward and operator == "mm":
        of_input = any(storage.name.endswith("weight") for storage in read)
        what = f"gradient of {'input' if of_input else 'weight'}"
    elif source.is_backward and operator == "sum" and not source.module:
        what = "gradient of position_embedding's rows"
    elif not source.is_backward and operator == "add" and source.module.endswith("add"):
        what = "x + update"
    elif not source.is_backward and source.module in ("", "head") and not results:
        what = said(operator, code_of(source.line))
    return f"{source.module}: {what}".removeprefix(": ")


def said(operator: str, code: str) -> str:
    """What a line of code makes with an operator."""
    for (part, by), what in LINES.items():
        is_there = code.startswith(f"{part} = ") if part.isidentifier() else part in code
        if by == operator and is_there:
            return what
    variable = re.match(r"(\w+) = ", code)
    return variable[1] if variable else operator


def code_of(line: str) -> str:
    """The code at "model.py:106"."""
    file, _, number = line.partition(":")
    return linecache.getline(str(ROOT / file), int(number or 0)).split("#")[0].strip()


def why(storage: Storage, reads: list[Read], is_gradient: bool) -> str:
    """A storage is there. `is_gradient`: backward made it (a replay is forward)."""
    if storage.kind in ALWAYS:
        return ALWAYS[storage.kind]
    in_backward = [] if is_gradient else [read for read in reads if read.in_backward]
    if storage.replayed:
        in_backward = [read for read in in_backward if not read.replays]
    if in_backward:
        first = in_backward[0]
        if first.replays:
            of_module = f" of {first.module}" if first.module else ""
            return f"a replay begins with it: {first.operator}{of_module}"
        for read in in_backward:
            if read[:2] in NEEDED:
                return NEEDED[read[:2]].format(read.module)
        if first.module.endswith("dropout"):
            return "dropout's backward needs its mask"
        if first.operator == "mm":
            parts = ("input", "weight") if "weight" in storage.name else ("weight", "input")
            return "the gradient of {}'s {} needs its {}".format(first.module, *parts)
        return f"backward needs it: {first.operator} of {first.module}"
    if storage.kind == "activations" and storage.born:
        return "its policy keeps it, though backward does not read it"
    readers = [*dict.fromkeys(read.operator for read in reads)]
    return f"on its way to {', '.join(readers[:3])}" if readers else "nobody reads it"
