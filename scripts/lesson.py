"""Show the exercises of docs/lesson.md, and check answers to them.

python -m scripts.lesson                   # list the exercises
python -m scripts.lesson 4                 # show exercise 4
python -m scripts.lesson 4 30              # check whether 30 is the answer to exercise 4
python -m scripts.lesson 4 --measure       # measure the answer to exercise 4
python -m scripts.lesson 4 --solution      # print the answer and its reason; without 4: all answers

The questions are in docs/lesson.md. Hints and reasons are in EXERCISES. The model and the planner
compute each answer on demand, in one function per exercise (MEASURES). Exit codes: 0 the answer is
right, 3 the answer is wrong, 2 the text is not an answer.
"""

import os
import sys

if not __package__:  # python scripts/lesson.py: the packages are one folder up
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    import scripts  # noqa: F401

import argparse
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from memory import POLICY_NAMES, MemorySavingGPT
from model import MLP, MiniGPTConfig
from planner import KINDS, Planner, StepMemory
from planner.choose import recomputed_flops_key
from planner.formulas import head_bytes
from scripts import cli_main
from scripts.checkpoint_from_scratch import run_step
from scripts.kept_tensors import kept_by_one_block, table
from scripts.style import relative_flops
from trainer.flags import OneLineParser, UsageError, number_in_range

PAGE = Path(__file__).parent.parent / "docs" / "lesson.md"
NOT_YET = 3
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Exercise:
    """Rules to parse an answer and to check it, and comments on it. docs/lesson.md has the
    question."""

    why: str  # printed with the right answer
    hint: str  # printed for a wrong answer that is not in `mistakes`
    mistakes: tuple[tuple[float | str, str], ...] = ()  # (a wrong answer, the comment on it)
    unit: str = ""  # unit of the number; "": no unit
    tolerance: float = 0.0  # relative error that still counts as right
    choices: tuple[str, ...] = ()  # if not empty, the answer is one of these

    def read(self, text: str) -> float | str:
        """Return the answer in `text`, which is a number or one of `choices`. Raises UsageError if
        `text` is neither."""
        if self.choices:
            word = text.strip("'\"`.() ").lower()
            if word not in self.choices:
                raise UsageError(f"answer one of {', '.join(self.choices)}, not {text[:40]!r}")
            return word
        number = re.fullmatch(rf"(?i)([-+]?\d*\.?\d+)\.?\s*(?:{self.unit}|x|times)?", text.strip())
        if not number:
            wanted = f"a number, as 12.3 {self.unit}".strip()
            raise UsageError(f"the answer must be {wanted}, not {text[:40]!r}")
        return float(number[1])

    def is_near(self, given: float | str, answer: float | str) -> bool:
        if isinstance(given, str) or isinstance(answer, str):
            return given == answer
        return abs(given - answer) <= self.tolerance * abs(answer)

    def comment(self, given: float | str) -> str:
        """Return the comment on the wrong answer `given`. The comment helps to find the right
        answer, but does not contain the right answer."""
        comments = (comment for wrong, comment in self.mistakes if self.is_near(given, wrong))
        return next(comments, self.hint)

    def answer(self, answer: float | str) -> str:
        """Return the right answer with its reason."""
        shown = answer if isinstance(answer, str) else f"{round(answer, 2):g} {self.unit}".strip()
        return f"{shown}. {self.why}"


EXERCISES: dict[int, Exercise] = {
    1: Exercise(
        why="Backward of a linear layer needs the layer's input, and backward of GELU needs GELU's "
        "input. No backward needs y. So the result of a last matmul is never kept.",
        hint="Go through the three operations one by one. Which tensor is in the formula of the "
        "operation's gradient: its input or its result?",
        mistakes=(
            (4, "One tensor is too many. Which tensor is in no formula of a gradient?"),
            (2, "The gradients of the weights need tensors, too. And so does the slope of GELU."),
        ),
    ),
    2: Exercise(
        unit="BTC",
        tolerance=0.01,
        why="x, ln_1, q, k, v, attention, x2 and ln_2 are 8 tensors of width C. c_fc and gelu are "
        "4 C wide, so each counts as 4 tensors: together 16 tensors of 4 BTC. No result of a "
        "c_proj is kept.",
        hint="Count tensors of width C, which have 4 BTC each: q, k and v are three, c_fc is four.",
        mistakes=(
            (72, "You counted the results of both c_proj. An addition does not need its inputs."),
            (68, "You counted one result of a c_proj. An addition does not need its inputs."),
            (16, "That is the number of tensors. How many bytes does a float32 number have?"),
            (32, "That would be for numbers of 2 bytes. A float32 number has 4 bytes."),
            (40, "You counted c_fc and gelu as if they were C wide. They are 4 C wide."),
            (60, "One tensor is missing. Did you count both x and x2?"),
        ),
    ),
    3: Exercise(
        unit="BTC",
        tolerance=0.01,
        why="x and x2 still have 4 BTC each. The 14 other tensors now have 2 BTC each: 8 + 28. "
        "Papers with a residual stream in 16 bits count 32 (or 34 with the masks of dropout).",
        hint="Take the 16 tensors of exercise 2. Which have 4 bytes per number, and which have 2?",
        mistakes=(
            (32, "Not all tensors have half the bytes: the residual stream stays in float32."),
            (34, "You counted one tensor of the residual stream in float32. A block has two."),
            (64, "That is the result for float32, as in exercise 2."),
        ),
    ),
    4: Exercise(
        unit="BTC",
        tolerance=0.01,
        why="ln_1 and ln_2 (2 BTC each) and gelu (8 BTC) are not kept. That is a third of the "
        "block, and no matmul is recomputed. Their inputs (x, x2, c_fc) must be kept for the "
        "replay.",
        hint="Subtract the results of two LayerNorms and a GELU from the answer to exercise 3.",
        mistakes=(
            (12, "That is what is no longer kept. How much is still kept?"),
            (28, "You subtracted one kind of two: LayerNorms (2 each) and GELU (8)."),
            (32, "You subtracted one kind of two: LayerNorms (2 each) and GELU (8)."),
            (16, "c_fc must be kept: GELU is recomputed from it, and c_fc itself is a matmul."),
            (26, "There are two LayerNorms in a block."),
        ),
    ),
    5: Exercise(
        tolerance=0.004,
        why="A block has 12 C^2 weights. The last matmul, with 4 C^2 of them, is not replayed: "
        "1 + (8/12) / 3. For GPT-2 small it is 1.17, because its head is not replayed.",
        hint="Forward is a third of a step's FLOPs. Which share of a block's forward is replayed?",
        mistakes=(
            (4 / 3, "That is the textbook's answer. Which matmul has a result that nothing needs?"),
            (1.17, "That is GPT-2 small with its head. The exercise asks for blocks alone."),
            (5 / 3, "The replay is a share of one forward, and a forward is a third of the step."),
            (1 + 11 / 36, "You left out the wrong matmul. Which matmul is the last of a block?"),
            (2 / 9, "That is the replay alone. Add the step itself."),
        ),
    ),
    6: Exercise(
        choices=("a", "b", "c", "d"),
        why="Forward computes the loss before any replay, so the loss is the same. But backward "
        "multiplies by the masks of the replay, which would be other masks. So checkpoint saves "
        "the generator's state, and then no bit differs.",
        hint="Is the loss computed before the replay or after it? And what does backward do with a "
        "dropout mask?",
        mistakes=(
            ("a", "All shapes and dtypes are the same. How would torch detect the difference?"),
            ("b", "Is the loss computed before the replay or after it?"),
            ("d", "Backward of dropout multiplies by a mask: forward's or the replay's?"),
        ),
    ),
    7: Exercise(
        unit="GiB",
        tolerance=0.02,
        why="The three tensors take 12 bytes for each of tokens x ids: more than all 12 blocks "
        "keep. So in this project the head runs in chunks. If it ran at once, even `full` would "
        "save less than a third of the peak.",
        hint="Tokens x ids x 3 tensors x 4 bytes; a GiB has 2^30 bytes.",
        mistakes=(
            (2.3, "That is one of the three tensors."),
            (4.6, "That is two of the three tensors."),
            (3.45, "A float32 number has 4 bytes."),
            (7.41, "That is in GB (10^9 bytes). A GiB has 2^30 bytes."),
            (0.58, "That is for one sequence. There are 12 sequences."),
        ),
    ),
    8: Exercise(
        why="All tensors of a block take as much memory as 9 inputs. So each block that is added "
        "to a group costs as much as 9 inputs. 4 L / K + 36 K has its minimum at sqrt(L) / 3, "
        "which is 1.2 for 12 blocks.",
        hint="Compute 4 L / K + 36 K for L = 12 and K = 1, 2, 3, 4.",
        mistakes=(
            (3, "sqrt(12) is for inputs as large as a block. Here an input is a ninth of a block."),
            (4, "sqrt(12) is for inputs as large as a block. Here an input is a ninth of a block."),
            (12, "Then all tensors of 12 blocks exist at the same time, as without recompute."),
        ),
    ),
    9: Exercise(
        unit="MiB",
        tolerance=0.01,
        why="The gradients, 4 bytes per parameter, exist during every forward except the first. "
        "The smaller batch still needs less memory, because activations shrink by more.",
        hint="What is summed over the micro-batches, and how many bytes per parameter is it?",
        mistakes=(
            (1899, "That is all 16 bytes. Which of them did not exist in forward with one batch?"),
            (1424, "That is 12 bytes: the weights and the moments. They exist in any case."),
            (949, "That is the moments. They exist in any case."),
            (498, "That is in MB (10^6 bytes). A MiB has 2^20 bytes."),
            (0, "Gradients are summed over the micro-batches. Where are they in the next forward?"),
        ),
    ),
    10: Exercise(
        choices=POLICY_NAMES,
        why="16 bytes per parameter leave 2.1 GiB of the 4 GiB. A BTC is 9 MiB here, so 12 blocks "
        "of 18 BTC take 1.9 GiB. `auto` would also try policies for only some of the blocks.",
        hint="Subtract 16 bytes per parameter from 4 GiB. A BTC is 12 x 1,024 x 768 bytes, and "
        "there are 12 blocks.",
        mistakes=(
            ("none", "12 blocks of 36 BTC are 3.8 GiB. Add the 16 bytes per parameter."),
            ("cheap", "12 blocks of 24 BTC are 2.5 GiB. How much do the parameters leave?"),
            ("selective", "It keeps as much as cheap. How much do the parameters leave?"),
            ("attn", "It keeps 26 BTC, more than cheap."),
            ("sdpa", "It fits, but a policy that costs less fits, too."),
            ("full", "It fits, but a policy that costs less fits, too."),
        ),
    ),
    11: Exercise(
        why="36 / K inputs of groups are kept, and K inputs of the blocks in one group. The sum is "
        "smallest at sqrt(36), as Chen et al. say. All tensors of a block take as much as 9 "
        "inputs, but they no longer count K times.",
        hint="Compute 36 / K + K for the divisors of 36.",
        mistakes=(
            (1, "Then all 36 inputs are kept. All tensors of only one block exist, whatever K is."),
            (2, "sqrt(36) / 3 is for groups whose blocks have all their tensors at the same time."),
            (36, "Then there is one group, and its replay keeps the inputs of all 36 blocks."),
        ),
    ),
    12: Exercise(
        choices=("a", "b", "c", "d"),
        why="Forward changes no weight. Backward changes only gradients, and the run drops them. "
        "With the same data and masks, the policy changes no bit. In the update, the first weights "
        "have changed already when memory runs out. A second update would change them twice.",
        hint="Which tensors does each part of a step change: forward, backward, update? Which of "
        "these changes can the run undo without a copy?",
        mistakes=(
            ("a", "Which tensors does backward change? Can the run undo these changes?"),
            ("c", "The update changes weight after weight. What if it fails after the first?"),
            ("d", "See exercise 6: does a policy change the result if the masks are the same?"),
        ),
    ),
}


# ---- The answers, each with the lines that --measure prints

Measured = tuple[float | str, list[str]]
GPT2_SMALL = MiniGPTConfig(dropout=0.0)
SEQ_LEN, SEQUENCES = 1024, 12
BUDGET = 4 * GIB  # memory of the GPU in exercise 10


def needed_by_backward() -> Measured:
    """Compute answer 1: the number of an MLP's tensors that autograd keeps for backward."""
    mlp = MLP(MiniGPTConfig(n_heads=1, d_model=8, d_ff=32))
    x = torch.randn(2, 4, 8, requires_grad=True)
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())  # views of a tensor share its storage
        return tensor

    # These are the operators of MLP.up_project and MLP.down_project.
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        wide = mlp.c_fc(x)
        g = F.gelu(wide, approximate="tanh")
        y = mlp.c_proj(g)
    tensors = {"x": x, "wide": wide, "g": g, "y": y}
    kept = {name: t.untyped_storage().data_ptr() in saved for name, t in tensors.items()}
    return sum(kept.values()), [
        f"{name:<5} {'kept' if kept[name] else 'not needed'}" for name in tensors
    ]


def block_keeps(policy: str, no_amp: bool = False) -> Measured:
    """Compute answers 2, 3 and 4: the memory that a block keeps with `policy`, in BTC (B * T * C
    bytes). Autocast's copies of the weights are left out, because they do not grow with the batch.
    `no_amp`: no autocast."""
    size = {"batch_size": 2, "seq_len": SEQ_LEN, "d_model": 768, "n_heads": 12}
    tensors = kept_by_one_block(policy, argparse.Namespace(**size, no_amp=no_amp))
    tensors = [tensor for tensor in tensors if tensor.shape[0] in (2, 2 * SEQ_LEN)]
    btc = 2 * SEQ_LEN * 768
    return sum(tensor.nbytes for tensor in tensors) / btc, [table(policy, tensors, btc)]


def cost_of_full() -> Measured:
    """Compute answer 5: the FLOPs of a step with `full`, divided by the FLOPs of a step with
    `none`. The answer counts only the weights' matrix products in the blocks. --measure prints
    three lines: the answer; the same with attention's own matrix products; the same with the head,
    too."""

    def relative(vocab_size: int, seq_len: int) -> float:
        config = replace(GPT2_SMALL, vocab_size=vocab_size, recompute="full")
        return relative_flops(config, seq_len)

    answer = relative(1, 0)  # (the head of a vocabulary of one id costs almost nothing)
    return answer, [
        f"{answer:.2f}  blocks alone",
        f"{relative(1, SEQ_LEN):.2f}  and attention's products",
        f"{relative(50257, SEQ_LEN):.2f}  and the head: GPT-2 small, 1,024 tokens",
    ]


def other_dice() -> Measured:
    """Compute answer 6: compare three steps with dropout: one without a checkpoint, one with a
    checkpoint, and one with a checkpoint that does not restore the random state."""
    none = run_step("none")
    lines, answer = [f"no checkpoint             loss {none.loss:.6f}"], ""
    for name, remembers in (("checkpoint", True), ("preserve_rng_state=False", False)):

        def other(*args: Any, remembers: bool = remembers, **options: Any) -> Any:
            return checkpoint(*args, **options | {"preserve_rng_state": remembers})

        step = run_step("full", partial(mock.patch, "model.checkpoint", other))
        pairs = [(gradient, step.gradients[n]) for n, gradient in none.gradients.items()]
        n_other = sum(not torch.equal(one, two) for one, two in pairs)
        same = torch.equal(none.loss, step.loss)
        answer = "b" if not same else "c" if n_other else "d"
        how = "equal to the bit" if same else f"{step.loss:.6f}"
        lines.append(f"{name:<24}  loss {how}, {n_other} of {len(pairs)} gradients differ")
    return answer, lines


@cache  # one planner simulates each step only once
def planner(accumulate: bool = False) -> Planner:
    """Return a planner for GPT-2 small on a GPU."""
    return Planner(
        GPT2_SMALL,
        SEQ_LEN,
        precision=torch.bfloat16,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        device_type="cuda",
        accumulates_gradients=accumulate,
    )


def ways(policies: Iterable[str], accumulate: bool = False, **memory: Any) -> list[StepMemory]:
    """Return a simulated step with each policy. A simulation takes one or two seconds, so a
    terminal shows a progress bar."""
    return [
        planner(accumulate).step(SEQUENCES, recompute=policy, **memory)
        for policy in tqdm(policies, leave=False, disable=None)
    ]


def the_head() -> Measured:
    """Compute answer 7: the GiB that the head takes if it computes all logits at once."""
    at_once = replace(GPT2_SMALL, loss_chunks=1)
    answer = head_bytes(at_once, SEQUENCES * SEQ_LEN, torch.float32) / GIB
    lines = []
    for loss_chunks, label in ((1, "head at once"), (0, "head in chunks")):
        for step in ways(("none", "full"), loss_chunks=loss_chunks):
            lines.append(f"{step.peak / GIB:5.2f} GiB  {step.config.recompute}, {label}")
    blocks = planner().step(SEQUENCES).kept_per_block * GPT2_SMALL.n_layers / GIB
    return answer, [
        f"{answer:5.2f} GiB  logits, log-softmax and the gradient of that",
        f"{blocks:5.2f} GiB  kept by 12 blocks",
        "so the peak of a step is",
        *lines,
    ]


def best_group(
    planner: Planner, sizes: Iterable[int], policy: str, formula: Callable[[int], float]
) -> Measured:
    """Return the group size K of the step with the lowest peak. `policy`: a policy string with the
    letter "K" in place of the size. `formula(K)` returns the memory that groups of K blocks need,
    in BTC."""
    peaks, lines = dict[int, int](), ["K   by formula   peak of a step"]
    for k in tqdm(sizes, leave=False, disable=None):
        peaks[k] = planner.step(SEQUENCES, recompute=policy.replace("K", str(k))).peak
        lines.append(f"{k:<3} {formula(k):6.0f} BTC   {peaks[k] / MIB:,.1f} MiB")
    return min(peaks, key=peaks.__getitem__), lines


def groups() -> Measured:
    """Compute answer 8: the best group size. The step accumulates gradients, so gradients exist all
    the time. Then the peak is at the start of backward."""
    accumulating = planner(accumulate=True)
    return best_group(accumulating, (1, 2, 3, 4, 6, 12), "full/K", lambda k: 4 * 12 / k + 36 * k)


def gradients_that_wait() -> Measured:
    """Compute answer 9: the MiB of gradients that exist when a micro-batch's forward begins."""
    n_parameters = sum(parameter.numel() for parameter in planner().model.parameters())
    steps = {
        "1 x 12 sequences": planner().step(12),
        "4 x  3 sequences": planner(accumulate=True).step(3),
    }
    lines = ["when a forward begins               peak of the step"]
    for name, step in steps.items():
        start = int(step.bytes_by_op[0])
        each = f"{start / MIB:,.0f} MiB, {start / n_parameters:.0f} a parameter"
        lines.append(f"{each:<33}  {step.peak / MIB:6,.0f} MiB   {name}")
    # Compare the gradients, not all memory: a smaller batch also has fewer token ids.
    before, now = (int(step.timeline[0, KINDS.index("gradients")]) for step in steps.values())
    return (now - before) / MIB, lines


def policy_for_a_card() -> Measured:
    """Compute answer 10: of the policies that fit in 4 GiB, the policy with the fewest FLOPs."""
    steps = sorted(ways(POLICY_NAMES), key=recomputed_flops_key)
    lines = ["policy     FLOPs      peak  in 4 GiB"]
    for step in steps:
        fits = "fits" if step.peak <= BUDGET else "no"
        flops = relative_flops(step.config, SEQ_LEN)
        lines.append(f"{step.config.recompute:<10}  {flops:.2f}  {step.peak / GIB:.2f} GiB  {fits}")
    return next(step.config.recompute for step in steps if step.peak <= BUDGET), lines


def nested_groups() -> Measured:
    """Compute answer 11: the best group size with nested checkpoints. The blocks are narrow, so
    their weights take little memory."""
    config = MiniGPTConfig(61, SEQ_LEN, n_layers=36, n_heads=1, d_model=64, d_ff=256, dropout=0.0)
    deep = replace(planner(), config=config)
    sizes = 2, 3, 4, 6, 9, 12, 18
    return best_group(deep, sizes, "full/K+nested", lambda k: 4 * (36 / k + k))


def weights_after(part: str, drop: bool = True) -> list[Tensor]:
    """Return the weights after two steps. In the first step memory runs out in the middle of
    `part`, and the step is repeated with `full`. `part` "": memory does not run out. `drop`: drop
    the gradients of the failed attempt before the step is repeated."""
    torch.manual_seed(0)
    model = MemorySavingGPT(MiniGPTConfig(61, 16, n_layers=2, n_heads=1, d_model=16, d_ff=64))
    weights: list[Tensor] = list(model.parameters())
    # Two optimizers, for even and odd weights, so that an update can fail halfway.
    even, odd = (torch.optim.AdamW(some) for some in (weights[::2], weights[1::2]))
    first, last = model.blocks
    hooks: dict[str, Callable] = {
        "forward": last.register_forward_pre_hook,
        "backward": first.get_parameter("ln_1.weight").register_hook,
        "update": odd.register_step_pre_hook,
    }
    if part:
        once = chain([torch.OutOfMemoryError("played")], repeat(None))
        hooks[part](mock.Mock(side_effect=once))
    for seed, recompute in ((1, "none"), *[(1, "full")] * bool(part), (2, "full")):
        model.config = replace(model.config, recompute=recompute)
        torch.manual_seed(seed)  # the seed determines the data and the masks
        ids = torch.randint(61, (2, 17))
        with suppress(torch.OutOfMemoryError):
            model(ids[:, :-1], ids[:, 1:]).backward()
            even.step()
            odd.step()
            model.zero_grad()
        if drop:
            model.zero_grad()
    return weights


def done_again() -> Measured:
    """Compute answer 12: compare runs in which memory runs out in forward, in backward, or in the
    update."""
    undisturbed = weights_after("")
    weights_by_part = {part: weights_after(part) for part in ("forward", "backward", "update")}
    weights_by_part["backward, gradients kept"] = weights_after("backward", drop=False)
    differ = [
        sum(not torch.equal(*pair) for pair in zip(weights, undisturbed, strict=True))
        for weights in weights_by_part.values()
    ]
    lines = [
        f"{name:<24}  {n or 'none'} of {len(undisturbed)} weights differ"
        for name, n in zip(weights_by_part, differ, strict=True)
    ]
    # Number of parts, counted from forward, in which memory may run out without a change of the
    # results.
    n_safe = next(i for i, n in enumerate(differ) if n)
    return "dabc"[n_safe], ["memory runs out in", *lines]


MEASURES: dict[int, Callable[[], Measured]] = {
    1: needed_by_backward,
    2: partial(block_keeps, "none", no_amp=True),
    3: partial(block_keeps, "none"),
    4: partial(block_keeps, "cheap"),
    5: cost_of_full,
    6: other_dice,
    7: the_head,
    8: groups,
    9: gradients_that_wait,
    10: policy_for_a_card,
    11: nested_groups,
    12: done_again,
}


# ---- The command


def sections() -> dict[int, str]:
    """Return the exercises of docs/lesson.md: number -> title and text."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^## ((\d+)\. .*?)\s*(?=^## |\Z)", text, re.M | re.S)
    return {int(number): section for section, number in found}


def check(n: int, text: str) -> int:
    """Print the comment on the answer `text` to exercise `n`. Return the exit code. Raises
    UsageError if `text` is not an answer."""
    exercise = EXERCISES[n]
    given, (answer, _) = exercise.read(text), MEASURES[n]()
    if exercise.is_near(given, answer):
        print(f"right: {exercise.answer(answer)}")
        return 0
    print(f"not yet: {exercise.comment(given)}")
    return NOT_YET


@cli_main
def main(argv: list[str]) -> int:
    parser = OneLineParser(
        prog="python -m scripts.lesson",
        description="Exercises on activation memory (docs/lesson.md), and a check of your answers.",
        epilog="exit codes: 0 right (or nothing to check), 3 wrong, 2 not an answer",
    )
    add = parser.add_argument
    add("exercise", nargs="?", type=number_in_range(int, 1, len(EXERCISES)), metavar="N",
        help=f"number of an exercise, 1 to {len(EXERCISES)}; alone: show it")  # fmt: skip
    add("answer", nargs="*", metavar="ANSWER", help="check this answer")
    add("--measure", action="store_true", help="measure the answer, in a few seconds")
    add("--solution", action="store_true", help="print the answer and its reason (without N: all)")
    args = parser.parse_args(argv)
    n, code = args.exercise, 0
    if n is None and args.measure:
        raise UsageError("--measure needs the number of an exercise")
    if n is None and not args.solution:
        titles = (section.partition("\n")[0] for section in sections().values())
        print(*titles, "", "python -m scripts.lesson N [ANSWER]", sep="\n")
    elif not (args.answer or args.measure or args.solution):
        print(sections()[n])
    if args.answer:
        code = check(n, " ".join(args.answer))
    if args.measure:
        print("\n".join(MEASURES[n]()[1]))
    if args.solution:
        for each in [n] if n else EXERCISES:
            print(f"{each}: {EXERCISES[each].answer(MEASURES[each]()[0])}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
