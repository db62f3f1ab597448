"""How a file is to be read; and its documents, if it is text, as a stream that fits in memory."""

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
CHUNK = 2**20  # bytes or characters held at a time, however long the text


def suffix_of(path: Path) -> str:
    """`.jsonl` for notes.jsonl and for NOTES.JSONL, "" for README: cameras, old programs and
    Windows write capitals, and mean the same."""
    return path.suffix.lower()


def read_documents(path: Path) -> Iterator[Iterator[str]]:
    """Each document as chunks of text. A .jsonl holds one a line, any other file is one. Raises
    DataError that names the file and the line or byte."""
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
    """Bytes start to stop of a UTF-8 file, as chunks that encode as the whole does. Raises
    DataError that names the file and the byte."""
    # (A mark of the byte order that text begins with is dropped.)
    decoder = codecs.getincrementaldecoder("utf-8" if start else "utf-8-sig")()
    text = ""  # what is read, but for the chunks before
    with open(path, "rb") as file:  # binary, so that no line end is translated
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
            except UnicodeDecodeError as error:  # (its object begins with what a block has left)
                byte = start - len(error.object) + error.start
                raise DataError(f"{path}: not UTF-8 at byte {byte}; {MAKE_UTF8}") from None
    yield text


def last_safe_split(text: str) -> int:
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
