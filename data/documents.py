"""Paths to documents: which files are meant, and their text as a stream that fits in memory."""

import codecs
import glob
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from unicodedata import category

from .tokenizer import DataError

CACHE_DIR = Path(__file__).resolve().parent / "cache"
CHUNK = 2**20  # bytes or characters held at a time, however long the text
TOKEN_SUFFIXES = {".bin", ".npy"}
TEXT_SUFFIXES = set(
    ".txt .text .md .rst .tex .org .log .srt .jsonl .json .csv .tsv .xml .html .htm .css .yaml "
    ".yml .toml .ini .cfg .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .js .ts .rb "
    ".php .pl .lua .r .jl .hs .ml .swift .sh .sql".split()
)
# Tests are two thirds of the standard library (and Debian ships it without them); encodings and
# pydoc_data are tables; the others are gone from newer Pythons.
STDLIB_SKIPS = set(
    "test tests idle_test encodings pydoc_data lib2to3 idlelib turtledemo __pycache__ "
    "site-packages dist-packages".split()
)


def find_files(patterns: Sequence[str], flag: str) -> list[Path]:
    """Files, folders (recursive) and globs as a list of files, each once, in the order given.

    Raises DataError that names `flag` and the pattern that finds nothing usable.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        if not pattern:
            raise DataError(f"{flag}: an empty name")
        paths = [Path(pattern)]
        if not paths[0].exists():  # a file whose name holds a [ is not a pattern
            paths = [Path(path) for path in sorted(glob.glob(pattern, recursive=True))]
        if not paths:
            what = "no file matches" if glob.has_magic(pattern) else "no such file or folder"
            raise DataError(f"{flag} {pattern}: {what}")
        for path in paths:
            inside = _walk(path, TEXT_SUFFIXES | TOKEN_SUFFIXES) if path.is_dir() else []
            if path.is_dir() and not inside:
                raise DataError(f"{flag} {path}: no text or token file in this folder")
            if not path.is_dir() and not path.is_file():
                raise DataError(f"{flag} {path}: not a regular file")
            if path.is_file() and path.stat().st_size == 0:
                raise DataError(f"{flag} {path}: the file is empty")
            found |= dict.fromkeys(inside or [path])
    return list(found)


def find_stdlib() -> list[Path]:
    """The running interpreter's standard library, .py only: a corpus that everybody has."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(root, {".py"}, STDLIB_SKIPS)
    if sum(path.stat().st_size for path in files) < 1_000_000:
        raise DataError(
            f"--train-data: the built-in corpus, Python's standard library, is not in {root}; "
            "name text files of your own"
        )
    return files


def _walk(root: Path, suffixes: set[str], skips: Iterable[str] = ()) -> list[Path]:
    """Files in a fixed order: not hidden, not empty, not in our own token cache."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name[0] != "." and name not in skips and Path(folder, name).resolve() != CACHE_DIR
        ]
        for path in (Path(folder, name) for name in names if name[0] != "."):
            if path.suffix.lower() in suffixes and path.is_file() and path.stat().st_size:
                found.append(path)
    return sorted(found)  # os.walk's order is the file system's


def read_documents(path: Path) -> Iterator[Iterator[str]]:
    """Each document as chunks of text. A .jsonl holds one a line, any other file is one.

    Raises DataError that names the file and the line or byte.
    """
    if path.suffix != ".jsonl":
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
