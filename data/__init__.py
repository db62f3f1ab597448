"""Turn text into batches of token ids. corpus.py shows the whole path of the data.

errors.py          the errors that end a run or a command with one line
files.py           find the files that --train-data and --val-data name
documents.py       choose how to read a file, and split text files into documents
tokenizer.py       convert text to ids and back
tokenizer_json.py  write a vocabulary as transformers' tokenizer.json
tokens.py          token files, the files of ids in the cache, and Dataset, the data of a run
store.py           the token cache: folders that are made once, and checked
corpus.py          convert documents to ids once, and keep the ids in the cache
toy.py             make random ids for which the lowest possible loss is known
batches.py         cut ids into batches
"""

from .batches import TrainBatches, ValBatches
from .corpus import load_dataset
from .errors import DataError, MiniGPTError
from .tokenizer import Tokenizer
from .tokens import Dataset, Tokens
