"""Decide how a file is read, and stream the documents of a text in chunks that fit in memory."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from unicodedata import category

from .tokenizer import DataError

TOKEN_SUFFIXES = (".bin", ".npy")
TEXT_SUFFIXES = tuple(
    ".txt .text .md .rst .tex .org .log .srt .jsonl .json .csv .tsv .xml .html .htm .css .yaml "
    ".yml .toml .ini .cfg .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .js .ts .rb "
    ".php .pl .lua .r .jl .hs .ml .swift .sh .sql".split()
)
MAKE_UTF8 = (
    "name files of UTF-8 text; `iconv -f CP1252 -t UTF-8 FILE > NEW` makes it of text in Western "
    "European, with -f UTF-16 of what some Windows programs write"
)
CHUNK = 2**20  # bytes or characters in memory at a time, for a text of any length


def suffix_of(path: Path) -> str:
    """Return the suffix in lower case: `.jsonl` for notes.jsonl and NOTES.JSONL, "" for README.
    Cameras, old programs and Windows write capitals and mean the same."""
    return path.suffix.lower()


def read_documents(path: Path) -> Iterator[Iterator[str]]:
    """Yield each document as chunks of text. A .jsonl file holds one document a line; any other
    file is one document. Raises DataError with the file and the line or byte."""
    if suffix_of(path) != ".jsonl":
        yield read_text(path, 0, path.stat().st_size)
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, RecursionError, LookupError, TypeError):
                text = None
            if not isinstance(text, str):
                begin = line[:60].decode(errors="replace")
                raise DataError(
                    f'{path}:{number}: want a JSON object with a string "text", not {begin!r}'
                )
            yield iter([text])


def read_text(path: Path, start: int, stop: int) -> Iterator[str]:
    """Yield bytes [start, stop) of a UTF-8 file as chunks of text. The ids of the chunks, one after
    the other, are the ids of the whole. Raises DataError with the file and the byte."""
    # utf-8-sig drops a byte order mark at the start of the file.
    decoder = codecs.getincrementaldecoder("utf-8" if start else "utf-8-sig")()
    text = ""  # read, but not yet yielded
    with open(path, "rb") as file:  # binary: Python must not translate line ends
        file.seek(start)
        while block := file.read(min(CHUNK, stop - start)):
            if text:
                cut = last_safe_split(text)
                yield text[:cut]
                text = text[cut:]
            if (nul := block.find(0)) >= 0:
                raise DataError(
                    f"{path}: a binary file, or UTF-16 (NUL at byte {start + nul}); {MAKE_UTF8}"
                )
            start += len(block)
            try:
                text += decoder.decode(block, final=start >= stop)
            except UnicodeDecodeError as error:
                # error.object begins with the bytes that the last block left over.
                byte = start - len(error.object) + error.start
                raise DataError(f"{path}: not UTF-8 at byte {byte}; {MAKE_UTF8}") from None
    yield text


def last_safe_split(text: str) -> int:
    """Return the last index where both pieces encode as the whole does: after a run of letters or
    digits, before white space or punctuation. Return len(text) if there is none.

    The patterns of GPT-2, cl100k and o200k all end a word there, and none looks back. So both
    pieces split into the same words as the whole. An apostrophe does not count, because o200k keeps
    the 's of "it's" with its word. A newline would NOT be safe: blank lines and \\r\\n make one
    word or two, depending on the next characters, and cl100k joins some newlines to the punctuation
    before them. A megabyte without a safe index is cut anyway, at the price of one odd token.
    """
    for end in range(len(text) - 1, 0, -1):
        if text[end - 1].isalnum() and (
            text[end].isspace() or text[end] != "'" and category(text[end])[0] in "PS"
        ):
            return end
    return len(text)
