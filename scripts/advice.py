"""Changes of flags that make a step fit, in the order of docs/planning.md ("Out of memory: which
knob first"). plan_memory prints them; each is proven by a simulation, or by the bytes of its state.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from planner import Layout
from planner.choose import nested_checkpoint_policies, recomputed_flops_key
from scripts.plans import CommandPlan as Plan
from scripts.plans import optimizer_name
from trainer.metrics import format_bytes
from trainer.plan import OFFLOAD_POLICY, POLICY_FLAG
from trainer.settings import SHAPE_BY_MODEL, Settings, to_words

ADVICE_OPS = 20_000  # advice ends after so many simulated operators, with what it has found
SMALLER_MODEL = "a smaller model (--n-layers, --d-model)"
Change = dict[str, Any]  # flags that are changed together: name in Settings -> new value


def cost_of(change: Change) -> str:
    """Return what a change that keeps the training the same costs, in words for the user."""
    costs = ["the same sequences"] if "batch_size" in change else []
    if str(change.get(POLICY_FLAG)).endswith("+offload"):
        costs.append("what backward needs waits in CPU memory")
    if not costs and "loss_chunks" in change:
        return "never holds all logits, at about the same speed"
    return ", ".join(costs) or "same results, some more time"


def in_words(change: Change) -> str:
    """Return the flags of a change as a user types them: "--batch-size 3 --grad-accum-steps 4"."""
    return " ".join(to_words({"model": change["model"]} if "model" in change else change))


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
    """Yield changes that keep the training the same, the cheapest first.

    A caller combines each with the fastest recompute policy that then fits. The first change may
    have no flags: the policy alone.
    """
    chunked_loss = {"loss_chunks": 0} if settings.loss_chunks == 1 else {}
    smaller = smaller_batches(settings)
    yield from (chunked_loss | batch for batch in [{}, *smaller])
    if device_type == "cuda" and not settings.recompute_plan.offload:
        for batch in [{}, *smaller]:
            yield chunked_loss | {POLICY_FLAG: OFFLOAD_POLICY} | batch


def changes_of_training(settings: Settings) -> Iterator[list[Change]]:
    """Yield lists of changes that change the training. The changes of a list are alternatives, the
    smallest first. A change never repeats the value that a flag has."""

    def alternatives(*changes: Change) -> list[Change]:
        return [c for c in changes if all(getattr(settings, name) != v for name, v in c.items())]

    seq_len, moments = settings.seq_len, {"moments_dtype": "bfloat16"}
    yield alternatives(*({"batch_size": c["batch_size"]} for c in smaller_batches(settings)))
    yield alternatives(*({"seq_len": seq_len // n} for n in (2, 4, 8) if seq_len >= n))
    yield alternatives(moments, {"optimizer": "muon"}, moments | {"optimizer": "muon"})
    model, names = settings.model or "", [*SHAPE_BY_MODEL]
    shape = SHAPE_BY_MODEL.get(model, {})
    if shape and all(getattr(settings, name) == value for name, value in shape.items()):
        follows = "d_ff" not in settings.typed
        yield [
            {"model": name, **sizes} | ({"d_ff": 4 * sizes["d_model"]} if follows else {})
            for name in reversed(names[: names.index(model)])
            for sizes in [SHAPE_BY_MODEL[name]]
        ]


def with_fitting_policy(plan: Plan) -> Plan | None:
    """Return the plan with the fastest policy that fits, or None if no policy fits.

    If neither `full` nor nested groups (`full/K+nested`) fit, no policy fits, because these have
    the smallest peaks. If the policy has offload, only this policy is tried. Other policies cannot
    be compared with it, because a predicted time does not include offload's copies.
    """
    if plan.settings.recompute_plan.offload:
        return plan if plan.fits else None
    smallest = ["full", *nested_checkpoint_policies(plan.settings.n_layers)[-1:]]
    fits = any(plan.with_policy(name).fits for name in smallest)
    return plan.with_fastest_policy() if fits else None


def advice(plan: Plan) -> tuple[str, Change | None]:
    """Return the cheapest change that makes a step fit and keeps the training the same.

    The result is (text for the user, change). The change has the fastest policy that fits with its
    other flags. If no such change exists, the change is None, and the text names changes of the
    training. Each change in the text fits by simulation; the search ends after ADVICE_OPS
    operators. If the state alone exceeds the budget, nothing is simulated.
    """
    if plan.state_bytes >= plan.usable_bytes:
        return advice_on_state(plan), None
    ops_left = ADVICE_OPS

    def first_that_fits(changes: Iterable[Change]) -> Change | None:
        """Return the first change that fits, with its policy, without flags that have their value
        already."""
        nonlocal ops_left
        for change in changes:
            changed = plan.with_flags(**change)
            if ops_left <= 0 or changed.state_bytes >= changed.usable_bytes:
                continue
            before = changed.planner.n_simulated_ops
            fits = with_fitting_policy(changed)
            ops_left -= changed.planner.n_simulated_ops - before
            if fits:
                flags = {POLICY_FLAG: ""} | change | {POLICY_FLAG: fits.policy}
                return {k: v for k, v in flags.items() if v != getattr(plan.settings, k)}
        return None

    change = first_that_fits(changes_with_same_training(plan.settings, plan.device.type))
    if change is not None:
        return f"{in_words(change)} fits ({cost_of(change)})", change
    ways = list[str]()
    for change in map(first_that_fits, changes_of_training(plan.settings)):
        if change:
            policy = change.pop(POLICY_FLAG, None)
            ways.append(in_words(change) + (f" with {policy}" if policy else ""))
    more_cards = islice(on_more_cards(plan), 4 if ops_left > 0 else 0)
    ways += islice((cards_in_words(more) for more in more_cards if more.fits), 1)
    return f"try what changes the training: {', or '.join(ways or [SMALLER_MODEL])}", None


def advice_on_state(plan: Plan) -> str:
    """Return why no step fits in less than the state, and changes of the training whose state fits,
    each with its bytes. Whether their steps fit is another question to the planner."""
    n, usable = plan.layout.world_size, plan.usable_bytes
    each = f" in each of {n} processes" * (n > 1)
    each += " (train_fsdp.py deals them out)" * (n > 1 and plan.layout.gradients_persist)
    ways = list[str]()
    for alternatives in changes_of_training(plan.settings):
        less = ((change, plan.with_flags(**change).state_bytes) for change in alternatives)
        fits = (f"{in_words(c)} ({format_bytes(size)})" for c, size in less if size < usable)
        ways += islice(fits, 1)
    ways += [
        f"{cards_in_words(more)} ({format_bytes(more.state_bytes)} each)"
        for more in islice(on_more_cards(plan), 1)
    ]
    return (
        f"weights, gradients and {optimizer_name(plan.settings)}'s state alone take "
        f"{format_bytes(plan.state_bytes)}{each}, more than the {format_bytes(usable)} "
        "that tensors may take: plan what changes the training and has less state: "
        f"{', or '.join(ways or [SMALLER_MODEL])}"
    )


def on_more_cards(plan: Plan) -> Iterator[Plan]:
    """Yield the plans of train_fsdp.py on more GPUs, at most 64, whose state fits, the fewest
    first. Yield none if several processes share the device."""
    most = 64 if plan.device.type == "cuda" and plan.layout.sp_degree == 1 else 0
    one = plan.with_policy("full").with_flags(gather_dtype="float32")
    for n in range(plan.layout.shard_degree + 1, most + 1):
        more = replace(one, layout=Layout("fsdp", world_size=n, local_world_size=n))
        if more.state_bytes < plan.usable_bytes:
            yield more


def cards_in_words(plan: Plan) -> str:
    return f"{plan.layout.world_size} of this card with train_fsdp.py"


def batch_without_recompute(plan: Plan) -> str:
    """Return text on a smaller micro-batch with which a step fits without recompute.

    If several such micro-batches fit, the text is on the largest of them. The text compares this
    micro-batch with the plan: "4 x 4 sequences with none: 5 % faster (...)". Without a card the
    text says only that as many sequences per step fit. Return "" if no smaller micro-batch fits, or
    if the largest that fits is not faster than the plan.
    """
    replays_products = recomputed_flops_key(plan.step)[0] > 0
    if plan.policy == "none" or not (plan.card or replays_products):
        # Give no advice. Without a card no time is known. If the step recomputes no matrix
        # product, `none` saves little time, and the matrix products of smaller micro-batches may
        # cost more time than it saves.
        return ""
    for batch in smaller_batches(plan.settings):
        flags = {POLICY_FLAG: "none"} | batch
        split = plan.with_flags(**flags)
        if split.fits:
            faster = plan.seconds / split.seconds - 1 if plan.card else 0.0
            if plan.card and faster <= 0.005:
                return ""
            speed = f": {100 * faster:.0f} % faster" if plan.card else " fit as well"
            text = f"{batch['grad_accum_steps']} x {batch['batch_size']} sequences with none"
            return f"{text}{speed} ({in_words(flags)})"
    return ""
