"""The errors that end a run or a command with one line instead of a traceback."""


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
