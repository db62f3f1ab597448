"""What a file that was given as text really is, told by its first bytes.

Most such files would stop at a NUL or at a byte that is no UTF-8. A PDF may have neither (some are
all ASCII), and a model would learn its drawing commands. And whoever gives one wants to know how
to get at the text.
"""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from .suffixes import TEXT_SUFFIXES, suffix_of
from .tokenizer import DataError

HEAD_BYTES = 512  # a tar says what it is at byte 257
PANDOC = "make it text: `pandoc {file} -o {text}`"
EXPORT = 'write its text to a .txt, or to a .jsonl with {{"text": ...}} in each line'
OTHER = "name files of text"
# What the first bytes match, what that is, and what to do. A sign of printable characters might
# begin a text as well: it goes on to a byte that no text has, or no text would begin like that.
SIGNS = [
    (rb"(\xef\xbb\xbf)?\s*%PDF-\d", "a PDF", "make it text: `pdftotext {file} {text}`"),
    (rb"\{\\rtf\d", "an RTF document", PANDOC),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document", EXPORT),
    (rb"PK(\x03\x04|\x05\x06|\x07\x08)", "a zip archive", "unpack it: `unzip {file} -d {folder}`"),
    (rb"\x1f\x8b\x08", "compressed by gzip", "unpack it: `gunzip -c {file} > {text}`"),
    (rb"BZh[1-9]1AY&SY", "compressed by bzip2", "unpack it: `bunzip2 -c {file} > {text}`"),
    (rb"\xfd7zXZ\0", "compressed by xz", "unpack it: `unxz -c {file} > {text}`"),
    (rb"\x28\xb5\x2f\xfd", "compressed by zstd", "unpack it: `unzstd -c {file} > {text}`"),
    (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it: `7z x {file}`"),
    (rb"Rar!\x1a\x07", "a rar archive", "unpack it: `unrar x {file}`"),
    (rb"(?=.*\0).{257}ustar", "a tar archive", "unpack it: `tar -xf {file}`"),
    (rb"PAR1\x15", "a Parquet table", EXPORT),
    (rb"ARROW1\0|\xff{4}.{3}\0\x10\0", "an Arrow table", EXPORT),
    (rb"SQLite format 3\0", "an SQLite database", EXPORT),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file", EXPORT),
    (
        rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a.*\0|RIFF.{4}WEBP|II\*\0|MM\0\*|BM.{4}\0{4}",
        "a picture",
        "if a text is on it: `tesseract {file} {folder}`",
    ),
    (
        rb"ID3[\x02-\x04]\0|OggS\0|fLaC\0|RIFF.{4}(WAVE|AVI )|\0\0..ftyp|\x1a\x45\xdf\xa3",
        "sound or video",
        "give a transcript of it",
    ),
    (rb"\x7fELF[\x01\x02]|MZ.*\0|[\xce\xcf]\xfa\xed\xfe|\xca\xfe\xba\xbe", "a program", OTHER),
    (rb"\x80[\x02-\x05]", "a Python pickle", OTHER),
    (rb"\x93NUMPY", "a NumPy array", "if it holds token ids, let its name end in .npy"),
    (
        rb"version https://git-lfs\.github\.com/spec/",
        "what Git LFS leaves in place of a file",
        "fetch the file itself: `git lfs pull`",
    ),
]
ZIPPED = dict.fromkeys((".docx", ".odt", ".epub"), PANDOC)
ZIPPED |= dict.fromkeys((".xlsx", ".ods", ".pptx", ".odp"), EXPORT)
ZIPPED |= dict.fromkeys((".pt", ".pth", ".npz"), OTHER)


def check_text(paths: Iterable[Path]) -> None:
    """Raises DataError for the first file that is no text: its name, what it is and what to do."""
    for path in paths:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
        for sign, what, way_out in SIGNS:
            if re.match(sign, head, re.DOTALL):
                raise DataError(f"{path}: {_named(path, what, way_out)}")


def _named(path: Path, what: str, way_out: str) -> str:
    """What it is and what to do, as the file's name says it more closely than its first bytes."""
    suffix, stem = suffix_of(path), path.with_suffix("")
    inner = suffix_of(stem)  # x.tar.gz has two
    if what == "a zip archive" and suffix in ZIPPED:
        what, way_out = f"a {suffix} file", ZIPPED[suffix]
    elif "compressed" in what and (inner == ".tar" or suffix in (".tgz", ".tbz2", ".txz")):
        way_out = "unpack it: `tar -xf {file}`"
    # x.pdf -> x.txt, x.jsonl.gz -> x.jsonl, and a PDF that is called x.txt -> x.txt.txt
    text = stem if inner in TEXT_SUFFIXES else Path(f"{stem}.txt")
    text = Path(f"{path}.txt") if text == path else text
    folder = stem if stem != path else Path(f"{path}.d")
    names = {"file": path, "text": text, "folder": folder}
    command = way_out.format(**{name: shlex.quote(str(at)) for name, at in names.items()})
    return f"{what}, not text; {command}"
