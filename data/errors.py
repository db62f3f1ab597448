"""The errors that end a run or a command with one line instead of a traceback."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MiniGPTError(ValueError):
    """A mistake of the user, or a state of the machine that ends a run.

    The message is one line that names the flag or the file, and the way out. `exit_code`: 2 bad
    input, 3 stopped safely, 4 out of memory.
    """

    def __init__(self, message: object, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code


class DataError(MiniGPTError):
    """Text, tokens or a tokenizer cannot be read, or the cache cannot be written."""


@contextmanager
def errors_as_data_errors(path: Path, kind: str | None = None) -> Iterator[None]:
    """Convert an OSError to a DataError of one line that names `path`. If `kind` (of file) is what
    a parser expects, convert every error of the parser, too. Raises DataError for anything but a
    file, because a pipe would wait forever."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise DataError(f"{path} is no file")
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged file makes parsers raise many kinds of errors
        if kind is None or isinstance(error, MemoryError):
            raise
        what = f": {error}" if isinstance(error, DataError) else f" is no {kind}, or is damaged"
        raise DataError(f"{path}{what}") from None
