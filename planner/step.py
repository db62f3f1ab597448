"""Plan one training step before it runs: its peak memory, the parts of the peak, and its place.

The planner runs one step of the real model, optimizer and policies on fake tensors (see
planner/op_recorder.py). planner/choose.py chooses a policy by the planner's figures, and
planner/formulas.py has these figures as formulas.
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
    BlockCalls,
    PinnedPool,
    RecomputePlan,
    format_recompute_plan,
    head,
    offload,
    recompute_plan,
)
from memory.offload import MIN_OFFLOAD_BYTES, pinned_nbytes
from memory.sequence import SequenceShard
from model import MiniGPT, MiniGPTConfig

from .batches import MAX_BATCH, largest_batch, ops_outside_head
from .formulas import head_bytes
from .op_recorder import CallSiteTracker, OpRecorder
from .operators import cublas_workspace_bytes, kernel_workspace_bytes
from .record import StepRecord, build_step_record
from .shards import add_shards, make_local_model, params_gathered_by_block
from .timeline import KINDS, Segment, StepMemory, split_into_segments


class FewCallStep:
    """The segments of a step with few calls. They represent those of a step with more calls.

    A call in MiniGPT.forward runs a block, or a group of blocks that share a checkpoint.
    """

    def __init__(self, segments: list[Segment]):
        self.n = n = len(segments) // 2 - 3  # number of calls
        self.state, self.embedding, *rest, self.embedding_backward, self.update = segments
        self.forward, self.backward = rest[:n], rest[: -n - 1 : -1]  # by call, as forward runs them
        self.left, self.head, self.entered = rest[n:-n]  # ln_f, the head, and ln_f's backward


@dataclass(eq=False)
class Planner:
    """Plan steps of the real model, optimizer and policies on fake tensors.

    The fake tensors are always on a CPU. For "cuda" the planner uses functions like CUDA's fused
    dropout and attention, and adds the workspaces of its kernels (planner/operators.py). For "mps"
    neither function is fused, as in training there.
    """

    config: MiniGPTConfig  # `step` can change its memory settings
    seq_len: int  # tokens
    _: KW_ONLY
    precision: torch.dtype  # of autocast, or float32. (float16's GradScaler adds a few bytes.)
    make_optimizer: Callable[[MiniGPT], torch.optim.Optimizer]  # the trainer's
    clip: Callable[..., object] = nn.utils.clip_grad_norm_  # gradient clipping, or a replacement
    device_type: str = "cpu"
    accumulate: bool = False  # gradients of an earlier micro-batch exist in forward
    ddp: bool = False  # gradients stay, in the buckets of DistributedDataParallel
    compress: bool = False  # average gradients in bfloat16 copies (first step: one bucket)
    # Number of processes that share one model (train_fsdp.py). The plan is for one of them. Do not
    # combine it with `ddp`.
    shard_degree: int = 1
    # Number of processes that share each sequence (train_sp.py). The plan is for rank 0: no other
    # rank has more tokens or heads.
    sp_degree: int = 1
    gather_in_low: bool = False  # gather the blocks' shards in bfloat16

    def __post_init__(self) -> None:
        config = self.config
        self.on_cpu = self.device_type == "cpu"
        self.sequence = SequenceShard(0, self.sp_degree, config.n_heads, no_communication)
        self.local_seq_len = self.sequence.start_sharding(self.seq_len).stop  # of each sequence
        self.fake = FakeTensorMode()
        self.steps: dict[tuple[int, MiniGPTConfig], StepMemory] = {}
        self.few_call_steps: dict[tuple, FewCallStep] = {}
        self.on_simulate: Callable[[], object] = lambda: None  # called before each simulation
        with self.fake:
            self.model = MiniGPT(config).train()
            shapes = {tuple(w.shape for w in b.parameters()) for b in self.model.blocks}
            self.are_alike = len(shapes) == 1  # a changed model.py may have different blocks
            self.model.embed = partial(cast(Any, self.model.embed), row_by_row=self.on_cpu)
            if self.sp_degree > 1:
                self.sequence.wrap_attention(self.model)
            if self.gather_in_low:
                for weight in params_gathered_by_block(self.model.blocks, in_low=True):
                    weight.data = weight.data.bfloat16()
            # The parameters that a process holds and updates.
            self.local_model = (
                self.model
                if self.shard_degree == 1
                else make_local_model(config, self.shard_degree)
            )
            named = [*self.model.named_parameters(), *self.local_model.named_parameters()]
            self.names = {parameter: name for name, parameter in named}
            self.optimizer = self.make_optimizer(self.local_model)
            make_state(self.optimizer, self.local_model.parameters())

    def step(self, batch_size: int, **memory: Any) -> StepMemory:
        """Return a step on `batch_size` sequences: its memory in bytes, and its work.

        `memory`: changed settings of the config, such as recompute="full".
        """
        config = replace(self.config, **memory)
        key, plan = (batch_size, config), recompute_plan(config)
        if key not in self.steps:
            # Some memory outlives its block: tensors on their way out, or buffers of shards. It
            # depends on the block's neighbours. So if blocks differ, simulate the whole step.
            is_mix, in_groups = len(set(plan.policies)) > 1, plan.group_size > 1
            if plan.offload and is_mix or self.shard_degree > 1 and in_groups:
                _, self.steps[key] = self.simulate(batch_size, config)
            else:
                self.steps[key] = self.compose_step(batch_size, config)
        return self.steps[key]

    def compose_step(self, batch_size: int, config: MiniGPTConfig) -> StepMemory:
        """Compose a step of segments from steps with few calls, all of which are equal."""
        groups, first = recompute_plan(config).checkpoint_groups, 0
        representatives = {
            call: self.few_call_step(batch_size, config, *call) for call in {("none", 1), *groups}
        }
        frame = representatives["none", 1]
        forward, backward = list[tuple[Segment, int]](), list[tuple[Segment, int]]()
        for to_come, call in zip(range(len(groups))[::-1], groups, strict=True):
            step, (_, size) = representatives[call], call
            # Index of the call that represents this one, counted from the first or the last.
            i = max(min(first // size, step.n // 2), step.n - 1 - to_come)
            forward.append((step.forward[i], first - i * size))
            backward.append((step.backward[i], first - i * size))
            first += size
        begin, end = representatives[groups[0]], representatives[groups[-1]]
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
        """Simulate a step with few calls, and cache it.

        Each call runs `size` blocks with this policy.
        """
        plan, plain = recompute_plan(config), replace(config, recompute="none")
        nested, moves = plan.nested and size > 1, plan.offload and policy != "none"
        key = batch_size, plain, policy, size, nested, moves
        if key not in self.few_call_steps:
            self.on_simulate()
            n = plain.n_layers // size
            if self.are_alike:  # only calls near both ends may differ
                ends_differ = moves or self.shard_degree > 1
                n = min(n, 3 + 2 * offload.MAX_COPIES_IN_FLIGHT * moves if ends_differ else 2)
            short_plan = RecomputePlan((policy,) * n * size, size, nested, moves)
            short = replace(plain, n_layers=n * size, recompute=format_recompute_plan(short_plan))
            frame = None if policy == "none" else self.few_call_step(batch_size, plain, "none", 1)
            segments = split_into_segments(self.run_fake_step(batch_size, short, frame), [size] * n)
            if frame is None:
                # Gradients of the left-out blocks exist from the begin here, for the update. Do not
                # count them: in the composed step each block's backward makes its own.
                left_out = (
                    set(self.local_model.blocks[n:].parameters()) - self.params_with_kept_grads
                )
                allocated = segments[0].changes[0, 0]
                allocated[KINDS.index("gradients")] -= sum(p.nbytes for p in left_out)
            self.few_call_steps[key] = FewCallStep(segments)
        return self.few_call_steps[key]

    def largest_batch(
        self, budget: int, batch_size: int, host: int | None = None, **memory: Any
    ) -> int:
        """Return the largest number of sequences whose peak is at most `budget` bytes, or 0.

        Args:
            batch_size: a batch to begin with, in sequences.
            host: limit of offload's CPU memory in bytes; None: unknown, no limit.
            memory: changed settings of the config, as in `step`.
        """
        with_offload = recompute_plan(replace(self.config, **memory)).offload
        # With fewer sequences the residual stream is too small to be moved. So their steps do not
        # predict those of larger batches.
        min_batch = (
            math.ceil(MIN_OFFLOAD_BYTES / (4 * self.local_seq_len * self.config.d_model))
            if with_offload
            else 1
        )
        one = self.step(max(batch_size, min_batch, 2), **memory)
        # One sequence: other functions need this step, too, and `step` caches it.
        two = self.step(one.batch_size + 1 if with_offload else 1, **memory)
        if len(ops_outside_head(one)) != len(ops_outside_head(two)):
            # With one sequence a reshape may be a view, where others run an operator that copies.
            two = self.step(one.batch_size + 1, **memory)

        def fits(sequences: int) -> bool:
            step = self.step(sequences, **memory)
            return step.peak <= budget and (host is None or step.host_bytes <= host)

        def head(sequences: int) -> int:
            return head_bytes(one.config, sequences * self.local_seq_len, self.precision)

        largest = largest_batch(one, two, budget, head, self.on_cpu)
        is_bound = largest == MAX_BATCH or with_offload and (self.on_cpu or host is not None)
        if is_bound and not (largest and fits(largest)):
            largest = bisect_left(
                range(1, max(largest, min_batch)), True, key=lambda n: not fits(n)
            )
        return max(largest, batch_size if fits(batch_size) else 0)

    def simulate(
        self, batch_size: int, config: MiniGPTConfig, sources: CallSiteTracker | None = None
    ) -> tuple[OpRecorder, StepMemory]:
        """Simulate a whole step; return its recorder and its memory.

        `sources`: finds the call sites that the recorder stores.
        """
        self.on_simulate()
        log = self.run_fake_step(batch_size, config, None, sources)
        segments = split_into_segments(
            log, [size for _, size in recompute_plan(config).checkpoint_groups]
        )
        whole = [(segment, 0) for segment in segments]
        return log, StepMemory(config, batch_size, self.seq_len, whole)

    def record(self, batch_size: int, **memory: Any) -> StepRecord:
        """Return a step as `step` does, with the name of each storage in it: planner/record.py.

        `memory`: changed settings of the config.
        """
        config = replace(self.config, **memory)
        return build_step_record(*self.simulate(batch_size, config, CallSiteTracker(self.model)))

    def run_fake_step(
        self,
        batch_size: int,
        config: MiniGPTConfig,
        known: "FewCallStep | None" = None,
        sources: CallSiteTracker | None = None,
    ) -> OpRecorder:
        """Run train_minimal.train_step on fake tensors, and return the recorder.

        Only the first `config.n_layers` blocks run. The update is that of all blocks in the
        planner's model.

        Args:
            known: another step with the same head and update: leave them out of this one.
            sources: finds the call sites that the recorder stores.
        """
        model, parameters = self.model, list(self.local_model.parameters())
        blocks = model.blocks[: config.n_layers]
        with self.fake:
            # Weights with gradients before forward; bfloat16 ones have separate sums in float32.
            weights = self.params_with_kept_grads.union(parameters if self.shard_degree > 1 else ())
            if not known:
                weights = weights.union(self.local_model.blocks[config.n_layers :].parameters())
            self.sums = {p: torch.empty(p.shape) for p in weights if p.dtype != torch.float32}
            for parameter in weights - self.sums.keys():
                parameter.grad = torch.empty_like(parameter)
            batch = torch.zeros(2, batch_size, self.seq_len, dtype=torch.int64)
            ids, labels = batch[:, :, : self.local_seq_len]
        with (
            simulated_on(self.device_type, self.fake, sources) as log,
            patched(model, blocks=blocks),
            patched(head, chunk_starts=representative_chunks(log, known)),
            ExitStack() as hooks,
        ):
            pool = UnsplitPool(log, self.on_cpu)
            model.config, cast(BlockCalls, model.blocks_with_recompute).offload_pool = (
                config,
                pool,
            )
            for handle in register_phase_hooks(blocks, model.ln_f, log):
                hooks.enter_context(handle)
            for parameter in self.names.keys() - parameters:  # full weights; shards count instead
                log.add(parameter).nbytes = 0
            name_what_is_there(log, self.names, self.optimizer, self.sums)
            log.label(batch, "activations", "token ids and labels")  # backward needs them
            forward = partial(model, ids, labels)
            loss = forward_and_backward(log, forward, self.precision, cache_enabled=False)
            name_what_is_there(log, self.names, self.optimizer, self.sums)
            if self.shard_degree > 1:
                shard_options = self.on_cpu, self.gather_in_low, self.sums
                add_shards(log, model, self.local_model, self.shard_degree, *shard_options)
            if self.compress:  # freed when the average exists
                copies = [cast(Tensor, parameter.grad).bfloat16() for parameter in parameters]
                for copy in copies:
                    log.label(copy, "gradients", "gradient on its way")
                del copies, copy
            log.enter_phase("optimizer")
            if known:
                torch.empty(1)  # memory freed now ends with an operator of the update
            else:
                # A GPU clips all tensors at once. For these CPU tensors torch would not.
                self.clip(parameters, 1.0, foreach=not self.on_cpu)
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            del loss  # the trainer holds it until here
        for buffer in pool.buffers:
            log.label(buffer, "activations", "buffer of offload", "copies wait in it for backward")
        return log

    @property
    def note(self) -> str:
        """Sentence on operators that the plan gets wrong on a GPU; "" if there are none."""
        # torch's native_functions.yaml has no other function that only a CPU composes of several.
        if self.on_cpu or not any(isinstance(part, nn.RMSNorm) for part in self.model.modules()):
            return ""
        return (
            "rms_norm is planned as several operators, as on a CPU; on "
            f"{self.device_type} it is one, which keeps less: the real peak is likely lower"
        )

    @property
    def params_with_kept_grads(self) -> set[nn.Parameter]:
        """Weights whose gradients exist from the step's begin to its end."""
        return set(self.model.parameters()) if self.accumulate or self.ddp else set()


def no_communication(sent: Tensor, send: list[int], take: list[int]) -> Tensor:
    """Return an uninitialised tensor (sum(take),) in place of an all-to-all in memory/sequence.py.

    `sent` (sum(send),): the elements that this rank would send.
    """
    return sent.new_empty(sum(take))


class UnsplitPool(PinnedPool):
    """Host memory with one buffer for each tensor, instead of several.

    So steps run the same operators with every batch size.
    """

    def __init__(self, log: OpRecorder, on_cpu: bool) -> None:
        super().__init__()
        self.log = log
        if not on_cpu:
            self.device = torch.device("meta")  # host memory is not on the simulated GPU

    def acquire_buffers(self, like: Tensor) -> list[Tensor]:
        """Return one host buffer for the 1-D `like`, and record the copy to it."""
        self.log.moved.append((like.nbytes, self.log.places[-1]))
        return [self.reuse_or_allocate(pinned_nbytes(like.nbytes), pinned=False)]


def representative_chunks(
    log: OpRecorder, known: "FewCallStep | None"
) -> Callable[[int, int], Iterator[int]]:
    """Return a replacement for `chunk_starts` of memory/head.py that yields few chunks.

    The head may have millions. The replacement yields the starts of the first chunk, of the second,
    and of the last. The second represents all in between, which run the same operators. With a
    `known` step, which has the head, it yields none.
    """

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
    """Give `thing` these attributes inside this context, and restore the old ones after it."""
    old_values = {name: getattr(thing, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in old_values.items():
            setattr(thing, name, value)


# ---- for any model


@contextmanager
def simulated_on(
    device_type: str, fake: FakeTensorMode, sources: CallSiteTracker | None = None
) -> Iterator[OpRecorder]:
    """Record the operators that run on fake tensors in this context; yield the recorder.

    The fake tensors are always on a CPU. For "cuda" use functions like CUDA's fused dropout and
    attention, and add the workspaces of its kernels. For "mps" neither function is fused, as in
    training there. `sources`: finds the call sites that the recorder stores.
    """
    on_cuda = device_type == "cuda"
    with (
        fake,
        OpRecorder(sources, kernel_workspace=kernel_workspace_bytes if on_cuda else None) as log,
        patched(F, **(FUSED if on_cuda else {})),
        sources.listen() if sources else nullcontext(),
        # Attention that is not fused keeps its scores, (B, H, T, T).
        sdpa_kernel(SDPBackend.MATH) if device_type == "mps" else nullcontext(),
        torch.autograd.set_detect_anomaly(False),  # fake tensors have no values to check
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
    """Make the optimizer's state of these parameters, as a first step does.

    So a simulated step finds the state, as all later steps do.
    """
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def forward_and_backward(
    log: OpRecorder, forward: Callable[[], Tensor], precision: torch.dtype, cache_enabled: bool
) -> Tensor:
    """Run `forward` under autocast and then backward; return the loss, a scalar.

    `precision`: dtype of autocast; float32: no autocast. `cache_enabled`: autocast keeps its copies
    of weights until forward ends.
    """
    enabled = precision != torch.float32
    log.enter_phase("forward")
    with torch.autocast("cpu", precision, enabled, cache_enabled):
        loss = forward()
    log.forward_end = log.n_ops
    if log.phase == "forward":  # else the head's backward comes first
        log.enter_phase("backward")
    loss.backward()
    return loss


def name_what_is_there(
    log: OpRecorder,
    names: Mapping[Any, str],
    optimizer: torch.optim.Optimizer,
    sums: Mapping[Any, Tensor],
) -> None:
    """Name the storages of weights, of the optimizer's state, and of existing gradients.

    `names`: weight -> its name. `sums`: weight -> the sum of its gradients, if that is not
    weight.grad.
    """
    for weight, name in names.items():
        # Also a full weight beside its shards. Its bytes are counted when it is gathered.
        log.find_storage(weight).name = name
        named = [
            (weight if weight in optimizer.state else None, "parameters", name),
            (sums.get(weight, weight.grad), "gradients", f"gradient of {name}"),
            *(
                (state_tensor, "optimizer", f"{state_name} of {name}")
                for state_name, state_tensor in optimizer.state.get(weight, {}).items()
            ),
        ]
        for tensor, kind, tensor_name in named:
            if isinstance(tensor, Tensor):
                log.label(tensor, kind, tensor_name)


def register_phase_hooks(
    blocks: nn.ModuleList | list[nn.Module], last: nn.Module, log: OpRecorder
) -> list[RemovableHandle]:
    """Register hooks that tell the recorder the running phase and block; return their handles.

    They follow forward, backward and recomputations. The head begins after `last`: the last block,
    or a module after it.
    """
    is_after_blocks = last not in blocks

    def enter_block(i: int, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        log.enter_phase(log.phase, i)
        if log.phase == "forward":  # backward of block i ends with its input's gradient
            when_gradient_is_there((args, kwargs), i - 1 if i > 0 else None)

    def leave_blocks(last: nn.Module, args: tuple) -> None:
        log.enter_phase("forward")
        when_gradient_is_there(args, len(blocks) - 1)

    def enter_head(last: nn.Module, args: tuple, output: Any) -> None:
        if log.phase == "forward":  # not a recomputation
            log.enter_phase("head")
            when_gradient_is_there(output, None if is_after_blocks else len(blocks) - 1)

    def when_gradient_is_there(tensors: Any, i: int | None) -> None:
        """Enter backward of block i when the first tensor that needs a gradient has it."""
        leaves = filter(torch.is_tensor, tree_leaves(tensors))
        for tensor in [leaf for leaf in leaves if leaf.requires_grad][:1]:
            tensor.register_hook(lambda _: log.enter_phase("backward", i))

    return [
        *(module.register_forward_pre_hook(leave_blocks) for module in [last] * is_after_blocks),
        last.register_forward_hook(enter_head),
        *(
            block.register_forward_pre_hook(partial(enter_block, i), with_kwargs=True)
            for i, block in enumerate(blocks)
        ),
    ]


# ---- functions that CUDA fuses

ATTENTION = F.scaled_dot_product_attention


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Return attention as F.scaled_dot_product_attention does, but keep no dropout mask."""
    return ATTENTION(query, key, value, attn_mask, 0.0, is_causal, **options)


def fused_dropout(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Return dropout of x as F.dropout does, and keep a mask of one byte for each element."""
    return torch.ops.aten.native_dropout(x, p, training)[0] if p and training else x


FUSED: dict[str, Any] = {"dropout": fused_dropout, "scaled_dot_product_attention": fused_attention}
