"""Text in, batches out. Read corpus.py for the way of the data, tokenizer.py for text -> ids and
batches.py for ids -> batches; documents.py reads text, store.py keeps the cache whole."""

from .batches import TokenFile, TrainBatches, ValBatches
from .corpus import Dataset, load_dataset
from .tokenizer import DataError, Tokenizer

__all__ = [
    "DataError",
    "Dataset",
    "TokenFile",
    "Tokenizer",
    "TrainBatches",
    "ValBatches",
    "load_dataset",
]
