"""What studies share: flags and quiet trainings."""

import argparse
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from train_minimal import train
from trainer.endings import run_safely
from trainer.flags import OneLineParser, UsageError, build_parser, fill_in, output_file
from trainer.metrics import read_metrics
from trainer.plan import vocabulary
from trainer.pretrained import open_init_from
from trainer.process import OneProcess
from trainer.snapshot import beside

Curve = list[tuple[int, float]]  # (step, a figure of the evaluation then)


def study_parser(module: str, doc: str | None) -> OneLineParser:
    """Its --help is the study's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    return OneLineParser(prog=f"python -m {module}", description=doc, formatter_class=raw)


def add_json(parser: Any) -> None:
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the raw numbers there"
    )


def training_parser(module: str, words: str, **defaults: Any) -> tuple[Any, Any]:
    """train_minimal.py's flags, and the group for those of the study."""
    parser = build_parser(f"python -m {module}", "unused")
    parser.description = words
    parser.set_defaults(save_interval=0, sample_tokens=0, **defaults)
    group = parser.add_argument_group("study (all else as in train_minimal.py)")
    add_json(group)
    return parser, group


def parse_training(parser: Any, argv: list[str], chosen: str) -> argparse.Namespace:
    """Raises UsageError, also if one of the flags was typed that the study has `chosen` itself,
    and DataError."""
    args = parser.parse_args(argv)
    for name in chosen.split():
        if name in args.typed:
            raise UsageError(f"--{name.replace('_', '-')}: this script chooses it: leave it out")
    fill_in(changed(args))  # contradictions
    open_init_from(args)
    return args


def ready(args: argparse.Namespace) -> argparse.Namespace:
    """`args` with defaults filled in, the size of the vocabulary among them. Raises DataError."""
    args.vocab_size = vocabulary(fill_in(args))
    return args


def changed(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    """The trainer's flags alone (a snapshot keeps them, and knows no others), some changed."""
    known = vars(build_parser("unused", "unused").parse_args([]))
    return argparse.Namespace(**{name: vars(args)[name] for name in known} | changes)


def val_curve(args: argparse.Namespace, figure: str, **changes: Any) -> Curve:
    """Train as train_minimal.py does, without its output. Raises SystemExit, KeyboardInterrupt."""
    with tempfile.TemporaryDirectory() as folder:
        run = changed(args, **{"checkpoint_path": Path(folder) / "run.pt"} | changes)
        with redirect_stdout(StringIO()):
            code = run_safely(run, OneProcess.alone, train)
        if code:
            raise KeyboardInterrupt if code == 130 else SystemExit(code)
        records = read_metrics(beside(run.checkpoint_path, ".metrics.jsonl"))
    return [(record["step"], record[figure]) for record in records if figure in record]


def reached(curve: Curve, goal: float) -> int | None:
    """The step at which a loss is down at the goal; None: it never is."""
    return next((step for step, loss in curve if loss <= goal), None)
