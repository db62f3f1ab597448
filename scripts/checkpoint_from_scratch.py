"""Rebuild activation checkpointing from scratch: a lesson that runs.

python -m scripts.checkpoint_from_scratch
python -m scripts.checkpoint_from_scratch --dropout 0     # the replay leaves out a matmul

`checkpoint(block, x, use_reentrant=False)` in model.py looks like magic, but needs only two hooks
of autograd. In forward, autograd passes each tensor that backward will need to the first hook, and
keeps the ticket, a placeholder, that the hook returns. The checkpoint drops the tensor. When
backward hands in the first ticket, the second hook runs the block a second time. This replay saves
the same tensors in the same order, so each ticket receives its recomputed tensor.

Part 1 of this file is the checkpoint. Part 2, the narrator, runs one small block and prints each
event as it happens. tests/test_checkpoint_from_scratch.py compares a training step with this
checkpoint and one with torch's: results are bitwise equal, and FLOPs and kept bytes are the same.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from model import Block, MiniGPTConfig
from scripts import cli_main
from trainer.flags import OneLineParser, number_in_range

# ---------------------------------------------------------------------------------------------
# Part 1: the checkpoint.


@dataclass(eq=False)
class Ticket:
    """Placeholder that autograd's graph keeps instead of a tensor, until the replay puts the
    recomputed tensor into it."""

    number: int
    tensor: Tensor | None = None


class EarlyStop(Exception):
    """Exception that ends a replay when every ticket has its tensor again, because backward does
    not need the rest of the function."""


Tell = Callable[..., None]  # (event, ticket or None, tensor or None)


def ignore_event(*event: Any) -> None:
    """Default of `tell`: ignore an event, which the narrator of part 2 would print."""


def checkpoint(function: Callable, *args: Any, tell: Tell = ignore_event) -> Any:
    """Return `function(*args)`, and recompute the tensors that backward needs instead of keeping
    them."""
    if not torch.is_grad_enabled():
        return function(*args)  # there will be no backward
    restored_rng_and_autocast = save_rng_and_autocast()
    # Weak references, so that only the graph keeps a ticket alive. If a result is dropped, its part
    # of the graph is freed, with the tickets in this part. For such a ticket the replay must not
    # keep a tensor, because backward will never hand in the ticket.
    tickets: list[weakref.ref[Ticket]] = []

    def pack(tensor: Tensor) -> Ticket:  # called in forward: autograd saves a tensor
        ticket = Ticket(len(tickets))
        tickets.append(weakref.ref(ticket))
        tell("pack", ticket, tensor)
        return ticket  # the tensor is freed when forward itself no longer needs it

    def unpack(ticket: Ticket) -> Tensor:  # called in backward: autograd needs the tensor
        tell("unpack", ticket)
        if ticket.tensor is None:  # true for the first ticket that is handed in
            replay(tickets, restored_rng_and_autocast(), function, args, tell)
        if ticket.tensor is None:
            raise RuntimeError("the replay saved fewer tensors: is the function deterministic?")
        tensor, ticket.tensor = ticket.tensor, None  # free the tensor after its use
        return tensor

    with saved_tensors_hooks(pack, unpack):
        return function(*args)


def replay(
    tickets: list[weakref.ref[Ticket]],
    restored_rng_and_autocast: AbstractContextManager,
    function: Callable,
    args: tuple,
    tell: Tell,
) -> None:
    """Run the function again, up to the last tensor that has a ticket, and put each tensor into its
    ticket."""
    tell("replay")
    n_filled = 0

    def fill(tensor: Tensor) -> Tensor:  # called in the same order as `pack`
        nonlocal n_filled
        ticket = tickets[n_filled]()
        if ticket is not None:
            tell("fill", ticket)
            # Without `detach`, the ticket would keep the graph of the replay alive.
            ticket.tensor = tensor.detach()
        n_filled += 1
        if n_filled == len(tickets):
            tell("stop")
            # A linear layer saves its input *before* its matmul, so without dropout the replay ends
            # before the last matmul of a block. With dropout the replay ends after this matmul,
            # because dropout runs next, and saves its mask when it has run.
            raise EarlyStop
        return tensor

    # Enable gradients, which are disabled in backward, because otherwise operators save nothing.
    with (
        restored_rng_and_autocast,
        torch.enable_grad(),
        saved_tensors_hooks(fill, lambda tensor: tensor),
    ):
        with suppress(EarlyStop):
            function(*args)  # ignore this result: forward has returned it already


def save_rng_and_autocast() -> Callable[[], AbstractContextManager]:
    """Record the conditions on which a result depends besides the arguments. Return a function that
    makes a context in which these conditions are restored.

    The first condition is the state of the random number generators: if dropout drew other masks in
    the replay than in forward, the gradients would be wrong without an error. The second condition
    is autocast: backward usually runs outside of autocast, so the replay would compute in float32
    what forward computed in bfloat16.
    """
    # (Reading a GPU's generator would initialize the GPU, if none is in use yet.)
    cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    cpu_rng = torch.get_rng_state()
    cache = torch.is_autocast_cache_enabled()
    autocasts = [
        (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        for device in ("cpu", "cuda")
    ]

    @contextmanager
    def restored_rng_and_autocast() -> Iterator[None]:
        with ExitStack() as stack:
            # After the replay, fork_rng restores the generators' states from before the replay.
            stack.enter_context(torch.random.fork_rng(devices=range(len(cuda_rng))))
            torch.set_rng_state(cpu_rng)
            torch.cuda.set_rng_state_all(cuda_rng)
            for device, dtype, enabled in autocasts:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=cache))
            yield

    return restored_rng_and_autocast


# torch's version does more:
# - It accepts keyword arguments, and devices other than CPUs and CUDA GPUs.
# - It saves the arguments through autograd, so that an outer checkpoint or an offload sees them,
#   and autograd detects an argument that was changed in place.
# - It compares shapes and dtypes of the tensors in the replay with those in forward.

# ---------------------------------------------------------------------------------------------
# Part 2: the narrator. The checkpoint works without the narrator.


class Narrator(TorchFunctionMode):
    """Print what happens to the tickets, one line for each layer or operator."""

    def __init__(self, module: torch.nn.Module, x: Tensor):
        super().__init__()
        self.names = {address(p): name for name, p in module.named_parameters()}
        self.names[address(x)] = "x"
        self.results: dict[int, str] = {}  # address of a tensor -> operator that made it
        self.operator = ""  # name of the running operator
        self.inputs: set[int] = set()  # addresses of the running operator's inputs
        self.owners: dict[int, str] = {}  # ticket number -> operator that saved the tensor
        self.line: tuple[str, str] | None = None  # (event, operator) of the unfinished line

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Run `func`, and record its inputs and its result; torch calls this method in place of
        each function on tensors."""
        kwargs = kwargs or {}
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        self.inputs = {address(x) for x in tensors}
        weights = [self.names[place] for place in self.inputs if "." in self.names.get(place, "")]
        self.operator = weights[0].rpartition(".")[0] if weights else func.__name__
        self.operator = self.operator.replace("scaled_dot_product_", "")
        result = func(*args, **kwargs)
        # A view of an input has the address of this input, and is not recorded.
        if isinstance(result, Tensor) and address(result) not in self.inputs:
            self.results[address(result)] = self.operator.rpartition(".")[2] + "(..)"
        return result

    def describe(self, tensor: Tensor) -> str:
        """Return the name and the shape of a tensor: "gelu(..) 4x32". A result of the running
        operator has no name yet, so only its shape is returned."""
        place, name = address(tensor), ""
        if place in self.names:
            name = self.names[place].rpartition(".")[2] + " "
        elif place in self.inputs and place in self.results:
            name = self.results[place] + " "
        return name + "x".join(map(str, tensor.shape)).removeprefix("1x")  # leave out B = 1

    def print_event(
        self, event: str, ticket: Ticket | None = None, tensor: Tensor | None = None
    ) -> None:
        if event == "replay":
            self.print_headline(
                " is empty.\nREPLAY: the block runs again, with the same random numbers:"
            )
        elif event == "stop":
            is_mask = self.owners[max(self.owners)] == "dropout"
            end = "too late for the matmul before it" if is_mask else "its matmul is not run"
            self.print_headline(f" was the last: EARLY STOP, {end}.\nBACKWARD continues:")
        elif ticket is not None:
            owner = self.owners.setdefault(ticket.number, self.operator)
            is_new_line = self.line != (event, owner)
            self.line = event, owner
            print(f"\n    {owner:<12}" if is_new_line else ",", end="")
            print(f" #{ticket.number}", end="", flush=True)
            if tensor is not None:
                print(f" {self.describe(tensor)}", end="", flush=True)

    def print_headline(self, text: str) -> None:
        print(text, end="", flush=True)
        self.line = None


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()  # views (q, k, v; weight.t()) have the same address


def narrate_forward_and_backward(dropout: float) -> None:
    """Run forward and backward of one block, and print each event.

    The last line of the block's code is `x + dropout(..)`, so with dropout the last ticket is for a
    mask, which exists only after the last matmul.
    """
    torch.manual_seed(0)
    block = Block(MiniGPTConfig(n_heads=2, d_model=8, d_ff=32, dropout=dropout))
    block.attn.dropout = 0.0  # on a CPU, attention with dropout saves a dozen more tensors
    x = torch.randn(1, 4, 8, requires_grad=True)
    with Narrator(block, x) as narrator:
        narrator.print_headline(
            "FORWARD drops each tensor that backward will need, and keeps a #ticket:"
        )
        y = checkpoint(block, x, tell=narrator.print_event)
        n = len(narrator.owners)
        narrator.print_headline(f"\nKept: x and {n} tickets. BACKWARD begins at the block's end:")
        y.sum().backward()
        narrator.print_headline("\nDone: each ticket was handed in once.\n")


@cli_main
def main(argv: list[str]) -> None:
    parser = OneLineParser(
        prog="python -m scripts.checkpoint_from_scratch",
        description="Activation checkpointing, rebuilt from scratch: the story of a block.",
    )
    parser.add_argument("--dropout", type=number_in_range(float, 0, 0.99), default=0.1, metavar="P",
                        help="dropout rate, 0 = off (default: %(default)s)")  # fmt: skip
    narrate_forward_and_backward(parser.parse_args(argv).dropout)


if __name__ == "__main__":
    sys.exit(main())
