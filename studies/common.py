"""A parser for the studies."""

import argparse

from trainer.flags import OneLineParser


def study_parser(module: str, doc: str | None) -> OneLineParser:
    """Return a parser whose --help is the study's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    return OneLineParser(prog=f"python -m {module}", description=doc, formatter_class=raw)
