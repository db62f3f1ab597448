"""Turn text into batches of token ids. corpus.py shows the whole path of the data.

errors.py          the errors that end a run or a command with one line
files.py           find the files that --train-data and --val-data name
documents.py       choose how to read a file, and split text files into documents
tokenizer.py       convert text to ids and back
tokenizer_json.py  write and read a vocabulary as transformers' tokenizer.json
corpus.py          convert documents to ids once, and keep the ids in a cache
store.py           define Dataset, the data of a training run, and its cache on disk
toy.py             make random ids for which the lowest possible loss is known
batches.py         cut ids into batches
"""

from .batches import TokenFile, TrainBatches, ValBatches
from .corpus import load_dataset
from .errors import DataError, MiniGPTError
from .store import Dataset
from .tokenizer import Tokenizer
