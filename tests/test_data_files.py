"""Names to files: nothing is passed over, or taken for text, without a word.

What a folder leaves out is counted; a file that is no text is told by its first bytes, whatever its
name; validation that is trained on is noticed. What the files hold: test_data_corpus.py.
"""

import gzip
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from harness.corpora import load, texts

from data import DataError
from data.documents import TEXT_SUFFIXES, TOKEN_SUFFIXES
from data.files import find_files
from data.tokenizer import format_ranks, load_tokenizer

# ---- Which files are meant


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*names: str) -> None:
    for path in map(Path, names):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {path}")


def find(*names: str) -> tuple[list[str], list[str]]:
    """The files that are found, and what is said about the others."""
    lines: list[str] = []
    found = find_files(names, "--train-data", lines.append)
    return [path.as_posix() for path in found], lines


def test_folders_and_globs() -> None:
    write("b.txt", "a.md", "sub/c.py", "sub/.hidden.txt", ".git/d.txt", "e.png", "[x].txt")
    Path("empty.txt").touch()
    assert find(".")[0] == ["[x].txt", "a.md", "b.txt", "sub/c.py"]
    assert find("b*.txt", "b.txt", "a.md")[0] == ["b.txt", "a.md"]
    assert find("**/*.py")[0] == ["sub/c.py"]
    assert find("[x].txt")[0] == ["[x].txt"]
    # Named on purpose: whether it is text, its bytes tell.
    assert find("e.png") == (["e.png"], [])


def test_a_suffix_says_the_same_in_any_case(cache) -> None:
    rows = "".join(f'{{"text": "document {i}"}}\n' for i in range(20))
    tokens = np.arange(200, dtype=np.uint16).tobytes()
    for name, content in (("a.jsonl", rows.encode()), ("a.bin", tokens), ("a.txt", b"word\n" * 20)):
        found = []
        for path in (Path(name, name), Path("capitals", name, name.upper())):
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
            found += [load(cache, path), load(cache, path.parent)]
        assert len({data.fingerprint for data in found}) == 1, name
    Path("My.Tiktoken").write_text(format_ranks(load_tokenizer("byte").ranks))
    assert load_tokenizer("My.Tiktoken").vocab_size == 257


def test_what_a_folder_leaves_out_is_counted() -> None:
    write("docs/a.txt", "docs/b.md", "docs/1.pdf", "docs/2.PDF", "docs/sub/3.pdf", "docs/x.docx")
    write("docs/LICENSE", "other/y.md", "plain/z.txt", *(f"many/x.kind{i}" for i in range(6)))
    (line,) = find("docs")[1]
    assert line.startswith("note     --train-data docs: 2 files taken, 5 skipped (.pdf 3, without")
    # One line for all names, in which a file that is named besides is not of the skipped.
    found, (line,) = find("docs", "other", "docs/x.docx", "plain/z.txt")
    assert len(found) == 5
    assert "docs and 3 more: 5 files taken, 4 skipped (.pdf 3, without suffix 1);" in line
    # A pattern may match a folder without any beside others.
    found, (line,) = find("[mp][al]*")
    assert found == ["plain/z.txt"] and "1 file taken, 6 skipped (.kind0 1, " in line
    assert line.count(".kind") == 5 and ", ...);" in line
    # What nobody would train on is no news; nor is a run's own log beside its text.
    write("a/a.txt", "a/.DS_Store", "a/.git/config", "a/__pycache__/a.pyc", "a/.cache/x.bin")
    write("a/run.metrics.jsonl")
    Path("a/empty.pdf").touch()
    os.symlink("nowhere", "a/broken.pdf")
    assert find("a") == (["a/a.txt"], [])


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["my man/deep/CAT.1", "my man/x.1", "my man/x.png"], "'my man/**/*.1'"),
        (["[man]/cat", "[man]/dog"], "'[[]man]/**/*'"),
    ],
)
def test_a_folder_with_nothing_usable_says_what_reads_it(names, pattern, cache) -> None:
    write(*names)
    with pytest.raises(DataError) as error:
        find_files([Path(names[0]).parts[0]], "--train-data", print)
    assert "no text or token file in this folder (" in str(error.value)
    assert str(error.value).endswith(f"is read whatever its suffix: {pattern}")
    data = load(cache, *shlex.split(pattern))
    assert len(texts(data.train)) == 2 and texts(data.train)[0].startswith(b"this is ")


# ---- Validation that is trained on


def said(cache: Path, *paths: str, val: list[str]) -> list[str]:
    lines: list[str] = []
    load(cache, *paths, val=val, say=lines.append)
    return [line for line in lines if not line.startswith("encoding")]


def test_validation_that_is_trained_on_is_noticed(cache) -> None:
    write("docs/a.txt", "docs/b.txt", "other/c.txt", "docs/x.docx")
    os.symlink("docs/a.txt", "link.txt")
    Path("copy.txt").write_bytes(Path("docs/b.txt").read_bytes())
    ids = np.random.default_rng(0).integers(0, 257, 10_000).astype(np.uint16)
    for name, last in (("train", 0), ("other", 1), ("val", 0)):  # a copy is one to its end
        ids[-1] = last
        ids.tofile(f"{name}.bin")
    a, b, of_two = "docs/a.txt", "docs/b.txt", "docs/a.txt ({} of its 2 files)"
    for train, val, file, twin in [
        (["docs"], [a], a, a),
        (["docs/*.txt"], ["other/../docs/a.txt"], "other/../docs/a.txt", a),
        ([a], ["link.txt"], "link.txt", a),
        (["docs"], ["copy.txt"], "copy.txt", b),
        (["docs"], [a, "other/c.txt"], of_two.format(1), a),
        (["docs"], ["docs"], of_two.format(2), a),
        (["docs"], ["docs"], of_two.format(2), a),  # not when it is encoded only
        (["other.bin", "train.bin"], ["val.bin"], "val.bin", "train.bin"),
    ]:
        *notes, line = said(cache, *train, val=val)
        assert line.startswith(f"warning  --val-data {file}: the same as {twin} in --train-data: ")
        flags = ["--train-data"] * (train == ["docs"]) + ["--val-data"] * (val == ["docs"])
        assert [note.split()[1] for note in notes] == flags
    Path("other/c.txt").write_text("that is docs/a.txt")  # another text of the same length
    assert said(cache, "docs/a.txt", val=["other"]) == []
    assert said(cache, "train.bin", val=["other.bin"]) == []


# ---- What is no text


PDF = b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\nBT (Hello) Tj ET\n"  # all ASCII
ZIP = b"PK\x03\x04\x14\0word/document.xml"
LFS = b"version https://git-lfs.github.com/spec/v1\noid"
PACKED = gzip.compress(b"{}")
# (name, its content): what it is called, and the way out
NO_TEXT = {
    ("a.PDF", b"\xef\xbb\xbf\r\n" + PDF): "a PDF, .*`pdftotext a.PDF a.PDF.txt`",
    ("a.txt", PDF): "a PDF, .*`pdftotext a.txt a.txt.txt`",  # not onto itself
    ("my {book}.pdf", PDF): r"a PDF, .*`pdftotext 'my {book}.pdf' 'my {book}.pdf.txt'`",
    ("a.rtf", rb"{\rtf1\ansi Hello}"): "an RTF document, .*`pandoc a.rtf -o a.rtf.txt`",
    ("a.docx", ZIP): "a .docx file, .*`pandoc a.docx -o a.docx.txt`",
    ("archive", ZIP): "a zip archive, .*`unzip archive`",
    ("a.jsonl.gz", PACKED): "compressed by gzip, .*`gunzip -c a.jsonl.gz > a.jsonl`",
    ("a.jsonl", PACKED): "compressed by gzip, .*`gunzip -c a.jsonl > a.jsonl.txt`",
    ("A.TAR.GZ", PACKED): "compressed by gzip, .*`tar -xf A.TAR.GZ`",
    ("a.tgz", PACKED): "compressed by gzip, .*`tar -xf a.tgz`",
    ("lfs.txt", LFS): "what Git LFS leaves in place of a file, .*`git lfs pull`",
}


@pytest.mark.parametrize(("file", "says"), NO_TEXT.items())
def test_a_file_that_is_no_text_is_refused(file, says, cache) -> None:
    name, content = file
    Path(name).write_bytes(content)
    with pytest.raises(DataError, match=f"^{name}: {says}") as error:
        load(cache, name)
    assert "\n" not in str(error.value) and not cache.exists()


def test_it_is_looked_for_before_anything_else(cache, monkeypatch) -> None:
    """In folders and in --val-data, too; and a missing tokenizer is not what is wrong."""
    write("docs/a.txt", "b.txt", "pdfs/a.x", "pdfs/y.pdf", "both/a.txt", "both/b.bin", "both/c.md5")
    Path("docs/z.txt").write_bytes(PDF)
    Path("pdfs/z.pdf").write_bytes(PDF)
    monkeypatch.setattr("data.corpus.load_tokenizer", None)
    a_pdf, both = "z.(pdf|txt): a PDF, not text; .*`pdftotext", "both text and token files"
    for train, val, says in [
        ("docs", None, a_pdf),
        ("b.txt", ["docs"], a_pdf),
        ("docs/z.txt", None, a_pdf),
        ("pdfs", None, a_pdf),  # a folder with nothing else
        ("both", None, both),
    ]:
        with pytest.raises(DataError, match=says):
            load(cache, train, val=val)


@pytest.mark.parametrize(
    "text", ["%PDF begins such a file, as %PDF-1.4", "PK\nand", "{\\rtfm}", "version https://a.org"]
)
def test_a_text_that_only_begins_so_is_read(text, cache) -> None:
    Path("notes.weird").write_text(text * 3)
    data = load(cache, "notes.weird")
    assert b"".join(texts(data.train) + texts(data.val)).decode() == text * 3


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("my notes.txt", "un caf\xe9 \u20ac ".encode("cp1252"), "un caf\xe9 \u20ac "),
        ("x.txt", "\ufeff日本".encode("utf-16-le"), "日本"),
    ],
)
@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
def test_the_command_makes_text_of_it(name, content, text, cache):
    Path(name).write_bytes(content * 20)
    with pytest.raises(DataError) as error:
        load(cache, name)
    command = str(error.value).split("`")[1]
    subprocess.run(["sh", "-c", command], check=True, timeout=30)
    data = load(cache, shlex.split(command)[-1])
    assert texts(data.train)[0].decode().startswith(text)


def test_the_readme_lists_every_known_suffix() -> None:
    readme = (Path(__file__).parent.parent / "data/README.md").read_text()
    blocks = [block.split() for block in readme.split("```")]
    assert [*TEXT_SUFFIXES, *TOKEN_SUFFIXES] in blocks
