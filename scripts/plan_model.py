"""Predict whether a training step of any PyTorch model fits in memory, before anything runs.

    python -m scripts.plan_model my_model.py:make_model --input 4x2048 --card "RTX 3090"
    python -m scripts.plan_model llama/config.json --input 1x2048 --card L4 --weights bfloat16

The model comes from a function in your file, or from a configuration of the package transformers.
It is made on torch's device "meta": its weights take no memory, and none are read or downloaded.
One training step of it runs on fake tensors, which have shapes but no data, without an activation
checkpoint, with one around some of the blocks, and with one around every block. No GPU is needed.
The budget, its margin and the columns are those of scripts/plan_memory.py, which answers the same
question for the trainers here, with more recompute policies.
"""

import argparse
import ast
import gc
import importlib
import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from tqdm import tqdm

from data import MiniGPTError
from planner import Card, PlanError, StepMemory
from planner.any_model import record_step
from planner.batches import largest_linear_batch
from planner.cards import choose_card
from planner.op_recorder import PROJECT_FOLDER
from planner.operators import MATMUL_DTYPES
from planner.record import StepRecord
from planner.simulate import files_of_classes, patched
from planner.timeline import KINDS
from planner.units import format_bytes, format_sizes
from scripts import cli_main, plan_table
from scripts.memory_page import page_data, write_page
from scripts.plan_table import (
    Row,
    describe_card_and_budget,
    fit_fields,
    largest_n_that_fits,
    step_row,
)
from scripts.plans import device_and_budget
from scripts.style import about, write_json
from trainer import flags
from trainer.device import MemoryBudget

MAX_IDS = 10**8  # in the batch of --input, whose ids are real: 0.8 GB
DTYPES = ("float32", "bfloat16", "float16")
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adamw-unfused": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "muon": torch.optim.Muon,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "model": dict(metavar="MODEL", help="FILE.py:FUNCTION that returns the model; or a folder with "
        "the config.json of a causal language model of the package transformers"),
    "--with": dict(dest="options", metavar="NAME=VALUE", action="append", default=[],
        help="argument of FUNCTION, or value in config.json: a literal, or text; repeatable"),
    "--input": dict(required=True, metavar="BxT", help="B sequences of T token ids, which are also "
        "the labels or targets if forward takes them; or FILE.py:FUNCTION that returns the batch, "
        "a dict or a tuple of forward's arguments"),
    "--loss": dict(metavar="FILE.py:FUNCTION", help="function (output, batch) that returns the "
        "loss (default: forward returns it)"),
    "--optimizer": dict(default="adamw", metavar="NAME", help=f"{', '.join(OPTIMIZERS)}; or "
        "FILE.py:FUNCTION that makes it from a list of parameters (default: adamw, which is fused; "
        "sgd has no momentum; muon is for the matrices of the blocks, with adamw for the rest)"),
    "--weights": dict(choices=DTYPES, help="dtype of the weights (default: the model's own)"),
    "--autocast": dict(choices=("off", *DTYPES[1:]), nargs="?", const="bfloat16", default="off",
        help="run forward under autocast, in bfloat16 unless told (default: off)"),
    "--freeze": dict(metavar="PATTERN", action="append", default=[],
        help="do not train the parameters with such names, as '*embed*'; repeatable"),
    "--blocks": dict(metavar="NAME", help="the list of blocks in the model, as model.layers "
        "(default: the longest list of modules of one class)"),
    "--grad-accum-steps": dict(type=flags.number_in_range(int, 1, flags.MAX_COUNT), default=1,
        metavar="N", help="micro-batches per step (default: 1)"),
    "--compile": dict(action="store_true", help="the step is compiled (a note: eager is planned)"),
    "--card": dict(type=flags.card_name, metavar="NAME", help="plan for this card, and predict the "
        "time; this-machine: measure it; list: all names"),
    "--device": dict(choices=("auto", "cpu", "cuda", "mps"), default="auto",
        help="device to plan for, also if it is not here (default: auto)"),
    "--memory-budget": dict(type=flags.byte_count, metavar="SIZE", help="memory to fit in, as "
        "24GiB (default: the card's, else what is free)"),
    "--at-peak": dict(action="store_true", help="list the tensors that are alive at the peak"),
    "--page": dict(type=flags.output_file, metavar="FILE",
        help="write a web page that shows each tensor of the step over time"),
    "--json": dict(type=flags.output_file, metavar="FILE", help="write the plan there, in bytes"),
}  # fmt: skip
# Argument that begins the message of a PlanError -> its flag
FLAGS = {"batch": "--input", "blocks": "--blocks", "loss": "--loss", "optimizer": "--optimizer"}
NOT_THEIRS = (
    *(Path(str(package.__file__)).parents[1] for package in (torch, importlib)),  # libraries
    *(PROJECT_FOLDER / room for room in ("planner", "scripts")),
)


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the flags as typed."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = flags.OneLineParser("python -m scripts.plan_model", description=summary)
    for name, how in ARGUMENTS.items():
        parser.add_argument(name, **how)
    return parser.parse_args(argv)


# ---- the user's files


@contextmanager
def their_errors(part: str) -> Iterator[None]:
    """Turn every error of the user's code into one line. It begins with the innermost line that is
    neither torch's nor the planner's; or with `part`, if there is no such line."""
    try:
        yield
    except MiniGPTError:
        raise
    except (Exception, SystemExit) as error:
        words, places = f"{type(error).__name__}: {error}", [part]
        if isinstance(error, PlanError):
            name, _, reason = str(error).partition(":")
            words, places = f"{FLAGS.get(name, name)}:{reason}", []
        places += [
            f"{frame.filename}:{frame.lineno}: {frame.line}"
            for frame in traceback.extract_tb((error.__cause__ or error).__traceback__)
            if frame.line and not any(map(Path(frame.filename).is_relative_to, NOT_THEIRS))
        ]
        if "meta tensor" in words or "CUDA enabled" in words:
            words += "; leave .to(device) out: the model is planned on the device meta"
        raise MiniGPTError(": ".join([*places[-1:], words])) from error


def load(place: str, flag: str, other: str = "") -> Callable:
    """Return the function that FILE.py:NAME names. Raises MiniGPTError, which says that `other` is
    allowed as well.

    Modules that the file imports are those of its own folder, also if modules of this project have
    the same names.
    """
    file, _, name = place.rpartition(":")
    path = Path(file).expanduser().resolve()
    if path.suffix != ".py" or not path.is_file():
        raise MiniGPTError(f"{flag} {place}: give {other}FILE.py:FUNCTION, with a file that exists")
    with their_errors(f"{flag} {place}"):
        function = getattr(import_file(path), name, None)
    if not callable(function):
        raise MiniGPTError(f"{flag} {place}: {path.name} has no function {name!r}")
    return function


@cache
def import_file(path: Path) -> Any:
    """Import a file, once, as a part of its packages; see `load`."""
    folder, name = path.parent, path.stem
    while (folder / "__init__.py").exists():
        folder, name = folder.parent, f"{folder.name}.{name}"
    ours, theirs = ({file.stem for file in at.iterdir()} for at in (PROJECT_FOLDER, folder))
    for other in [other for other in sys.modules if other.partition(".")[0] in ours & theirs]:
        del sys.modules[other]
    sys.path.insert(0, str(folder))
    return importlib.import_module(name)


# ---- the model, its batch, its optimizer


def make_model(args: argparse.Namespace) -> nn.Module:
    """Return the model on "meta" in training mode, with the weights of --weights and --freeze."""
    options = dict(map(option, args.options))
    if ".py" in args.model:
        make = partial(load(args.model, "MODEL"), **options)
    else:
        make = partial(transformers_model, Path(args.model), options)
    with their_errors(f"MODEL {args.model} (--with NAME=VALUE passes arguments)"):
        try:
            with torch.device("meta"):
                model = make()
        except RuntimeError:
            # Code such as torch.linspace(0, 1, 9).tolist() needs values: move only weights.
            with patched(nn.Module, register_parameter=register_on_meta):
                model = make()
    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose code is not planned
    if not isinstance(model, nn.Module):
        raise MiniGPTError(f"MODEL {args.model}: it returns no nn.Module, but a {type(model)}")
    names = dict(model.named_parameters())
    for pattern in args.freeze:
        frozen = [names[name] for name in names if fnmatch(name, pattern)]
        if not frozen:
            raise MiniGPTError(f"--freeze {pattern}: no name of a parameter, as {[*names][:1]}")
        nn.ParameterList(frozen).requires_grad_(False)
    return model.to(args.weights and getattr(torch, args.weights)).train()


def option(text: str) -> tuple[str, Any]:
    """Return the name and the value in NAME=VALUE. Raises MiniGPTError."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise MiniGPTError(f"--with {text}: NAME=VALUE, as n_layers=2")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


make_parameter = nn.Module.register_parameter


def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Do what nn.Module.register_parameter does, with a parameter on the device "meta"."""
    if parameter is not None and not parameter.is_meta:
        parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    make_parameter(module, name, parameter)


def transformers_model(path: Path, options: dict[str, Any]) -> nn.Module:
    """Return the model of a config.json of the package transformers. Raises MiniGPTError."""
    folder = path.parent if path.name == "config.json" else path
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        options |= {"local_files_only": True, "return_unused_kwargs": True}
        config, unused = AutoConfig.from_pretrained(folder, **options)
        if unused:
            raise MiniGPTError(
                f"--with {', '.join(unused)}: {folder}/config.json has no such value"
            )
        return AutoModelForCausalLM.from_config(config)
    except (ImportError, OSError, ValueError) as error:
        raise MiniGPTError(
            f"MODEL {path}: give FILE.py:FUNCTION, or a folder with a config.json, which needs the "
            "package transformers (pip install transformers): "
            + re.split(r"\.\s", str(error))[0]  # the first sentence
        ) from None


def make_batch(args: argparse.Namespace, model: nn.Module) -> Any:
    """Return the batch of --input: a dict of forward's arguments, a tuple or a list."""
    shape = re.fullmatch(r"(\d+)x(\d+)", args.input)
    if shape is None:
        make = load(args.input, "--input", "BxT, as 4x2048, or ")
        with their_errors(f"--input {args.input}"):
            batch = make()
        return (batch,) if isinstance(batch, Tensor) else batch
    rows, columns = int(shape[1]), int(shape[2])
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if not sizes or not 0 < rows * columns <= MAX_IDS:
        raise MiniGPTError(
            f"--input {args.input}: 1 to {MAX_IDS:,} ids for a model with an nn.Embedding, which "
            f"has {len(sizes)}; FILE.py:FUNCTION returns any other batch"
        )
    ids = (torch.arange(rows * columns) % sizes[0]).reshape(rows, columns)
    names = [*inspect.signature(model.forward).parameters, "input_ids"]
    first = "input_ids" if "input_ids" in names[:-1] else names[0]
    return dict.fromkeys([first, *(name for name in ("labels", "targets") if name in names)], ids)


def lists_of_blocks(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the lists of modules of one class that are not inside another such list, by name."""
    lists: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules():
        own, is_inside = [*module.children()], any(path.startswith(f"{outer}.") for outer in lists)
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        if is_list and len(own) > 1 and len({*map(type, own)}) == 1 and not is_inside:
            lists[path] = own
    return lists


def blocks_of(model: nn.Module, name: str | None) -> tuple[str, list[nn.Module]]:
    """Return the name of the list of blocks, and the blocks: --blocks, or the longest of
    `lists_of_blocks`; ("", []): there is none."""
    lists = lists_of_blocks(model)
    if name is None:
        return max(lists.items(), key=lambda item: len(item[1]), default=("", []))
    chosen = [*dict(model.named_modules()).get(name, nn.Module()).children()]
    if not chosen:
        raise MiniGPTError(f"--blocks {name}: no list of modules; here: {', '.join(lists) or None}")
    return name, chosen


def optimizer_of(name: str, blocks: list[nn.Module]) -> Callable:
    """Return the function that makes the optimizer from the list of trained parameters."""
    if name == "muon" and not blocks:
        raise MiniGPTError("--optimizer muon: it is for the matrices of blocks; --blocks NAME")
    if name in OPTIMIZERS:
        return OPTIMIZERS[name] if name != "muon" else partial(make_muon, blocks)
    make = load(name, "--optimizer", f"{', '.join(OPTIMIZERS)}, or ")
    return their_errors(f"--optimizer {name}")(make)


def make_muon(blocks: list[nn.Module], trained: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices that have a shape of the blocks' matrices, and AdamW for the
    other parameters, as far as there are any."""
    shapes = {p.shape for block in blocks for p in block.parameters() if p.dim() == 2}
    by_muon = [p for p in trained if p.shape in shapes]
    others = [p for p in trained if p.shape not in shapes]
    rules = (OPTIMIZERS["muon"], by_muon), (OPTIMIZERS["adamw"], others)
    return [make(parameters) for make, parameters in rules if parameters]


# ---- the plan


@dataclass(eq=False)
class ModelPlan:
    """The step of a model, in each way to place activation checkpoints around its blocks."""

    model: nn.Module
    batch: Any
    blocks_name: str  # "": no blocks
    blocks: list[nn.Module]
    how: dict[str, Any]  # arguments of record_step that all ways share
    micro_batches: int
    budget: MemoryBudget
    card: Card | None

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def n_tokens(self) -> int:
        """Number of integers in the batch's first tensor; if it has no integers, its first size."""
        leaves = [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor)]
        is_ids = leaves and not leaves[0].is_floating_point()
        return leaves[0].numel() if is_ids else self.step("none").batch_size

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, buffers, gradients and optimizer state, which every way takes."""
        at_start = dict(zip(KINDS, self.step("none").timeline[0].tolist(), strict=True))
        gradients = sum(p.numel() * p.itemsize for p in self.trained)
        return at_start["parameters"] + at_start["optimizer"] + gradients

    @property
    def ways(self) -> dict[str, slice]:
        """Name of a way -> which blocks have an activation checkpoint; the cheapest way first."""
        n = len(self.blocks)
        half = (n + 1) // 2
        some = {f"first {half} blocks": slice(half), "every second block": slice(None, None, 2)}
        return (
            {"none": slice(0)}
            | (some if n > 2 else {})
            | ({"every block": slice(None)} if n else {})
        )

    @cache  # noqa: B019 (a program makes one plan)
    def record(self, way: str, sequences: int | None) -> StepRecord:
        """Return the record of a step with another number of sequences; None: with the batch as it
        is. (Tensors whose first dimension is that of the batch's first tensor have sequences.)
        Raises MiniGPTError."""
        batch, size = self.batch, self.step(way).batch_size if sequences else 0
        if sequences:
            rows = torch.arange(sequences) % size
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
            resized = {id(t): t[rows] for t in tensors if t.dim() and t.size(0) == size}
            batch = tree_map(lambda leaf: resized.get(id(leaf), leaf), batch)
        with their_errors("model"):
            return record_step(self.model, batch, recompute=self.blocks[self.ways[way]], **self.how)

    def step(self, way: str, sequences: int | None = None) -> StepMemory:
        return self.record(way, sequences).step_memory

    def largest_batch(self, way: str) -> int:
        """Return the largest number of sequences that fits with the margin; 0: none."""
        step, usable = self.step(way), self.budget.bytes_within_margin or 0
        size, state, fits = step.batch_size, int(step.bytes_after_each_op[0]), step.peak <= usable
        if size == 0 or state > usable or size == 1 and not fits:
            return 0
        # With one sequence a reshape may return a view. So extrapolate from more.
        sizes = max(2, size), max(2, size) + 1
        known = [self.step(way, n if n != size else None).bytes_after_each_op for n in sizes]
        if len(known[0]) != len(known[1]):  # the operators depend on the batch
            most = 2 * usable // max(1, int(known[1].max() - known[0].max()))
            return largest_n_that_fits(lambda n: self.step(way, n).peak, state, usable, most)
        return max(largest_linear_batch(sizes, known, usable), size if fits else 0)

    def row(self, way: str) -> Row:
        """Return the row of a way, in the form of the JSON file."""
        step, budget = self.step(way), self.budget
        seconds = step.seconds(self.card, self.micro_batches) if self.card else None
        return step_row(step, way) | {
            "grad_accum_steps": self.micro_batches,
            **fit_fields(budget, lambda limit: step.peak <= limit),
            "largest_batch": None if budget.limit_bytes is None else self.largest_batch(way),
            "seconds": seconds,
            "tokens_per_s": seconds and self.micro_batches * self.n_tokens / seconds,
        }

    def recommended_plan(self) -> str | None:
        """Return the cheapest way that fits with the margin; None: none fits."""
        usable = self.budget.bytes_within_margin or 0
        return next((way for way in self.ways if self.step(way).peak <= usable), None)

    def code(self, way: str) -> str:
        """Return the Python code that makes the blocks of a way recompute; "" for "none". (A
        recomputed block would fill a KV cache of transformers a second time.)"""
        which, call = self.ways[way], "functools.partial(torch.utils.checkpoint.checkpoint"
        subscript = f"[:{which.stop}]" if which.stop else f"[::{which.step}]" if which.step else ""
        loop = f"for block in model.{self.blocks_name}{subscript}: block.forward = {call}"
        has_cache = hasattr(getattr(self.model, "config", None), "use_cache")
        no_cache = "\nmodel.config.use_cache = False" * has_cache
        return f"{loop}, block.forward, use_reentrant=False){no_cache}" * (way != "none")


# ---- what is printed


def describe_target(plan: ModelPlan, args: argparse.Namespace) -> str:
    """Return the lines above the table: model, batch, device, card, budget, training state."""
    parameters, blocks = [*plan.model.parameters()], plan.blocks
    dtypes = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))
    n, trained = (sum(p.numel() for p in some) for some in (parameters, plan.trained))
    count = f"{n:,} parameters in {dtypes}, {trained:,} trained"
    inside = f", {len(blocks)} x {type(blocks[0]).__name__} in {plan.blocks_name}" if blocks else ""
    weights = next((p.dtype for p in parameters if p.dtype in MATMUL_DTYPES), torch.float32)
    precision = weights if args.autocast == "off" else plan.how["precision"]
    autocast = f"autocast {args.autocast}" if args.autocast != "off" else "no autocast"
    lines = [
        f"model    {count}: {type(plan.model).__name__}{inside}",
        f"batch    {f'{plan.micro_batches} x ' * (plan.micro_batches > 1)}{args.input}",
        f"device   {plan.budget.device_type}, {autocast}",
        *describe_card_and_budget(plan.card, precision, plan.budget),
        f"always   {format_bytes(plan.state_bytes)}: weights, gradients, {args.optimizer}",
    ]
    return "\n".join(lines)


def answer(plan: ModelPlan, args: argparse.Namespace, taken: str | None) -> str:
    """Return the verdict: what fits, with the code for it; or why nothing fits, and what would."""
    usable = plan.budget.bytes_within_margin or 0
    way = taken or [*plan.ways][-1]
    step, largest = plan.step(way), plan.largest_batch(way)
    batch = f"batch {step.batch_size:,}" + f" with {way} checkpointed" * (way != "none")
    peak = f"{batch}: {' of '.join(format_sizes([step.peak, usable]))}"
    if taken:
        return f"fits     {peak}; at most batch {largest:,}\n{plan.code(way)}".strip()
    if largest:
        return f"nothing fits; {peak}; at most batch {largest:,}"
    return (
        f"nothing fits; {peak}; {format_bytes(plan.state_bytes)} are weights, gradients and "
        f"{args.optimizer}: --weights bfloat16, --optimizer sgd, --freeze or LoRA take less"
    )


def notes_on(plan: ModelPlan, args: argparse.Namespace) -> list[str]:
    """Return what the plan cannot know about this model."""
    record, on_cuda = plan.record("none", None), plan.budget.device_type == "cuda"
    work, names = record.step_memory.flops_and_bytes_by_op, {*record.operator_names}
    foreign = ", ".join(sorted(name for name in names if "::" in name))
    in_float32 = ((work.attention > 0) & (work.precision == 0)).any()
    others = ", ".join(lists_of_blocks(plan.model).keys() - {plan.blocks_name})
    has_rnn = any(isinstance(module, nn.RNNBase) for module in plan.model.modules())
    notes = {
        "eager code is simulated; the compiler may change time and memory": args.compile,
        "no list of equal blocks found; --blocks NAME gives one, for more rows": not plan.blocks,
        f"activation checkpoints are planned in {plan.blocks_name} only, not in {others}": others,
        "the autocast of CUDA runs more functions in float32 than the simulated one, such as "
        "torch.pow; then forward keeps more": on_cuda and args.autocast != "off",
        "scaled_dot_product_attention is planned as a kernel that keeps no scores; in float32 a "
        "card may have none, with a mask or with grouped queries": on_cuda and in_float32,
        "scaled_dot_product_attention is planned with its scores; a card may have a kernel that "
        "keeps none": on_cuda and "_safe_softmax" in names,
        "an LSTM, a GRU or an RNN has kernels of its own, whose memory is not planned; on a CPU an "
        "LSTM's plan was 0.57 of its measured peak": has_rnn,
        "tokens/s are samples/s: the first tensor of the batch has no ids": plan.card
        and plan.n_tokens == record.step_memory.batch_size,
        "a recomputed BatchNorm updates its running statistics twice": any(
            isinstance(module, nn.modules.batchnorm._BatchNorm)
            for block in plan.blocks
            for module in block.modules()
        ),
        "the workspaces of convolutions are not planned": on_cuda and "convolution" in names,
        f"the memory that these kernels take inside is not planned: {foreign}": foreign,
    }
    return [note for note, is_true in notes.items() if is_true]


def write_page_of(
    plan: ModelPlan, args: argparse.Namespace, rows: list[Row], taken: str, argv: list[str]
) -> None:
    """Write the page of --page, which shows all ways, and first `taken`."""
    ways = [
        [
            row["peak_bytes"],
            row["seconds"] or 1 + row["recomputed_flops_share"],
            way,
            plan.code(way),
        ]
        for way, row in zip(plan.ways, rows, strict=True)
    ]
    texts = {way: (f"an activation checkpoint around {way}", plan.code(way)) for way in plan.ways}
    device = plan.card.name if plan.card else plan.budget.device_type
    data = page_data(
        {way: plan.record(way, None) for way in plan.ways},
        texts,
        taken,
        [args.model, f"batch {args.input}", f"predicted for {device}"],
        plan.card,
        plan.budget.bytes_within_margin,
        ways,
        files_of_classes(plan.model),
    )
    write_page(args.page, data, "scripts.plan_model", argv)


def plan_of(args: argparse.Namespace) -> ModelPlan:
    """Return the plan of a command. Raises MiniGPTError."""
    device, budget, _ = device_and_budget(args)
    card = choose_card(args.card, device, False, 1024, 64) if args.card else None
    model = make_model(args)
    blocks_name, blocks = blocks_of(model, args.blocks)
    how = {
        "optimizer": optimizer_of(args.optimizer, blocks),
        "blocks": blocks or None,
        "loss": args.loss and load(args.loss, "--loss"),
        "precision": torch.float32 if args.autocast == "off" else getattr(torch, args.autocast),
        "device_type": device.type,
        "card_name": card.name if card and card.memory else None,  # memory 0: a measured card
        "accumulates_gradients": args.grad_accum_steps > 1,
    }
    batch = make_batch(args, model)
    return ModelPlan(model, batch, blocks_name, blocks, how, args.grad_accum_steps, budget, card)


@cli_main
def main(argv: list[str]) -> None:
    args = parse(argv)
    # torch logs what fails on fake tensors, beside the error.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    plan = plan_of(args)
    print(describe_target(plan, args) + "\n")
    taken = plan.recommended_plan()
    if plan.budget.limit_bytes is not None:
        print(answer(plan, args, taken) + "\n", flush=True)
    rows = [plan.row(way) for way in tqdm(plan.ways, unit="row", disable=None, leave=False)]
    notes = notes_on(plan, args)
    print(
        "\n".join([plan_table.format_table(rows, taken), *(f"note     {note}" for note in notes)])
    )
    record = plan.record(taken or "none", None)
    if args.at_peak:
        print(f"\n{plan_table.format_peak(record, taken or 'none')}")
    if args.page:
        write_page_of(plan, args, rows, taken or "none", argv)
    result = {
        "parameters": sum(p.numel() for p in plan.model.parameters()),
        "trained_parameters": sum(p.numel() for p in plan.trained),
        "device": plan.budget.device_type,
        "state_bytes": plan.state_bytes,
        "card": plan.card and plan.card.name,
        "budget_bytes": plan.budget.limit_bytes,
        "safe_bytes": plan.budget.bytes_within_margin,
        "optimizer": args.optimizer,
        "takes": taken,
        "rows": rows,
        "notes": notes,
        "alive_at_peak": plan_table.at_peak(record) if args.at_peak else None,
    }
    write_json(args.json, about("scripts.plan_model", argv) | result)


if __name__ == "__main__":
    gc.set_threshold(1_000_000)  # a simulation makes no reference cycles: do not search for them
    sys.exit(main())
