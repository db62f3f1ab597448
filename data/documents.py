"""How a file is to be read; and its documents, if it is text, as a stream that fits in memory."""

import codecs
import json
import re
import shlex
from collections.abc import Iterable, Iterator
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
KEYS, KEY_LENGTH = 6, 40  # of a line of JSON: how many are shown, and how much of each
ZIP, GZIP = rb"PK(\x03\x04|\x05\x06|\x07\x08)", rb"\x1f\x8b\x08"
TEXT = "make it text: "
# What the first bytes match, how the name ends, what that is, and what to do. Any other binary
# stops at a NUL or at a byte that is no UTF-8. These may have neither (there are PDFs all in ASCII,
# and a model would learn their drawing commands), or are so common that their text should be found
# at once.
SIGNS: list[tuple[bytes, str | tuple[str, ...], str, str]] = [
    (rb"(\xef\xbb\xbf)?\s*%PDF-\d", "", "a PDF", TEXT + "`pdftotext {file} {text}`"),
    (rb"\{\\rtf\d", "", "an RTF document", TEXT + "`pandoc {file} -o {text}`"),
    (ZIP, (".docx", ".odt", ".epub"), "a {suffix} file", TEXT + "`pandoc {file} -o {text}`"),
    (ZIP, "", "a zip archive", "unpack it: `unzip {file}`"),
    (GZIP, (".tar.gz", ".tgz"), "compressed by gzip", "unpack it: `tar -xf {file}`"),
    (GZIP, "", "compressed by gzip", "unpack it: `gunzip -c {file} > {text}`"),
    (
        rb"version https://git-lfs\.github\.com/spec/",
        "",
        "what Git LFS leaves in place of a file",
        "fetch the file itself: `git lfs pull`",
    ),
]


def suffix_of(path: Path) -> str:
    """`.jsonl` for notes.jsonl and for NOTES.JSONL, "" for README: cameras, old programs and
    Windows write capitals, and mean the same."""
    return path.suffix.lower()


def check_text(paths: Iterable[Path]) -> None:
    """Raises DataError for the first file that is no text: its name, what it is and what to do."""
    for path in paths:
        with open(path, "rb") as file:
            head = file.read(64)
        for sign, end, what, way_out in SIGNS:
            if re.match(sign, head) and path.name.lower().endswith(end):
                text = path.with_suffix("") if suffix_of(path) == ".gz" else f"{path}.txt"
                names = {"file": shlex.quote(str(path)), "text": shlex.quote(str(text))}
                line = f"{what}, not text; {way_out}".format(**names, suffix=suffix_of(path))
                raise DataError(f"{path}: {line}")


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
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            text = found.get("text") if isinstance(found, dict) else None
            if not isinstance(text, str):
                what = f'want a JSON object with a string "text"{_keys(found)}'
                raise DataError(f"{path}:{number}: {what}")
            pieces = [text[first : first + CHUNK] for first in range(0, len(text), CHUNK)]
            yield at_safe_cuts(pieces)


def _keys(found: object) -> str:
    """What a line has instead of a "text" of words."""
    if not isinstance(found, dict) or not found:
        return ""
    if "text" in found:
        return f'; its "text" is of type {type(found["text"]).__name__}'
    names = [json.dumps(key[:KEY_LENGTH]) for key in found]
    return f"; it has {', '.join(names[:KEYS])}{', ...' * (len(names) > KEYS)}"


def _encoded(path: Path, what: str, encoding: str) -> DataError:
    made = path.with_name(f"{path.stem}.utf8{path.suffix}")
    names = f"{shlex.quote(str(path))} > {shlex.quote(str(made))}"
    return DataError(f"{path}: {what}: `iconv -f {encoding} -t UTF-8 {names}`")


def read_text(path: Path, start: int, stop: int) -> Iterator[str]:
    """Bytes start to stop of a UTF-8 file, as chunks that encode as the whole does.

    Raises DataError that names the file and the byte.
    """
    return at_safe_cuts(_decoded(path, start, stop))


def _decoded(path: Path, start: int, stop: int) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
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
            first, start = start, start + len(block)
            try:
                text = decoder.decode(block, final=start >= stop)
            except UnicodeDecodeError as error:  # (its object begins with what a block has left)
                byte = start - len(error.object) + error.start
                what = f"not UTF-8 at byte {byte}; if it is Western European"
                raise _encoded(path, what, "CP1252") from None
            yield text if first else text.removeprefix("\ufeff")


def at_safe_cuts(pieces: Iterable[str]) -> Iterator[str]:
    """The same text in chunks, each of which ends where a piece does or a little before."""
    text = ""
    for piece in pieces:
        if text:
            cut = safe_cut(text)
            yield text[:cut]
            text = text[cut:]
        text += piece
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
