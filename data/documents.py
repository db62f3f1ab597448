"""Choose how to read a file by its suffix, and read text files document by document. Long documents
come in chunks, so they need not fit in memory."""

import codecs
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unicodedata import category

from .errors import DataError

TOKEN_SUFFIXES = (".bin", ".npy")
TEXT_SUFFIXES = tuple(
    ".txt .text .md .rst .tex .org .log .srt .jsonl .json .csv .tsv .xml .html .htm .css .yaml "
    ".yml .toml .ini .cfg .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .js .ts .rb "
    ".php .pl .lua .r .jl .hs .ml .swift .sh .sql".split()
)
UTF8_HINT = (
    "name files of UTF-8 text; `iconv -f CP1252 -t UTF-8 FILE > NEW` makes it of text in Western "
    "European, with -f UTF-16 of what some Windows programs write"
)
# The first bytes of files of zip, gzip, zstd, xz, bzip2, 7z and rar.
ARCHIVE_MAGICS = (
    *(b"PK\x03\x04", b"\x1f\x8b", b"(\xb5/\xfd", b"\xfd7zXZ\x00", b"BZh91AY&SY"),
    *(b"7z\xbc\xaf'\x1c", b"Rar!\x1a\x07"),
)
CHUNK = 2**20  # number of bytes that are read at a time from a long text file


def suffix_of(path: Path) -> str:
    """Return the suffix in lower case: `.jsonl` for notes.jsonl and NOTES.JSONL, "" for README.
    Cameras, old programs and Windows write some suffixes in capitals, with the same meaning."""
    return path.suffix.lower()


@contextmanager
def reading(path: Path, remedy: str = "") -> Iterator[None]:
    """Convert an OSError to a DataError that names `path` (an error of a read names none)."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}{remedy}") from None


def iter_chunked_documents(path: Path, text_key: str = "text") -> Iterator[Iterator[str]]:
    """Yield the documents of a file. Each document is an iterator over chunks of text.

    In a .jsonl file each line is a JSON object, and its string `text_key` is a document. Any other
    file is one document. Raises DataError, which names the file and the line or the byte.
    """
    if suffix_of(path) != ".jsonl":
        yield iter_text_chunks(path, 0, path.stat().st_size)
        return
    with reading(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                # (Python does not convert more than 4,300 digits to an int.)
                text = json.loads(line, parse_int=float)[text_key]
            except (ValueError, RecursionError, LookupError, TypeError):
                text = None
            if not isinstance(text, str):
                raise DataError(
                    f'{path}:{number}: want a JSON object with a string "{text_key}" (--text-key '
                    f"names another key), not {line[:60].decode(errors='replace')!r}"
                )
            yield iter([text])


def iter_text_chunks(path: Path, start: int, stop: int) -> Iterator[str]:
    """Decode bytes [start, stop) of a UTF-8 file, and yield the text in chunks.

    Encoding the chunks one after the other gives the ids of the whole text: see
    `last_safe_split`. Raises DataError, which names the file and the byte.
    """
    # utf-8-sig drops a byte order mark at the start of the file.
    decoder = codecs.getincrementaldecoder("utf-8" if start else "utf-8-sig")()
    text = ""  # text that was decoded, but not yet yielded
    with reading(path), open(path, "rb") as file:  # (binary: line ends stay as they are)
        is_archive = file.read(10).startswith(ARCHIVE_MAGICS)
        hint = "an archive (as .docx and .npz are): unpack it first" if is_archive else UTF8_HINT
        file.seek(start)
        while block := file.read(min(CHUNK, stop - start)):
            if text:
                cut = last_safe_split(text)
                yield text[:cut]
                text = text[cut:]
            if (nul := block.find(0)) >= 0:
                raise DataError(
                    f"{path}: a binary file, or UTF-16 (NUL at byte {start + nul}); {hint}"
                )
            start += len(block)
            try:
                text += decoder.decode(block, final=start >= stop)
            except UnicodeDecodeError as error:
                # error.object begins with the bytes that the decoder kept from the block before.
                byte = start - len(error.object) + error.start
                raise DataError(f"{path}: not UTF-8 at byte {byte}; {hint}") from None
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
    for end in range(len(text) - 1, 0, -1):
        if text[end - 1].isalnum() and (
            text[end].isspace() or text[end] != "'" and category(text[end])[0] in "PS"
        ):
            return end
    return len(text)
