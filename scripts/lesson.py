"""Show the exercises of docs/lesson.md, and check answers to them.

python -m scripts.lesson                   # what there is
python -m scripts.lesson 4                 # shows exercise 4
python -m scripts.lesson 4 30              # is 30 the answer to it?
python -m scripts.lesson 4 --measure       # see for yourself
python -m scripts.lesson 4 --solution      # the answer, and why (without a number: all of them)

The texts come from docs/lesson.md. The model and the planner compute each answer on demand: one
function per exercise, below the texts. Exit codes: 0 right, 3 not yet right, 2 no answer at all.
"""

import os
import sys

if not __package__:  # python scripts/lesson.py: the others lie one folder up
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

from memory import RECOMPUTE_POLICIES
from model import MLP, MiniGPT, MiniGPTConfig
from planner import KINDS, Planner, StepMemory
from planner.formulas import head_bytes, recompute_cost
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
    """How an answer is parsed, and the comments on it. The question is in docs/lesson.md."""

    why: str  # printed with the right answer
    hint: str  # printed for a wrong answer that is not in `mistakes`
    mistakes: tuple[tuple[float | str, str], ...] = ()  # (a wrong answer, the comment on it)
    unit: str = ""  # of the number; "": none
    tolerance: float = 0.0  # relative, for a number
    choices: tuple[str, ...] = ()  # if not empty, the answer is one of these, not a number

    def read(self, text: str) -> float | str:
        """Return the answer in `text`. Raises UsageError if it cannot be an answer."""
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
        """Return the comment on a wrong answer: it tells where to look, not the right answer."""
        comments = (comment for wrong, comment in self.mistakes if self.is_near(given, wrong))
        return next(comments, self.hint)

    def answer(self, answer: float | str) -> str:
        """Return the right answer and its reason."""
        shown = answer if isinstance(answer, str) else f"{round(answer, 2):g} {self.unit}".strip()
        return f"{shown}. {self.why}"


EXERCISES: dict[int, Exercise] = {
    1: Exercise(
        why="A linear layer's backward needs the layer's input, GELU's needs GELU's. Nobody needs "
        "y: the result of a last matmul is never kept.",
        hint="Go through the three operations one by one: which tensor is in the formula of its "
        "gradient, what went in or what came out?",
        mistakes=(
            (4, "One of them is only handed on: whose gradient has it in its formula?"),
            (2, "Weights want their gradients, too; and GELU has no weights, but a slope."),
        ),
    ),
    2: Exercise(
        unit="BTC",
        tolerance=0.01,
        why="x, ln_1, q, k, v, attention, x2 and ln_2 are 8 tensors of the width C, c_fc and gelu "
        "count for 4 each: 16 tensors of 4 BTC. Not one c_proj is among them.",
        hint="Count in tensors of the width C, of 4 BTC each: q, k and v are three, c_fc is four.",
        mistakes=(
            (72, "Both results of a c_proj are in that. An addition needs neither of its inputs."),
            (68, "One result too many: what comes out of a c_proj goes into an addition."),
            (16, "That many tensors, yes; and how many bytes has a number in float32?"),
            (32, "That would be 2 bytes a number; float32 has 4."),
            (40, "That is c_fc and gelu as if they were 1 C wide; they are 4 C."),
            (60, "One is missing. Is x there, and x2 as well?"),
        ),
    ),
    3: Exercise(
        unit="BTC",
        tolerance=0.01,
        why="x and x2 stay at 4, the 14 others are 2 now: 8 + 28. Papers that keep the stream in "
        "16 bits as well have 32 (and with masks of dropout 34).",
        hint="Take the 16 tensors of exercise 2 again: which have 4 bytes a number, which have 2?",
        mistakes=(
            (32, "Not all of it is halved: the residual stream is not."),
            (34, "One tensor of the residual stream is in it; a block has two."),
            (64, "That was float32."),
        ),
    ),
    4: Exercise(
        unit="BTC",
        tolerance=0.01,
        why="ln_1 and ln_2 (2 each) and gelu (8) go: a third of the block, and no matmul is done "
        "again. What they are made from (x, x2, c_fc) has to stay for it.",
        hint="Subtract from exercise 3 what two LayerNorms and a GELU return.",
        mistakes=(
            (12, "So much goes. How much stays?"),
            (28, "One kind of the two: LayerNorms (2 each) and GELU (8)."),
            (32, "One kind of the two: LayerNorms (2 each) and GELU (8)."),
            (16, "c_fc must stay: GELU is made from it, and making c_fc again is a matmul."),
            (26, "There are two LayerNorms in a block."),
        ),
    ),
    5: Exercise(
        tolerance=0.004,
        why="Of 12 C^2 weights in a block the last 4 are not multiplied again: 1 + (8/12) / 3. The "
        "head, which is not replayed at all, makes it 1.17 for GPT-2 small.",
        hint="Forward is 1 of the 3 parts of a step. Which share of a block's forward is replayed?",
        mistakes=(
            (4 / 3, "That is the textbook's. Which matmul's result does nobody need?"),
            (1.17, "That is GPT-2 small with its head; here there are only blocks."),
            (5 / 3, "The replay is a share of forward, and forward is a third of the step."),
            (1 + 11 / 36, "A matmul less, but not that one: which is the last of a block?"),
            (2 / 9, "That is what is added. And the step itself?"),
        ),
    ),
    6: Exercise(
        choices=("a", "b", "c", "d"),
        why="The loss is forward's and forward is the same; but backward multiplies with the masks "
        "of other dice. So checkpoint keeps the generator's state, and then nothing differs.",
        hint="When is the loss computed, before the replay or after? And what does backward do "
        "with a dropout mask?",
        mistakes=(
            ("a", "Shapes and types are all as they were; who would notice?"),
            ("b", "When is the loss computed, before the replay or after?"),
            ("d", "Backward of dropout multiplies with the mask. Which one does it get?"),
        ),
    ),
    7: Exercise(
        unit="GiB",
        tolerance=0.02,
        why="12 bytes for each of tokens x ids, more than all 12 blocks keep. So the head runs in "
        "chunks here; with it at once, even `full` would save less than a third of the peak.",
        hint="Tokens x ids x 3 tensors x 4 bytes; a GiB has 2^30 bytes.",
        mistakes=(
            (2.3, "That is one of the three."),
            (4.6, "That is two of the three."),
            (3.45, "float32 has 4 bytes a number."),
            (7.41, "Those are GB (10^9); a GiB has 2^30 bytes."),
            (0.58, "That is one sequence."),
        ),
    ),
    8: Exercise(
        why="A block in full is as much as 9 inputs, so what a group saves in inputs it loses nine "
        "times over: 4 L / K + 36 K has its minimum at sqrt(L) / 3, which is 1.2 for 12.",
        hint="Write down 4 L / K + 36 K for L = 12 and K = 1, 2, 3, 4.",
        mistakes=(
            (3, "That is sqrt(12), for inputs as large as blocks. Here they are a ninth."),
            (4, "That is sqrt(12), for inputs as large as blocks. Here they are a ninth."),
            (12, "Then all 12 blocks are there in full at a time: as without recompute."),
        ),
    ),
    9: Exercise(
        unit="MiB",
        tolerance=0.01,
        why="The gradients, 4 bytes a parameter, wait through every forward but the first. Still "
        "the smaller batch wins: activations shrink by more.",
        hint="What is summed from one micro-batch to the next, and how many bytes a parameter?",
        mistakes=(
            (1899, "That is all 16 bytes. Which of them were not there before?"),
            (1424, "Those 12 bytes, weights and moments, are there in any case."),
            (949, "The moments are there in any case."),
            (498, "Those are MB (10^6); a MiB has 2^20 bytes."),
            (0, "Gradients are summed over the micro-batches: where are they meanwhile?"),
        ),
    ),
    10: Exercise(
        choices=RECOMPUTE_POLICIES,
        why="16 bytes a parameter leave 2.1 GiB of the 4, and 12 blocks of 18 BTC, 9 MiB each, "
        "take 1.9. `auto` would look further, for a policy in only a part of the blocks.",
        hint="4 GiB less 16 bytes a parameter; a BTC is 12 x 1,024 x 768 bytes, times 12 blocks.",
        mistakes=(
            ("none", "12 blocks of 36 BTC are 3.8 GiB, and the parameters' 16 bytes come on top."),
            ("cheap", "12 blocks of 24 BTC are 2.5 GiB; how much do the 16 bytes leave?"),
            ("selective", "It keeps as much as cheap; how much do the 16 bytes leave?"),
            ("attn", "It keeps 26 BTC, more than cheap."),
            ("sdpa", "It fits, but one that costs less does, too."),
            ("full", "It fits, but one that costs less does, too."),
        ),
    ),
    11: Exercise(
        why="36 / K inputs of groups wait, and K of the blocks inside of one: least at sqrt(36), "
        "as Chen et al. say. A block in full, as much as 9 inputs, no longer counts K times.",
        hint="Write down 36 / K + K for the divisors of 36.",
        mistakes=(
            (1, "Then all 36 inputs wait. What is there in full is one block, whatever K is."),
            (2, "That is sqrt(36) / 3, for groups whose blocks are all there in full."),
            (36, "Then the only group's replay keeps the inputs of all 36 blocks."),
        ),
    ),
    12: Exercise(
        choices=("a", "b", "c", "d"),
        why="Forward changes no weight, backward only gradients, and those are dropped; with the "
        "same data and masks the policy changes no bit. In the update the first weights have "
        "changed already when a later one fails: a second update would move them twice.",
        hint="Which tensors that stay does each part of a step write: forward, backward, update? "
        "Which of them can be put back without a copy?",
        mistakes=(
            ("a", "What does backward write? Can the run put that back?"),
            ("c", "The update goes from weight to weight. How are the first ones when it fails?"),
            ("d", "Exercise 6: does a policy change the result, if the masks are the same?"),
        ),
    ),
}


# ---- The answers, each with the lines that --measure prints

Measured = tuple[float | str, list[str]]
GPT2_SMALL = MiniGPTConfig(dropout=0.0)
SEQ_LEN, SEQUENCES = 1024, 12
BUDGET = 4 * GIB  # exercise 10


def needed_by_backward() -> Measured:
    """Answer 1: the number of an MLP's tensors that autograd keeps."""
    mlp = MLP(MiniGPTConfig(n_heads=1, d_model=8, d_ff=32))
    x = torch.randn(2, 4, 8, requires_grad=True)
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())  # views of one tensor share their storage
        return tensor

    # The same operators as in Block.up_project and Block.down_project.
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
    """Answers 2, 3 and 4: BTC that a block keeps, without autocast's copies of the weights, which
    do not grow with the batch."""
    size = {"batch_size": 2, "seq_len": SEQ_LEN, "d_model": 768, "n_heads": 12}
    tensors = kept_by_one_block(policy, argparse.Namespace(**size, no_amp=no_amp))
    tensors = [tensor for tensor in tensors if tensor.shape[0] in (2, 2 * SEQ_LEN)]
    btc = 2 * SEQ_LEN * 768
    return sum(tensor.nbytes for tensor in tensors) / btc, [table(policy, tensors, btc)]


def cost_of_full() -> Measured:
    """Answer 5: FLOPs of blocks alone with `full`; the other lines add the rest of a model."""

    def relative(vocab_size: int, seq_len: int) -> float:
        config = replace(GPT2_SMALL, vocab_size=vocab_size, recompute="full")
        return relative_flops(config, seq_len)

    answer = relative(1, 0)  # (a head of one id costs almost nothing)
    return answer, [
        f"{answer:.2f}  blocks alone",
        f"{relative(1, SEQ_LEN):.2f}  and attention's products",
        f"{relative(50257, SEQ_LEN):.2f}  and the head: GPT-2 small, 1,024 tokens",
    ]


def other_dice() -> Measured:
    """Answer 6: compare steps with dropout: without a checkpoint, with one, and with one that
    forgets the random state."""
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


@cache  # a planner keeps its simulated steps
def planner(accumulate: bool = False) -> Planner:
    """Return the planner of GPT-2 small on a GPU."""
    return Planner(
        GPT2_SMALL,
        SEQ_LEN,
        precision=torch.bfloat16,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        device_type="cuda",
        accumulate=accumulate,
    )


def ways(policies: Iterable[str], accumulate: bool = False, **memory: Any) -> list[StepMemory]:
    """Simulate a step with each policy: a second or two each, with a progress bar on a terminal."""
    return [
        planner(accumulate).step(SEQUENCES, recompute=policy, **memory)
        for policy in tqdm(policies, leave=False, disable=None)
    ]


def the_head() -> Measured:
    """Answer 7: GiB that the head takes if it computes all logits at once."""
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
    """Return the K with the lowest peak. `policy`: a policy with the letter K for K; `formula`: BTC
    with groups of K."""
    peaks, lines = dict[int, int](), ["K   by formula   peak of a step"]
    for k in tqdm(sizes, leave=False, disable=None):
        peaks[k] = planner.step(SEQUENCES, recompute=policy.replace("K", str(k))).peak
        lines.append(f"{k:<3} {formula(k):6.0f} BTC   {peaks[k] / MIB:,.1f} MiB")
    return min(peaks, key=peaks.__getitem__), lines


def groups() -> Measured:
    """Answer 8: the best group size. Gradients exist all the time, so that the peak is at the start
    of backward."""
    accumulating = planner(accumulate=True)
    return best_group(accumulating, (1, 2, 3, 4, 6, 12), "full/K", lambda k: 4 * 12 / k + 36 * k)


def gradients_that_wait() -> Measured:
    """Answer 9: MiB of gradients that exist when the forward of a micro-batch begins."""
    n_parameters = sum(parameter.numel() for parameter in planner().model.parameters())
    steps = {
        "1 x 12 sequences": planner().step(12),
        "4 x  3 sequences": planner(accumulate=True).step(3),
    }
    lines = ["when a forward begins               peak of the step"]
    for name, step in steps.items():
        start = int(step.total[0])
        each = f"{start / MIB:,.0f} MiB, {start / n_parameters:.0f} a parameter"
        lines.append(f"{each:<33}  {step.peak / MIB:6,.0f} MiB   {name}")
    # Compare the gradients, not all memory: a smaller batch also has fewer token ids.
    before, now = (int(step.timeline[0, KINDS.index("gradients")]) for step in steps.values())
    return (now - before) / MIB, lines


def policy_for_a_card() -> Measured:
    """Answer 10: the policy with the fewest FLOPs that fits in 4 GiB."""
    steps = sorted(ways(RECOMPUTE_POLICIES), key=lambda s: recompute_cost(s.config, SEQ_LEN))
    lines = ["policy     FLOPs      peak  in 4 GiB"]
    for step in steps:
        fits = "fits" if step.peak <= BUDGET else "no"
        flops = relative_flops(step.config, SEQ_LEN)
        lines.append(f"{step.config.recompute:<10}  {flops:.2f}  {step.peak / GIB:.2f} GiB  {fits}")
    return next(step.config.recompute for step in steps if step.peak <= BUDGET), lines


def nested_groups() -> Measured:
    """Answer 11: the best group size with nested checkpoints. The blocks are narrow, so their
    weights do not matter."""
    config = MiniGPTConfig(61, SEQ_LEN, n_layers=36, n_heads=1, d_model=64, d_ff=256, dropout=0.0)
    deep = replace(planner(), config=config)
    sizes = 2, 3, 4, 6, 9, 12, 18
    return best_group(deep, sizes, "full/K+nested", lambda k: 4 * (36 / k + k))


def weights_after(part: str, drop: bool = True) -> list[Tensor]:
    """Return the weights after two steps. In the first step memory runs out in the middle of
    `part`, so the step is done again, with `full`. `drop`: drop the first attempt's gradients
    before that."""
    torch.manual_seed(0)
    model = MiniGPT(MiniGPTConfig(61, 16, n_layers=2, n_heads=1, d_model=16, d_ff=64))
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
        torch.manual_seed(seed)  # data and masks follow from it
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
    """Answer 12: compare runs in which memory runs out in forward, in backward, or in the
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
    # The number of parts after which a step may be done again.
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
    """Return number -> text of the exercise in docs/lesson.md, with its title."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^## ((\d+)\. .*?)\s*(?=^## |\Z)", text, re.M | re.S)
    return {int(number): section for section, number in found}


def check(n: int, text: str) -> int:
    """Print the comment on an answer; return the exit code. Raises UsageError."""
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
        description="Exercises on activation memory (docs/lesson.md), and whether you are right.",
        epilog="exit codes: 0 right (or nothing to check), 3 not yet right, 2 no answer at all",
    )
    add = parser.add_argument
    add("exercise", nargs="?", type=number_in_range(int, 1, len(EXERCISES)), metavar="N",
        help=f"an exercise, 1 to {len(EXERCISES)}; alone: show it")  # fmt: skip
    add("answer", nargs="*", metavar="ANSWER", help="is it right?")
    add("--measure", action="store_true", help="see for yourself, in a few seconds")
    add("--solution", action="store_true", help="the answer, and why (without N: all of them)")
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
