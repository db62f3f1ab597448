"""Out of memory in forward or backward: the same again, with a policy that needs less.

Before its update, a step changes gradients and nothing else. Its data and its dropout masks follow
from (seed, number), and no policy changes a bit. So forward and backward can be given up and done
again. The run ends with the weights of one that had the deeper policy, or the memory, from the
start.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from planner import StepMemory

from .check import check_techniques
from .endings import is_out_of_memory
from .flags import UsageError
from .metrics import format_bytes
from .run import Run

REHEARSED = 2  # steps: the second one has the optimizer's state beside it, and DDP's final buckets


def with_less_memory(run: Run, accumulate: Callable[..., list[Tensor]]) -> list[Tensor]:
    """Return `accumulate(run)`: a step's losses, after its forward and backward.

    When memory runs out, do it again with a deeper policy, as often as it takes. Where gradients
    travel during backward, which then cannot be done again, the first steps are rehearsed.

    Raises the error if no policy needs less, or if --on-out-of-memory says stop.
    """
    if run.args.on_out_of_memory == "stop":
        return accumulate(run)
    if run.process.sends_early and run.clock.steps < REHEARSED:
        attempt(run, lambda run: accumulate(run, average=False))
        run.process.drop_gradients(run.optimizer)
    return attempt(run, accumulate)


def attempt(run: Run, accumulate: Callable[[Run], list[Tensor]]) -> list[Tensor]:
    """`accumulate(run)`, with one policy after the other."""
    while True:
        try:
            return accumulate(run)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not run.process.can_repeat():
                run.process.remember_shortage(run.model.config.recompute)
                raise
            message = str(error)
        # Only behind the `except` block: in it the traceback holds the frames, and those hold all
        # tensors of the step.
        go_deeper(run, message)


def go_deeper(run: Run, message: str) -> None:
    """Free what the failed attempt has made, and take the next policy. Raises MemoryError if there
    is none."""
    process, device, policy = run.process, run.process.device, run.model.config.recompute
    run.clock.give_up()
    process.drop_gradients(run.optimizer)
    # A backward that failed leaves its tasks in autograd's queue, and they hold the graph
    # (pytorch#82218). The next backward clears the queue: this one.
    torch.zeros((), device=device, requires_grad=True).backward()
    seen = None
    if device.type == "cuda":
        # Offload may still copy tensors that are free by now. To unmap their memory, the allocator
        # waits for the stream that computes, and for no other one.
        torch.cuda.synchronize(device)
        seen = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)  # the next peak is that of the policy to come
        torch.cuda.empty_cache()  # whole segments, without remains of the step between
    with run.clock.paused("plan"):
        step = take_next_policy(run, seen)
    if step is None:
        process.remember_shortage(policy)  # this run ends: with it all others do
        raise MemoryError(message)
    run.clock.expect(step.peak)
    taken = run.identity["config"]["recompute"] = step.config.recompute
    run.rescues.append(policy)
    same = "" if run.args.compile or run.args.mlp_chunks != 1 else ": same results"
    process.say_own(
        f"warning  step {run.step}: out of memory with recompute {policy}; again, and from now on, "
        f"with {taken} ({format_bytes(step.peak)} predicted){same}"
    )


def take_next_policy(run: Run, seen: int | None) -> StepMemory | None:
    """Give the model the next policy that needs less, and return its step.

    `seen`: bytes that the policy before it took, if they were counted.
    None: no policy needs less, or there is no memory to plan with, either.
    """
    config, policy = run.model.config, run.model.config.recompute
    with suppress(Exception):
        while step := run.next_policy(policy, seen):
            policy, seen = step.config.recompute, None
            run.model.config = replace(config, recompute=policy)
            with suppress(UsageError):  # a changed model.py may be exact under some policies only
                check_techniques(run.model, run.process.device, run.precision)
                return step
    run.model.config = config
    return None
