"""Turn text into batches of token ids. corpus.py shows the whole path of the data.

files.py           find the files that --train-data and --val-data name
documents.py       decide how a file is read, and split text files into documents
tokenizer.py       convert text to ids and back
tokenizer_json.py  write and read a vocabulary as transformers' tokenizer.json
corpus.py          convert documents to ids once, and keep the ids in a cache
store.py           the Dataset that a trainer gets, and the cache: a folder is whole or absent
toy.py             random ids whose best loss is known
batches.py         cut ids into batches
"""

from .batches import TokenFile, TrainBatches, ValBatches
from .corpus import find_dataset
from .store import Dataset
from .tokenizer import DataError, DiskFull, Tokenizer
