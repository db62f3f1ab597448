"""Show the exercises of docs/lesson.md, and check answers to them.

python -m scripts.lesson                   # list the exercises
python -m scripts.lesson 4                 # show exercise 4
python -m scripts.lesson 4 30              # check whether 30 is the answer to exercise 4
python -m scripts.lesson 4 --measure       # show the measurement that gives the answer
python -m scripts.lesson 4 --solution      # print the answer and its reason; without 4: all answers

The questions are in docs/lesson.md; answers, measurements, hints and reasons are in EXERCISES, and
tests/test_lesson.py measures each answer again. Exit codes: 0 right answer, 3 wrong answer, 2 not
an answer.
"""

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from data.errors import MiniGPTError
from memory import POLICY_NAMES
from scripts import cli_main
from scripts.kept_tensors import format_kept_tensors, kept_by_one_block
from trainer.flags import OneLineParser, number_in_range

PAGE = Path(__file__).parent.parent / "docs" / "lesson.md"
NOT_YET = 3


def table_of_kept_tensors(policy: str, no_amp: bool = False) -> str:
    """Return the table of the tensors that GPT-2 small's block keeps, without autocast's copies of
    the weights, which do not grow with the batch."""
    size = argparse.Namespace(batch_size=2, seq_len=1024, d_model=768, n_heads=12, no_amp=no_amp)
    tensors = [t for t in kept_by_one_block(policy, size) if t.shape[0] in (2, 2 * 1024)]
    return format_kept_tensors(policy, tensors, 2 * 1024 * 768)


@dataclass(frozen=True)
class Exercise:
    """Answer to a question of docs/lesson.md, the rules to check an answer, and comments on it."""

    answer: float | str
    facts: str | Callable[[], str]  # the measurement that gives the answer
    why: str  # printed with the right answer
    hint: str  # printed for a wrong answer that is not in `mistakes`
    mistakes: tuple[tuple[float | str, str], ...] = ()  # (a wrong answer, the comment on it)
    unit: str = ""  # unit of the number; "": no unit
    tolerance: float = 0.0  # relative error that still counts as right
    choices: tuple[str, ...] = ()  # if not empty, the answer is one of these

    def read(self, text: str) -> float | str:
        """Return the answer in `text`: a number, or one of `choices`. Raises MiniGPTError for any
        other text."""
        if self.choices:
            word = text.strip("'\"`.() ").lower()
            if word not in self.choices:
                raise MiniGPTError(f"answer one of {', '.join(self.choices)}, not {text[:40]!r}")
            return word
        # "4/3", "1,33" and "1.33 x" are numbers, too; in "1,424" the comma separates thousands.
        text = re.sub(r",(?!\d{3}\b)", ".", text.strip()).replace(",", "")
        number = re.fullmatch(
            rf"(?i)([-+]?\d*\.?\d+)(?:/([1-9]\d*))?\.?\s*(?:{self.unit}|x|times)?", text
        )
        if not number:
            wanted = f"a number, as 12.3 {self.unit}".strip()
            raise MiniGPTError(f"the answer must be {wanted}, not {text[:40]!r}")
        return float(number[1]) / float(number[2] or 1)

    def is_near(self, given: float | str, answer: float | str) -> bool:
        if isinstance(given, str) or isinstance(answer, str):
            return given == answer
        return abs(given - answer) <= self.tolerance * abs(answer)

    def comment(self, given: float | str) -> str:
        """Return the comment on the wrong answer `given`, a hint that does not contain the right
        answer."""
        comments = (comment for wrong, comment in self.mistakes if self.is_near(given, wrong))
        return next(comments, self.hint)

    def solution(self) -> str:
        """Return the right answer with its reason."""
        right = self.answer
        shown = right if isinstance(right, str) else f"{round(right, 2):g} {self.unit}".strip()
        return f"{shown}. {self.why}"


EXERCISES: dict[int, Exercise] = {
    1: Exercise(
        answer=3,
        facts="""\
x     kept
wide  kept
g     kept
y     not needed""",
        why="Backward of a linear layer needs the layer's input, and backward of GELU needs GELU's "
        "input. No backward needs y, so the result of a last matmul is never kept.",
        hint="Go through the three operations one by one. Which tensor is in the formula of the "
        "operation's gradient: its input or its result?",
        mistakes=(
            (4, "One tensor is too many. Which tensor is in no formula of a gradient?"),
            (2, "The gradients of the weights need tensors, and so does the slope of GELU."),
        ),
    ),
    2: Exercise(
        answer=64.08,
        facts=partial(table_of_kept_tensors, "none", no_amp=True),
        unit="BTC",
        tolerance=0.01,
        why="x, ln_1, q, k, v, attention, x2 and ln_2 are 8 tensors of width C. c_fc and gelu are "
        "4 C wide, so each counts as 4 tensors: all together 16 tensors of 4 BTC. No result of a "
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
        answer=36.08,
        facts=partial(table_of_kept_tensors, "none"),
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
        answer=24.06,
        facts=partial(table_of_kept_tensors, "cheap"),
        unit="BTC",
        tolerance=0.01,
        why="ln_1 and ln_2 (2 BTC each) and gelu (8 BTC) are not kept. That is a third of the "
        "block, and no matmul is recomputed. The inputs of the three (x, x2, c_fc) must be kept "
        "for the replay.",
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
        answer=1 + 8 / 36,
        facts="""\
1.22  blocks alone
1.23  and attention's products
1.17  and the head: GPT-2 small, 1,024 tokens""",
        tolerance=0.004,
        why="A block has 12 C^2 weights. The last matmul, with 4 C^2 of them, is not replayed: "
        "1 + (8/12) / 3. For GPT-2 small with its head the factor is 1.17: no head is replayed.",
        hint="Forward is a third of a step, so the factor is 1 + a third of the share of a block's "
        "forward that is replayed. Which share is that?",
        mistakes=(
            (4 / 3, "That is the textbook's answer. Which matmul has a result that nothing needs?"),
            (1.17, "That is GPT-2 small with its head. The exercise asks for blocks alone."),
            (5 / 3, "The replay is a share of one forward, and a forward is a third of the step."),
            (1 + 11 / 36, "You left out the wrong matmul. Which matmul is the last of a block?"),
            (2 / 9, "That is the replay alone. Add the step itself."),
            (2 / 3, "That is the replayed share of a forward. A forward is a third of the step."),
            (1 + 1 / 9, "That is the share that is left out. Which share is replayed?"),
            (1.25, "Which share of 12 C^2 is replayed? A forward is a third of the step."),
            (1.23, "That includes the products inside attention. Count the linear layers alone."),
            (1.2, "Nearly: give two digits after the decimal point."),
            (22, "As a factor of the whole step, not in percent."),
            (122, "As a factor of the whole step, not in percent."),
            (1 + 7 / 36, "attn.c_proj is replayed: its result is part of x2, which ln_2 needs."),
        ),
    ),
    6: Exercise(
        answer="c",
        facts="""\
no checkpoint             loss 4.168554
checkpoint                loss equal to the bit, 0 of 28 gradients differ
preserve_rng_state=False  loss equal to the bit, 26 of 28 gradients differ""",
        choices=("a", "b", "c", "d"),
        why="Forward computes the loss before any replay, so the loss is the same. But backward "
        "multiplies by the masks of the replay, which would be other masks. With the generator's "
        "state, which checkpoint saves and restores, no bit differs.",
        hint="Is the loss computed before the replay or after it? And what does backward do with a "
        "dropout mask?",
        mistakes=(
            ("a", "All shapes and dtypes are the same. How would torch detect the difference?"),
            ("b", "Is the loss computed before the replay or after it?"),
            ("d", "Backward of dropout multiplies by a mask: forward's or the replay's?"),
        ),
    ),
    7: Exercise(
        answer=6.90,
        facts="""\
 6.90 GiB  logits, log-softmax and its gradient
 3.96 GiB  kept by 12 blocks
so the peak of a step is
12.40 GiB  none, head at once
 8.86 GiB  full, head at once
 5.78 GiB  none, head in chunks
 2.40 GiB  full, head in chunks""",
        unit="GiB",
        tolerance=0.02,
        why="The three tensors take 12 bytes for each pair of a token and an id: more than all 12 "
        "blocks keep. This project therefore runs the head in chunks. With the head at once, even "
        "`full` would save less than a third of the peak.",
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
        answer=1,
        facts="""\
K   by formula   peak of a step
1       84 BTC   2,927.2 MiB
2       96 BTC   3,049.5 MiB
3      124 BTC   3,315.7 MiB
4      156 BTC   3,618.0 MiB
6      224 BTC   4,258.5 MiB
12     436 BTC   6,252.0 MiB""",
        why="All tensors of a block take as much memory as 9 inputs, and each block that is added "
        "to a group costs as much. 4 L / K + 36 K has its minimum at K = sqrt(L) / 3, which is "
        "1.2 for 12 blocks.",
        hint="Compute 4 L / K + 36 K for L = 12 and K = 1, 2, 3, 4.",
        mistakes=(
            (3, "sqrt(12) is for inputs as large as a block. Here an input is a ninth of a block."),
            (4, "sqrt(12) is for inputs as large as a block. Here an input is a ninth of a block."),
            (12, "All tensors of 12 blocks would exist at the same time, as without recompute."),
        ),
    ),
    9: Exercise(
        answer=474.70,
        facts="""\
when a forward begins               peak of the step
1,441 MiB, 12 a parameter           5,924 MiB   1 x 12 sequences
1,915 MiB, 16 a parameter           3,389 MiB   4 x  3 sequences""",
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
        answer="mlp",
        facts="""\
policy     FLOPs      peak  in 4 GiB
none        1.00  5.78 GiB  no
cheap       1.00  4.37 GiB  no
selective   1.00  4.36 GiB  no
mlp         1.07  3.80 GiB  fits
attn        1.08  4.67 GiB  no
qkv         1.09  3.15 GiB  fits
sdpa        1.14  2.59 GiB  fits
full        1.17  2.40 GiB  fits""",
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
        answer=6,
        facts="""\
K   by formula   peak of a step
2       80 BTC   129.7 MiB
3       60 BTC   114.7 MiB
4       52 BTC   108.7 MiB
6       48 BTC   105.7 MiB
9       52 BTC   108.7 MiB
12      60 BTC   114.7 MiB
18      80 BTC   130.1 MiB""",
        why="36 / K inputs of groups are kept, and K inputs of the blocks in one group. The sum is "
        "smallest at sqrt(36), as Chen et al. say. All tensors of a block take as much as 9 "
        "inputs, but count once, not K times.",
        hint="Compute 36 / K + K for the divisors of 36.",
        mistakes=(
            (1, "All 36 inputs would be kept. The tensors of one block exist at a time for any K."),
            (2, "sqrt(36) / 3 is for groups whose blocks have all their tensors at the same time."),
            (36, "With a single group, its replay keeps the inputs of all 36 blocks."),
        ),
    ),
    12: Exercise(
        answer="b",
        facts="""\
memory runs out in
forward                   none of 28 weights differ
backward                  none of 28 weights differ
update                    28 of 28 weights differ
backward, gradients kept  28 of 28 weights differ""",
        choices=("a", "b", "c", "d"),
        why="Forward changes no weight, and backward changes only gradients, which the run drops. "
        "With the same data and masks, the policy does not change the result. In the update, some "
        "weights have already changed when memory runs out; a second update would change them "
        "twice.",
        hint="Which tensors does each part of a step change: forward, backward, update? Which of "
        "these changes can the run undo without a copy?",
        mistakes=(
            ("a", "Which tensors does backward change? Can the run undo these changes?"),
            ("c", "The update changes weight after weight. What if it fails after the first?"),
            ("d", "See exercise 6: does a policy change the result if the masks are the same?"),
        ),
    ),
}


# ---- The command


def sections() -> dict[int, str]:
    """Return the exercises of docs/lesson.md: number -> title and text."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^## ((\d+)\. .*?)\s*(?=^## |\Z)", text, re.M | re.S)
    return {int(number): section for section, number in found}


def check_answer(exercise: Exercise, text: str) -> int:
    """Print the comment on the answer `text`; return the exit code. Raises MiniGPTError if `text`
    is not an answer."""
    given = exercise.read(text)
    if exercise.is_near(given, exercise.answer):
        print(f"right: {exercise.solution()}")
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
    add("--measure", action="store_true", help="show the measurement that gives the answer")
    add("--solution", action="store_true", help="print the answer and its reason (without N: all)")
    args = parser.parse_args(argv)
    n, code = args.exercise, 0
    if n is None:
        if args.measure:
            parser.error("--measure needs the number of an exercise")
        for number, section in sections().items():
            solution = f"{number}: {EXERCISES[number].solution()}"
            print(solution if args.solution else section.partition("\n")[0])
        return 0
    if args.answer:
        code = check_answer(EXERCISES[n], " ".join(args.answer))
    elif not (args.measure or args.solution):
        print(sections()[n])
    if args.measure:
        facts = EXERCISES[n].facts
        print(facts if isinstance(facts, str) else facts())
    if args.solution:
        print(f"{n}: {EXERCISES[n].solution()}")
    return code


if __name__ == "__main__":
    sys.exit(main())
