"""Will it fit, and what is the cheapest way to make it fit? An answer before the run.

The flags are the trainers' own; add nothing but what you ask:
    python -m scripts.plan_memory --model gpt2 --device cuda --memory-budget 8GiB
    python -m scripts.plan_memory --model gpt2 --card "RTX 4090" --all-knobs

One training step of that model is simulated for each recompute policy, on tensors that have shapes
but no memory: no GPU is needed, nothing is downloaded, 1.5 billion parameters take a quarter of a
minute on a laptop. `--device cuda` plans for a GPU wherever you are, `--card` for one with that
much memory, and predicts the time, too. What is recommended leaves a margin to what tensors are not
(the CUDA context, kernels, an allocator's gaps): a tenth of the budget, on a GPU at least 1 GiB.
"""

import os
import sys

if not __package__:  # python scripts/plan_memory.py: the others lie one folder up
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    import scripts  # noqa: F401

import argparse
import gc
import json
import shlex
import time
from dataclasses import asdict, replace
from typing import Any

import torch
from tqdm import tqdm

from planner.cards import THIS_MACHINE
from planner.formulas import closed_form, count_parameters
from planner.operators import PRECISIONS
from planner.record import Record
from planner.shards import share_of
from scripts import plan_knobs, plan_table, tool
from scripts.plan_knobs import CHUNKED, STEP, setting_json, with_length
from scripts.plan_table import Row, digits, recommend
from trainer import flags
from trainer.flags import UsageError, as_argv
from trainer.metrics import format_bytes
from trainer.optimizer import optimizer_name
from trainer.plan import Question, ask
from trainer.pretrained import open_init_from
from trainer.report import describe_model

PROGRESS = "{n_fmt} steps simulated [{elapsed}]"  # how many it will be is not known
# The trainers' flags that change no plan.
PASSED_ON = (
    "val_data val_ratio max_tokens data_seed num_epochs lr min_lr lr_scheduler warmup_steps seed "
    "weight_decay grad_clip_norm log_interval eval_interval save_interval save_minutes log_to "
    "eval_tokens checkpoint_path resume sample_tokens profile detect_anomaly"
).split()
# What a command has as it was found, and not as it was typed.
ANSWERED = {"memory_budget", "card", "use_activation_checkpoint"}


def parse(argv: list[str]) -> argparse.Namespace:
    """The trainers' flags. Those that the table is about may be there, and are left out of it;
    they say which step --at-peak lists."""
    parser = flags.build_parser("python -m scripts.plan_memory", "unused.pt")
    does = "Predict the memory of a training run, for each recompute policy."
    parser.description = f"{does} All other flags of the trainers may be there, too."
    for action in parser._actions:
        if action.dest in PASSED_ON:
            action.help = argparse.SUPPRESS
    add = parser.add_argument_group("plan (all else as in train_minimal.py)").add_argument
    add("--nproc-per-node", type=flags.number(int, 1, 10**4), metavar="N",
        help="plan for train_ddp.py, with N processes on a machine")  # fmt: skip
    add("--fsdp", action="store_true",
        help="with --nproc-per-node: for train_fsdp.py, whose processes hold one model between "
        "them; predicted is what one of them takes")  # fmt: skip
    add("--sp", action="store_true",
        help="with --nproc-per-node: for train_sp.py, whose processes share each sequence, and the "
        "model as well; predicted is what the first of them takes")  # fmt: skip
    add("--longest-sequence", action="store_true",
        help="for each policy, the longest sequence that fits at this batch, in multiples of "
        f"{STEP} tokens; positions grow with it, unless --max-position-embeddings is typed; "
        "with --all-knobs: the longest that the tokens of a step can be cut into")  # fmt: skip
    add("--all-knobs", action="store_true",
        help="with --card: the most tokens/s that fit, by micro-batch, accumulation, policy and "
        "mix; as many sequences a step as asked")  # fmt: skip
    add("--at-peak", action="store_true",
        help="list what is alive at the peak: with the --use-activation-checkpoint (...) that is "
        "typed, else with the one that is recommended, else with none")  # fmt: skip
    add("--json", type=flags.output_file, metavar="FILE", help="write the table there, in bytes")
    args = parser.parse_args(argv)
    check(args)
    typed = set(args.typed)
    open_init_from(args)
    args.implied = dict.fromkeys(args.typed - typed)  # what the weights say, nobody needs to type
    args.typed_policy = plan_table.typed_policy(args) if args.at_peak else None
    args.use_activation_checkpoint = "none"  # the rows are changes of a run without recompute
    flags.fill_in(args, 1 if args.sp else args.nproc_per_node or 1, is_run=False)
    if args.sp:
        flags.check_shared(args, args.nproc_per_node)
    args.typed -= ANSWERED | ({"compress_gradients"} if args.fsdp or args.sp else set())
    return args


def check(args: argparse.Namespace) -> None:
    """Raises UsageError where flags do not go together."""
    if args.all_knobs and args.card is None:
        raise UsageError(f"--all-knobs compares times: name a --card, or --card {THIS_MACHINE}")
    if args.fsdp and args.sp:
        raise UsageError("--fsdp and --sp: leave --fsdp out; train_sp.py deals the model out, too")
    if not (args.fsdp or args.sp):
        return
    sharded = "--sp" if args.sp else "--fsdp"
    if args.nproc_per_node is None:
        raise UsageError(f"{sharded}: over how many processes? --nproc-per-node tells")
    trainer = "train_sp.py" if args.sp else "train_fsdp.py"
    flags.check_sharded(args, args.nproc_per_node, trainer)


def aim(argv: list[str]) -> tuple[Question, float]:
    """What is asked; and in how many seconds the machine was measured, if it was. Raises UsageError
    or DataError."""
    args, start = parse(argv), time.perf_counter()
    asked = ask(args, args.nproc_per_node, args.fsdp or args.sp, args.sp)
    if args.longest_sequence and asked.room.budget is None:
        raise UsageError("--longest-sequence: within what? --card or --memory-budget tells")
    return asked, time.perf_counter() - start


def describe_target(asked: Question, seconds: float) -> str:
    """What the table below is about."""
    args, room, kind, card = asked.args, asked.room, asked.device.type, asked.card
    precision = str(asked.precision).removeprefix("torch.")
    if room.budget is None:
        limit = f"no {kind} here and no --memory-budget: what fits cannot be told"
    else:
        limit = f"tensors may take {room}"
    lines = [
        f"model    {count_parameters(asked.config):,} parameters: {describe_model(asked.config)}",
        f"batch    {args.grad_accum_steps} x {args.batch_size} sequences of {args.seq_len} tokens",
        f"device   {kind}, {precision}{parallel_words(asked)}",
    ]
    if card:
        flops = digits(3, card.flops[PRECISIONS.index(asked.precision)] / 1e12)
        speed = f"{flops} TFLOP/s in {precision}, {digits(3, card.bytes_per_s / 1e9)} GB/s"
        how = f", measured in {seconds:.1f} s" if args.card == THIS_MACHINE else " at most"
        lines.append(f"card     {card.name}: {speed}{how}; times are estimates")
    lines.append(f"budget   {limit}")
    lines.append(f"always   {format_bytes(asked.state)}: {state_words(asked)}")
    if assumed := assumptions(asked):
        lines.append(f"note     assumed, as nothing else was asked: {', '.join(assumed)}")
    if args.compile:
        lines.append("note     eager code is simulated; the compiler may change time and memory")
    if card and asked.processes > 1:
        lines.append("note     the times are without what processes send each other")
    return "\n".join(lines)


def parallel_words(asked: Question) -> str:
    if asked.shards > 1:
        held = f", fully_shard: {asked.shards} processes hold the model between them"
        return held + ", and share each sequence" * (asked.sharing > 1)
    return ", DistributedDataParallel" if asked.ddp else ""


def state_words(asked: Question) -> str:
    args, config, shards = asked.args, asked.config, asked.shards
    size = replace(asked, shards=1).state / count_parameters(config)
    dtype = "" if args.moments_dtype == "float32" else f" in {args.moments_dtype}"
    state = f"weights, gradients, {optimizer_name(args)}{dtype} ({size:.3g} bytes a parameter)"
    if shards == 1:
        return state
    gathered = format_bytes(share_of(0, config, shards))
    return f"1/{shards} of {state}; and gathered token embeddings, {gathered}"


def assumptions(asked: Question) -> list[str]:
    """What stands for flags that were left out by someone who asked for a model of their own."""
    args = asked.args
    shape = {"n_layers": "layers", "d_model": "channels", "n_heads": "heads"}
    if args.model or args.init_from:
        return []
    if not args.typed & (shape.keys() | {"d_ff", "seq_len", "vocab_size"}):
        return []
    assumed = [
        f"{getattr(args, name)} {noun}" for name, noun in shape.items() if name not in args.typed
    ]
    if not args.typed & {"tokenizer_name", "vocab_size", "train_data"}:
        words = f"a vocabulary of {asked.vocab_size:,}"
        assumed.append(words + ("" if args.use_toy_data else " (--tokenizer-name gpt2: 50,257)"))
    if "seq_len" not in args.typed:
        assumed.append(f"{args.seq_len} tokens (--seq-len)")
    return assumed


def command_line(args: argparse.Namespace, trainer: str = "", **found: Any) -> str:
    """The trainer's command: what was asked, with what was found."""
    start = ["python", "train_minimal.py"]
    if args.nproc_per_node:
        ours = "train_sp.py" if args.sp else "train_fsdp.py" if args.fsdp else "train_ddp.py"
        trainer = trainer or ours
        start = ["torchrun", f"--nproc-per-node={args.nproc_per_node}", trainer]
    found = {name: None if value is False else value for name, value in found.items()}
    return shlex.join([*start, *as_argv(args, **args.implied | found)])


def verdict(asked: Question, table: list[Row]) -> list[str]:
    """What to run; or why nothing fits, and what would."""
    args, room, taken = asked.args, asked.room, recommend(table)
    if room.budget is None:
        return ["--memory-budget 8GiB, say, tells what fits, and which of them to take"]
    if taken and not taken.offloaded:
        return [command_line(args, **taken.changes(args))]
    lines, (_, knob) = [], asked.way_out()
    if taken:  # offloaded; there may be something cheaper than that
        if knob and "+offload" not in knob.flags.get("use_activation_checkpoint", ""):
            lines = [f"or, instead of offloading, {knob.command(args)} ({knob.words})"]
        return [*lines, command_line(args, **taken.changes(args))]
    tight = [row for row in table if row.fits]
    if tight:
        row = min(tight, key=lambda row: row.step.peak)
        lines.append(
            f"tight    {row.name} leaves {format_bytes(room.budget - row.step.peak)} to "
            "kernels, the CUDA context and gaps"
        )
    lines.append(f"nothing fits{' with a margin' * bool(tight)}; {asked.advice()}")
    return [*lines, command_line(args, knob.trainer, **knob.flags)] if knob else lines


def longest_verdict(asked: Question, table: list[Row]) -> list[str]:
    """The command for the longest sequence of all rows, or what is said where none fits."""

    def command(row: Row) -> str:
        longer = row.asked.about(with_length(row.asked.args, row.longest or 0))
        return command_line(asked.args, **Row(longer).changes(asked.args))

    # Of as long ones the cheapest, offloaded last.
    table = sorted(table, key=lambda row: (-(row.longest or 0), row.offloaded, row.cost))
    if not table[0].longest:
        return verdict(asked, table)
    here, cut = next(row for row in table if not row.offloaded), plan_knobs.in_chunks(table[0])
    lines = [f"or, with {CHUNKED}, {cut.longest:,} tokens: {command(cut)}"] if cut else []
    if here is not table[0]:
        lines.append(f"or, without offloading, {here.longest or 0:,} tokens: {command(here)}")
    return [*lines, command(table[0])]


def as_json(
    asked: Question,
    table: list[Row],
    settings: list[Row],
    after: list[Row],
    run: dict[str, Any],
    record: Record | None,
) -> dict[str, Any]:
    args, taken = asked.args, recommend(table)
    shape = args.batch_size, args.seq_len, asked.precision
    moments = args.optimizer, getattr(torch, args.moments_dtype)
    config = (taken or min(table, key=lambda row: row.step.peak)).step.config
    alive = plan_table.at_peak(record) if record else None
    return {
        "config": asdict(asked.config),
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "device": asked.device.type,
        "precision": str(asked.precision).removeprefix("torch."),
        "shards": asked.shards,
        "state_bytes": asked.state,
        "card": asked.card and asked.card.name,
        "budget_bytes": asked.room.budget,
        "safe_bytes": asked.room.safe,
        "takes": taken and taken.name,
        "run": run,
        "optimizer": args.optimizer,
        "moments_dtype": args.moments_dtype,
        "closed_form": closed_form(config, *shape, *moments),
        "rows": [row.as_json() for row in table],
        "if_out_of_memory": [
            {"policy": row.name, "peak_bytes": row.step.peak, "seconds": row.seconds}
            for row in after
        ],
        "all_knobs": [setting_json(row, args) for row in settings],
        "alive_at_peak": alive,
        "alive_at_peak_of": record and record.step.config.recompute,
    }


def make_table(asked: Question) -> list[Row]:
    table = plan_table.rows(asked)
    if not asked.args.longest_sequence or asked.args.all_knobs:
        return table
    return [replace(row, longest=plan_knobs.longest_sequence(row)) for row in table]


def plan(asked: Question, bar: tqdm) -> dict[str, Any]:
    """Print the plan; returns what goes into the JSON file. Raises UsageError or DataError."""
    args, table, settings = asked.args, list[Row](), list[Row]()
    if asked.room.budget is None or asked.state < asked.room.budget:
        if args.all_knobs:
            settings = plan_knobs.turn_all_knobs(asked)
        if settings:
            bar.write(plan_knobs.format_settings(settings) + "\n")
        else:
            table = make_table(asked)
            best = recommend(table)
            bar.write(plan_table.format_table(table, best) + "\n")
            if host := plan_table.describe_host(table):
                bar.write(host + "\n")
            if best and best.longest is None and (instead := asked.instead_of(best.step)):
                bar.write(f"note     {instead}\n")
    shown = settings or table
    if shown and (note := shown[0].asked.planner.note):
        bar.write(f"note     {note}\n")
    taken, record = settings[0] if settings else recommend(table), None
    if args.at_peak:
        record = plan_table.record_step(asked, taken)
        bar.write(plan_table.format_peak(record) + "\n")
    run, words = plan_table.whole_run(asked, taken)
    lines = plan_table.describe_next(taken) + words
    if settings:
        lines.append(command_line(args, **settings[0].changes(args)))
    elif table and table[0].longest is not None:
        lines += longest_verdict(asked, table)
    else:
        lines += verdict(asked, table)
    bar.write("\n".join(lines))
    if not args.json:
        return {}
    after = [*plan_table.if_memory_runs_out(taken)]
    return as_json(asked, table or make_table(asked), settings, after, run, record)


@tool
def main(argv: list[str]) -> None:
    asked, seconds = aim(argv)  # --help and errors want no bar yet
    with tqdm(bar_format=PROGRESS, disable=None, leave=False) as bar:
        bar.write(describe_target(asked, seconds) + "\n")
        result = plan(replace(asked, watch=bar.update), bar)
    if asked.args.json:
        command = {"command": shlex.join(["python", "-m", "scripts.plan_memory", *argv])}
        about = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        asked.args.json.write_text(json.dumps(about | command | result, indent=1) + "\n")


if __name__ == "__main__":
    gc.set_threshold(1_000_000)  # a planned step makes no garbage: to look for it only takes time
    sys.exit(main())
