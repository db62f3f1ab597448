"""Plan one training step before it runs: its peak memory, the bytes of each kind of tensor at the
peak, and the phase and the block in which the peak occurs.

The planner runs one step with the real model, optimizer and recompute policies, but on fake tensors
(see planner/simulate.py). planner/choose.py chooses a policy by the results of the planner, and
planner/formulas.py computes the same figures by formulas.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memory
import model
from memory import (
    MemorySavingGPT,
    PinnedPool,
    RecomputePlan,
    format_recompute_plan,
    head,
    offload,
    recompute_plan_of_config,
)
from memory.offload import host_buffer_bytes
from memory.sequence import SequenceShard
from model import MiniGPTConfig

from .batches import MAX_BATCH, bytes_at_ops_outside_head, largest_batch
from .formulas import head_bytes
from .layout import Layout
from .op_recorder import CallSiteTracker, OpRecorder
from .record import StepRecord, explain_storages
from .shards import add_fsdp_storages, block_group_params, make_local_model
from .simulate import (
    empty_function_caches,
    forward_and_backward,
    label_existing_storages,
    patched,
    phase_hooks,
    plan_errors,
    recording_simulated_ops,
)
from .timeline import KINDS, Segment, StepMemory, split_into_segments

# The files whose lines a record names.
SOURCES = Path(model.__file__), Path(memory.__file__).parent


class ShortStepSegments:
    """Segments of a step with few calls, which represent the segments of a step with more calls.

    A call in MiniGPT.forward runs one block, or a group of blocks that share an activation
    checkpoint.
    """

    def __init__(self, segments: list[Segment]):
        self.n = n = len(segments) // 2 - 3  # number of calls
        self.state, self.embedding, *rest, self.embedding_backward, self.update_segment = segments
        self.forward, self.backward = rest[:n], rest[: -n - 1 : -1]  # by call, in forward's order
        self.left, self.head, self.entered = rest[n:-n]  # ln_f, the head, and ln_f's backward


@dataclass(eq=False)
class Planner:
    """Plan training steps: run the real model, optimizer and recompute policies on fake tensors.

    The fake tensors are always on a CPU. For "cuda" the planner uses functions that keep the same
    tensors as CUDA's fused dropout and fused attention, and adds the workspaces of CUDA's kernels
    (planner/operators.py). For "mps" dropout and attention are not fused, as in real training.
    """

    config: MiniGPTConfig  # `step` can change its memory settings
    seq_len: int  # tokens
    _: KW_ONLY
    # Dtype of autocast; float32: no autocast. (The plan leaves out a few bytes of a GradScaler.)
    precision: torch.dtype
    # Makes the trainer's optimizer for a model.
    make_optimizer: Callable[[MemorySavingGPT], torch.optim.Optimizer]
    clip_gradients: Callable[..., object] = nn.utils.clip_grad_norm_  # clips the gradients
    device_type: str = "cpu"
    accumulates_gradients: bool = False  # gradients of an earlier micro-batch exist in forward
    # Which processes share what. The plan is for one process: for rank 0 if sequences are shared,
    # because no other rank has more tokens or heads.
    layout: Layout = Layout()
    # Number of pending sums of earlier gradients that a parameter has besides `.grad`, and that are
    # freed when its gradient is complete (see --reproducible-sums).
    n_pending_sums: int = 0
    # Gradients are sent or received in copies of this dtype; None: in place. With DDP the plan
    # counts all copies at once, as in the first step, in which one bucket has all gradients.
    gradient_copies: torch.dtype | None = None
    gather_in_bfloat16: bool = False  # True: the blocks' shards are gathered in bfloat16
    card_name: str | None = None  # name in CARDS; None: this machine's GPU
    on_simulate: Callable[[int], object] = lambda n: None  # gets each simulation's operators

    def __post_init__(self) -> None:
        config = self.config
        self.on_cpu = self.device_type == "cpu"
        self.has_one_kernel_addmm = self.device_type == "cuda" and head.HAS_ADDMM_OUT_DTYPE
        sequence = SequenceShard(0, self.layout.sp_degree, config.n_heads, fake_all_to_all)
        self.local_seq_len = sequence.start_sharding(self.seq_len).stop  # tokens per sequence
        shard = sequence if self.layout.sp_degree > 1 else None
        self.fake = FakeTensorMode()
        self.steps: dict[tuple[int, MiniGPTConfig], StepMemory] = {}
        self.short_step_segments: dict[tuple, ShortStepSegments] = {}
        self.n_simulated_ops = 0
        with self.fake:
            self.model = MemorySavingGPT(config, self.device_type, shard).train()
            # A changed model.py may have different blocks, or blocks that share weights.
            blocks = self.model.blocks
            shapes = {tuple(w.shape for w in block.parameters()) for block in blocks}
            self.are_alike = len(shapes) == 1 and len({*blocks}) == len(blocks)
            if self.gather_in_bfloat16:
                for weight in block_group_params(self.model.blocks, in_bfloat16=True):
                    weight.data = weight.data.bfloat16()
            # The model with the parameters that one process keeps and updates.
            self.local_model = (
                self.model
                if self.layout.shard_degree == 1
                else make_local_model(config, self.layout.shard_degree)
            )
            named = [*self.model.named_parameters(), *self.local_model.named_parameters()]
            self.names = {parameter: name for name, parameter in named}
            self.optimizer = self.make_optimizer(self.local_model)
            make_optimizer_state(self.optimizer, self.local_model.parameters())

    def step(self, batch_size: int, **memory: Any) -> StepMemory:
        """Return a planned step with `batch_size` sequences: its memory in bytes, and the FLOPs and
        the memory traffic of each operator. `memory`: changed settings of the config, such as
        recompute="full"."""
        config = self.model.normalized_config(replace(self.config, **memory))
        key, plan = (batch_size, config), recompute_plan_of_config(config)
        if key not in self.steps:
            # Simulate the whole step if calls with offload have several policies, or if groups of
            # sharded blocks are unequal: tensors that offload is copying, and all-gather buffers,
            # still exist when the next call runs, and depend on both calls.
            is_mix, sizes = len(set(plan.policies)) > 1, {*plan.group_policies_and_sizes}
            has_shards = self.layout.shard_degree > 1 and plan.group_size > 1
            if plan.offload and is_mix or has_shards and len(sizes) > 1:
                _, self.steps[key] = self.simulate_whole_step(batch_size, config)
            else:
                self.steps[key] = self.compose_step(batch_size, config)
        return self.steps[key]

    def compose_step(self, batch_size: int, config: MiniGPTConfig) -> StepMemory:
        """Return a step whose segments were simulated in shorter steps (see `ShortStepSegments`),
        each of which has few calls, all with the same policy."""
        groups, first = recompute_plan_of_config(config).group_policies_and_sizes, 0
        representatives = {
            call: self.simulate_short_step(batch_size, config, *call)
            for call in {("none", 1), *groups}
        }
        frame = representatives["none", 1]
        forward, backward = list[tuple[Segment, int]](), list[tuple[Segment, int]]()
        for to_come, call in zip(range(len(groups))[::-1], groups, strict=True):
            step, (_, size) = representatives[call], call
            # Index of the call in `step` that represents this call: the call with the same distance
            # from the first or the last call, or one in the middle.
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
            *((segment, 0) for segment in (begin.embedding_backward, frame.update_segment)),
        ]
        return StepMemory(config, batch_size, self.seq_len, segments)

    def simulate_short_step(
        self, batch_size: int, config: MiniGPTConfig, policy: str, size: int
    ) -> ShortStepSegments:
        """Simulate a step with few calls, each of which runs `size` blocks with `policy`, and cache
        the step's segments."""
        plan, plain = recompute_plan_of_config(config), replace(config, recompute="none")
        nested, moves = plan.nested and size > 1, plan.offload and policy != "none"
        key = batch_size, plain, policy, size, nested, moves
        if key not in self.short_step_segments:
            frame = (
                None if policy == "none" else self.simulate_short_step(batch_size, plain, "none", 1)
            )
            n = plain.n_layers // size
            if self.are_alike:  # only calls near the first and the last may differ
                ends_differ = moves or self.layout.shard_degree > 1
                n = min(n, 3 + 2 * offload.MAX_COPIES_IN_FLIGHT * moves if ends_differ else 2)
            short_plan = RecomputePlan((policy,) * n * size, size, nested, moves)
            short = replace(plain, n_layers=n * size, recompute=format_recompute_plan(short_plan))
            log = self.run_fake_step(batch_size, short, runs_head=frame is None, runs_update=False)
            if log.loop_has_ops and not moves and self.are_alike:
                # MiniGPT.forward of a changed model.py does more for each block than to call it, so
                # that tensors of several blocks may exist together: simulate all calls. (The copies
                # of offload run between blocks, too, but each belongs to one block.)
                self.are_alike = False
                return self.simulate_short_step(batch_size, config, policy, size)
            segments = split_into_segments(log, [size] * n)
            if self.gather_in_bfloat16:
                # The root group has the LayerNorms of all blocks. Their full gradients are freed
                # when backward ends, also for the blocks that do not run here.
                rest = self.model.blocks[n * size :]
                norms = {*rest.parameters()} - {*block_group_params(rest, in_bfloat16=True)}
                freed = segments[-2].allocated_and_freed_by_kind[-1, 1]
                freed[KINDS.index("gradients")] += sum(p.nbytes for p in norms)
            segments[-1] = self.update_segment
            self.short_step_segments[key] = ShortStepSegments(segments)
        return self.short_step_segments[key]

    @cached_property
    def update_segment(self) -> Segment:
        """The update of the weights, which is the same for every policy and batch."""
        with self.fake:
            for parameter in self.local_model.parameters():
                parameter.grad = torch.empty_like(parameter)
        with self.recording() as log:
            label_existing_storages(log, self.names, self.optimizer, {})
            self.simulate_update(log)
        return split_into_segments(log)[-1]

    @contextmanager
    def recording(self, sources: CallSiteTracker | None = None) -> Iterator[OpRecorder]:
        """Record simulated operators, and count them."""
        with recording_simulated_ops(self.device_type, self.fake, sources, self.card_name) as log:
            yield log
        self.n_simulated_ops += log.n_ops
        self.on_simulate(log.n_ops)

    def largest_batch(self, budget: int, start: int, host: int | None = None, **memory: Any) -> int:
        """Return the largest number of sequences with which a step fits in `budget` bytes, or 0.

        Args:
            start: number of sequences with which the search begins.
            host: bytes of CPU memory that offload may take; None: unknown, so there is no limit.
            memory: changed settings of the config, as in `step`.
        """
        with_offload = recompute_plan_of_config(replace(self.config, **memory)).offload
        # With fewer than `min_batch` sequences the residual stream is too small for offload, so
        # such steps do not predict steps with larger batches.
        min_batch = (
            math.ceil(offload.MIN_OFFLOAD_BYTES / (4 * self.local_seq_len * self.config.d_model))
            if with_offload
            else 1
        )
        one = self.step(max(start, min_batch, 2), **memory)
        # Prefer the step with one sequence: other functions need it, too, and `step` caches it.
        two = self.step(one.batch_size + 1 if min_batch > 1 else 1, **memory)
        if len(bytes_at_ops_outside_head(one)) != len(bytes_at_ops_outside_head(two)):
            # Replace the step of a single sequence, in which a reshape may return a view: with more
            # sequences it copies, which is one more operator.
            two = self.step(one.batch_size + 1, **memory)

        def fits(sequences: int) -> bool:
            step = self.step(sequences, **memory)
            return step.peak <= budget and (host is None or step.host_bytes <= host)

        def bytes_of_head(sequences: int) -> int:
            shape = one.config, sequences * self.local_seq_len, self.precision
            return head_bytes(*shape, in_rows=not self.has_one_kernel_addmm)

        largest = largest_batch(one, two, budget, bytes_of_head, self.on_cpu)
        is_bound = largest == MAX_BATCH or with_offload and (self.on_cpu or host is not None)
        if is_bound and not (largest and fits(largest)):
            largest = bisect_left(
                range(1, max(largest, min_batch)), True, key=lambda n: not fits(n)
            )
        return max(largest, start if fits(start) else 0)

    def simulate_whole_step(
        self, batch_size: int, config: MiniGPTConfig, sources: CallSiteTracker | None = None
    ) -> tuple[OpRecorder, StepMemory]:
        """Simulate a whole step; return its recorder and its memory.

        `sources`: finds the call sites that the recorder stores; None: store no call sites.
        """
        log = self.run_fake_step(batch_size, config, sources=sources)
        sizes = [size for _, size in recompute_plan_of_config(config).group_policies_and_sizes]
        whole = [(segment, 0) for segment in split_into_segments(log, sizes)]
        return log, StepMemory(config, batch_size, self.seq_len, whole)

    def record(self, batch_size: int, **memory: Any) -> StepRecord:
        """Simulate a whole step; return its record, which names each storage (planner/record.py).

        `memory`: changed settings of the config.
        """
        config = self.model.normalized_config(replace(self.config, **memory))
        tracker = CallSiteTracker(self.model, "blocks", SOURCES)
        return explain_storages(*self.simulate_whole_step(batch_size, config, tracker))

    def run_fake_step(
        self,
        batch_size: int,
        config: MiniGPTConfig,
        runs_head: bool = True,
        runs_update: bool = True,
        sources: CallSiteTracker | None = None,
    ) -> OpRecorder:
        """Do train_minimal.train_step for one micro-batch on fake tensors, with only the first
        `config.n_layers` blocks; return the recorder.

        Args:
            runs_head, runs_update: False: leave out the head or the update (which one operator
                replaces), because another step has the same one.
            sources: finds the call sites that the recorder stores; None: store no call sites.
        """
        model, blocks = self.model, self.model.blocks[: config.n_layers]
        gathered = self.names.keys() - {*self.local_model.parameters()}
        with self.fake:
            self.make_earlier_gradients(self.params_left_out(config.n_layers))
            rows = torch.zeros(batch_size, self.seq_len + 1, dtype=torch.int64)
            # As in data/batches.py: with a single sequence, both are views of `rows`.
            batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
            ids, labels = (tensor[:, : self.local_seq_len] for tensor in batch)
            del rows
        with (
            self.recording(sources) as log,
            patched(model, blocks=blocks),
            patched(head, chunk_starts=make_chunk_starts_replacement(log, runs_head)),
            phase_hooks(blocks, model.ln_f, log),
            ExitStack() as hooks,
        ):
            model.config, pool = config, SimulatedPinnedPool(log, self.on_cpu)
            model.offload_pool = pool
            # The full weights of a sharded model take no memory here: `add_fsdp_storages` counts
            # them.
            for parameter in gathered:
                log.add_storage(parameter).nbytes = 0
            for parameter in self.sums if self.layout.shard_degree == 1 else ():
                hooks.enter_context(
                    parameter.register_post_accumulate_grad_hook(self.sums.__delitem__)
                )
            label_existing_storages(log, self.names, self.optimizer, self.sums)
            if not self.layout.gradients_persist:  # DDP's gradients exist in every micro-batch
                gradients = (p.grad for p in self.params_with_persistent_grads)
                log.gradient_sums = {log.find_storage(g) for g in gradients if g is not None}
            for tensor in batch:  # backward needs them
                log.label_storage(tensor, "activations", "token ids and labels")
            del tensor
            forward = partial(model, ids, labels)
            with plan_errors("model.py cannot be planned", Exception), empty_function_caches(model):
                loss = forward_and_backward(log, forward, self.precision, cache_enabled=False)
            del forward, ids, labels, batch  # freed before the update
            label_existing_storages(log, self.names, self.optimizer, self.sums)
            if self.layout.shard_degree > 1:
                shards = model, self.local_model, self.layout.shard_degree, self.sums
                copies = self.gradient_copies is not None
                add_fsdp_storages(log, *shards, self.on_cpu, self.gather_in_bfloat16, copies)
            if runs_update:
                self.simulate_update(log)
            else:
                log.enter_phase("optimizer")
                torch.empty(1)  # storages that are freed below end after this operator
                self.optimizer.zero_grad(set_to_none=True)
            del loss  # the trainer keeps the loss until here
        for buffer in pool.buffers:
            log.label_storage(
                buffer, "activations", "buffer of offload", "copies wait in it for backward"
            )
        return log

    def make_earlier_gradients(self, left_out: set[nn.Parameter]) -> None:
        """Make the gradients that exist before forward: of earlier micro-batches, and of shards
        that are not `left_out`. `sums` gets what is not in `.grad`: the float32 sums of bfloat16
        weights, and pending sums."""
        shards = {*self.local_model.parameters()} if self.layout.shard_degree > 1 else set()
        weights = self.params_with_persistent_grads | shards - left_out
        self.sums = {p: torch.empty(p.shape) for p in weights if p.dtype != torch.float32}
        for parameter in weights - self.sums.keys():
            parameter.grad = torch.empty_like(parameter)
        if n := self.n_pending_sums:
            self.sums |= {
                p: torch.empty(n, *p.shape)
                for p in self.local_model.parameters()
                if p.requires_grad
            }

    def simulate_update(self, log: OpRecorder) -> None:
        """Clip the gradients of all parameters, update the parameters and free the gradients, once
        in a step."""
        log.enter_phase("optimizer")
        parameters = list(self.local_model.parameters())
        if (dtype := self.gradient_copies) and self.layout.gradients_persist:
            # Freed when the averages exist
            copies = [cast(Tensor, p.grad).to(dtype, copy=True) for p in parameters]
            for copy in copies:
                log.label_storage(copy, "gradients", "gradient on its way")
            del copies, copy
        # A GPU clips all tensors at once, which is not torch's default on a CPU.
        self.clip_gradients(parameters, 1.0, foreach=not self.on_cpu)
        step_once_of_each_kind(self.optimizer, log)
        self.optimizer.zero_grad(set_to_none=True)

    def params_left_out(self, n: int) -> set[nn.Parameter]:
        """Return this process's weights of the blocks after the first n, which a short step leaves
        out. (LayerNorms that belong to the root group of shards are not among them.)"""
        ran, left_out = (
            {*block_group_params(blocks, self.gather_in_bfloat16)}
            for blocks in (self.local_model.blocks[:n], self.local_model.blocks[n:])
        )
        return left_out - ran

    @property
    def inaccuracy_note(self) -> str:
        """Sentence for the user on operators that the plan gets wrong for a GPU; "" if none."""
        # RMSNorm is the only function in torch's native_functions.yaml that runs as one operator on
        # a GPU and as several on a CPU.
        is_other = not self.on_cpu and any(isinstance(m, nn.RMSNorm) for m in self.model.modules())
        return is_other * (
            "rms_norm is planned as several operators, as on a CPU; on "
            f"{self.device_type} it is one, which keeps less: the real peak is likely lower"
        )

    @property
    def params_with_persistent_grads(self) -> set[nn.Parameter]:
        """Weights whose gradients exist during the whole step, from its start to its end."""
        persist = self.accumulates_gradients or self.layout.gradients_persist
        return set(self.model.parameters()) if persist else set()


def fake_all_to_all(x: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
    """Return an uninitialised tensor (sum(receive_sizes),) in place of the result of an all-to-all
    of memory/sequence.py. `x` (sum(send_sizes),): the elements that this rank would send.
    `send_sizes`, `receive_sizes`: number of elements for each rank, and from each rank."""
    return x.new_empty(sum(receive_sizes))


class SimulatedPinnedPool(PinnedPool):
    """Pool of host memory in which each tensor has one buffer instead of several, so that a step
    runs the same operators with every batch size."""

    def __init__(self, log: OpRecorder, on_cpu: bool) -> None:
        super().__init__()
        self.log = log
        if not on_cpu:
            self.device = torch.device("meta")  # so host memory does not count as memory of the GPU

    def acquire_buffers(self, like: Tensor) -> list[Tensor]:
        """Return one host buffer for the 1-D tensor `like`, and record the copy to it."""
        size = host_buffer_bytes(like.nbytes)
        self.log.offloaded_tensors.append(((like.nbytes, size), self.log.phase_marks[-1]))
        return [self.reuse_or_allocate(size, pinned=False)]


def make_chunk_starts_replacement(
    log: OpRecorder, runs_head: bool
) -> Callable[[int, int], Iterator[int]]:
    """Return a replacement for `chunk_starts` of memory/head.py, which may yield millions of
    chunks. The replacement yields the starts of the first, the second and the last chunk. The
    second represents all chunks between the first and the last, because they run the same
    operators. `runs_head`: False: yield no chunk."""

    def few_chunk_starts(n_tokens: int, n: int) -> Iterator[int]:
        n_chunks = math.ceil(n_tokens / n) if runs_head else 0
        chunk = 0
        for log.times in [1, n_chunks - 2, 1] if n_chunks > 3 else [1] * n_chunks:
            yield chunk * n
            chunk += log.times
        log.times = 1

    return few_chunk_starts


def make_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]
) -> None:
    """Make the optimizer's state of these parameters, as the first step of a run does, so that a
    simulated step finds this state, as all later steps do. An optimizer with a method `make_state`
    need not run a whole update, which has many operators for a large model."""
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    getattr(optimizer, "make_state", optimizer.step)()
    optimizer.zero_grad(set_to_none=True)


def step_once_of_each_kind(optimizer: torch.optim.Optimizer, log: OpRecorder) -> None:
    """Record the optimizer's step: of updates that run the same operators, one runs, which the
    recorder counts as often as there are such updates. An optimizer with a method `updates_by_kind`
    tells which updates these are; any other optimizer runs a whole step."""
    every = {"all": [optimizer.step]}
    with torch.no_grad():
        for updates in getattr(optimizer, "updates_by_kind", lambda: every)().values():
            log.times = len(updates)
            updates[0]()
    log.times = 1
