"""Describe each storage of a simulated step: its name, why it exists, when it is freed.

The name comes from the operator that made the storage, and the reason from the operators that read
it. For example, if backward's operator `gelu_backward` reads a storage, forward kept this storage
because "GELU's backward needs its input".
"""

import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from .op_recorder import PROJECT_FOLDER, Op, OpRecorder, PhaseMark, Storage
from .timeline import StepMemory

# Operator -> {pattern: names of its results}. The first pattern that matches a call counts. A call
# is "forward MODULE < INPUT;INPUT;" or "backward MODULE < INPUT;INPUT;", with the names of the
# storages that the operator reads. {read}: the first of these names, {half}: see HALF_BY_INPUT.
RESULT_NAMES_BY_OP: dict[str, dict[str, tuple[str, ...]]] = {
    "_to_copy": {"": ("{dtype} copy of {read}",)},
    "embedding": {"": ("rows of {read}",)},
    "arange": {"": ("positions",)},
    "addmm": {"": ("output",)},
    "gelu": {"": ("gelu",)},
    "native_layer_norm": {"": ("output", "mean", "1 / deviation")},
    "native_dropout": {"": ("output", "mask")},
    "attention": {"": ("attention", "logsumexp")},
    "_safe_softmax": {"": ("softmax",)},
    "_log_softmax": {"": ("log-softmax",)},
    "nll_loss_forward": {"": ("loss", "tokens that count")},
    "ones_like": {"": ("gradient of the loss",)},
    "nll_loss_backward": {"": ("gradient of log-softmax",)},
    "_log_softmax_backward_data": {"": ("gradient of logits",)},
    "native_layer_norm_backward": {
        "": ("gradient of input", "gradient of gain", "gradient of shift"),
    },
    "native_dropout_backward": {"": ("gradient of input",)},
    "gelu_backward": {"": ("gradient of gelu's input",)},
    "attention_backward": {"": ("gradient of q", "gradient of k", "gradient of v")},
    "_softmax_backward_data": {"": ("gradient of scores",)},
    "embedding_dense_backward": {"": ("gradient of weight",)},
    "cat": {"^backward": ("gradient of q, k and v",)},
    "sum": {
        "^backward  <": ("gradient of position_embedding's rows",),
        "^backward": ("gradient of bias",),
        "< head: labels that count;$": ("count",),
    },
    "add": {
        "^backward": ("sum of gradients",),
        "< (rows of [^;]*;)+$": ("x, the sum of both embeddings",),
        r"\.attn\.|\.mlp\.|\.dropout ": ("x + {half}",),
    },
    "mul": {
        "^backward [^<]*dropout": ("gradient of input",),
        "dropout": ("output",),  # if it is not fused
        "^forward head": ("a chunk's input, 0 for ignored labels",),
    },
    "empty_like": {"dropout": ("mask",), "^forward head < (?!head)": ("gradient of its input",)},
    "zeros_like": {"weight;": ("gradient of the weight",), "": ("sum of losses",)},
    "new_empty": {"^forward head": ("logits of a chunk, then their gradient",)},
    "new_zeros": {"^forward head": ("low-precision copy of the weight, padded",)},
    "where": {"token ids and labels;": ("target",)},
    "ne": {"^forward head": ("labels that count",)},
    "gather": {"^forward head": ("log-probabilities of the labels",)},
    "mm": {
        "^backward .*weight;": ("gradient of input",),
        "^backward": ("gradient of weight",),
        "^forward head < (?!head)": ("logits",),
        "^forward head .*weight": ("gradient of a chunk's input",),
        "^forward head": ("a part of the weight's gradient",),
    },
}
# Part of an input's name -> the method of a block that made this input
HALF_BY_INPUT = {
    ".attn.": "attention",
    ".dropout of attention": "attention",
    ".mlp.": "feed_forward",
    ".dropout of feed_forward": "feed_forward",
}
# (operator of backward, argument) -> why forward keeps this argument; {}: module of the operator
REASON_BY_BACKWARD_READ = {
    ("gelu_backward", "self"): "GELU's backward needs its input",
    ("native_layer_norm_backward", "input"): "{}'s backward needs its input",
    ("native_layer_norm_backward", "mean"): "{}'s backward needs the mean of its input",
    ("native_layer_norm_backward", "rstd"): "{}'s backward needs the deviation of its input",
    ("native_dropout_backward", "mask"): "dropout's backward needs its mask",
    ("embedding_dense_backward", "indices"): "an embedding's gradient is added up by id",
    ("mul_", "self"): "backward multiplies it by the loss's gradient",
    ("index_add_", "index"): "an embedding's gradient is added up by id",
    ("attention_backward", "query"): "attention's backward needs q, k and v",
    ("attention_backward", "out"): "attention's backward needs its output",
    ("attention_backward", "logsumexp"): "attention's backward needs the softmax's normaliser",
    ("_softmax_backward_data", "output"): "softmax's backward needs its output",
    ("_log_softmax_backward_data", "output"): "log-softmax's backward needs its output",
}
# kind -> why storages of this kind exist
REASON_BY_KIND = {
    "parameters": "a weight: there all the time",
    "gradients": "waits for the optimizer",
    "optimizer": "what the optimizer keeps from step to step",
}
# kind -> the one name that all storages of this kind share in a list
GROUP_NAME_BY_KIND = {
    "parameters": "weight",
    "gradients": "gradient",
    "optimizer": "optimizer state",
}


@dataclass(frozen=True)
class StepRecord:
    """The storages and the operators of one step."""

    step_memory: StepMemory
    storages: list[Storage]  # sorted by `born`
    operator_names: list[str]  # (operators + 1,) names; "": before the step, or a view
    replay_mask: np.ndarray  # (operators + 1,) bool: True if backward recomputes this operator

    def alive(self, at: int) -> list[Storage]:
        """Return the storages that exist right after operator `at`, sorted by `born`."""
        return [s for s in self.storages if s.born <= at <= s.died]

    @property
    def at_peak(self) -> list[Storage]:
        """Storages that exist at the step's peak, sorted by `born`."""
        return self.alive(int(self.step_memory.bytes_after_each_op.argmax()))

    @property
    def groups_at_peak(self) -> list[list[Storage]]:
        """The storages of `at_peak`, grouped by `group_name_and_kind`, the largest group first."""
        groups = defaultdict[tuple[str, str], list[Storage]](list)
        for storage in self.at_peak:
            groups[group_name_and_kind(storage)].append(storage)
        return sorted(groups.values(), key=lambda group: -sum(s.nbytes for s in group))


def explain_storages(log: OpRecorder, step: StepMemory) -> StepRecord:
    """Return the record of a step, with a name and a reason (`reason_alive`) for each storage, and
    with the five largest groups in its `step_memory.largest_at_peak`.

    `log`: the recorder of the step, with call sites. `step`: the memory of the same step.
    """
    reads: dict[Storage, list[tuple[Op, str]]] = defaultdict(list)  # (operator, argument) per read
    gradients: set[Storage] = set()  # made by operators of backward
    times = Counter[tuple[str, PhaseMark]]()  # number of a block's results with this name
    for op in log.ops:
        for argument, storage in op.named_inputs:
            reads[storage].append((op, argument))
        for i, storage in op.indexed_new_outputs:
            if op.call_site.is_backward:
                gradients.add(storage)
            if not storage.name:
                storage.name = name = name_of_result(op, i, storage.dtype)
                times[name, op.phase_mark] += 1
                if op.phase_mark[2] is not None and (n := times[name, op.phase_mark]) > 1:
                    storage.name += f" ({n})"
    storages = []
    for seen in log.storages:
        if seen.device.type != "cpu" or not seen.nbytes:
            # Skip a host buffer of offload, which is on "meta" (see SimulatedPinnedPool), and a
            # storage of 0 bytes, such as a full weight of a sharded model.
            continue
        storage = replace(seen)  # a copy: the log's storages change later, when they are freed
        storages.append(storage)
        storage.reason_alive = storage.reason_alive or reason_alive(
            storage, reads[seen], seen in gradients
        )
        if storage.block_index is None and (match := re.search(r"\.(\d+)\b", storage.name)):
            storage.block_index = int(match[1])  # a weight of a block, or its gradient
    record = StepRecord(
        step,
        sorted(storages, key=lambda storage: storage.born),
        operator_names=[op.name for op in log.ops],
        replay_mask=np.array([op.replayed for op in log.ops]),
    )
    largest = [
        (
            f"{len(group)} x {group_name_and_kind(group[0])[0]}" if group[1:] else group[0].name,
            sum(storage.nbytes for storage in group),
        )
        for group in record.groups_at_peak[:5]
    ]
    return replace(record, step_memory=replace(step, largest_at_peak=largest))


def group_name_and_kind(storage: Storage) -> tuple[str, str]:
    """Return (name, kind) of the group to which a storage belongs: the same tensor of all blocks is
    one group, and so are all weights, all gradients, and the whole state of the optimizer."""
    return (
        GROUP_NAME_BY_KIND.get(storage.kind) or re.sub(r"\.\d+\b", ".*", storage.name),
        storage.kind,
    )


def name_of_result(op: Op, i: int, dtype: torch.dtype) -> str:
    """Return the name of the result with index `i` and dtype `dtype` of an operator, such as
    "blocks.0.mlp.c_fc: output"."""
    module, _, is_backward = op.call_site
    inputs = "".join(f"{storage.name};" for _, storage in op.named_inputs)
    half = next((half for part, half in HALF_BY_INPUT.items() if part in inputs), "")
    if module.endswith("dropout") and half:
        module += f" of {half}"
    call = f"{'backward' if is_backward else 'forward'} {module} < {inputs}"
    patterns = RESULT_NAMES_BY_OP.get(op.name, {}).items()
    names = next((names for pattern, names in patterns if re.search(pattern, call)), ())
    name = names[i] if i < len(names) else op.name
    if "{read}" not in name:
        name = f"{module}: {name}".removeprefix(": ")
    read, number_type = inputs.partition(";")[0], str(dtype).removeprefix("torch.")
    return name.format(read=read, half=half, dtype=number_type)


def read_source_line(line: str, files: Sequence[Path] = ()) -> str:
    """Return the code of a line without its comment. `line`: file and line number, such as
    "model.py:106"; the file is one of `files`, or in this project."""
    name, _, number = line.partition(":")
    file = next((file for file in files if file.name == name), PROJECT_FOLDER / name)
    return linecache.getline(str(file), int(number or 0)).split("#")[0].strip()


def reason_alive(storage: Storage, reads: list[tuple[Op, str]], is_gradient: bool) -> str:
    """Return why a storage exists.

    `reads`: (operator, its argument) for each read of the storage. `is_gradient`: an operator of
    backward made the storage. (Operators of a recomputation do not count as operators of backward.)
    """
    if storage.kind in REASON_BY_KIND:
        return REASON_BY_KIND[storage.kind]
    backward_reads = [
        (op, argument)
        for op, argument in reads
        if (op.phase_mark[1] == "backward" or op.call_site.is_backward)
        and not is_gradient
        and not (storage.replayed and op.replayed)
    ]
    if backward_reads:
        first, module = backward_reads[0][0], backward_reads[0][0].call_site.module
        if first.replayed:
            of_module = f" of {module}" if module else ""
            return f"a replay begins with it: {first.name}{of_module}"
        for op, argument in backward_reads:
            if (op.name, argument) in REASON_BY_BACKWARD_READ:
                return REASON_BY_BACKWARD_READ[op.name, argument].format(op.call_site.module)
        if module.endswith("dropout"):
            return "dropout's backward needs its mask"
        if first.name == "mm":
            parts = ("input", "weight") if "weight" in storage.name else ("weight", "input")
            return "the gradient of {}'s {} needs its {}".format(module, *parts)
        return f"backward needs it: {first.name} of {module}"
    if storage.kind == "activations" and storage.born:
        return "its policy keeps it, though backward does not read it"
    readers = [*dict.fromkeys(op.name for op, _ in reads)]
    return f"on its way to {', '.join(readers[:3])}" if readers else "nobody reads it"
