"""Choose how to read a file by its suffix, and read text files document by document. Documents come
in chunks, so a long one need not fit in memory."""

import codecs
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import regex

from .errors import DataError

TOKEN_SUFFIXES = (".bin", ".npy")
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
TEXT_SUFFIXES = JSON_LINES_SUFFIXES + tuple(
    ".txt .text .md .rst .tex .org .log .srt .json .csv .tsv .xml .html .htm .css .yaml "
    ".yml .toml .ini .cfg .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .js .ts .rb "
    ".php .pl .lua .r .jl .hs .ml .swift .sh .sql".split()
)
CHUNK = 2**20  # number of bytes or characters that a chunk of a document has at most
SAFE_SPLIT = regex.compile(r"(?rV1)(?<=[\p{L}\p{N}])(?=[\s\p{P}\p{S}--'])")  # (r: the last one)


def suffix_of(path: str | Path) -> str:
    """Return the suffix in lower case: `.jsonl` for notes.jsonl and NOTES.JSONL, "" for README.
    Cameras, old programs and Windows write some suffixes in capitals, with the same meaning."""
    return Path(path).suffix.lower()


@contextmanager
def reading(path: Path, remedy: str = "") -> Iterator[None]:
    """Convert an OSError to a DataError that names `path` (an error of a read names none)."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}{remedy}") from None


def is_json_lines(path: Path, text_key: str) -> bool:
    """Return whether each line of a file is a JSON object with a document: by the suffix, and for a
    .json file by its first line."""
    if suffix_of(path) != ".json":
        return suffix_of(path) in JSON_LINES_SUFFIXES
    with reading(path), open(path, "rb") as file:
        return _text_of_line(file.readline(CHUNK), text_key) is not None


def _text_of_line(line: bytes, text_key: str) -> str | None:
    """Return the string `text_key` of a JSON object; None if `line` is no such object."""
    try:
        # (Python does not convert more than 4,300 digits to an int.)
        text = json.loads(line, parse_int=float)[text_key]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return text if isinstance(text, str) else None


def iter_chunked_documents(path: Path, text_key: str = "text") -> Iterator[Iterator[str]]:
    """Yield the documents of a file: the string `text_key` in each line of JSON Lines, or else the
    whole file. Each document is an iterator over chunks of text.

    Raises DataError, which names the file and the line or the byte.
    """
    if not is_json_lines(path, text_key):
        yield iter_text_chunks(path, 0, path.stat().st_size)
        return
    with reading(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            text = _text_of_line(line, text_key)
            if text is None:
                raise DataError(
                    f'{path}:{number}: want a JSON object with a string "{text_key}" (--text-key '
                    f"names another key), not {line[:60].decode(errors='replace')!r}"
                )
            yield rechunk(text[i : i + CHUNK] for i in range(0, len(text), CHUNK))


def iter_text_chunks(path: Path, start: int, stop: int) -> Iterator[str]:
    """Decode bytes [start, stop) of a UTF-8 file, and yield the text in chunks. Raises DataError,
    which names the file and the byte."""
    return rechunk(_decode_blocks(path, start, stop))


def _decode_blocks(path: Path, start: int, stop: int) -> Iterator[str]:
    # utf-8-sig drops a byte order mark at the start of the file.
    decoder = codecs.getincrementaldecoder("utf-8" if start else "utf-8-sig")()
    with reading(path), open(path, "rb") as file:  # (binary: line ends stay as they are)
        file.seek(start)
        while block := file.read(min(CHUNK, stop - start)):
            if (nul := block.find(0)) >= 0:
                raise DataError(
                    f"{path}: a binary file, or UTF-16 (NUL at byte {start + nul}); name files of "
                    "UTF-8 text"
                )
            start += len(block)
            try:
                yield decoder.decode(block, final=start >= stop)
            except UnicodeDecodeError as error:
                # error.object begins with the bytes that the decoder kept from the block before.
                byte = start - len(error.object) + error.start
                raise DataError(
                    f"{path}: not UTF-8 at byte {byte}; name files of UTF-8 text"
                ) from None


def rechunk(blocks: Iterable[str]) -> Iterator[str]:
    """Yield the text of `blocks` in chunks. Encoding them one after the other gives the ids of the
    whole text: see `last_safe_split`."""
    text = ""  # text that was not yet yielded
    for block in blocks:
        if text:
            cut = last_safe_split(text)
            yield text[:cut]
            text = text[cut:]
        text += block
    yield text


def last_safe_split(text: str) -> int:
    """Return the last index at which `text` can be cut without changing its ids. Return len(text)
    if there is no such index.

    An index is safe if it is after a letter or a digit, and before white space or punctuation. The
    patterns of GPT-2, cl100k and o200k all end a word there, and no pattern looks at earlier
    characters. So the words of both pieces are the words of the whole text. An apostrophe does not
    count as punctuation, because o200k keeps the 's of "it's" with its word.

    An index after a newline would NOT be safe. Blank lines, and also \\r\\n, are one word or two
    words, depending on the next characters. And cl100k joins some newlines to the punctuation
    before them.

    If a megabyte of text has no safe index, the text is cut at its end. There one token may be
    different from the tokens of the whole text.
    """
    match = SAFE_SPLIT.search(text)
    return match.start() if match else len(text)
