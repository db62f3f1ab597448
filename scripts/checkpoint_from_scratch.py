"""Rebuild activation checkpointing from scratch: a lesson that runs.

python -m scripts.checkpoint_from_scratch
python -m scripts.checkpoint_from_scratch --dropout 0     # the replay leaves out a matmul

`checkpoint(block, x, use_reentrant=False)` in model.py looks like magic. It works like a cloakroom.
In forward, autograd hands in each tensor that backward will need, and gets a ticket for it. The
cloakroom throws the tensor away. When backward comes with the first ticket, the block runs once
more. The tensors that it hands in this time are the missing ones.

First, one small block is run, and each event is printed as it happens. Then a MiniGPT trains one
step with the checkpoint of this file, and one with torch's own. Both must be equal to the bit, to
the operation and to the byte, else the exit code is 1.

Part 1 is the checkpoint, part 2 the narrator, part 3 the comparison.
"""

import os
import sys

if not __package__:  # python scripts/checkpoint_from_scratch.py: the others lie one folder up
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    import scripts  # noqa: F401

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from model import Block, MiniGPT, MiniGPTConfig
from planner.op_recorder import kept_for_backward
from scripts import cli_main
from trainer.flags import OneLineParser, number_in_range

# ---------------------------------------------------------------------------------------------
# Part 1: the checkpoint.


class Ticket:
    """A placeholder that the graph holds instead of a tensor. The replay puts the tensor into
    it."""

    def __init__(self, number: int):
        self.number = number
        self.tensor: Tensor | None = None


class EarlyStop(Exception):
    """Ends a replay: all tickets are filled, and the rest of the function is not needed."""


def checkpoint(function: Callable, *args: Any) -> Any:
    """Return `function(*args)`. Recompute in backward what backward needs, instead of keeping
    it."""
    if not torch.is_grad_enabled():
        return function(*args)  # there will be no backward
    same_conditions = remember_conditions()
    # Weak references: only the graph owns a ticket. If a result is dropped, its part of the graph
    # goes, and the tickets with it. The replay must not keep tensors that backward never fetches.
    tickets: list[weakref.ref[Ticket]] = []

    def pack(tensor: Tensor) -> Ticket:  # forward: autograd wants to keep this tensor
        ticket = Ticket(len(tickets))
        tickets.append(weakref.ref(ticket))
        tell("pack", ticket, tensor)
        return ticket  # the tensor is freed as soon as forward itself no longer needs it

    def unpack(ticket: Ticket) -> Tensor:  # backward: autograd wants the tensor back
        tell("unpack", ticket)
        if ticket.tensor is None:  # true for the first ticket that comes back, whichever it is
            replay(tickets, same_conditions(), function, args)
        if ticket.tensor is None:
            raise RuntimeError("the replay saved fewer tensors: did the function change its way?")
        tensor, ticket.tensor = ticket.tensor, None  # free it as soon as backward has used it
        return tensor

    with saved_tensors_hooks(pack, unpack):
        return function(*args)


def replay(
    tickets: list[weakref.ref[Ticket]],
    same_conditions: AbstractContextManager,
    function: Callable,
    args: tuple,
) -> None:
    """Run the function again, up to the last tensor that has a ticket, and fill the tickets."""
    tell("replay")
    n_filled = 0

    def fill(tensor: Tensor) -> Tensor:  # the order is that of forward: no more is needed
        nonlocal n_filled
        ticket = tickets[n_filled]()
        if ticket is not None:
            tell("fill", ticket)
            ticket.tensor = tensor.detach()  # else it would keep the replay's graph alive
        n_filled += 1
        if n_filled == len(tickets):
            tell("stop")
            # A linear layer saves its input *before* its matmul. So without dropout the last matmul
            # of a block is not run again. Dropout saves its mask after it has run.
            raise EarlyStop
        return tensor

    # Backward runs with gradients disabled, and then operators save nothing: so enable them.
    with same_conditions, torch.enable_grad(), saved_tensors_hooks(fill, lambda tensor: tensor):
        with suppress(EarlyStop):
            function(*args)  # the result is thrown away: forward has returned it long ago


def remember_conditions() -> Callable[[], AbstractContextManager]:
    """Record what a result depends on besides the arguments; return a function that makes a context
    in which all that is restored.

    Random number generators: dropout must draw forward's masks again, else the gradients are wrong,
    without an error. Autocast: backward usually runs outside of it, so the replay would compute in
    float32 what forward computed in bfloat16.
    """
    # (Reading the generators of a GPU that is not used yet would initialize it.)
    cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    cpu_rng = torch.get_rng_state()
    cache = torch.is_autocast_cache_enabled()
    autocasts = [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        for device in ("cpu", "cuda")
    ]

    @contextmanager
    def same_conditions() -> Iterator[None]:
        with ExitStack() as stack:
            # fork_rng: after the replay, the generators continue where backward found them.
            stack.enter_context(torch.random.fork_rng(devices=range(len(cuda_rng))))
            torch.set_rng_state(cpu_rng)
            torch.cuda.set_rng_state_all(cuda_rng)
            for device, dtype, enabled in autocasts:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=cache))
            yield

    return same_conditions


# torch's version does more: it takes keyword arguments; it saves the arguments through autograd, so
# an outer checkpoint or an offload sees them, and a change in place is noticed; it compares shapes
# and dtypes of the tensors that the replay saves; it knows devices other than these two.

# ---------------------------------------------------------------------------------------------
# Part 2: the narrator. A checkpoint works without it.


class Narrator(TorchFunctionMode):
    """Print what happens to the tickets, one line for each layer or operator."""

    def __init__(self, module: torch.nn.Module, x: Tensor):
        super().__init__()
        self.names = {address(p): name for name, p in module.named_parameters()}
        self.names[address(x)] = "x"
        self.results: dict[int, str] = {}  # address -> the operator that made the tensor there
        self.operator = ""  # the running operator
        self.inputs: set[int] = set()  # addresses of its inputs
        self.owners: dict[int, str] = {}  # ticket number -> the operator that got it
        self.line: tuple[str, str] | None = None  # (event, operator) of the unfinished line

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run `func` and note its inputs and result. torch calls this instead of every function on
        tensors."""
        kwargs = kwargs or {}
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        self.inputs = {address(x) for x in tensors}
        weights = [self.names[place] for place in self.inputs if "." in self.names.get(place, "")]
        self.operator = weights[0].rpartition(".")[0] if weights else func.__name__
        self.operator = self.operator.replace("scaled_dot_product_", "")
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and address(result) not in self.inputs:  # not a view
            self.results[address(result)] = self.operator.rpartition(".")[2] + "(..)"
        return result

    def describe(self, tensor: Tensor) -> str:
        """Return name and shape: "gelu(..) 4x32". A tensor of the running operator has no name
        yet."""
        place, name = address(tensor), ""
        if place in self.names:
            name = self.names[place].rpartition(".")[2] + " "
        elif place in self.inputs and place in self.results:
            name = self.results[place] + " "
        return name + "x".join(map(str, tensor.shape)).removeprefix("1x")  # B = 1

    def hear(self, event: str, ticket: Ticket | None, tensor: Tensor | None) -> None:
        if event == "replay":
            self.headline(" is empty.\nREPLAY: the block runs again, with the same random numbers:")
        elif event == "stop":
            is_mask = self.owners[max(self.owners)] == "dropout"
            end = "too late for the matmul before it" if is_mask else "its matmul is not run"
            self.headline(f" was the last: EARLY STOP, {end}.\nBACKWARD goes on:")
        elif ticket is not None:
            owner = self.owners.setdefault(ticket.number, self.operator)
            is_new_line = self.line != (event, owner)
            self.line = event, owner
            print(f"\n    {owner:<12}" if is_new_line else ",", end="")
            print(f" #{ticket.number}", end="", flush=True)
            if tensor is not None:
                print(f" {self.describe(tensor)}", end="", flush=True)

    def headline(self, text: str) -> None:
        print(text, end="", flush=True)
        self.line = None


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()  # views (q, k and v; weight.t()) share it


narrator: Narrator | None = None


def tell(event: str, ticket: Ticket | None = None, tensor: Tensor | None = None) -> None:
    if narrator:
        narrator.hear(event, ticket, tensor)


def tell_the_story(dropout: float) -> None:
    """Print the story of one block, forward and backward. Its last line is `x + dropout(..)`: with
    dropout, the last ticket is for a mask, which exists only after the last matmul."""
    global narrator
    torch.manual_seed(0)
    block = Block(MiniGPTConfig(n_heads=2, d_model=8, d_ff=32, dropout=dropout))
    block.attn.dropout = 0.0  # on a CPU, attention with dropout saves a dozen tensors more
    x = torch.randn(1, 4, 8, requires_grad=True)
    narrator = Narrator(block, x)
    try:
        with narrator:
            narrator.headline("FORWARD: each tensor that backward will need goes, a #ticket stays.")
            y = checkpoint(block, x)
            n = len(narrator.owners)
            narrator.headline(f"\nKept: x and {n} tickets. BACKWARD begins at the end:")
            y.sum().backward()
            narrator.headline("\nDone: each ticket came back once.\n\n")
    finally:
        narrator = None


# ---------------------------------------------------------------------------------------------
# Part 3: the comparison, on the real model.

CONFIG = MiniGPTConfig(
    vocab_size=64, max_position_embeddings=32, n_layers=2, n_heads=4, d_model=64, d_ff=256
)
PRECISIONS = {"float32": torch.float32, "bfloat16 autocast": torch.bfloat16}


def in_place_of_torchs(function: Callable, *args: Any, **options: bool) -> Any:
    return checkpoint(function, *args)


# Name of a variant -> (recompute policy, context in which the step runs)
VARIANTS: dict[str, tuple[str, Callable[[], AbstractContextManager]]] = {
    "no checkpoint": ("none", nullcontext),
    "torch, no early stop": ("full", partial(set_checkpoint_early_stop, False)),
    "torch": ("full", nullcontext),
    # The same model with the same line; only the name `checkpoint` in it means another function.
    "this file": ("full", partial(mock.patch, "model.checkpoint", in_place_of_torchs)),
}


@dataclass(frozen=True)
class Step:
    """Results and costs of one training step of the model."""

    loss: Tensor
    gradients: dict[str, Tensor]
    flops: int  # matmuls of forward and backward (fused attention: since torch 2.15)
    kept: int  # bytes that live from forward to backward


def run_step(
    policy: str,
    context: Callable[[], AbstractContextManager] = nullcontext,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.1,
) -> Step:
    torch.manual_seed(0)
    model = MiniGPT(replace(CONFIG, recompute=policy, dropout=dropout)).train()
    ids = torch.randint(0, CONFIG.vocab_size, (4, 33))

    def forward() -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False):
            return model(ids[:, :-1], ids[:, 1:])

    with context():
        # Count all storages that forward made and that are still alive. A hook sees only those of
        # the graph, and our x hides in a closure.
        kept = sum(tensor.nbytes for tensor in kept_for_backward(model, forward))
        torch.manual_seed(1)
        with FlopCounterMode(display=False) as counter:
            loss = forward()
            loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach(), gradients, counter.get_total_flops(), kept)


def same_gradients(a: Step, b: Step) -> bool:
    return a.gradients.keys() == b.gradients.keys() and all(
        torch.equal(gradient, b.gradients[name]) for name, gradient in a.gradients.items()
    )


def is_torchs(ours: Step, torchs: Step) -> bool:
    """Return whether both steps are equal to the bit, to the operation and to the byte."""
    same_cost = (ours.flops, ours.kept) == (torchs.flops, torchs.kept)
    return same_cost and torch.equal(ours.loss, torchs.loss) and same_gradients(ours, torchs)


def print_table(steps: dict[str, Step]) -> None:
    none = steps["no checkpoint"]
    for variant, step in steps.items():
        loss, gradients = f"{step.loss:.6f}", f"{len(step.gradients)} tensors"
        if step is not none:
            loss = "equal" if torch.equal(step.loss, none.loss) else "NOT EQUAL"
            gradients = "equal" if same_gradients(step, none) else "NOT EQUAL"
        print(
            f"    {variant:<22}{loss:<11}{gradients:<12}{step.flops:>12,}"
            f"{step.flops / none.flops:>7.3f}{step.kept:>12,}{step.kept / none.kept:>7.3f}"
        )


@cli_main
def main(argv: list[str]) -> int:
    parser = OneLineParser(
        prog="python -m scripts.checkpoint_from_scratch",
        description="Activation checkpointing, rebuilt from scratch and compared with torch's.",
    )
    parser.add_argument("--dropout", type=number_in_range(float, 0, 0.99), default=0.1, metavar="P",
                        help="of block and model, 0 = off (default: %(default)s)")  # fmt: skip
    args = parser.parse_args(argv)
    tell_the_story(args.dropout)
    model = f"a MiniGPT with {CONFIG.n_layers} blocks, dropout {args.dropout:g}"
    print(f"One step of {model}; times: relative to no checkpoint.")
    times = f"{'times':>7}"
    print(f"{'':<26}{'loss':<11}{'gradients':<12}{'FLOPs':>12}{times}{'bytes kept':>12}{times}")
    is_equal = True
    for precision, dtype in PRECISIONS.items():
        print(precision)
        steps = {name: run_step(*how, dtype, args.dropout) for name, how in VARIANTS.items()}
        print_table(steps)
        is_equal &= is_torchs(steps["this file"], steps["torch"])
    how = "equal" if is_equal else "NOT EQUAL"
    print(f"This file and torch: {how} to the bit, to the operation and to the byte.")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
