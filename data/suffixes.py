"""How a file is to be read, as the end of its name tells it."""

from pathlib import Path

TOKEN_SUFFIXES = (".bin", ".npy")
TEXT_SUFFIXES = tuple(
    ".txt .text .md .rst .tex .org .log .srt .jsonl .json .csv .tsv .xml .html .htm .css .yaml "
    ".yml .toml .ini .cfg .py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .kt .scala .js .ts .rb "
    ".php .pl .lua .r .jl .hs .ml .swift .sh .sql".split()
)


def suffix_of(path: Path | str) -> str:
    """`.jsonl` for notes.jsonl and for NOTES.JSONL, "" for README: cameras, old programs and
    Windows write capitals, and mean the same. Nothing in data/ looks at a suffix but by this."""
    return Path(path).suffix.lower()
