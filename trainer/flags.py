"""Define the command line of all trainers. The flags are in groups. The help of a flag gives its
unit, its default, and the value that switches it off.

If a flag is wrong, the trainer prints one error line and ends with exit code 2, before it reads the
data or writes a file.
"""

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from data.errors import MiniGPTError
from memory import POLICY_NAMES, RecomputePlan, format_recompute_plan, parse_recompute_plan
from model import MiniGPTConfig
from planner.cards import canonical_card_name

# Value of --model -> shape of the model (Radford et al., 2019, table 2; each head has 64 channels).
# --model also sets --seq-len and --max-position-embeddings to 1,024, and the tokenizer to GPT-2's.
SHAPE_BY_MODEL: dict[str, dict[str, int]] = {
    "gpt2": {"n_layers": 12, "n_heads": 12, "d_model": 768},
    "gpt2-medium": {"n_layers": 24, "n_heads": 16, "d_model": 1024},
    "gpt2-large": {"n_layers": 36, "n_heads": 20, "d_model": 1280},
    "gpt2-xl": {"n_layers": 48, "n_heads": 25, "d_model": 1600},
}


# Upper limits, far above any useful value. They reject a typing error before it can fill the
# memory.
MAX_COUNT = 10**9
MAX_LAYERS = 10**4
MAX_SIZES = {  # largest allowed sizes of a model, by field of MiniGPTConfig
    "n_layers": MAX_LAYERS,
    **dict.fromkeys(("n_heads", "d_model", "d_ff"), 10**6),
    **dict.fromkeys(("max_position_embeddings", "vocab_size"), MAX_COUNT),
}
AUTO = "auto"  # value of --use-activation-checkpoint: the run chooses the policy
RUN_LENGTH_FLAGS = ("num_steps", "num_tokens", "num_epochs")  # a user may type only one of them
# Removed flag -> hint at its replacement.
REPLACED_FLAGS = {
    "--eval-batches": "--eval-tokens 16K says how many tokens validate, at any batch size",
    "--largest-batch": "scripts.plan_memory names it; --batch-size measures it",
    "--memory-viz": "python -m scripts.memory_page shows it",
    "--recompute-layers": "now --use-activation-checkpoint POLICY:N",
    "--recompute-rest": "now --use-activation-checkpoint POLICY:N,POLICY",
    "--recompute-group": "now --use-activation-checkpoint full/K",
    "--offload-activations": "now --use-activation-checkpoint POLICY+offload",
    "--repeats": "--steps says how many are measured",
}
# Suffix of a number of tokens -> factor.
TOKEN_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


class OneLineParser(argparse.ArgumentParser):
    """ArgumentParser that prints an error as one line. argparse itself prints a long usage text
    first."""

    def error(self, message: str) -> NoReturn:
        print_error(message.removeprefix("argument "))
        self.exit(2)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        # The intermixed parser also finds positional arguments that stand between flags.
        positionals = self._get_positional_actions()
        parse = self.parse_known_intermixed_args if positionals else self.parse_known_args
        parsed, unknown = parse(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            similar = difflib.get_close_matches(name, self._option_string_actions, n=1)
            hint = f"did you mean {similar[0]}?" if similar else "--help lists all flags"
            self.error(
                f"unrecognized arguments: {' '.join(unknown)}; {REPLACED_FLAGS.get(name, hint)}"
            )
        return parsed


class ExplicitFlagsParser(OneLineParser):
    """Parser that also stores in the result which flags were typed: `typed`, a set of names. With
    --model, the flags of the model's shape count as typed, too.

    A flag that the user typed overrides the value in the snapshot (--resume) and the shape of
    --model. In the result the typed flags come first, in the order of --help.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        untyped = object()
        names = [action.dest for action in self._actions if action.dest != "help"]
        parsed = super().parse_args(args, argparse.Namespace(**dict.fromkeys(names, untyped)))
        typed = {name: value for name, value in vars(parsed).items() if value is not untyped}
        shape = SHAPE_BY_MODEL.get(typed.get("model", ""), {})
        defaults = {name: self.get_default(name) for name in names}
        if shape:
            defaults |= {"seq_len": 1024, "max_position_embeddings": 1024, **shape}
        if shape and "use_toy_data" not in typed:
            defaults["tokenizer_name"] = "gpt2"
        others = {name: value for name, value in defaults.items() if name not in typed}
        return argparse.Namespace(**typed, **others, typed=typed.keys() | shape.keys())


def with_flags(args: argparse.Namespace, **flags: Any) -> argparse.Namespace:
    """Return a copy of `args` in which `flags` have new values."""
    return argparse.Namespace(**vars(args) | flags)


def flag(name: str) -> str:
    """Return the flag whose value argparse stores as `name`: `--n-layers` for `n_layers`."""
    return "--" + name.replace("_", "-")


def as_argv(args: argparse.Namespace, **changes: Any) -> list[str]:
    """Return the command-line arguments for `args`, so that parse_args(as_argv(args)) == args.

    The arguments are the typed flags in the order of --help, and then `changes`, which are flags
    with new values. The value None removes a flag.
    """
    shape = SHAPE_BY_MODEL.get(args.model, {})
    typed = {
        name: value
        for name, value in vars(args).items()
        if name in args.typed and name not in changes and value != shape.get(name)
    }
    return to_argv(typed | changes)


def to_argv(flags: dict[str, Any]) -> list[str]:
    """Return `flags`, a dict such as {"n_layers": 3}, as command-line arguments. Leave out a flag
    whose value is None, and a name that is no flag of the trainers."""
    actions, words = {action.dest: action for action in build_parser("", "")._actions}, []
    for name, value in flags.items():
        if value is None or name not in actions:
            continue
        flag, *off = actions[name].option_strings
        if isinstance(value, bool):
            words += [flag] if value else off
            continue
        values = value if isinstance(value, list) else [value]
        first, *others = map(FORMATTER_BY_TYPE.get(actions[name].type, str), values)
        # A value may begin with "-", such as a file named -x.pt. argparse accepts it only as
        # --flag=-x.pt.
        words += [f"{flag}={first}", *others] if first.startswith("-") else [flag, first, *others]
    return words


def is_valid_model_size(name: str, value: object) -> bool:
    """Return True if `value`, which may come from a file, is a valid size for the flag `name`."""
    return type(value) is int and 0 < value <= MAX_SIZES[name]


def print_error(message: object) -> None:
    """Print the message on stderr as one line, even if the message contains line breaks."""
    print(f"error: {' '.join(str(message).splitlines())}", file=sys.stderr)


def number_in_range(
    kind: type, low: float, high: float = math.inf, *, open: bool = False
) -> Callable:
    """Return an argparse type for finite numbers in [low, high]; with `open`, in (low, high)."""
    noun = "a whole number" if kind is int else "a number"
    limits = f"above {low:g}" if open else f"of at least {low:g}"
    if high != math.inf:
        limits += f" and {'below' if open else 'at most'} {high:,}"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan  # NaN fails every comparison below
        inside = low < value < high if open else low <= value <= high
        if not inside or value == math.inf:
            raise argparse.ArgumentTypeError(f"must be {noun} {limits}, not {text[:40]!r}")
        return value

    return parse


def check_policy_string(text: str) -> str:
    """Check a policy string and return it (argparse type). The string must be "auto", or one that
    `memory.parse_recompute_plan` accepts.

    The number of layers is not known yet. So the N of `POLICY:N` is only checked against
    MAX_LAYERS.
    """
    if text != AUTO:
        try:
            parse_recompute_plan(text, MAX_LAYERS)
        except ValueError as error:
            message = str(error).removeprefix("recompute must be ")
            raise argparse.ArgumentTypeError(f"must be auto or {message}") from None
    return text


def auto_as_full(policy: str) -> str:
    """Return "full" for "auto", else the policy unchanged. (An invalid string such as "auto:3"
    stays invalid.)"""
    return "full" if policy == AUTO else policy


def recompute_plan_of(args: argparse.Namespace) -> RecomputePlan:
    """Return the recompute policy of each block according to the flags; `auto` counts as `full`.
    Raises MiniGPTError if the policy string is invalid for --n-layers."""
    try:
        return parse_recompute_plan(auto_as_full(args.use_activation_checkpoint), args.n_layers)
    except ValueError as error:
        raise MiniGPTError(replace_fields_by_flags(str(error))) from None


def replace_fields_by_flags(message: str) -> str:
    """Replace the names of config fields in `message` by the flags that the user knows, such as
    `d_model` by `--d-model`."""
    names = "|".join(field.name for field in fields(MiniGPTConfig))
    message = re.sub(rf"\b({names})\b", lambda name: flag(name[0]), message)
    return message.replace("--recompute", "--use-activation-checkpoint")


def byte_count(text: str) -> int:
    """Parse a number of bytes (argparse type). The units in "8GiB" and "8G" are powers of 1,024;
    the unit in "500 MB" is a power of 1,000."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(?:([kmgt])(i?b)?|b)\s*", text.lower())
    unit = (1000 if match[3] == "b" else 1024) ** " kmgt".index(match[2] or " ") if match else 0
    count = float(match[1]) * unit if match else 0.0
    if not 1 <= count < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a number with a unit (KiB MiB GiB TiB, or kB MB GB TB), a byte or more, as "
            f"in 8GiB, not {text[:40]!r}"
        )
    return int(count)


def token_count(text: str, least: int = 1) -> int:
    """Parse a number of tokens (argparse type): "1B", "1.5B", "300M", "1e9" or plain digits. The
    smallest valid number is `least`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)([kmbt]?)", text.strip().lower())
    count = Fraction(match[1]) * TOKEN_COUNT_UNITS[match[2]] if match else Fraction(-1)
    if count.denominator > 1 or not least <= count <= 10**15:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of tokens up to 1000T, as in 300M, 1.5B or 1e9, "
            f"not {text[:40]!r}"
        )
    return int(count)


# argparse type -> function that writes a value of this type with its unit, for `to_argv`.
FORMATTER_BY_TYPE: dict[Any, Callable[[int], str]] = {byte_count: "{}b".format}


def snapshot_path(text: str) -> Path:
    """Parse the path of a snapshot (argparse type). Reject a path that names no file, such as
    "checkpoints/" or ".pt". (The text is checked, because Path would drop a slash at the end.)"""
    if os.path.basename(text).strip(".") in ("", "pt", "pth", "ckpt"):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file, as checkpoints/run.pt")
    return Path(text)


def output_file(text: str) -> Path:
    """Parse the path of a file to write (argparse type). Check now that the file can be written,
    before the program spends hours on its content."""
    path = Path(text)
    target = path if os.path.exists(path) else path.parent
    if os.path.isdir(path) or not os.access(target, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written: is there such a folder?")
    return path


def build_parser(prog: str, checkpoint_path: str) -> argparse.ArgumentParser:
    """Return the parser of a trainer. All trainers have the same flags. `prog`: file name of the
    trainer. `checkpoint_path`: default path of the trainer's snapshot."""
    parser = ExplicitFlagsParser(
        prog=prog,
        description="Train a MiniGPT and see what activation memory costs.",
        allow_abbrev=False,
    )
    count, count_or_zero = number_in_range(int, 1, MAX_COUNT), number_in_range(int, 0, MAX_COUNT)
    layers, size = (
        number_in_range(int, 1, MAX_SIZES["n_layers"]),
        number_in_range(int, 1, MAX_SIZES["d_model"]),
    )
    seed = number_in_range(int, 0, 2**63 - 1)
    positive, positive_or_zero = number_in_range(float, 0, open=True), number_in_range(float, 0)

    # fmt: off
    # Each entry is a flag with its type and its default, and then its help text.
    add = parser.add_argument_group("data").add_argument
    add("--train-data", nargs="+", metavar="PATH",
        help="files, folders or globs of the training data. A file is text, .jsonl with a string "
        "\"text\" in each line (see --text-key), or tokens (.bin, .npy) (default: Python's own "
        "standard library)")
    add("--val-data", nargs="+", metavar="PATH",
        help="validation data (default: split off by --val-ratio)")
    add("--val-ratio", type=number_in_range(float, 0, 1, open=True), default=0.1, metavar="SHARE",
        help="share of the data to validate on (default: %(default)s)")
    add("--text-key", metavar="NAME", help="key of the text in a line of .jsonl (default: text)")
    add("--tokenizer-name", metavar="NAME",
        help="tokenizer: bpe (trained on your data), byte, gpt2, any other tiktoken name, "
        "FILE.tiktoken (default: bpe for the built-in corpus, gpt2 for your own data)")
    add("--vocab-size", type=count, metavar="N",
        help="ids of a trained bpe (default: 1024), or of the toy data (default: 256)")
    add("--use-toy-data", action="store_true", help="random tokens whose best loss is known: ln 4")
    add("--max-tokens", type=count, metavar="N", help="use at most N tokens for training, "
        "and at most N for validation (default: all)")
    add("--data-seed", type=seed, metavar="N", help="seed of the order of the training "
        "data, and of toy data (default: --seed)")

    add = parser.add_argument_group("model").add_argument
    add("--model", choices=tuple(SHAPE_BY_MODEL),
        help="shape of a GPT-2, with 1,024 positions and --tokenizer-name gpt2; the flags below "
        "override single values (default: the small shape below)")
    add("--init-from", type=Path, metavar="PATH",
        help="start from trained weights: a snapshot, or a folder of transformers' GPT-2 "
        "(config.json, model.safetensors; needs the package safetensors); this also sets shape and "
        "tokenizer (default: random weights)")
    add("--n-layers", type=layers, default=3, metavar="N", help="blocks (default: %(default)s)")
    add("--n-heads", type=size, default=4, metavar="N",
        help="attention heads of a block (default: %(default)s)")
    add("--d-model", type=size, default=128, metavar="N", help="channels (default: %(default)s)")
    add("--d-ff", type=size, metavar="N", help="channels inside the MLP (default: 4 x --d-model)")
    add("--dropout", type=number_in_range(float, 0, 0.99), default=0.0, metavar="P",
        help="dropout probability, 0 = off (default: %(default)s)")
    add("--max-position-embeddings", type=count, metavar="N",
        help="longest sequence that the model can process, in tokens (default: --seq-len)")

    add = parser.add_argument_group("memory").add_argument
    add("--use-activation-checkpoint", nargs="?", const="full", default="none", metavar="POLICY",
        type=check_policy_string,
        help="which tensors backward recomputes instead of keeping them; policies from least to "
        f"most recompute: {' '.join(POLICY_NAMES)}; mlp:7 = mlp in the first 7 blocks; "
        "mlp:7,cheap = mlp in the first 7 blocks, cheap in the others; full/2 = keep one input for "
        "every 2 blocks; full/4+nested = keep one input for every 4 blocks, and recompute the "
        "blocks of a group once more, one by one; full+offload = kept tensors wait in CPU memory "
        "(selective and sdpa without --compile: only each block's input); auto = the least "
        "recompute that fits in memory (default: none; the flag without POLICY means full)")
    add("--memory-budget", type=byte_count, metavar="SIZE",
        help="memory to plan for, e.g. 8GiB (default: the free memory): auto uses no more, and a "
        "run with another policy prints a warning if it needs more; a tenth stays free, on a GPU "
        "at least 1 GiB (a quarter, if SIZE is less than 4 GiB)")
    add("--card", type=canonical_card_name, metavar="NAME",
        help="card for predicted times: auto, and a run that runs out of memory, choose the policy "
        "that is predicted to be fastest on this card: H100, \"RTX 4090\", ..., or this-machine, "
        "which is measured (default: the CUDA GPU's own name; without a known GPU, the policy that "
        "recomputes the fewest FLOPs is chosen)")
    add("--loss-chunks", type=count_or_zero, default=0, metavar="N",
        help="compute head and loss in N chunks of tokens; 1 = all at once, 0 = automatic "
        "(default: 0)")
    add("--mlp-chunks", type=count_or_zero, default=1, metavar="N",
        help="for long sequences, with mlp, sdpa or full: recompute LayerNorm and MLP, the second "
        "half of a block, in at most N chunks of at least 64 tokens; 1 = all at once, 0 = "
        "automatic; chunks change the rounding of six gradients per block (default: 1)")
    add("--on-out-of-memory", choices=("deeper", "stop"), default="deeper",
        help="deeper: do the step again, and all later steps, with a policy that needs less; the "
        "results are the same. stop: end with exit code 4 (default: %(default)s)")

    add = parser.add_argument_group("training").add_argument
    add("--batch-size", type=size, default=12, metavar="N",
        help="sequences per micro-batch and process (default: %(default)s)")
    add("--seq-len", type=count, default=64, metavar="N",
        help="tokens of a sequence (default: %(default)s)")
    add("--grad-accum-steps", type=count, default=1, metavar="N",
        help="micro-batches per process and step (default: %(default)s)")
    add("--num-steps", type=count, default=1000, metavar="N",
        help="optimizer steps (default: %(default)s)")
    add("--num-tokens", type=token_count, metavar="N",
        help="instead of --num-steps: train on N tokens, counted over all processes; e.g. 1B, "
        "300M, 1e9")
    add("--num-epochs", type=number_in_range(float, 0, 10**6, open=True), metavar="X",
        help="instead of --num-steps: pass X times over the training data")
    add("--lr", type=positive, metavar="RATE",
        help="peak learning rate (default: 0.4 / --d-model, which is close to GPT-3's table; with "
        "--optimizer muon, 0.8 / --d-model; with --init-from, a tenth of these values)")
    add("--min-lr", type=positive_or_zero, metavar="RATE",
        help="learning rate at the last step, absolute (default: --lr / 10)")
    add("--lr-scheduler", choices=("cosine", "linear", "constant"), default="cosine",
        help="learning-rate schedule after the warm-up (default: %(default)s)")
    add("--warmup-steps", type=count_or_zero, metavar="N",
        help="steps of linear warm-up, 0 = none (default: a twentieth of --num-steps)")
    add("--weight-decay", type=positive_or_zero, default=0.1, metavar="X",
        help="weight decay, on matrices only, 0 = off (default: %(default)s)")
    add("--optimizer", choices=("adamw", "muon"), default="adamw",
        help="muon: for the blocks' matrices, with one moment instead of two; the rest keeps AdamW "
        "(default: adamw)")
    add("--moments-dtype", choices=("float32", "bfloat16"), default="float32",
        help="dtype of the stored moments; the optimizer computes in float32 (default: "
        "%(default)s)")
    add("--grad-clip-norm", type=positive_or_zero, default=1.0, metavar="X",
        help="largest gradient norm, 0 = off (default: %(default)s)")
    add("--seed", type=seed, default=1337, metavar="N",
        help="seed of weights and dropout (default: %(default)s)")

    add = parser.add_argument_group("machine").add_argument
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto",
        help="device to compute on (default: cuda if there is one, else mps, else cpu)")
    add("--no-amp", action="store_true", help="float32 throughout")
    add("--amp-dtype", choices=("auto", "bfloat16", "float16"), default="auto",
        help="dtype of autocast (default: bfloat16 where the hardware has it, else float16 on "
        "cuda, else float32)")
    add("--tf32", action=argparse.BooleanOptionalAction, default=False,
        help="run float32 matmuls (--no-amp) on a GPU's tensor cores, with inputs rounded from 23 "
        "to 10 mantissa bits: results differ; by the data sheets 8 times as fast on an A100, 7 "
        "times on an H100, no faster on a GeForce")
    add("--compile", action=argparse.BooleanOptionalAction, default=False,
        help="torch.compile each block: slow start, fast steps")
    add("--compress-gradients", action=argparse.BooleanOptionalAction, default=False,
        help="with several processes, average gradients in bfloat16. This halves the traffic, adds "
        "up to 2 bytes per parameter, and gives other results than one process gives (with one "
        "process: no effect)")
    add("--gather-dtype", choices=("float32", "bfloat16"), default="float32",
        help="train_fsdp.py, train_sp.py: dtype in which a block's weights are gathered; they are "
        "stored in float32. bfloat16 needs bfloat16 autocast. It halves the bytes, and keeps the "
        "losses; more than two processes sum gradients in another order (default: %(default)s)")

    add = parser.add_argument_group("running").add_argument
    add("--log-interval", type=count_or_zero, default=50, metavar="N",
        help="steps between log lines; without a progress bar, there is at least one line in 30 s; "
        "0 = log only steps that evaluate or save; the last step always logs, evaluates and saves "
        "(default: %(default)s)")
    add("--eval-interval", type=count_or_zero, default=250, metavar="N",
        help="steps between evaluations, 0 = at the end only (default: %(default)s)")
    add("--save-interval", type=count_or_zero, default=500, metavar="N",
        help="steps between snapshots, 0 = not by steps; the first evaluation saves, too (default: "
        "%(default)s)")
    add("--save-minutes", type=positive_or_zero, default=15.0, metavar="M",
        help="save when the last snapshot is M minutes old, 0 = not by time (default: 15)")
    add("--eval-tokens", type=partial(token_count, least=0), default=16_000, metavar="N",
        help="validate on N tokens, in windows of --seq-len that are spread over the validation "
        "set; 0 = all of it (default: 16K)")
    add("--checkpoint-path", type=snapshot_path, default=Path(checkpoint_path), metavar="FILE",
        help="file of the newest snapshot (default: %(default)s)")
    add("--resume", action="store_true",
        help="go on from --checkpoint-path, with the flags of that run; typed flags override them")
    add("--sample-tokens", type=count_or_zero, default=128, metavar="N",
        help="tokens of the sample text at the end, 0 = none (default: %(default)s)")
    add("--log-to", choices=("none", "tensorboard", "wandb"), default="none",
        help="a logger in addition to RUN.metrics.jsonl (default: none)")
    add("--profile", type=count, metavar="N",
        help="after 3 steps, record N steps: a trace of every operator, and a table of the ten "
        "slowest")
    add("--detect-anomaly", action=argparse.BooleanOptionalAction, default=False,
        help="find the operation that made a NaN in backward (slow)")
    # fmt: on
    return parser


def tokens_per_step(args: argparse.Namespace, replicas: int) -> int:
    """Return the number of tokens in a training step, in all micro-batches of all replicas.

    `replicas`: see `OneProcess.replicas`.
    """
    return int(args.batch_size * args.seq_len * args.grad_accum_steps * replicas)


def resolve_defaults(args: argparse.Namespace, replicas: int = 1) -> argparse.Namespace:
    """Set the defaults that depend on other flags, in `args` itself, and return `args`. Raises
    MiniGPTError if flags contradict each other."""
    lengths = [flag(name) for name in RUN_LENGTH_FLAGS if name in args.typed]
    if len(lengths) > 1:
        raise MiniGPTError(f"{' and '.join(lengths)}: each says how long the run is; give only one")
    lr_factor = 1.0 if args.init_from is None else 0.1  # a high rate would destroy trained weights
    defaults = {
        "data_seed": args.seed,
        "d_ff": 4 * args.d_model,
        "max_position_embeddings": args.seq_len,
        "lr": (0.8 if args.optimizer == "muon" else 0.4) / args.d_model * lr_factor,
    }
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    set_num_steps(args, replicas)
    if args.min_lr is None:
        args.min_lr = args.lr / 10
    if args.min_lr > args.lr:
        raise MiniGPTError(f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}")
    if args.no_amp and args.amp_dtype != "auto":
        raise MiniGPTError(f"--amp-dtype {args.amp_dtype} and --no-amp contradict each other")
    if args.mlp_chunks != 1 and args.compile:
        raise MiniGPTError(
            f"--mlp-chunks {args.mlp_chunks}: compiled blocks are not cut; --no-compile or "
            "--mlp-chunks 1"
        )
    model_config(args, vocab_size=1)  # report an impossible shape before the data are read
    return args


def check_sharded(args: argparse.Namespace, processes: int, trainer: str) -> None:
    """Raise MiniGPTError for flags that a sharded model does not support. `trainer`: name of the
    trainer, for the error message."""
    plan = recompute_plan_of(args)
    if plan.group_size > 1 and not plan.nested and processes > 1:  # (one process has no shards)
        raise MiniGPTError(
            f"--use-activation-checkpoint {args.use_activation_checkpoint}: {trainer} gathers "
            f"block by block; {format_recompute_plan(plan._replace(nested=True))} fits"
        )
    if args.compress_gradients:
        raise MiniGPTError("--compress-gradients: train_ddp.py can; --no-compress-gradients fits")


def check_sequence_parallel(args: argparse.Namespace, processes: int) -> None:
    """Raise MiniGPTError if train_sp.py cannot share each sequence among `processes` processes:
    each needs at least one head and one token, and --compile is not supported."""
    if processes == 1:
        return
    for name in ("n_heads", "seq_len"):
        value = getattr(args, name)
        if value < processes:
            raise MiniGPTError(
                f"{flag(name)} {value}: each of {processes} processes of train_sp.py needs one at "
                f"least: --nproc-per-node={value}, or train_fsdp.py"
            )
    if args.compile:
        raise MiniGPTError("--compile: train_fsdp.py can; train_sp.py has not been tried with it")


def set_num_steps(args: argparse.Namespace, replicas: int, windows: int | None = None) -> None:
    """Set --num-steps to the length that --num-tokens or --num-epochs gives, rounded up to whole
    steps. Then set the default of --warmup-steps, which depends on --num-steps.

    `windows`: number of training sequences in an epoch; None: the data are not read yet. If
    `windows` is None and --num-epochs is given, set neither flag: a later call will set both.
    """
    tokens: int | Fraction | None = args.num_tokens
    if args.num_epochs is not None:
        if windows is None:
            return
        # Fraction("1.1") is exact: 1.1 epochs of 10 sequences are 11 steps of one sequence.
        # Fraction(1.1) is a little more than 1.1, and would give 12 steps.
        tokens = Fraction(str(args.num_epochs)) * windows * args.seq_len
    if tokens is not None:
        args.num_steps = math.ceil(Fraction(tokens) / tokens_per_step(args, replicas))
    if args.warmup_steps is None:
        args.warmup_steps = args.num_steps // 20


def model_config(args: argparse.Namespace, vocab_size: int) -> MiniGPTConfig:
    """Return the config of the model that the flags describe; the policy `auto` counts as `full`.
    Raises MiniGPTError if such a model is impossible."""
    if args.seq_len > args.max_position_embeddings:
        raise MiniGPTError(
            f"--seq-len {args.seq_len} is above --max-position-embeddings "
            f"{args.max_position_embeddings}: raise the latter, or leave it out"
        )
    values = vars(args) | {
        "vocab_size": vocab_size,
        "recompute": format_recompute_plan(recompute_plan_of(args)),
    }
    try:
        return MiniGPTConfig(**{field.name: values[field.name] for field in fields(MiniGPTConfig)})
    except ValueError as error:
        raise MiniGPTError(replace_fields_by_flags(str(error))) from None
