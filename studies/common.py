"""What studies share: flags."""

import argparse
from typing import Any

from trainer.flags import OneLineParser, output_file


def study_parser(module: str, doc: str | None) -> OneLineParser:
    """Its --help is the study's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    return OneLineParser(prog=f"python -m {module}", description=doc, formatter_class=raw)


def add_json(parser: Any) -> None:
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the raw numbers there"
    )
