"""Trained weights from a file: of one of our snapshots."""

from pathlib import Path

import torch

from data import Tokenizer
from model import MiniGPT, MiniGPTConfig

from .snapshot import SnapshotError, read_snapshot


def load_model(path: Path, device: torch.device) -> tuple[MiniGPT, Tokenizer]:
    """The model in a snapshot, ready to evaluate, and its tokenizer. Raises SnapshotError."""
    state = read_snapshot(path)
    try:
        tokenizer = Tokenizer.from_state(state["tokenizer"])
        model = MiniGPT(MiniGPTConfig(**state["config"]))
        model.load_state_dict(state["model"])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        raise SnapshotError(f"{path} holds no model: is it damaged?") from None
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise SnapshotError(f"{path} holds NaN weights: take an older snapshot")
    return model.to(device).eval(), tokenizer
