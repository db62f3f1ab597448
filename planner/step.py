"""Plan one training step: its peak, what that is made of, where it stands. Before it runs.

The planner runs one step of the real model, optimizer and policies on fake tensors (see
planner/tracker.py). planner/choose.py chooses by its figures; planner/formulas.py has them as
formulas.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from memory import HostMemory, head
from memory.offload import SMALL, bytes_of_blocks
from model import MiniGPT, MiniGPTConfig

from .batches import Batches, outside_of_head
from .kernels import inside, workspaces
from .record import Record, Witness
from .shards import gather, shard_of
from .timeline import KINDS, MOST_RUNS, StepMemory, repeat_blocks, summarize
from .tracker import Storage, StorageTracker
from .work import Notebook, Operation


class Planner:
    """One training step of the real model, optimizer and policies, on fake tensors.

    Args:
        config: the model; `step` can change how it spends memory.
        seq_len: tokens in a sequence.
        precision: float32, or the dtype of autocast. (float16's GradScaler needs some bytes more.)
        make_optimizer: what the trainer makes its own with.
        clip: what it clips gradients with, given weights, limit and `foreach`: torch's by default.
        device_type: the kind of device it is planned for. The fake tensors are the CPU's in any
            case. For "cuda" its fused dropout and attention are put in, and what its kernels take
            besides (planner/kernels.py); on "mps" neither is fused where it is trained.
        accumulate: forward runs beside the gradients of an earlier micro-batch.
        ddp: gradients stay, in the buckets of DistributedDataParallel.
        compress: they are averaged in bfloat16, in copies (the first step's are one bucket).
        shards: processes that hold the model between them (train_fsdp.py): planned is what one of
            them takes. Not with `ddp`.
    """

    def __init__(
        self,
        config: MiniGPTConfig,
        seq_len: int,
        *,
        precision: torch.dtype,
        make_optimizer: Callable[[MiniGPT], torch.optim.Optimizer],
        clip: Callable[[list[nn.Parameter], float, bool], object] | None = None,
        device_type: str = "cpu",
        accumulate: bool = False,
        ddp: bool = False,
        compress: bool = False,
        shards: int = 1,
    ):
        self.config, self.seq_len, self.precision = config, seq_len, precision
        self.on_cpu, self.accumulate, self.ddp = device_type == "cpu", accumulate, ddp
        self.clip = clip or clip_as_torch
        self.kernels = device_type == "cuda"  # there they need memory of their own, too
        self.fused = device_type != "mps"  # attention, which else keeps its scores, (B, H, T, T)
        self.compress, self.shards = compress, shards
        self.fake = FakeTensorMode()
        self.steps: dict[tuple[int, MiniGPTConfig], StepMemory] = {}
        self.watch: Callable[[], object] = lambda: None  # called before each simulation
        with self.fake:
            self.model = MiniGPT(config).train()
            self.model.token_embedding.on_cpu = self.on_cpu
            if self.kernels:
                fuse_dropout(self.model)
            # What a process holds, and updates.
            self.held = self.model if shards == 1 else shard_of(config, shards)
            whole = [*self.model.named_parameters(), *self.held.named_parameters()]
            self.names = {parameter: name for name, parameter in whole}
            self.optimizer = make_optimizer(self.held)
            # The first step makes the optimizer's state; all others find it there.
            for parameter in self.held.parameters():
                parameter.grad = torch.empty_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def step(self, batch_size: int, **memory: Any) -> StepMemory:
        """A step on `batch_size` sequences. `memory`: changes of the config (recompute="full")."""
        config = replace(self.config, **memory)
        if (batch_size, config) not in self.steps:
            self.watch()
            self.steps[batch_size, config] = self.simulate_few(batch_size, config)
        return self.steps[batch_size, config]

    def largest_batch(
        self, budget: int, batch_size: int, host: int | None = None, **memory: Any
    ) -> int:
        """The most sequences whose peak stays within `budget` bytes; 0 = not even one does.

        `host`: bytes of CPU memory that offload may have; None: nobody knows.
        """
        first, other, moves = batch_size, 1 if batch_size > 1 else 2, 0
        if replace(self.config, **memory).offload_activations:
            # Of fewer sequences the residual stream is too small to be moved: what they take, and
            # what more of them take, are two things.
            moves = math.ceil(SMALL / (4 * self.seq_len * self.config.d_model))
            first = max(first, moves)
            other = first + 1
        one, two = self.step(first, **memory), self.step(other, **memory)
        while outside_of_head(one) != outside_of_head(two):
            # Offload moves tensors from a certain size on, and some have it in one of the two only.
            # Larger batches soon agree; then what they say of others misses less than that size.
            last = max(one, two, key=lambda step: step.batch_size)
            one, two = last, self.step(last.batch_size + 1, **memory)

        def fits(sequences: int) -> bool:
            step = self.step(sequences, **memory)
            return step.peak <= budget and (host is None or step.host <= host)

        most = Batches(one, two, self.precision, self.on_cpu).largest(budget, host)
        while host is not None and most and (asked := self.step(most, **memory).host) > host:
            most = most * host // asked  # what is too small to be moved in the two may travel here
        if most < moves:
            most = bisect_left(range(1, moves), True, key=lambda n: not fits(n))
        return max(most, batch_size if fits(batch_size) else 0)

    def simulate_few(self, batch_size: int, config: MiniGPTConfig) -> StepMemory:
        """As `simulate`; but of the blocks that do the same only the first, one more, and the last.

        Not with offload, whose copies of a block wait for another, nor with groups.
        """
        if config.offload_activations or config.recompute_group > 1:
            return self.simulate(batch_size, config)
        n_first = config.n_recomputed
        first, rest = few_of(n_first), few_of(config.n_layers - n_first)
        layers = None if config.recompute_layers is None else len(first)
        few = replace(config, n_layers=len(first + rest), recompute_layers=layers)
        return repeat_blocks(self.simulate(batch_size, few), config, first + rest)

    def record(self, batch_size: int, **memory: Any) -> Record:
        """A step as `step` has it, and each storage in it by name: see planner/record.py.

        (Of more than `MOST_RUNS` chunks of the head there are three.)
        """
        self.watch()
        config, witness = replace(self.config, **memory), Witness(self.model)
        tracker, operations, forward_end = self.run(batch_size, config, witness)
        shape = batch_size, self.seq_len
        step = summarize(tracker, operations, config, *shape, forward_end, most_runs=1)
        return witness.record(step, tracker, operations)

    def simulate(self, batch_size: int, config: MiniGPTConfig) -> StepMemory:
        """A step through the first `config.n_layers` blocks; all that the planner's model has are
        updated."""
        tracker, operations, forward_end = self.run(batch_size, config)
        step = summarize(tracker, operations, config, batch_size, self.seq_len, forward_end)
        # The other blocks' gradients: backward makes them, block by block.
        left_out = set(self.held.blocks[config.n_layers :].parameters()) - self.waiting
        step.timeline[:, KINDS.index("gradients")] -= sum(p.nbytes for p in left_out)
        return step

    def run(
        self, batch_size: int, config: MiniGPTConfig, witness: Witness | None = None
    ) -> tuple[StorageTracker, list[Operation], int]:
        """What train_minimal.train_step does, without its data and its numbers.

        Returns what it took, what it did, and the operator with which forward ended. `witness` is
        told of each operator.
        """
        model, parameters, notebook = self.model, list(self.held.parameters()), Notebook()
        in_low = self.precision != torch.float32
        # Gradients from an earlier micro-batch, or of blocks that are left out of this step.
        made_before = self.waiting.union(self.held.blocks[config.n_layers :].parameters())
        tracker = StorageTracker(
            inside=inside if self.kernels else None,
            notes=[notebook, witness] if witness else [notebook],
        )
        model.config, model.host_memory = config, WholeBlocks()
        if not self.on_cpu:
            model.host_memory.device = torch.device("meta")  # anything but the fake GPU
        with (
            self.fake,
            tracker,
            without_blocks(model, config.n_layers),
            follow(model, tracker),
            few_chunks(tracker, MOST_RUNS if witness else 0),
            witness.modules if witness else nullcontext(),
            gather(model, self.held, self.shards, tracker, gloo=self.on_cpu) as gathering,
            nullcontext() if self.fused else sdpa_kernel(SDPBackend.MATH),
            torch.autograd.set_detect_anomaly(False),  # a fake step has none to report
        ):
            for parameter in made_before:
                parameter.grad = torch.empty_like(parameter)
            self.name_what_is_there(tracker)
            ids, labels = torch.zeros(2, batch_size, self.seq_len, dtype=torch.int64)
            tracker.name(ids, "activations", "token ids and labels")  # backward will want them
            tracker.restart()
            notebook.operations.clear()
            if witness:
                witness.restart()
            if self.kernels:
                tracker.storages.append(cublas(workspaces()))

            tracker.enter("forward")
            with torch.autocast("cpu", self.precision, enabled=in_low, cache_enabled=False):
                loss = model(ids, labels)
            forward_end = tracker.now
            loss.backward()
            gathering.end_backward()
            self.name_what_is_there(tracker)
            if self.compress:
                send_copies(tracker, parameters)
            tracker.enter("optimizer")
            # (A GPU takes all tensors at a time; torch would not for the CPU's.)
            self.clip(parameters, 1.0, not self.on_cpu)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        tracker.moved = model.host_memory.moved
        for buffer in model.host_memory.made:  # in the first step; all others find them there
            storage = tracker.find(buffer)
            storage.born, storage.kind = 0, "activations"
            storage.name, storage.why = "buffer of offload", "copies wait in it for backward"
        return tracker, notebook.operations, forward_end

    def name_what_is_there(self, tracker: StorageTracker) -> None:
        """Weights, gradients as far as there are any, and the optimizer's state."""
        for parameter, name in self.names.items():
            if parameter in self.optimizer.state:  # (what is gathered from shards is in none)
                tracker.name(parameter, "parameters", name)
                for state, tensor in self.optimizer.state[parameter].items():
                    tracker.name(tensor, "optimizer", f"{state} of {name}")
            else:  # whole, of shards: its bytes are those of what was gathered
                tracker.find(parameter).name = name
            if parameter.grad is not None:
                tracker.name(parameter.grad, "gradients", f"gradient of {name}")

    @property
    def waiting(self) -> set[nn.Parameter]:
        """Weights whose gradients are there from the step's begin to its end."""
        return set(self.model.parameters()) if self.accumulate or self.ddp else set()


class WholeBlocks(HostMemory):
    """A tensor's blocks as one: then steps do the same operators, however large a batch is."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[int] = []  # the bytes of each tensor that travels

    def take(self, like: Tensor) -> list[Tensor]:
        self.moved.append(like.nbytes)
        return [self.unused_or_new(bytes_of_blocks(like.nbytes), pinned=False)]


def send_copies(tracker: StorageTracker, parameters: list[nn.Parameter]) -> None:
    """In bfloat16, of all gradients; they are gone when the average is there."""
    copies = [cast(Tensor, p.grad).bfloat16() for p in parameters]
    for copy in copies:
        tracker.name(copy, "gradients", "gradient on its way")


def clip_as_torch(parameters: list[nn.Parameter], limit: float, foreach: bool) -> None:
    nn.utils.clip_grad_norm_(parameters, limit, foreach=foreach)


def cublas(size: int) -> Storage:
    """What its kernels work in is there all the time."""
    there = Storage(size, (size,), torch.uint8, torch.device("cpu"), born=0, kind="temporaries")
    return replace(there, name="workspaces of cuBLAS", why="its kernels work in them")


def few_of(n: int) -> list[int]:
    """Of a run of n equal blocks, or chunks, a few: how many each of them stands for."""
    return [1, n - 2, 1] if n > 3 else [1] * n


@contextmanager
def without_blocks(model: MiniGPT, begin: int) -> Iterator[None]:
    """The model ends before block `begin`."""
    blocks, model.blocks = model.blocks, model.blocks[:begin]
    try:
        yield
    finally:
        model.blocks = blocks


@contextmanager
def few_chunks(tracker: StorageTracker, few: int) -> Iterator[None]:
    """Of the head's chunks, of which there may be millions, only the first, one more and the last
    run: those in between do the same, operator by operator. Up to `few`, all of them."""

    def starts_of_few(n_tokens: int, n: int) -> Iterator[int]:
        n_chunks, chunk = math.ceil(n_tokens / n), 0
        for times in few_of(n_chunks) if n_chunks > few else [1] * n_chunks:
            begin = tracker.now + 1
            yield chunk * n
            if times > 1:
                tracker.repeats.append((begin, tracker.now + 1, times))
            chunk += times

    starts, head.starts_of_chunks = head.starts_of_chunks, starts_of_few
    try:
        yield
    finally:
        head.starts_of_chunks = starts


@contextmanager
def follow(model: MiniGPT, tracker: StorageTracker) -> Iterator[None]:
    """Tell the tracker which part of the model is at work, in forward, backward and replays."""

    def enter_block(i: int) -> Callable:
        def hook(ln_1: nn.Module, args: tuple[Tensor]) -> None:
            phase = tracker.phase
            tracker.enter(phase, i)
            if phase == "forward" and i > 0:  # backward of block i ends with its input's gradient
                args[0].register_hook(lambda _: tracker.enter("backward", i - 1))

        return hook

    def leave_blocks(ln_f: nn.Module, args: tuple[Tensor]) -> None:
        tracker.enter("forward")

    def enter_head(ln_f: nn.Module, args: tuple[Tensor], x: Tensor) -> None:
        tracker.enter("head")
        x.register_hook(lambda _: tracker.enter("backward", len(model.blocks) - 1))

    handles = [model.ln_f.register_forward_pre_hook(leave_blocks)]
    handles += [model.ln_f.register_forward_hook(enter_head)]
    handles += [
        block.ln_1.register_forward_pre_hook(enter_block(i))  # type: ignore[union-attr]
        for i, block in enumerate(model.blocks)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class FusedDropout(nn.Module):
    """Dropout as CUDA does it: what it keeps is a mask of one byte an element."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.native_dropout(x, self.p, self.training)[0]


def fuse_dropout(model: MiniGPT) -> None:
    """A CPU has no fused dropout, and no fused attention with dropout; CUDA has both."""
    for module in list(model.modules()):
        if isinstance(getattr(module, "dropout", None), nn.Dropout) and model.config.dropout > 0:
            module.dropout = FusedDropout(model.config.dropout)
    for block in model.blocks:
        block.attn.dropout = 0.0  # type: ignore[union-attr]  # its mask is never stored
