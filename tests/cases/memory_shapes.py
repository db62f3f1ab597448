"""The models whose steps are planned and measured, in this process and under torchrun."""

from dataclasses import replace

from model import MiniGPTConfig

T = 32
CONFIG = MiniGPTConfig(
    vocab_size=997,  # an odd number of rows
    max_position_embeddings=T,
    n_layers=4,
    n_heads=2,
    d_model=32,
    d_ff=128,
    dropout=0.0,
    loss_chunks=4,
)
WIDE = replace(CONFIG, vocab_size=61, d_model=64, d_ff=192)
