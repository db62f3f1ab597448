"""The cheapest change of flags that makes a step fit, in the order of docs/planning.md ("Out of
memory: which knob first"). plan_memory prints it; it is proven by a simulation, or by the bytes of
its state.
"""

from collections.abc import Iterator
from itertools import chain, product, repeat
from typing import Any

from planner.choose import nested_checkpoint_policies
from scripts.plans import CommandPlan as Plan
from scripts.plans import optimizer_name
from trainer.metrics import format_bytes
from trainer.plan import OFFLOAD_POLICY, POLICY_FLAG
from trainer.settings import Settings, to_words

ADVICE_OPS = 20_000  # the search ends after so many simulated operators
OTHER_WAYS = "a smaller model (--n-layers, --d-model), or more cards with train_fsdp.py"
Change = dict[str, Any]  # flags that are changed together: name in Settings -> new value


def smaller_batches(settings: Settings) -> list[Change]:
    """Return all changes that split the sequences of a step into smaller micro-batches
    (--batch-size / n, --grad-accum-steps x n), the largest micro-batch first."""
    size, steps = settings.batch_size, settings.grad_accum_steps
    return [
        {"batch_size": size // n, "grad_accum_steps": steps * n}
        for n in range(2, size + 1)
        if size % n == 0 and settings.can_sum(steps * n)
    ]


def changes_with_same_training(settings: Settings, device_type: str) -> Iterator[Change]:
    """Yield changes that keep the training the same, the cheapest first. The first of them may
    have no flags: then only the policy, which each change is combined with, is another one."""
    chunked_loss = {"loss_chunks": 0} if settings.loss_chunks == 1 else {}
    policies: list[Change] = [{}]
    if device_type == "cuda" and not settings.recompute_plan.offload:
        policies.append({POLICY_FLAG: OFFLOAD_POLICY})
    for policy, batch in product(policies, [{}, *smaller_batches(settings)]):
        yield chunked_loss | policy | batch


def changes_of_training(settings: Settings) -> Iterator[Change]:
    """Yield changes that change the training. None repeats the value that a flag has."""
    moments, optimizer = {"moments_dtype": "bfloat16"}, {"optimizer": "muon"}
    changes = [
        *({"batch_size": batch["batch_size"]} for batch in smaller_batches(settings)),
        *({"seq_len": settings.seq_len // n} for n in (2, 4, 8) if settings.seq_len >= n),
        *(moments, optimizer, moments | optimizer),
    ]
    for change in changes:
        if all(getattr(settings, name) != value for name, value in change.items()):
            yield change


def with_fitting_policy(plan: Plan) -> Plan | None:
    """Return the plan with the fastest policy that fits, or None if no policy fits.

    If neither `full` nor nested groups (`full/K+nested`) fit, no policy fits, because these have
    the smallest peaks. If the policy has offload, only this policy is tried. Other policies cannot
    be compared with it, because a predicted time does not include offload's copies.
    """
    if plan.settings.recompute_plan.offload:
        return plan if plan.fits else None
    smallest = ["full", *nested_checkpoint_policies(plan.settings.n_layers)[-1:]]
    fits = any(plan.with_policy(name).peak <= plan.usable_bytes for name in smallest)
    return plan.with_fastest_policy() if fits else None


def advice(plan: Plan) -> tuple[str, Change | None]:
    """Return the cheapest change that makes a step fit, in words and as flags, with the fastest
    policy that fits. The flags are None if the search finds none in ADVICE_OPS operators, or if the
    state alone exceeds the budget. Then nothing is simulated, and the words name a change whose
    state fits."""
    settings, usable, n_ops = plan.settings, plan.usable_bytes, 0
    if plan.state_bytes >= usable:
        return advice_on_state(plan), None
    changes = chain(
        zip(changes_with_same_training(settings, plan.device.type), repeat("the same training")),
        zip(changes_of_training(settings), repeat("another training")),
    )
    for change, training in changes:
        changed = plan.with_flags(**change)
        before = changed.planner.n_simulated_ops
        if fits := with_fitting_policy(changed):
            flags = {POLICY_FLAG: ""} | change | {POLICY_FLAG: fits.policy}
            flags = {k: v for k, v in flags.items() if v != getattr(settings, k)}
            return f"{' '.join(to_words(flags))} fits ({training})", flags
        n_ops += changed.planner.n_simulated_ops - before
        if n_ops > ADVICE_OPS:
            break
    return f"plan {OTHER_WAYS}", None


def advice_on_state(plan: Plan) -> str:
    """Return why no step fits in less than the state, and what has less state. Whether its step
    fits is another question to the planner."""
    usable = plan.usable_bytes
    changes = ((c, plan.with_flags(**c).state_bytes) for c in changes_of_training(plan.settings))
    ways = [
        f"{' '.join(to_words(c))} ({format_bytes(size)})" for c, size in changes if size < usable
    ]
    return (
        f"weights, gradients and {optimizer_name(plan.settings)}'s state alone take "
        f"{format_bytes(plan.state_bytes)}, more than the {format_bytes(usable)} that tensors may "
        f"take: plan what has less state, {', or '.join([*ways, OTHER_WAYS])}"
    )
