"""A file to its documents: their text, as a stream that fits in memory."""

import codecs
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from unicodedata import category

from .suffixes import TEXT_SUFFIXES, suffix_of
from .tokenizer import DataError

CHUNK = 2**20  # bytes or characters held at a time, however long the text
KEYS, KEY_LENGTH = 6, 40  # of a line of JSON: how many are shown, and how much of each
PANDOC = "make it text: `pandoc {file} -o {text}`"
# What the first bytes match, what that is, and what to do. Any other binary stops at a NUL or at a
# byte that is no UTF-8. These may have neither (there are PDFs all in ASCII, and a model would
# learn their drawing commands), or are so common that their text should be found at once.
SIGNS = [
    (rb"(\xef\xbb\xbf)?\s*%PDF-\d", "a PDF", "make it text: `pdftotext {file} {text}`"),
    (rb"\{\\rtf\d", "an RTF document", PANDOC),
    (rb"PK(\x03\x04|\x05\x06|\x07\x08)", "a zip archive", "unpack it: `unzip {file}`"),
    (rb"\x1f\x8b\x08", "compressed by gzip", "unpack it: `gunzip -c {file} > {text}`"),
    (
        rb"version https://git-lfs\.github\.com/spec/",
        "what Git LFS leaves in place of a file",
        "fetch the file itself: `git lfs pull`",
    ),
]


def check_text(paths: Iterable[Path]) -> None:
    """Raises DataError for the first file that is no text: its name, what it is and what to do."""
    for path in paths:
        with open(path, "rb") as file:
            head = file.read(64)
        for sign, what, way_out in SIGNS:
            if re.match(sign, head):
                raise DataError(f"{path}: {_named(path, what, way_out)}")


def _named(path: Path, what: str, way_out: str) -> str:
    """What it is and what to do, as the file's name says it more closely than its first bytes."""
    suffix, stem = suffix_of(path), path.with_suffix("")
    inner = suffix_of(stem)  # x.tar.gz has two
    if "zip" in what and suffix in (".docx", ".odt", ".epub"):
        what, way_out = f"a {suffix} file", PANDOC
    elif "zip" in what and (inner == ".tar" or suffix == ".tgz"):
        way_out = "unpack it: `tar -xf {file}`"
    # x.pdf -> x.txt, x.jsonl.gz -> x.jsonl, and a PDF that is called x.txt -> x.txt.txt
    text = stem if inner in TEXT_SUFFIXES else Path(f"{stem}.txt")
    text = Path(f"{path}.txt") if text == path else text
    command = way_out.format(file=shlex.quote(str(path)), text=shlex.quote(str(text)))
    return f"{what}, not text; {command}"


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
                what = f'want a JSON object with a string "text"{_keys(found, path)}'
                raise DataError(f"{path}:{number}: {what}")
            yield split_text(text)


def _keys(found: object, path: Path) -> str:
    """What a line has instead of "text", and what makes "text" of the longest string in it."""
    if not isinstance(found, dict) or not found:
        return ""
    if "text" in found:
        return f'; its "text" is of type {type(found["text"]).__name__}'
    names = [json.dumps(key[:KEY_LENGTH]) for key in found]
    words = f"; it has {', '.join(names[:KEYS])}{', ...' * (len(names) > KEYS)}"
    strings = [key for key, value in found.items() if isinstance(value, str)]
    longest = max(strings, key=lambda key: len(found[key]), default="")
    if 0 < len(longest) < KEY_LENGTH:
        program = f"{{text: .{json.dumps(longest)}}}"
        words += f"; if {json.dumps(longest)} is the text: `jq -c {shlex.quote(program)} "
        words += f"{_into(path, 'text')}`"
    return words


def _into(path: Path, what: str) -> str:
    """`notes.txt > notes.utf8.txt`, for a shell."""
    made = path.with_name(f"{path.stem}.{what}{path.suffix}")
    return f"{shlex.quote(str(path))} > {shlex.quote(str(made))}"


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
                command = f"iconv -f UTF-16 -t UTF-8 {_into(path, 'utf8')}"
                raise DataError(f"{path}: the text is UTF-16; make it UTF-8: `{command}`")
            if (nul := block.find(0)) >= 0:
                where = f"NUL at byte {start + nul}"
                raise DataError(f"{path}: a binary file, not text ({where}); name files of text")
            held = len(decoder.getstate()[0])  # bytes of a character that began a block earlier
            try:
                text = decoder.decode(block, final=start + len(block) >= stop)
            except UnicodeDecodeError as error:
                byte = start - held + error.start
                command = f"iconv -f CP1252 -t UTF-8 {_into(path, 'utf8')}"
                raise DataError(
                    f"{path}: not UTF-8 at byte {byte}; if it is Western European: `{command}`"
                ) from None
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
