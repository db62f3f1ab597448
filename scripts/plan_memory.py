"""Will it fit, and what is the cheapest way to make it fit? An answer before the run.

The flags are the trainers' own; add nothing but what you ask:
    python -m scripts.plan_memory --model gpt2 --device cuda --memory-budget 8GiB
    python -m scripts.plan_memory --model gpt2 --card "RTX 4090" --all-knobs

One training step of that model is simulated for each recompute policy, on tensors that have shapes
but no memory: no GPU is needed, nothing is downloaded, 1.5 billion parameters take a minute on a
laptop. `--device cuda` plans for a GPU wherever you are, `--card` for one with that much memory,
and predicts the time, too. What is recommended leaves a margin to what tensors are not (the CUDA
context, kernels, an allocator's gaps): a tenth of the budget, on a GPU at least 1 GiB.
"""

import sys

if not __package__:  # python scripts/plan_memory.py: the others lie one folder up
    sys.path[0] += "/.."
    import scripts  # noqa: F401

import trainer.start  # noqa: F401  # before torch: then garbage is looked for rarely

# isort: split
import argparse
import json
import shlex
import time
from dataclasses import asdict, dataclass, replace

import torch
from tqdm import tqdm

from data import DataError
from model import MiniGPTConfig
from planner.formulas import closed_form, count_parameters
from planner.operators import PRECISIONS
from planner.record import Record
from planner.shards import share_of
from scripts import plan_knobs, plan_peak, plan_table, say_stopped
from scripts.plan_knobs import STEP, Setting
from scripts.plan_table import Clock, Row, WholeRun, digits, recommend
from scripts.plan_viz import write_viz
from trainer import flags
from trainer.card import THIS_MACHINE
from trainer.flags import UsageError, model_config
from trainer.metrics import format_bytes
from trainer.older import OLDER
from trainer.optimizer import optimizer_name
from trainer.plan import SMALLER, Plans, asked_card, target, vocabulary
from trainer.pretrained import open_init_from
from trainer.report import describe_model
from trainer.room import Room

PROGRESS = "{n_fmt} steps simulated [{elapsed}]"  # how many it will be is not known
# The trainers' flags that change no plan.
PASSED_ON = (
    "val_data val_ratio max_tokens data_seed num_epochs lr min_lr lr_scheduler warmup_steps seed "
    "weight_decay grad_clip_norm log_interval eval_interval save_interval save_minutes log_to "
    "eval_batches checkpoint_path resume sample_tokens profile detect_anomaly"
).split()
# Those that a command does not have as they were typed: this tool's own, and what it answers.
ANSWERED = (
    "--json --nproc-per-node --memory-budget --card --longest-sequence --all-knobs --fsdp "
    "--at-peak --memory-viz --use-activation-checkpoint"
).split() + [*map(flags.flag, OLDER)]


@dataclass(frozen=True)
class Asked:
    """What is asked, and for which device."""

    argv: list[str]
    args: argparse.Namespace
    plans: Plans
    room: Room
    clock: Clock | None  # None: no --card
    measured: float | None  # seconds that measuring this machine took


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
    add("--memory-viz", type=flags.output_file, metavar="FILE.pickle",
        help="write the same step there, for https://pytorch.org/memory_viz")  # fmt: skip
    add("--json", type=flags.output_file, metavar="FILE", help="write the table there, in bytes")
    args = parser.parse_args(argv)
    if args.fsdp:
        check_fsdp(args)
    if args.json and args.json == args.memory_viz:
        raise UsageError(f"--json and --memory-viz: both are to be written to {args.json}")
    open_init_from(args)
    args.typed_policy = plan_peak.typed_policy(args) if wants_record(args) else None
    # The rows are changes of a run without recompute, and the least of them is what auto takes.
    args.use_activation_checkpoint = "auto"
    if args.all_knobs and args.card is None:
        raise UsageError(f"--all-knobs compares times: name a --card, or --card {THIS_MACHINE}")
    args = flags.fill_in(args, args.nproc_per_node or 1)
    args.use_activation_checkpoint = "none"
    return args


def wants_record(args: argparse.Namespace) -> bool:
    return args.at_peak or args.memory_viz is not None


def check_fsdp(args: argparse.Namespace) -> None:
    """Raises UsageError where a flag does not go with --fsdp."""
    if args.nproc_per_node is None:
        raise UsageError("--fsdp: over how many processes? --nproc-per-node tells")
    if flags.recompute_of(args).group > 1:
        raise UsageError(
            f"--use-activation-checkpoint {args.use_activation_checkpoint}: with --fsdp weights "
            "are gathered block by block; leave it out"
        )
    if args.compress_gradients:
        raise UsageError("--compress-gradients is for train_ddp.py: leave it or --fsdp out")


def aim(argv: list[str]) -> Asked:
    """Raises UsageError or DataError."""
    args = parse(argv)
    processes = args.nproc_per_node or 1
    kind, precision, room = target(args, processes)
    if args.card == THIS_MACHINE and kind == "cpu" and processes > 1:
        raise UsageError(
            f"--card {THIS_MACHINE} measures one process, and {processes} would share the CPU: "
            "leave out --nproc-per-node"
        )
    if args.longest_sequence and room.budget is None:
        raise UsageError("--longest-sequence: within what? --card or --memory-budget tells")
    start, card = time.perf_counter(), asked_card(args)
    measured = time.perf_counter() - start if args.card == THIS_MACHINE else None
    ddp, shards = args.nproc_per_node is not None and not args.fsdp, processes if args.fsdp else 1
    device = torch.device(kind)
    plans = Plans(vocabulary(args), device, precision, ddp, processes, shards, room.host, card)
    clock = None
    if card:
        clock = Clock(card, args.compile, args.grad_accum_steps, processes, shards)
    return Asked(argv, args, plans, room, clock, measured)


def describe_target(asked: Asked) -> str:
    """What the table below is about."""
    args, plans, room = asked.args, asked.plans, asked.room
    config, kind = model_config(args, plans.vocab_size), plans.device.type
    precision = str(plans.precision).removeprefix("torch.")
    if room.budget is None:
        limit = f"no {kind} here and no --memory-budget: what fits cannot be told"
    else:
        limit = f"tensors may take {room}"
    lines = [
        f"model    {count_parameters(config):,} parameters: {describe_model(config)}",
        f"batch    {args.grad_accum_steps} x {args.batch_size} sequences of {args.seq_len} tokens",
        f"device   {kind}, {precision}{parallel_words(plans)}",
    ]
    if asked.clock:
        card = asked.clock.card
        flops = digits(3, card.flops[PRECISIONS.index(plans.precision)] / 1e12)
        speed = f"{flops} TFLOP/s in {precision}, {digits(3, card.bytes_per_s / 1e9)} GB/s"
        how = f", measured in {asked.measured:.1f} s" if asked.measured else " at most"
        lines.append(f"card     {card.name}: {speed}{how}; times are estimates")
    lines += [
        f"budget   {limit}",
        f"always   {format_bytes(plans.state(args))}: {state_words(args, plans, config)}",
    ]
    if assumed := assumptions(args, config.vocab_size):
        lines.append(f"note     assumed, as nothing else was asked: {', '.join(assumed)}")
    if args.compile:
        lines.append("note     eager code is simulated; the compiler may keep less, or more")
    if asked.clock and plans.processes > 1:
        lines.append("note     the times are without what processes send each other")
    return "\n".join(lines)


def parallel_words(plans: Plans) -> str:
    if plans.shards > 1:
        return f", fully_shard: {plans.shards} processes hold the model between them"
    return ", DistributedDataParallel" if plans.ddp else ""


def state_words(args: argparse.Namespace, plans: Plans, config: MiniGPTConfig) -> str:
    size = replace(plans, shards=1).state(args) / count_parameters(config)
    dtype = "" if args.moments_dtype == "float32" else f" in {args.moments_dtype}"
    state = f"weights, gradients, {optimizer_name(args)}{dtype} ({size:.3g} bytes a parameter)"
    if plans.shards == 1:
        return state
    gathered = format_bytes(share_of(0, config, plans.shards))
    return f"1/{plans.shards} of {state}; and gathered embeddings, {gathered}"


def assumptions(args: argparse.Namespace, vocab_size: int) -> list[str]:
    """What stands for flags that were left out by someone who asked for a model of their own."""
    shape = {"n_layers": "layers", "d_model": "channels", "n_heads": "heads"}
    if args.model or args.init_from:
        return []
    if not args.typed & (shape.keys() | {"d_ff", "seq_len", "vocab_size"}):
        return []
    assumed = [
        f"{getattr(args, name)} {noun}" for name, noun in shape.items() if name not in args.typed
    ]
    if not args.typed & {"tokenizer_name", "vocab_size", "train_data"}:
        words = f"a vocabulary of {vocab_size:,}"
        assumed.append(words + ("" if args.use_toy_data else " (--tokenizer-name gpt2: 50,257)"))
    if "seq_len" not in args.typed:
        assumed.append(f"{args.seq_len} tokens (--seq-len)")
    return assumed


def command_line(argv: list[str], args: argparse.Namespace, flags: list[str]) -> str:
    """The trainer's command: what was asked, with what was found."""
    left_out = {*ANSWERED, *flags, *["--compress-gradients"] * args.fsdp}
    kept, keep = [], True
    for word in argv:
        if word.startswith("-"):  # else it is a value of the flag before it
            keep = word.partition("=")[0] not in left_out
        kept += [word] * keep
    start = ["python", "train_minimal.py"]
    if args.nproc_per_node:
        trainer = "train_fsdp.py" if args.fsdp else "train_ddp.py"
        start = ["torchrun", f"--nproc-per-node={args.nproc_per_node}", trainer]
    return shlex.join([*start, *kept, *flags])


def verdict(asked: Asked, table: list[Row]) -> str:
    """What to run; or why nothing fits, and what would."""
    argv, args, plans, room = asked.argv, asked.args, asked.plans, asked.room
    if room.safe is None:
        return "--memory-budget 8GiB, say, tells what fits, and which of them to take"
    lines, taken = [], recommend(table)
    if taken and not taken.offloaded:
        return command_line(argv, args, taken.flags)
    why, knob = plans.way_out(args, room.safe)
    if taken:  # offloaded; there may be something cheaper than that
        if knob and "+offload" not in knob.flags.get("use_activation_checkpoint", ""):
            lines = [f"or, instead of offloading, {knob.command(args)} ({knob.words})"]
        return "\n".join([*lines, command_line(argv, args, taken.flags)])
    nothing = "nothing fits"
    if tight := [row for row in table if row.fits]:
        row = min(tight, key=lambda row: row.step.peak)
        left = format_bytes((room.budget or 0) - row.step.peak)
        lines.append(f"tight    {row.name} leaves {left} to kernels, the CUDA context and gaps")
        nothing += " with a margin"
    if knob is None:
        return "\n".join([*lines, f"{nothing}; {why}{SMALLER}"])
    lines.append(f"{nothing}; {why}{knob.command(args)} fits ({knob.words})")
    if knob.trainer:
        args = argparse.Namespace(**vars(args) | {"fsdp": True})
    return "\n".join([*lines, command_line(argv, args, knob.typed())])


def longest_verdict(asked: Asked, table: list[Row]) -> str:
    """The command for the longest sequence of all rows, or what is said where none fits."""

    def command(row: Row) -> str:
        wanted = plan_knobs.with_length(asked.args, row.longest or 0)
        words = plan_knobs.length_words(asked.args, wanted)
        return command_line(asked.argv, asked.args, words + row.flags)

    # Of as long ones the cheapest, offloaded last.
    table = sorted(table, key=lambda row: (-(row.longest or 0), row.offloaded, row.cost))
    if not table[0].longest:
        return verdict(asked, table)
    here = next(row for row in table if not row.offloaded)
    if here is table[0]:
        return command(here)
    instead = f"or, without offloading, {here.longest or 0:,} tokens: {command(here)}"
    return f"{instead}\n{command(table[0])}"


def as_json(
    asked: Asked, table: list[Row], settings: list[Setting], run: WholeRun, record: Record | None
) -> str:
    args, plans, taken = asked.args, asked.plans, recommend(table)
    shape = args.batch_size, args.seq_len, plans.precision
    moments = args.optimizer, getattr(torch, args.moments_dtype)
    config = (taken or min(table, key=lambda row: row.step.peak)).step.config
    alive = [group.as_json() for group in plan_peak.at_peak(record)] if record else None
    result = {
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "-m", "scripts.plan_memory", *asked.argv]),
        "config": asdict(model_config(args, plans.vocab_size)),
        "batch_size": args.batch_size,
        "seq_len": args.seq_len,
        "device": plans.device.type,
        "precision": str(plans.precision).removeprefix("torch."),
        "shards": plans.shards,
        "state_bytes": plans.state(args),
        "card": asked.clock and asked.clock.card.name,
        "budget_bytes": asked.room.budget,
        "safe_bytes": asked.room.safe,
        "takes": taken and taken.name,
        "run": run.as_json(),
        "optimizer": args.optimizer,
        "moments_dtype": args.moments_dtype,
        "closed_form": closed_form(config, *shape, *moments),
        "rows": [row.as_json() for row in table],
        "all_knobs": [setting.as_json(args) for setting in settings],
        "alive_at_peak": alive,
        "alive_at_peak_of": record and record.step.config.recompute,
    }
    return json.dumps(result, indent=1) + "\n"


def make_table(asked: Asked) -> list[Row]:
    args, plans = asked.args, asked.plans
    table = plan_table.rows(plans.planner(args), args, asked.room, asked.clock)
    if not args.longest_sequence or args.all_knobs:
        return table
    return [replace(row, longest=plan_knobs.longest_sequence(row, args, plans)) for row in table]


def plan(asked: Asked, bar: tqdm) -> int:
    """Print the plan. Raises UsageError or DataError."""
    args, plans, room, clock = asked.args, asked.plans, asked.room, asked.clock
    bar.write(describe_target(asked) + "\n")
    table: list[Row] = []
    settings: list[Setting] = []
    if room.budget is None or plans.state(args) < room.budget:
        if args.all_knobs and clock:
            settings = plan_knobs.turn_all_knobs(args, plans, room.safe or 0, clock)
        if settings:
            bar.write(plan_knobs.format_settings(settings) + "\n")
        else:
            table = make_table(asked)
            bar.write(plan_table.format_table(table, recommend(table)) + "\n")
            if host := plan_table.describe_host(table, plans.processes, plans.device.type):
                bar.write(host + "\n")
    record = None
    if wants_record(args):
        record = plan_peak.record_step(args, plans, table, settings)
        if args.at_peak:
            bar.write(plan_peak.format_peak(record) + "\n")
        if args.memory_viz:
            write_viz(args.memory_viz, record, clock)
    fastest = settings[0].seconds if settings else None
    run = plan_table.whole_run(args, plans.processes, table, fastest)
    for line in plan_table.describe_whole(run, args):
        bar.write(line)
    if settings:
        bar.write(command_line(asked.argv, args, settings[0].flags(args)))
    elif args.longest_sequence and table and table[0].longest is not None:
        bar.write(longest_verdict(asked, table))
    else:
        bar.write(verdict(asked, table))
    if args.json:
        args.json.write_text(as_json(asked, table or make_table(asked), settings, run, record))
    return 0


def main(argv: list[str] | None = None) -> int:
    try:
        asked = aim(sys.argv[1:] if argv is None else argv)  # --help and errors want no bar yet
        with tqdm(bar_format=PROGRESS, disable=None, leave=False) as bar:
            return plan(replace(asked, plans=replace(asked.plans, watch=bar.update)), bar)
    except (UsageError, DataError) as error:
        flags.print_error(error)
        return 2
    except KeyboardInterrupt:
        say_stopped()
        return 130


if __name__ == "__main__":
    sys.exit(main())
