"""Draw where the memory of a training step goes, and what recompute changes: three pictures.

python -m scripts.memory_timeline                                    # the demo's model: seconds
python -m scripts.memory_timeline --model gpt2 --batch-size 8 --device cuda       # a minute
python -m scripts.memory_timeline --model gpt2 --batch-size 8 --memory-budget 3GiB --device cuda

    out/memory_timeline.png    memory over one step, a panel a policy
    out/memory_frontier.png    peak memory against FLOPs of a step; with --card, time on that card
    out/memory_made_of.png     what the peak is made of

The flags are the trainers' own and mean the same here, but for those that choose a policy: all are
drawn, as the planner predicts them. --memory-budget marks what `auto` would take; `--device cuda`
plans for a GPU wherever you are. Needs matplotlib: pip install matplotlib
"""

import argparse
import sys
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from planner import Card, Planner, StepMemory
from planner.choose import describe_recompute
from scripts.style import load_pyplot, n_parameters, relative_flops
from studies.common import about, add_json, add_out, run_study, write_json, write_picture
from studies.timeline_pictures import Subject, choose, draw_frontier, draw_made_of, draw_timeline
from trainer import flags
from trainer.flags import model_config
from trainer.plan import asked_card, make_planner, target, vocabulary
from trainer.pretrained import open_init_from
from trainer.report import describe_model


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises UsageError."""
    parser = flags.build_parser("python -m scripts.memory_timeline", "unused")
    parser.description = (
        "Draw where the memory of a training step goes. Takes the trainers' flags, which mean the "
        "same here; those of running, and those that choose a policy, have no effect."
    )
    group = parser.add_argument_group("pictures")
    add_out(group)
    add_json(group)
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
    config = model_config(args, vocabulary(args))
    return make_planner(args, config, torch.device(kind), precision)


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
        "relative_flops": relative_flops(config, step.seq_len),
        "predicted_bytes": step.peak,
        "predicted_s": None if card is None else step.seconds(card, compiled),
        "where": step.where,
        "at_peak": step.at_peak,
    }


def draw_all(args: argparse.Namespace) -> dict[str, Any]:
    """Draws and writes the pictures; what the JSON file says. Raises UsageError, DataError."""
    plt = load_pyplot("memory_timeline")
    with tqdm(unit="step", desc="simulating", disable=None, leave=False) as bar:
        planner, card = prepare(args), asked_card(args)
        precision = str(planner.precision).removeprefix("torch.")
        bar.write(
            f"model    {n_parameters(planner):,} parameters: {describe_model(planner.config)}"
        )
        bar.write(f"device   {'cpu' if planner.on_cpu else 'GPU'}, {precision}")
        planner.watch = bar.update
        subject = Subject(planner, args.batch_size, card, args.compile)
        choice = choose(subject, args.memory_budget and target(args)[2].safe)
        figures = {
            "timeline": draw_timeline(plt, subject),
            "frontier": draw_frontier(plt, subject, choice),
            "made_of": draw_made_of(plt, subject),
        }
    for name, figure in figures.items():
        write_picture(figure, args.out / f"memory_{name}.png")
    return {"rows": [row(step, card, args.compile) for step in planner.steps.values()]}


def study(argv: list[str]) -> None:
    args = parse(argv)
    write_json(args.json, about("scripts.memory_timeline", argv) | draw_all(args))
    if args.json:
        print(f"wrote {args.json}")


main = partial(run_study, study)


if __name__ == "__main__":
    sys.exit(main())
