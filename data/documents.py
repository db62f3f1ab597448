"""A file to its documents: their text, as a stream that fits in memory."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from unicodedata import category

from .suffixes import suffix_of
from .tokenizer import DataError

CHUNK = 2**20  # bytes or characters held at a time, however long the text


def read_documents(path: Path) -> Iterator[Iterator[str]]:
    """Each document as chunks of text. A .jsonl holds one a line, any other file is one.

    Raises DataError that names the file and the line or byte.
    """
    if suffix_of(path) != ".jsonl":
        yield read_text(path, 0, path.stat().st_size)
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, LookupError, TypeError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise DataError(f'{path}:{number}: want a JSON object with a string "text"')
            yield split_text(text)


def read_text(path: Path, start: int, stop: int) -> Iterator[str]:
    """Bytes start to stop of a UTF-8 file, as chunks that encode as the whole does.

    Raises DataError that names the file and the byte.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = ""
    with open(path, "rb") as file:  # binary, so that no line end is translated
        file.seek(start)
        while start < stop:
            block = file.read(min(CHUNK, stop - start))
            if not block:
                raise DataError(f"{path}: the file shrank while it was read")
            if start == 0 and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(f"{path}: the text is UTF-16; save it as UTF-8")
            if (nul := block.find(0)) >= 0:
                raise DataError(f"{path}: a binary file, not text (NUL at byte {start + nul})")
            held = len(decoder.getstate()[0])  # bytes of a character that began a block earlier
            try:
                text = decoder.decode(block, final=start + len(block) >= stop)
            except UnicodeDecodeError as error:
                byte = start - held + error.start
                raise DataError(f"{path}: not UTF-8 at byte {byte}; save it as UTF-8") from None
            text = rest + (text.removeprefix("\ufeff") if start == 0 else text)
            start += len(block)
            cut = safe_cut(text) if start < stop else len(text)
            yield text[:cut]
            rest = text[cut:]


def split_text(text: str) -> Iterator[str]:
    """`text` in chunks that encode as the whole does."""
    start = 0
    while len(text) - start > CHUNK:
        cut = safe_cut(text[start : start + CHUNK + 1])
        yield text[start : start + cut]
        start += cut
    yield text[start:]


def safe_cut(text: str) -> int:
    """The last place where both pieces encode as the whole does: where a run of letters or digits
    meets white space or punctuation.

    The patterns of GPT-2, cl100k and o200k all end a word there, and none looks back, so both
    sides split into words as if nothing had happened. The apostrophe is out because o200k keeps
    the 's of "it's" with its word. A cut at a newline would NOT do: blank lines and \\r\\n make
    one word or two, depending on what follows, and cl100k has some newlines join the punctuation
    before them. A megabyte without such a place is cut anyhow, at the price of one odd token.
    """
    for end in range(len(text) - 1, 0, -1):
        if text[end - 1].isalnum() and (
            text[end].isspace() or text[end] != "'" and category(text[end])[0] in "PS"
        ):
            return end
    return len(text)
