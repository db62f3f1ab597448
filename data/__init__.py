"""Text in, batches out. Read corpus.py for the way of the data.

files.py           what --train-data and --val-data name
documents.py       how a file is to be read, and its documents if it is text
tokenizer.py       text to ids and back
tokenizer_json.py  the same vocabulary for transformers
corpus.py          documents to ids, once: the result is kept in a cache
store.py           what a trainer gets, and a cache that is never seen half done
toy.py             random ids whose best loss is known
batches.py         ids to batches
"""

from .batches import TokenFile, TrainBatches, ValBatches
from .corpus import find_dataset
from .store import Dataset
from .tokenizer import DataError, DiskFull, Tokenizer
