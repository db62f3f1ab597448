"""Choose how to read a file by its suffix, and read text files document by document. Documents come
in chunks, so a long one need not fit in memory."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import regex

from .errors import DataError, errors_as_data_errors

TOKEN_SUFFIXES = (".bin", ".npy")
JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
TEXT_SUFFIXES = JSON_LINES_SUFFIXES + tuple(
    ".txt .text .md .rst .tex .org .log .srt .json .csv .tsv .xml .html .htm .css .yaml "
    ".yml .toml .ini .cfg .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .js .ts .rb "
    ".php .pl .lua .r .jl .hs .ml .swift .sh .sql".split()
)
# Number of characters that are read at a time. (The regex engine of tiktoken fails on a million
# blanks in a row, which may come from two chunks.)
CHUNK = 2**18
SAFE_SPLIT = regex.compile(r"(?rV1)(?<=[\p{L}\p{N}])(?=[\s\p{P}\p{S}--'])")  # (r: the last one)


def suffix_of(path: str | Path) -> str:
    """Return the suffix in lower case: `.jsonl` for notes.jsonl and NOTES.JSONL, "" for README.
    (Cameras, old programs and Windows write some suffixes in capitals, with the same meaning.)"""
    return Path(path).suffix.lower()


def is_json_lines(path: Path, text_key: str) -> bool:
    """Return whether each line of a file is a JSON object with a document: by the suffix, and for a
    .json file by its first line. Raises DataError for a .json file that is an array of documents.
    """
    if suffix_of(path) != ".json":
        return suffix_of(path) in JSON_LINES_SUFFIXES
    with errors_as_data_errors(path), open(path, "rb") as file:
        line = file.readline(2**24)
        is_array = line.lstrip().startswith(b"[")
        start = (line + file.read(2**24 * is_array)).lstrip()
    if is_array:
        first, _, _ = start[1:].partition(b"}")  # (a "}" in the text of the first is not found)
        if _text_of_line(first + b"}", text_key) is not None:
            raise DataError(
                f"{path} is a JSON array: write each of its objects in a line of .jsonl"
            )
    return _text_of_line(line, text_key) is not None


def _text_of_line(line: bytes, text_key: str) -> str | None:
    """Return the string `text_key` of a JSON object; None if `line` is no such object."""
    try:
        # (Python does not convert more than 4,300 digits to an int.)
        text = json.loads(line, parse_int=float)[text_key]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return text if isinstance(text, str) else None


def iter_chunked_documents(path: Path, text_key: str = "text") -> Iterator[Iterator[str]]:
    """Yield the documents of a file, each an iterator over chunks of text: the string `text_key` in
    each line of JSON Lines, or else the whole file.

    Raises DataError, which names the file and the line or the byte.
    """
    if not is_json_lines(path, text_key):
        yield rechunk_at_word_ends(_read_text(path))
        return
    with errors_as_data_errors(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                text = _text_of_line(line, text_key)
                if text is None:
                    raise DataError(
                        f'{path}:{number}: want a JSON object with a string "{text_key}" (--text-'
                        f"key names another key), not {line[:60].decode(errors='replace')!r}"
                    )
                yield rechunk_at_word_ends(text[i : i + CHUNK] for i in range(0, len(text), CHUNK))


def _read_text(path: Path) -> Iterator[str]:
    # utf-8-sig drops a byte order mark at the start of the file; newline="" keeps line ends.
    with (
        errors_as_data_errors(path, "UTF-8 text"),
        open(path, encoding="utf-8-sig", newline="") as file,
    ):
        while block := file.read(CHUNK):
            if "\0" in block:
                raise DataError("a binary file, or UTF-16; name files of UTF-8 text")
            yield block


def rechunk_at_word_ends(blocks: Iterable[str]) -> Iterator[str]:
    """Yield the text of `blocks` in chunks whose ids, one behind the other, are those of the whole.

    A chunk ends at the last index that is after a letter or a digit, and before white space or
    punctuation. The patterns of GPT-2, cl100k and o200k all end a word there, and no pattern looks
    at earlier characters, so that both pieces together have the words of the whole text. An
    apostrophe does not count as punctuation, because o200k keeps the 's of "it's" with its word.

    An index after a newline would NOT be safe: blank lines, and also \\r\\n, are one word or two
    words, depending on the next characters, and cl100k joins some newlines to the punctuation
    before them.

    Text of CHUNK characters without a safe index is cut at its end, where one token may differ from
    those of the whole text.
    """
    text = ""  # text that was not yet yielded
    for block in blocks:
        if text:
            cut = match.start() if (match := SAFE_SPLIT.search(text)) else len(text)
            yield text[:cut]
            text = text[cut:]
        text += block
    yield text
