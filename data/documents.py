"""How a file is to be read; and its documents, if it is text, as a stream that fits in memory."""

import codecs
import json
import shlex
import textwrap
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
CHUNK = 2**20  # bytes or characters held at a time, however long the text


def suffix_of(path: Path) -> str:
    """`.jsonl` for notes.jsonl and for NOTES.JSONL, "" for README: cameras, old programs and
    Windows write capitals, and mean the same."""
    return path.suffix.lower()


def quoted(path: Path) -> str:
    """For a shell, and for a program that would take -x.txt for a flag."""
    return shlex.quote("./" * str(path).startswith("-") + str(path))


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
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            text = found.get("text") if isinstance(found, dict) else None
            if not isinstance(text, str):
                want = f'{path}:{number}: want a JSON object with a string "text"'
                if isinstance(found, dict):  # its keys may be called otherwise
                    want += f", not with {textwrap.shorten(json.dumps([*found]), 100)}"
                raise DataError(want)
            yield iter([text])


def _encoded(path: Path, what: str, encoding: str) -> DataError:
    made = path.with_name(f"{path.stem}.utf8{path.suffix}")
    names = f"{quoted(path)} > {quoted(made)}"
    return DataError(f"{path}: {what}: `iconv -f {encoding} -t UTF-8 {names}`")


def read_text(path: Path, start: int, stop: int) -> Iterator[str]:
    """Bytes start to stop of a UTF-8 file, as chunks that encode as the whole does. Raises
    DataError that names the file and the byte."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text = ""  # what is read, but for the chunks before
    with open(path, "rb") as file:  # binary, so that no line end is translated
        file.seek(start)
        while start < stop:
            block = file.read(min(CHUNK, stop - start))
            if not block:
                raise DataError(f"{path}: the file shrank while it was read")
            if start == 0 and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise _encoded(path, "the text is UTF-16; make it UTF-8", "UTF-16")
            if (nul := block.find(0)) >= 0:
                where = f"NUL at byte {start + nul}"
                raise DataError(f"{path}: a binary file, not text ({where}); name files of text")
            if text:
                cut = safe_cut(text)
                yield text[:cut]
                text = text[cut:]
            first, start = start, start + len(block)
            try:
                new = decoder.decode(block, final=start >= stop)
            except UnicodeDecodeError as error:  # (its object begins with what a block has left)
                byte = start - len(error.object) + error.start
                what = f"not UTF-8 at byte {byte}: no text, or Western European"
                raise _encoded(path, what, "CP1252") from None
            text += new if first else new.removeprefix("\ufeff")
    yield text


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
