"""Plan one training step: its peak, what that is made of, where it stands. Before it runs.

The planner runs one step of the real model, optimizer and policies on fake tensors (see
planner/op_recorder.py). planner/choose.py chooses by its figures; planner/formulas.py has them as
formulas.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from memory import (
    PinnedPool,
    RecomputePlan,
    RecomputeSchedule,
    format_recompute,
    head,
    offload,
    recompute_plan,
)
from memory.offload import MIN_OFFLOAD_BYTES, padded_nbytes
from memory.sequence import SequenceShard
from model import MiniGPT, MiniGPTConfig

from .batches import MAX_BATCH, largest_batch, ops_outside_head
from .formulas import head_bytes
from .op_recorder import CallSiteTracker, OpRecorder
from .operators import cublas_workspace_bytes, kernel_workspace_bytes
from .record import StepRecord, record_of
from .shards import add_shards, make_local_model, params_gathered_by_block
from .timeline import KINDS, Segment, StepMemory, split_into_segments


class FewCallStep:
    """The segments of a step with a few calls, each like those of a step with more."""

    def __init__(self, segments: list[Segment]):
        self.n = n = len(segments) // 2 - 3  # calls
        self.state, self.embedding, *rest, self.embedding_backward, self.update = segments
        self.forward, self.backward = rest[:n], rest[: -n - 1 : -1]  # by call
        self.left, self.head, self.entered = rest[n:-n]  # from ln_f on, and back again


@dataclass(eq=False)
class Planner:
    """One training step of the real model, optimizer and policies, on fake tensors.

    They are the CPU's in any case. For "cuda" its fused dropout and attention are put in, and what
    its kernels take besides (planner/operators.py); on "mps" neither is fused where it is trained.
    """

    config: MiniGPTConfig  # `step` can change how it spends memory
    seq_len: int
    _: KW_ONLY
    precision: torch.dtype  # of autocast, or float32. (float16's GradScaler needs some bytes more.)
    # What the trainer makes its own with.
    make_optimizer: Callable[[MiniGPT], torch.optim.Optimizer]
    clip: Callable[..., object] = nn.utils.clip_grad_norm_  # gradients, or what does as this does
    device_type: str = "cpu"
    accumulate: bool = False  # forward runs beside the gradients of an earlier micro-batch
    ddp: bool = False  # gradients stay, in the buckets of DistributedDataParallel
    compress: bool = False  # averaged in bfloat16, in copies (the first step's are one bucket)
    # Processes that hold the model between them (train_fsdp.py): planned is what one of them takes.
    # Not with `ddp`.
    shard_degree: int = 1
    # Processes that share each sequence (train_sp.py): planned is the first, as none has more of
    # its tokens and heads.
    sp_degree: int = 1
    gather_in_low: bool = False  # shards of blocks, in bfloat16

    def __post_init__(self) -> None:
        config = self.config
        self.on_cpu = self.device_type == "cpu"
        self.sequence = SequenceShard(0, self.sp_degree, config.n_heads, no_communication)
        self.local_seq_len = self.sequence.shard(self.seq_len).stop  # of a sequence
        self.fake = FakeTensorMode()
        self.steps: dict[tuple[int, MiniGPTConfig], StepMemory] = {}
        self.few_call_steps: dict[tuple, FewCallStep] = {}
        self.on_simulate: Callable[[], object] = lambda: None  # called before each simulation
        with self.fake:
            self.model = MiniGPT(config).train()
            shapes = {tuple(w.shape for w in b.parameters()) for b in self.model.blocks}
            self.are_alike = len(shapes) == 1  # not in any changed model.py
            self.model.embed = partial(cast(Any, self.model.embed), row_by_row=self.on_cpu)
            if self.sp_degree > 1:
                self.sequence.wrap_attention(self.model)
            if self.gather_in_low:
                for weight in params_gathered_by_block(self.model.blocks, in_low=True):
                    weight.data = weight.data.bfloat16()
            # What a process holds, and updates.
            self.local_model = (
                self.model
                if self.shard_degree == 1
                else make_local_model(config, self.shard_degree)
            )
            whole = [*self.model.named_parameters(), *self.local_model.named_parameters()]
            self.names = {parameter: name for name, parameter in whole}
            self.optimizer = self.make_optimizer(self.local_model)
            make_state(self.optimizer, self.local_model.parameters())

    def step(self, batch_size: int, **memory: Any) -> StepMemory:
        """A step on `batch_size` sequences. `memory`: changes of the config (recompute="full")."""
        config = replace(self.config, **memory)
        key, how = (batch_size, config), recompute_plan(config)
        if key not in self.steps:
            # Some blocks leave to others what depends on which those are: what they have sent away,
            # or the buffers of shards.
            is_mix, in_groups = len(set(how.policies)) > 1, how.group_size > 1
            if how.offload and is_mix or self.shard_degree > 1 and in_groups:
                _, self.steps[key] = self.simulate(batch_size, config)
            else:
                self.steps[key] = self.compose_step(batch_size, config)
        return self.steps[key]

    def compose_step(self, batch_size: int, config: MiniGPTConfig) -> StepMemory:
        """Put a step together of segments from steps with a few calls, all alike."""
        how, first = recompute_plan(config), 0
        few_of = {
            call: self.few_call_step(batch_size, config, *call)
            for call in {("none", 1), *how.block_groups}
        }
        frame = few_of["none", 1]
        forward, backward = list[tuple[Segment, int]](), list[tuple[Segment, int]]()
        for to_come, call in zip(range(len(how.block_groups))[::-1], how.block_groups, strict=True):
            few, (_, size) = few_of[call], call
            # The same call among the few, from the begin or from the end.
            i = max(min(first // size, few.n // 2), few.n - 1 - to_come)
            forward.append((few.forward[i], first - i * size))
            backward.append((few.backward[i], first - i * size))
            first += size
        begin, end = few_of[how.block_groups[0]], few_of[how.block_groups[-1]]
        between = end.left, frame.head, end.entered
        segments = [
            *((segment, 0) for segment in (frame.state, begin.embedding)),
            *forward,
            *((segment, 0) for segment in between),
            *backward[::-1],
            *((segment, 0) for segment in (begin.embedding_backward, frame.update)),
        ]
        return StepMemory(config, batch_size, self.seq_len, segments)

    def few_call_step(
        self, batch_size: int, config: MiniGPTConfig, policy: str, size: int
    ) -> FewCallStep:
        """Simulate a step with a few calls, all of `size` blocks with that policy, once."""
        asked, plain = recompute_plan(config), replace(config, recompute="none")
        nested, moves = asked.nested and size > 1, asked.offload and policy != "none"
        key = batch_size, plain, policy, size, nested, moves
        if key not in self.few_call_steps:
            self.on_simulate()
            n = plain.n_layers // size
            if self.are_alike:  # but for the first and the last one, and those next to them
                ends_differ = moves or self.shard_degree > 1
                n = min(n, 3 + 2 * offload.MAX_COPIES_IN_FLIGHT * moves if ends_differ else 2)
            how = RecomputePlan((policy,) * n * size, size, nested, moves)
            few = replace(plain, n_layers=n * size, recompute=format_recompute(how))
            frame = None if policy == "none" else self.few_call_step(batch_size, plain, "none", 1)
            segments = split_into_segments(self.run_fake_step(batch_size, few, frame), [size] * n)
            if frame is None:
                # Each block's backward makes its gradients, also of those that are left out here.
                left_out = (
                    set(self.local_model.blocks[n:].parameters()) - self.params_with_kept_grads
                )
                made = segments[0].changes[0, 0]
                made[KINDS.index("gradients")] -= sum(p.nbytes for p in left_out)
            self.few_call_steps[key] = FewCallStep(segments)
        return self.few_call_steps[key]

    def largest_batch(
        self, budget: int, batch_size: int, host: int | None = None, **memory: Any
    ) -> int:
        """The most sequences whose peak stays within `budget` bytes; 0 = not even one does.

        `host`: bytes of CPU memory that offload may have; None: nobody knows.
        """
        with_offload = recompute_plan(replace(self.config, **memory)).offload
        # Of fewer sequences the residual stream is too small to be moved: what they take, and what
        # more of them take, are two things.
        least = (
            math.ceil(MIN_OFFLOAD_BYTES / (4 * self.local_seq_len * self.config.d_model))
            if with_offload
            else 1
        )
        one = self.step(max(batch_size, least, 2), **memory)
        # (The step of one sequence is asked for elsewhere, too.)
        two = self.step(one.batch_size + 1 if with_offload else 1, **memory)
        if len(ops_outside_head(one)) != len(ops_outside_head(two)):
            # (A reshape of one sequence alone may be a view.)
            two = self.step(one.batch_size + 1, **memory)

        def fits(sequences: int) -> bool:
            step = self.step(sequences, **memory)
            return step.peak <= budget and (host is None or step.host_bytes <= host)

        def head(sequences: int) -> int:
            return head_bytes(one.config, sequences * self.local_seq_len, self.precision)

        most = largest_batch(one, two, budget, head, self.on_cpu)
        is_bound = most == MAX_BATCH or with_offload and (self.on_cpu or host is not None)
        if is_bound and not (most and fits(most)):
            most = bisect_left(range(1, max(most, least)), True, key=lambda n: not fits(n))
        return max(most, batch_size if fits(batch_size) else 0)

    def simulate(
        self, batch_size: int, config: MiniGPTConfig, sources: CallSiteTracker | None = None
    ) -> tuple[OpRecorder, StepMemory]:
        """Simulate all of a step."""
        self.on_simulate()
        log = self.run_fake_step(batch_size, config, None, sources)
        segments = split_into_segments(
            log, [size for _, size in recompute_plan(config).block_groups]
        )
        whole = [(segment, 0) for segment in segments]
        return log, StepMemory(config, batch_size, self.seq_len, whole)

    def record(self, batch_size: int, **memory: Any) -> StepRecord:
        """A step as `step` has it, and each storage in it by name: see planner/record.py."""
        config = replace(self.config, **memory)
        return record_of(*self.simulate(batch_size, config, CallSiteTracker(self.model)))

    def run_fake_step(
        self,
        batch_size: int,
        config: MiniGPTConfig,
        known: "FewCallStep | None" = None,
        sources: CallSiteTracker | None = None,
    ) -> OpRecorder:
        """What train_minimal.train_step does, without its data and its numbers: by the first
        `config.n_layers` blocks; all that the planner's model has are updated.

        `known`: another step. Then head and update, which are the same, are left out of this one.
        `sources`: the log is to name who asks for each operator.
        """
        model, parameters = self.model, list(self.local_model.parameters())
        blocks = model.blocks[: config.n_layers]
        with self.fake:
            # (Weights in bfloat16 have their sums apart, in float32.)
            there = self.params_with_kept_grads.union(parameters if self.shard_degree > 1 else ())
            if not known:
                there = there.union(self.local_model.blocks[config.n_layers :].parameters())
            self.sums = {p: torch.empty(p.shape) for p in there if p.dtype != torch.float32}
            for parameter in there - self.sums.keys():
                parameter.grad = torch.empty_like(parameter)
            batch = torch.zeros(2, batch_size, self.seq_len, dtype=torch.int64)
            ids, labels = batch[:, :, : self.local_seq_len]
        with (
            simulated_on(self.device_type, self.fake, sources) as log,
            patched(model, blocks=blocks),
            patched(head, chunk_starts=representative_chunks(log, known)),
            ExitStack() as hooks,
        ):
            host = UnsplitPool(log, self.on_cpu)
            model.config, cast(RecomputeSchedule, model.blocks_with_recompute).offload_pool = (
                config,
                host,
            )
            for handle in register_phase_hooks(blocks, model.ln_f, log):
                hooks.enter_context(handle)
            for parameter in self.names.keys() - parameters:  # shards count, and what is gathered
                log.add(parameter).nbytes = 0
            name_what_is_there(log, self.names, self.optimizer, self.sums)
            log.label(batch, "activations", "token ids and labels")  # backward will want them
            forward = partial(model, ids, labels)
            loss = forward_and_backward(log, forward, self.precision, cache_enabled=False)
            name_what_is_there(log, self.names, self.optimizer, self.sums)
            if self.shard_degree > 1:
                how = self.on_cpu, self.gather_in_low, self.sums
                add_shards(log, model, self.local_model, self.shard_degree, *how)
            if self.compress:  # they are gone when the average is there
                copies = [cast(Tensor, parameter.grad).bfloat16() for parameter in parameters]
                for copy in copies:
                    log.label(copy, "gradients", "gradient on its way")
                del copies, copy
            log.enter_phase("optimizer")
            if known:
                torch.empty(1)  # what goes now goes with an operator of the update
            else:
                # (A GPU takes all tensors at a time; torch would not for the CPU's.)
                self.clip(parameters, 1.0, foreach=not self.on_cpu)
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            del loss  # which the trainer holds until then
        for buffer in host.buffers:
            log.label(buffer, "activations", "buffer of offload", "copies wait in it for backward")
        return log

    @property
    def note(self) -> str:
        """A sentence on what these plans do not know of a device that is no CPU; "" if nothing."""
        # (torch's native_functions.yaml has no other function that a CPU alone is composed of.)
        if self.on_cpu or not any(isinstance(part, nn.RMSNorm) for part in self.model.modules()):
            return ""
        return (
            "rms_norm is planned as several operators, as on a CPU; on "
            f"{self.device_type} it is one, which keeps less: the real peak is likely lower"
        )

    @property
    def params_with_kept_grads(self) -> set[nn.Parameter]:
        """Weights whose gradients are there from the step's begin to its end."""
        return set(self.model.parameters()) if self.accumulate or self.ddp else set()


def no_communication(sent: Tensor, send: list[int], take: list[int]) -> Tensor:
    """What would come from other processes, for memory/sequence.py."""
    return sent.new_empty(sum(take))


class UnsplitPool(PinnedPool):
    """A tensor's blocks as one: then steps do the same operators, however large a batch is."""

    def __init__(self, log: OpRecorder, on_cpu: bool) -> None:
        super().__init__()
        self.log = log
        if not on_cpu:
            self.device = torch.device("meta")  # anything but the fake GPU

    def acquire(self, like: Tensor) -> list[Tensor]:
        self.log.moved.append((like.nbytes, self.log.places[-1]))
        return [self.reuse_or_allocate(padded_nbytes(like.nbytes), pinned=False)]


def representative_chunks(
    log: OpRecorder, known: "FewCallStep | None"
) -> Callable[[int, int], Iterator[int]]:
    """For memory/head.py: of its chunks, of which there may be millions, only the first, one more
    and the last; none if the head is `known`. Those in between run the same operators."""

    def starts_of_few(n_tokens: int, n: int) -> Iterator[int]:
        n_chunks = 0 if known else math.ceil(n_tokens / n)
        chunk = 0
        for log.times in [1, n_chunks - 2, 1] if n_chunks > 3 else [1] * n_chunks:
            yield chunk * n
            chunk += log.times
        log.times = 1

    return starts_of_few


@contextmanager
def patched(thing: Any, **attributes: Any) -> Iterator[None]:
    """While it is entered, `thing` has these attributes."""
    before = {name: getattr(thing, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


# ---- of any model


@contextmanager
def simulated_on(
    device_type: str, fake: FakeTensorMode, sources: CallSiteTracker | None = None
) -> Iterator[OpRecorder]:
    """A log of what runs while this is entered, on fake tensors.

    They are the CPU's in any case. For "cuda" its fused dropout and attention are put in, and the
    workspaces of its kernels; on "mps" neither is fused where it is trained.
    """
    on_cuda = device_type == "cuda"
    with (
        fake,
        OpRecorder(sources, kernel_workspace=kernel_workspace_bytes if on_cuda else None) as log,
        patched(F, **(FUSED if on_cuda else {})),
        sources.listen() if sources else nullcontext(),
        # (Attention that is not fused keeps its scores, (B, H, T, T).)
        sdpa_kernel(SDPBackend.MATH) if device_type == "mps" else nullcontext(),
        torch.autograd.set_detect_anomaly(False),  # a fake step has none to report
    ):
        if on_cuda:
            log.add_bytes(
                cublas_workspace_bytes(),
                "workspaces of cuBLAS",
                "its kernels work in them",
                0,
                math.inf,
            )
        yield log


def make_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """The first step makes the optimizer's state; all others find it there."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def forward_and_backward(
    log: OpRecorder, forward: Callable[[], Tensor], precision: torch.dtype, cache_enabled: bool
) -> Tensor:
    """Run `forward` under autocast (float32: without), and backward; return the loss.

    `cache_enabled`: autocast keeps its copies of weights until forward ends.
    """
    enabled = precision != torch.float32
    log.enter_phase("forward")
    with torch.autocast("cpu", precision, enabled, cache_enabled):
        loss = forward()
    log.forward_end = log.n_ops
    if log.phase == "forward":  # else the head's gradients come first
        log.enter_phase("backward")
    loss.backward()
    return loss


def name_what_is_there(
    log: OpRecorder,
    names: Mapping[Any, str],
    optimizer: torch.optim.Optimizer,
    sums: Mapping[Any, Tensor],
) -> None:
    """Name weights (`names`), the optimizer's state, and the gradients that are there.

    `sums`: weight -> the sum of its gradients, where it is not weight.grad.
    """
    for weight, name in names.items():
        log.storage_of(
            weight
        ).name = name  # whole, of shards: its bytes are those of what was gathered
        named = [
            (weight if weight in optimizer.state else None, "parameters", name),
            (sums.get(weight, weight.grad), "gradients", f"gradient of {name}"),
            *(
                (its, "optimizer", f"{state} of {name}")
                for state, its in optimizer.state.get(weight, {}).items()
            ),
        ]
        for tensor, kind, its_name in named:
            if isinstance(tensor, Tensor):  # there is one
                log.label(tensor, kind, its_name)


def register_phase_hooks(
    blocks: nn.ModuleList | list[nn.Module], last: nn.Module, log: OpRecorder
) -> list[RemovableHandle]:
    """Hooks that tell the log which part of the model is at work: forward, backward, replays.

    The head begins behind `last`: the last block, or what comes after it.
    """
    behind = last not in blocks

    def enter_block(i: int, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        log.enter_phase(log.phase, i)
        if log.phase == "forward":  # backward of block i ends with its input's gradient
            when_gradient_is_there((args, kwargs), i - 1 if i > 0 else None)

    def leave_blocks(last: nn.Module, args: tuple) -> None:
        log.enter_phase("forward")
        when_gradient_is_there(args, len(blocks) - 1)

    def enter_head(last: nn.Module, args: tuple, output: Any) -> None:
        if log.phase == "forward":  # no replay
            log.enter_phase("head")
            when_gradient_is_there(output, None if behind else len(blocks) - 1)

    def when_gradient_is_there(tensors: Any, i: int | None) -> None:
        """That of the first tensor that has one: backward is in block i from then on."""
        leaves = filter(torch.is_tensor, tree_leaves(tensors))
        for tensor in [leaf for leaf in leaves if leaf.requires_grad][:1]:
            tensor.register_hook(lambda _: log.enter_phase("backward", i))

    return [
        *(module.register_forward_pre_hook(leave_blocks) for module in [last] * behind),
        last.register_forward_hook(enter_head),
        *(
            block.register_forward_pre_hook(partial(enter_block, i), with_kwargs=True)
            for i, block in enumerate(blocks)
        ),
    ]


# ---- what CUDA fuses

ATTENTION = F.scaled_dot_product_attention


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Attention that keeps no mask of its dropout."""
    return ATTENTION(query, key, value, attn_mask, 0.0, is_causal, **options)


def fused_dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout that keeps a mask of one byte an element."""
    return torch.ops.aten.native_dropout(x, p, training)[0] if p and training else x


FUSED: dict[str, Any] = {"dropout": fused_dropout, "scaled_dot_product_attention": fused_attention}
