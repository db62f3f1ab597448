"""Draw where the memory of a training step goes, and what recompute changes: three pictures.

python -m scripts.memory_timeline                                    # the demo's model: seconds
python -m scripts.memory_timeline --model gpt2 --batch-size 8 --device cuda       # a minute
python -m scripts.memory_timeline --model gpt2 --batch-size 8 --memory-budget 3GiB --device cuda
python -m scripts.memory_timeline --measure                 # and train, to see if it is so

    out/memory_timeline.png    memory over one step, a panel a policy
    out/memory_frontier.png    peak memory against FLOPs of a step; with --card, time on that card
    out/memory_made_of.png     what the peak is made of

The flags are the trainers' own and mean the same here: the model, vocabulary, precision and device
that train_minimal.py would have with them are drawn. `--device cuda` plans for a GPU wherever you
are. Only what chooses a policy has no effect, because all policies are drawn; --memory-budget marks
the one that --use-activation-checkpoint auto would take.

What is drawn is the planner's prediction (planner/step.py): memory_timeline_numbers.py asks for it,
memory_timeline_pictures.py and memory_timeline_frontier.py draw it. Needs matplotlib:
pip install matplotlib
"""

import sys

if not __package__:  # python scripts/memory_timeline.py: the others lie one folder up
    sys.path[0] += "/.."
    import scripts  # noqa: F401

import argparse
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data import DataError
from planner import Card
from planner.choose import describe_recompute
from planner.step import Planner
from planner.timeline import StepMemory
from scripts import say_stopped
from scripts.allocator_trace import DEVICE_TYPES
from scripts.memory_timeline_frontier import Choice, draw_frontier
from scripts.memory_timeline_numbers import (
    PANELS,
    POLICIES,
    Cost,
    Record,
    load_measured,
    n_parameters,
    record_step,
    relative_flops,
    ways,
)
from scripts.memory_timeline_pictures import (
    FORMATS,
    draw_made_of,
    draw_timeline,
    load_pyplot,
    save_picture,
)
from trainer import flags
from trainer.device import choose_device
from trainer.flags import UsageError, model_config, output_file, output_folder, print_error
from trainer.plan import asked_card, make_planner, target, vocabulary
from trainer.pretrained import open_init_from
from trainer.report import describe_model


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Raises UsageError."""
    parser = flags.build_parser("python -m scripts.memory_timeline", "unused")
    parser.description = (
        "Draw where the memory of a training step goes. Takes the trainers' flags, which mean the "
        "same here; those of running, and those that choose a policy, have no effect."
    )
    add = parser.add_argument_group("pictures").add_argument
    # fmt: off
    add("--out", type=output_folder, default=Path("out"), metavar="FOLDER",
        help="where the pictures go; is made if need be (default: %(default)s)")
    add("--format", choices=tuple(FORMATS), default="png", help="(default: %(default)s)")
    add("--json", type=output_file, metavar="FILE", help="write the numbers there")
    add("--measure", action="store_true",
        help="also train, and draw the allocator's own record over the prediction (slow on a CPU)")
    add("--measured", type=Path, metavar="FILE",
        help="from scripts.benchmark --json: the frontier shows its times, none predicted")
    # fmt: on
    args = parser.parse_args(argv)
    args.use_activation_checkpoint = "auto"  # --memory-budget may stand beside it
    args.recompute_layers, args.recompute_rest = None, None
    args.recompute_group, args.offload_activations = 1, False
    open_init_from(args)
    flags.fill_in(args)
    args.use_activation_checkpoint = "none"
    return args


def prepare(args: argparse.Namespace) -> Planner:
    """The planner that the trainers would have with these flags. Raises UsageError, DataError."""
    kind, precision, _ = target(args)
    if args.measure:
        choose_device(kind)  # a device that is not there can be planned for, not trained on
        if kind not in DEVICE_TYPES:
            raise UsageError(f"--measure: nothing records {kind}'s allocator: try --device cpu")
    config = model_config(args, vocabulary(args))
    return make_planner(args, config, torch.device(kind), precision)


def simulate(
    planner: Planner, args: argparse.Namespace, bar: tqdm, card: Card | None = None
) -> tuple[dict[str, Record], Choice]:
    """Ask for all that the pictures show; the planner remembers it. (--measure's records, best)"""
    wanted = ways(planner, args.batch_size)
    recorded = PANELS if args.measure else {}
    bar.reset(len(wanted) + len(recorded) + 3)  # and a picture each
    records: dict[str, Record] = {}
    for batch_size, memory in wanted:
        bar.set_description(f"simulating {memory['recompute']}")
        planner.step(batch_size, **memory)
        bar.update()
    for name in recorded:
        bar.set_description(f"training, {name}")
        step = planner.step(args.batch_size, **POLICIES[name])
        records[name] = record_step(planner, step, args)
        bar.update()
    planner.watch = lambda: bar.set_description("choosing")  # who knows how many steps yet
    budget = args.memory_budget and target(args)[2].safe
    return records, Choice.of(planner, args.batch_size, budget, card, args.compile)


def row(step: StepMemory, card: Card | None = None, compiled: bool = False) -> dict[str, Any]:
    """For the JSON file; what a benchmark's file has, too, has the same name there."""
    config = step.config
    return {
        "name": describe_recompute(config),
        "policy": config.recompute,
        "layers": config.recompute_layers,
        "rest": config.recompute_rest,
        "group": config.recompute_group,
        "loss_chunks": config.loss_chunks,
        "batch_size": step.batch_size,
        "seq_len": step.seq_len,
        "relative_flops": relative_flops(step),
        "predicted_bytes": step.peak,
        "predicted_s": None if card is None else step.seconds(card, compiled),
        "where": step.where,
        "at_peak": step.at_peak,
    }


def describe_target(planner: Planner) -> str:
    """Which model is drawn, in the words of the trainers' first lines."""
    config, precision = planner.config, str(planner.precision).removeprefix("torch.")
    return (
        f"model    {n_parameters(planner):,} parameters: {describe_model(config)}\n"
        f"device   {'cpu' if planner.on_cpu else 'GPU'}, {precision}"
    )


def draw_all(args: argparse.Namespace) -> dict[str, Any]:
    """Draws and writes the pictures; what the JSON file says. Raises UsageError, DataError."""
    plt, size = load_pyplot(), args.batch_size
    measured = load_measured(args) if args.measured else None
    with tqdm(unit="step", desc="setting up", disable=None, leave=False) as bar:
        planner, card = prepare(args), asked_card(args)
        bar.write(describe_target(planner))
        records, choice = simulate(planner, args, bar, card)
        cost = Cost(planner, size, card, args.compile)
        pictures: dict[str, Callable[[], Any]] = {
            "timeline": lambda: draw_timeline(plt, planner, size, records),
            "frontier": lambda: draw_frontier(plt, planner, size, choice, measured, cost),
            "made_of": lambda: draw_made_of(plt, planner, size),
        }
        args.out.mkdir(parents=True, exist_ok=True)
        for name, draw in pictures.items():
            bar.set_description(f"drawing {name}")
            file = args.out / f"memory_{name}.{args.format}"
            save_picture(draw(), file, FORMATS[args.format])
            bar.update()
            bar.write(f"wrote {file}")
    return {
        "recorded_bytes": {name: int(record[1].max()) for name, record in records.items()},
        "rows": [row(step, card, args.compile) for step in planner.steps.values()],
    }


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse(argv)
        numbers = draw_all(args)
    except (UsageError, DataError) as error:
        print_error(error)
        return 2
    except OSError as error:  # a full disk
        print_error(f"--out: {error.filename}: {error.strerror}")
        return 2
    except KeyboardInterrupt:
        say_stopped()
        return 130
    words = sys.argv[1:] if argv is None else argv
    result = {
        "command": shlex.join(["python", "-m", "scripts.memory_timeline", *words]),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        **numbers,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
