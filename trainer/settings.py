"""The settings of a run: one table of flags, and the values of one command line.

A field of `Settings` is a flag, whose row holds the default, how the text is read, the help, and
its rules: may the flag change at --resume, may it differ between ranks. A new flag is a row here,
the line that uses the value, and a line in docs/flags.md. Settings are frozen, so `resolve` and
`replace` return new ones.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Flag, auto
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from data.errors import MiniGPTError
from memory import POLICY_NAMES, RecomputePlan, format_recompute_plan, parse_recompute_plan
from model import MiniGPTConfig
from planner import Layout

from .flags import (
    AUTO,
    MAX_COUNT,
    MAX_LAYERS,
    MAX_WIDTH,
    OneLineParser,
    byte_count,
    card_name,
    check_policy_string,
    flag,
    format_byte_count,
    number_in_range,
    replace_fields_by_flags,
    snapshot_path,
    token_count,
)

# Value of --model -> shape of the model (Radford et al., 2019, table 2; each head has 64 channels).
# --model also sets --seq-len and --max-position-embeddings to 1,024, and the tokenizer to GPT-2's.
SHAPE_BY_MODEL: dict[str, dict[str, int]] = {
    "gpt2": {"n_layers": 12, "n_heads": 12, "d_model": 768},
    "gpt2-medium": {"n_layers": 24, "n_heads": 16, "d_model": 1024},
    "gpt2-large": {"n_layers": 36, "n_heads": 20, "d_model": 1280},
    "gpt2-xl": {"n_layers": 48, "n_heads": 25, "d_model": 1600},
}
# A user may type only one of each pair. At --resume it replaces the snapshot's other one.
EXCLUSIVE_FLAGS = (("num_steps", "num_tokens"), ("no_amp", "amp_dtype"))
# argparse type -> function that writes a value of this type with its unit
FORMATTER_BY_TYPE: dict[Any, Callable[[Any], str]] = {byte_count: format_byte_count}
ON_OFF = argparse.BooleanOptionalAction  # a switch that --no-FLAG turns off
ONE_PROCESS = Layout()
S = TypeVar("S", bound="Settings")


class Rule(Flag):
    """A rule on the value of a flag, without which the value may change at --resume, and must be
    the same on all ranks."""

    FIXED = auto()  # decides shape, random numbers, optimizer or tokens: no change at --resume
    DATA = auto()  # chooses the data: no change at --resume, unless the data stay the same
    # May differ between ranks: paths, what each machine finds for itself ("auto"), and what has an
    # effect on rank 0 only. Ranks compare the data, the weights, the device and the dtype instead.
    PER_RANK = auto()
    SHAPE = auto()  # a size of the model, which --init-from sets
    THIS_START = auto()  # --resume takes it from the command line, not from the snapshot


NO_RULES = Rule(0)


def row(
    default: Any,
    kind: Any,
    help: str,
    rules: Rule = NO_RULES,
    metavar: str = "N",
    group: str = "",
    **options: Any,
) -> Any:
    """Return the field of a flag.

    Args:
        kind: argparse type of a value; a tuple of choices; `bool` (a switch) or ON_OFF.
        help: `{default}` stands for the default.
        group: title of a group of flags in --help, set in the row of its first flag.
        options: further arguments of argparse's add_argument.
    """
    if isinstance(kind, tuple):
        options["choices"] = kind
    elif kind in (bool, ON_OFF):
        options["action"] = "store_true" if kind is bool else kind
    else:
        options |= {"type": kind, "metavar": metavar}
    options["help"] = help
    metadata = {"rules": rules, "group": group, "options": options}
    return field(default=default, metadata=metadata)


COUNT, COUNT_OR_ZERO = number_in_range(int, 1, MAX_COUNT), number_in_range(int, 0, MAX_COUNT)
LAYERS, SIZE = number_in_range(int, 1, MAX_LAYERS), number_in_range(int, 1, MAX_WIDTH)
SEED = number_in_range(int, 0, 2**63 - 1)
POSITIVE, POSITIVE_OR_ZERO = number_in_range(float, 0, open=True), number_in_range(float, 0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The values of all flags of a trainer, and which of them were typed. (`dropout` is 0.0 here,
    but 0.1 in MiniGPTConfig.)

    `resolve` fills in the defaults that depend on other flags, which are None until then.
    """

    # fmt: off
    train_data: tuple[str, ...] | None = row(None, str, group="data",
        rules=Rule.DATA | Rule.PER_RANK, metavar="PATH", nargs="+",
        help="files, folders or globs of the training data. A file is text, .jsonl with a string "
        "\"text\" in each line (see --text-key), or tokens (.bin, .npy) (default: Python's own"
        " standard library)")
    val_data: tuple[str, ...] | None = row(None, str,
        rules=Rule.DATA | Rule.PER_RANK, metavar="PATH", nargs="+",
        help="validation data (default: split off by --val-ratio)")
    val_ratio: float = row(0.1, number_in_range(float, 0, 1, open=True),
        rules=Rule.DATA, metavar="SHARE",
        help="share of the data to validate on (default: {default})")
    text_key: str | None = row(None, str, rules=Rule.DATA, metavar="NAME",
        help="key of the text in a line of .jsonl (default: text)")
    tokenizer_name: str | None = row(None, str,
        rules=Rule.FIXED | Rule.DATA | Rule.PER_RANK, metavar="NAME",
        help="tokenizer: bpe (trained on your data), byte, gpt2, any other tiktoken name, "
        "FILE.tiktoken (default: bpe for the built-in corpus, gpt2 for your own data)")
    vocab_size: int | None = row(None, COUNT, rules=Rule.FIXED | Rule.DATA,
        help="ids of a trained bpe (default: 1024), or of the toy data (default: 256)")
    use_toy_data: bool = row(False, bool, rules=Rule.FIXED | Rule.DATA,
        help="random tokens whose best loss is known: ln 4")
    max_tokens: int | None = row(None, COUNT, rules=Rule.DATA,
        help="use at most N tokens for training, and at most N for validation (default: all)")
    data_seed: int = row(None, SEED, rules=Rule.FIXED,
        help="seed of the order of the training data, and of toy data (default: --seed)")

    model: str | None = row(None, tuple(SHAPE_BY_MODEL), group="model",
        help="shape of a GPT-2, with 1,024 positions and --tokenizer-name gpt2; the flags below "
        "override single values (default: the small shape below)")
    init_from: Path | None = row(None, Path, rules=Rule.PER_RANK, metavar="PATH",
        help="start from trained weights: a snapshot, or a folder of transformers' GPT-2 "
        "(config.json, model.safetensors; needs the package safetensors); this also sets "
        "shape and tokenizer (default: random weights)")
    n_layers: int = row(3, LAYERS, rules=Rule.FIXED | Rule.SHAPE,
        help="blocks (default: {default})")
    n_heads: int = row(4, SIZE, rules=Rule.FIXED | Rule.SHAPE,
        help="attention heads of a block (default: {default})")
    d_model: int = row(128, SIZE, rules=Rule.FIXED | Rule.SHAPE,
        help="channels (default: {default})")
    d_ff: int = row(None, SIZE, rules=Rule.FIXED | Rule.SHAPE,
        help="channels inside the MLP (default: 4 x --d-model)")
    dropout: float = row(0.0, number_in_range(float, 0, 0.99), rules=Rule.FIXED, metavar="P",
        help="dropout probability, 0 = off (default: {default})")
    max_position_embeddings: int = row(None, COUNT, rules=Rule.FIXED | Rule.SHAPE,
        help="longest sequence that the model can process, in tokens (default: --seq-len)")

    use_activation_checkpoint: str = row("none", check_policy_string, group="memory",
        metavar="POLICY", nargs="?", const="full",
        help="which tensors backward recomputes instead of keeping them; policies from least to "
        f"most recompute: {' '.join(POLICY_NAMES)}; mlp:7 = mlp in the first 7 blocks; "
        "mlp:7,cheap = mlp in the first 7 blocks, cheap in the others; full/2 = keep one input for "
        "every 2 blocks; full/4+nested = keep one input for every 4 blocks, and recompute the "
        "blocks of a group once more, one by one; full+offload = kept tensors wait in CPU memory "
        "(selective and sdpa without --compile: only each block's input); auto = the least "
        "recompute that fits in memory (default: none; the flag without POLICY means full)")
    memory_budget: int | None = row(None, byte_count, rules=Rule.PER_RANK, metavar="SIZE",
        help="memory to plan for, e.g. 8GiB (default: the free memory): auto uses no more, and a "
        "run with another policy prints a warning if it needs more; a tenth stays free, on a"
        " GPU at least 1 GiB (a quarter, if SIZE is less than 4 GiB)")
    card: str | None = row(None, card_name, metavar="NAME",
        help="card for predicted times: auto, and a run that runs out of memory, choose the "
        "policy that is predicted to be fastest on this card: H100, \"RTX 4090\", ..., or "
        "this-machine, which is measured; list prints all cards (default: the CUDA GPU's own "
        "name; without a known GPU, the policy that recomputes the fewest FLOPs is chosen)")
    loss_chunks: int = row(0, COUNT_OR_ZERO,
        help="compute head and loss in N chunks of tokens; 1 = all at once, 0 = automatic "
        "(default: 0)")
    mlp_chunks: int = row(1, COUNT_OR_ZERO,
        help="for long sequences, with mlp, sdpa or full: recompute LayerNorm and MLP, the second"
        " half of a block, in at most N chunks of at least 64 tokens; 1 = all at once, 0 = "
        "automatic; chunks change the rounding of six gradients per block (default: 1)")
    on_out_of_memory: str = row("deeper", ("deeper", "stop"),
        help="deeper: do the step again, and all later steps, with a policy that needs less memory "
        "(with several processes: end with exit code 4, and begin with such a policy if torchrun "
        "starts them again); the results are the same. stop: end with exit code 4 (default: "
        "{default})")

    batch_size: int = row(12, SIZE, group="training",
        help="sequences per micro-batch and process (default: {default})")
    seq_len: int = row(64, COUNT, rules=Rule.FIXED,
        help="tokens of a sequence (default: {default})")
    grad_accum_steps: int = row(1, COUNT,
        help="micro-batches per process and step (default: {default})")
    num_steps: int = row(1000, COUNT,
        help="optimizer steps (default: {default})")
    num_tokens: int | None = row(None, token_count(least=1),
        help="instead of --num-steps: train on N tokens, counted over all processes; e.g. 1B, "
        "300M, 1e9")
    lr: float = row(None, POSITIVE, metavar="RATE",
        help="peak learning rate (default: 0.4 / --d-model, which is close to GPT-3's table; with"
        " --optimizer muon, 0.8 / --d-model; with --init-from, a tenth of these values)")
    min_lr: float = row(None, POSITIVE_OR_ZERO, metavar="RATE",
        help="learning rate at the last step, absolute (default: --lr / 10)")
    lr_scheduler: str = row("cosine", ("cosine", "linear", "constant"),
        help="learning-rate schedule after the warm-up (default: {default})")
    warmup_steps: int = row(None, COUNT_OR_ZERO,
        help="steps of linear warm-up, 0 = none (default: a twentieth of --num-steps)")
    weight_decay: float = row(0.1, POSITIVE_OR_ZERO, metavar="X",
        help="weight decay, on matrices only, 0 = off (default: {default})")
    optimizer: str = row("adamw", ("adamw", "muon"), rules=Rule.FIXED,
        help="muon: for the blocks' matrices, with one moment instead of two; the rest keeps "
        "AdamW (default: adamw)")
    moments_dtype: str = row("float32", ("float32", "bfloat16"),
        help="dtype of the stored moments; the optimizer computes in float32 (default: {default})")
    grad_clip_norm: float = row(1.0, POSITIVE_OR_ZERO, metavar="X",
        help="largest gradient norm, 0 = off (default: {default})")
    seed: int = row(1337, SEED, rules=Rule.FIXED,
        help="seed of weights and dropout (default: {default})")

    device: str = row("auto", ("auto", "cpu", "cuda", "mps"), group="machine", rules=Rule.PER_RANK,
        help="device to compute on (default: cuda if there is one, else mps, else cpu)")
    no_amp: bool = row(False, bool, rules=Rule.PER_RANK,
        help="float32 throughout")
    amp_dtype: str = row("auto", ("auto", "bfloat16", "float16"),
        rules=Rule.PER_RANK,
        help="dtype of autocast (default: bfloat16 where the hardware has it, else float16 on "
        "cuda, else float32)")
    tf32: bool = row(False, ON_OFF,
        help="run float32 matmuls (--no-amp) on a GPU's tensor cores, with inputs rounded from 23"
        " to 10 mantissa bits: results differ; by the data sheets 8 times as fast on an "
        "A100, 7 times on an H100, no faster on a GeForce")
    compile: bool = row(False, ON_OFF, help="torch.compile each block: slow start, fast steps")
    compress_gradients: bool = row(False, ON_OFF,
        help="with several processes, average gradients in bfloat16. This halves the traffic, "
        "adds up to 2 bytes per parameter, and gives other results than one process gives "
        "(with one process: no effect)")
    reproducible_sums: bool = row(False, ON_OFF,
        help="sum the gradients of a step in an order that does not depend on the number of "
        "processes; this number and --grad-accum-steps must be powers of two. The results are "
        "bitwise equal (docs/reliability.md)")
    gather_dtype: str = row("float32", ("float32", "bfloat16"),
        help="train_fsdp.py, train_sp.py: dtype in which a block's weights are gathered; they are"
        " stored in float32. bfloat16 needs bfloat16 autocast. It halves the bytes, and "
        "keeps the losses; more than two processes sum gradients in another order (default: "
        "{default})")

    log_interval: int = row(50, COUNT_OR_ZERO, group="running",
        help="steps between log lines; without a progress bar, there is at least one line in 30 "
        "s; 0 = log only steps that evaluate or save; the last step always logs, evaluates "
        "and saves (default: {default})")
    eval_interval: int = row(250, COUNT_OR_ZERO,
        help="steps between evaluations, 0 = at the end only (default: {default})")
    save_interval: int = row(500, COUNT_OR_ZERO,
        help="steps between snapshots, 0 = not by steps; the first evaluation saves, too "
        "(default: {default})")
    save_minutes: float = row(15.0, POSITIVE_OR_ZERO, metavar="M",
        help="save when the last snapshot is M minutes old, 0 = not by time (default: 15)")
    eval_tokens: int = row(16_000, token_count(least=0),
        help="validate on N tokens, in windows of --seq-len that are spread over the validation "
        "set; 0 = all of it (default: 16K)")
    checkpoint_path: Path = row(Path("checkpoints/minigpt_single.pt"), snapshot_path,
        rules=Rule.PER_RANK | Rule.THIS_START, metavar="FILE",
        help="file of the newest snapshot (default: {default})")
    resume: bool = row(False, bool, rules=Rule.THIS_START,
        help="continue from --checkpoint-path with its flags; typed flags override them")
    sample_tokens: int = row(128, COUNT_OR_ZERO,
        help="tokens of the sample text at the end, 0 = none (default: {default})")
    log_to: str = row("none", ("none", "tensorboard", "wandb"), rules=Rule.PER_RANK,
        help="a logger in addition to RUN.metrics.jsonl (default: none)")
    profile: int | None = row(None, COUNT, rules=Rule.PER_RANK | Rule.THIS_START,
        help="after 3 steps, record N steps: a trace of every operator, and a table of the ten "
        "slowest")
    detect_anomaly: bool = row(False, ON_OFF,
        help="find the operation that made a NaN in backward (slow)")

    # fmt: on
    # The values of the flags that were typed, and of those that --init-from sets.
    typed: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(
        cls: type[S],
        argv: Sequence[str] | None,
        prog: str,
        description: str = "Train a MiniGPT and see what activation memory costs.",
        first: Sequence[str] = (),
        **defaults: Any,
    ) -> S:
        """Return the settings of the command-line words `argv`; None: those of this process.

        `first`: the flags that --help shows before all others. `defaults`: this program's own
        defaults, by flag. A wrong word prints one line and ends the program with exit code 2.
        """
        # With SUPPRESS the result has the typed flags only.
        parser: Any = OneLineParser(
            prog=prog,
            description=description,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            usage=f"{prog} [FLAG ...]",
        )
        rows, group = {row.name: row for row in fields(cls) if row.metadata}, ""
        group_of = {name: (group := row.metadata["group"] or group) for name, row in rows.items()}
        group_of |= dict.fromkeys(first, "what matters first")
        rest = [name for name in rows if name not in first]
        for title, names in groupby([*first, *rest], group_of.get):
            add = parser.add_argument_group(title).add_argument
            for name in names:
                default, options = rows[name].default, rows[name].metadata["options"]
                words = options["help"].replace("{default}", str(defaults.get(name, default)))
                add(flag(name), default=argparse.SUPPRESS, **options | {"help": words})
        return cls.from_given_flags(vars(parser.parse_args(argv)), **defaults)

    @classmethod
    def from_given_flags(cls: type[S], typed: Mapping[str, Any], **defaults: Any) -> S:
        """Return the settings in which the flags `typed` have these values, and all others their
        defaults."""
        if shape := SHAPE_BY_MODEL.get(typed.get("model", "")):
            defaults |= {"seq_len": 1024, "max_position_embeddings": 1024, **shape}
            if "use_toy_data" not in typed:
                defaults["tokenizer_name"] = "gpt2"
        typed = {name: tuple(v) if isinstance(v, list) else v for name, v in typed.items()}
        return cls(**{**defaults, **typed}, typed=typed)

    def replace(self: S, **changes: Any) -> S:
        """Return a copy with other values, in which the same flags count as typed."""
        return replace(self, **changes)

    def words(self, **changes: Any) -> list[str]:
        """Return the command-line words of the typed flags, and then of `changes`: flag -> new
        value, or None to leave the flag out."""
        kept = {name: value for name, value in self.typed.items() if name not in changes}
        return to_words(kept | changes)

    # ---- what follows from the values

    @property
    def recompute_plan(self) -> RecomputePlan:
        """The recompute policy of each block, where `auto` counts as `full`; raises ValueError if
        the policy string is invalid for --n-layers."""
        policy = self.use_activation_checkpoint
        return parse_recompute_plan("full" if policy == AUTO else policy, self.n_layers)

    def model_config(self, vocab_size: int) -> MiniGPTConfig:
        """Return the config of the model, in which the policy `auto` counts as `full`, or raise
        MiniGPTError if such a model is impossible."""
        names = {field.name for field in fields(MiniGPTConfig)} & ROWS.keys() - {"vocab_size"}
        same: dict[str, Any] = {name: getattr(self, name) for name in names}
        try:
            recompute = format_recompute_plan(self.recompute_plan)
            return MiniGPTConfig(vocab_size=vocab_size, recompute=recompute, **same)
        except ValueError as error:
            raise MiniGPTError(replace_fields_by_flags(str(error))) from None

    def can_sum_reproducibly(self, n: int) -> bool:
        """Return False if --reproducible-sums cannot sum the gradients of n micro-batches, or of n
        processes."""
        return n.bit_count() == 1 or not self.reproducible_sums

    def tokens_per_step(self, replicas: int) -> int:
        """Return the tokens of a training step, in all micro-batches of all replicas."""
        return self.batch_size * self.seq_len * self.grad_accum_steps * replicas


# An error names the first of several flags that differ, so flags without a default of their own,
# which may follow from another flag, are last.
ROWS: dict[str, Mapping[str, Any]] = {
    row.name: row.metadata
    for row in sorted(fields(Settings), key=lambda row: row.default is None)
    if row.metadata
}


def flags_with_rule(rule: Rule) -> list[str]:
    """Return the names of the flags with this rule."""
    return [name for name, row in ROWS.items() if rule in row["rules"]]


def to_words(flags: Mapping[str, Any]) -> list[str]:
    """Return `flags`, such as {"n_layers": 3}, as command-line words, without flags whose value is
    None and names that are no flags of the trainers."""
    words = list[str]()
    for name, value in flags.items():
        if value is None or name not in ROWS:
            continue
        options = ROWS[name]["options"]
        if isinstance(value, bool):
            off = [flag(f"no_{name}")] if options["action"] is ON_OFF else []
            words += [flag(name)] if value else off
        else:
            values = value if isinstance(value, tuple | list) else [value]
            to_text = FORMATTER_BY_TYPE.get(options.get("type"), str)
            words += [flag(name), *map(to_text, values)]
    return words


def resolve(settings: S, layout: Layout = ONE_PROCESS, script: str = "") -> S:
    """Return the settings with the defaults that depend on other flags.

    `layout`, `script`: the processes of the run, and the name of their trainer for messages. Raises
    MiniGPTError if flags contradict each other, or if the processes do not support a flag.
    """
    lr = settings.lr or (0.8 if settings.optimizer == "muon" else 0.4) / settings.d_model * (
        1 if settings.init_from is None else 0.1  # a high rate would destroy trained weights
    )
    steps = settings.num_steps
    if settings.num_tokens is not None:
        steps = math.ceil(settings.num_tokens / settings.tokens_per_step(layout.replicas))
    defaults = {
        "data_seed": settings.seed,
        "d_ff": 4 * settings.d_model,
        "max_position_embeddings": settings.seq_len,
        "lr": lr,
        "min_lr": lr / 10,
        "warmup_steps": steps // 20,
    }
    missing = {name: v for name, v in defaults.items() if getattr(settings, name) is None}
    settings = settings.replace(**missing, num_steps=steps)
    settings.model_config(vocab_size=1)  # report an impossible shape before the data are read
    for wrong, message in contradictions(settings, layout, script):
        if wrong:
            raise MiniGPTError(message)
    return settings


def contradictions(s: Settings, layout: Layout, script: str) -> list[tuple[object, str]]:
    """Return (whether the flags `s` break a rule, the error message) for each rule. `layout`,
    `script`: as in `resolve`."""
    n, plan, sharded = layout.world_size, s.recompute_plan, layout.kind in ("fsdp", "sp")
    no_power_of_two = [
        (
            not s.can_sum_reproducibly(value),
            f"{name} {value}: --reproducible-sums needs a power of two, such as "
            f"{2 ** (value.bit_length() - 1)}; --no-reproducible-sums does not",
        )
        for name, value in (("--nproc-per-node", n), ("--grad-accum-steps", s.grad_accum_steps))
    ]
    exclusive = [
        ({*pair} <= s.typed.keys(), f"{flag(pair[0])} and {flag(pair[1])}: give only one of them")
        for pair in (*EXCLUSIVE_FLAGS, ("model", "init_from"))
    ]
    too_few = [
        (
            value < layout.sp_degree,
            f"{name} {value}: each of {n} processes of {script} needs one at least: "
            f"--nproc-per-node={value}, or train_fsdp.py",
        )
        for name, value in (("--n-heads", s.n_heads), ("--seq-len", s.seq_len))
    ]
    return [
        *exclusive,
        (
            s.seq_len > s.max_position_embeddings,
            f"--seq-len {s.seq_len} is above --max-position-embeddings "
            f"{s.max_position_embeddings}: raise the latter, or leave it out",
        ),
        (s.min_lr > s.lr, f"--min-lr {s.min_lr:g} is above --lr {s.lr:g}"),
        (
            s.mlp_chunks != 1 and s.compile,
            f"--mlp-chunks {s.mlp_chunks}: compiled blocks are not cut; --no-compile or "
            "--mlp-chunks 1",
        ),
        *no_power_of_two,
        (
            s.reproducible_sums and (layout.kind == "sp" or s.compress_gradients),
            "--reproducible-sums: neither train_sp.py, which splits sequences, nor "
            "--compress-gradients can have it; train_ddp.py and train_fsdp.py can",
        ),
        (
            sharded and n > 1 and plan.group_size > 1 and not plan.nested,  # (one has no shards)
            f"--use-activation-checkpoint {s.use_activation_checkpoint}: {script} gathers block by "
            f"block; {format_recompute_plan(plan._replace(nested=plan.group_size > 1))} fits",
        ),
        (
            sharded and s.compress_gradients,
            "--compress-gradients: train_ddp.py can; --no-compress-gradients fits",
        ),
        *too_few,
        (
            layout.sp_degree > 1 and s.compile,
            "--compile: train_fsdp.py can; train_sp.py has not been tried with it",
        ),
    ]
