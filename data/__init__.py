"""Text in, batches out. Read corpus.py for the way of the data, tokenizer.py for text -> ids and
batches.py for ids -> batches. files.py finds what is named (suffixes.py: how it is to be read),
documents.py reads it, store.py keeps the cache whole; token_files.py and toy.py need no text."""

from .batches import TokenFile, TrainBatches, ValBatches
from .corpus import find_dataset, load_dataset
from .dataset import Dataset, FoundData
from .tokenizer import DataError, DiskFull, Tokenizer

__all__ = [
    "DataError",
    "Dataset",
    "DiskFull",
    "FoundData",
    "TokenFile",
    "Tokenizer",
    "TrainBatches",
    "ValBatches",
    "find_dataset",
    "load_dataset",
]
