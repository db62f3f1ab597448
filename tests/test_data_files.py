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
from data.files import find_files
from data.suffixes import TEXT_SUFFIXES, TOKEN_SUFFIXES
from data.tokenizer import format_ranks, load_tokenizer

# ---- Which files are meant


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}")


def find(folder: Path, *names: str) -> tuple[list[str], list[str]]:
    """The files that are found, and what is said about the others."""
    lines: list[str] = []
    found = find_files([str(folder / name) for name in names], "--train-data", lines.append)
    return [path.relative_to(folder).as_posix() for path in found], lines


def test_folders_and_globs(tmp_path) -> None:
    write(tmp_path, "b.txt", "a.md", "sub/c.py", "sub/.hidden.txt", ".git/d.txt", "e.png")
    (tmp_path / "empty.txt").touch()
    assert find(tmp_path, "")[0] == ["a.md", "b.txt", "sub/c.py"]
    (tmp_path / "empty.txt").unlink()
    assert find(tmp_path, "*.txt", "b.txt", "a.md")[0] == ["b.txt", "a.md"]
    assert find(tmp_path, "**/*.py")[0] == ["sub/c.py"]
    # Named on purpose: whether it is text, its bytes tell.
    assert find(tmp_path, "e.png") == (["e.png"], [])
    write(tmp_path, "[x].txt")
    assert find(tmp_path, "[x].txt")[0] == ["[x].txt"]


def test_a_suffix_says_the_same_in_any_case(cache, tmp_path) -> None:
    rows = "".join(f'{{"text": "document {i}"}}\n' for i in range(20))
    tokens = np.arange(200, dtype=np.uint16).tobytes()
    for name, content in (("a.jsonl", rows.encode()), ("a.bin", tokens), ("a.txt", b"word\n" * 20)):
        found = []
        for given in (name, name.upper()):
            path = tmp_path / given[0] / name / given
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
            found += [load(cache, path), load(cache, path.parent)]
        assert len({data.fingerprint for data in found}) == 1, name
    (tmp_path / "My.Tiktoken").write_text(format_ranks(load_tokenizer("byte").ranks))
    assert load_tokenizer(str(tmp_path / "My.Tiktoken")).vocab_size == 257


def test_what_a_folder_leaves_out_is_counted(tmp_path) -> None:
    write(tmp_path, "docs/a.txt", "docs/b.md", "docs/1.pdf", "docs/2.PDF", "docs/sub/3.pdf")
    write(tmp_path, "docs/x.docx", "docs/LICENSE", "other/y.md", "plain/z.txt")
    (line,) = find(tmp_path, "docs")[1]
    assert line.startswith(f"note     --train-data {tmp_path}/docs: 2 files taken, 5 skipped (.pdf")
    assert "(.pdf 3, without suffix 1, .docx 1)" in line
    # One line for all folders, in which a file that is named besides is not of the skipped.
    found, (line,) = find(tmp_path, "docs", "other", "docs/x.docx", "plain/z.txt")
    assert len(found) == 5
    assert "docs and 1 more: 3 files taken, 4 skipped (.pdf 3, without suffix 1);" in line
    for number in range(6):
        write(tmp_path, *(f"many/{i}.kind{number}" for i in range(number + 1)), "many/x.txt")
    (line,) = find(tmp_path, "many")[1]
    assert "many: 1 file taken, 21 skipped (.kind5 6, .kind4 5, " in line and ", ...)" in line
    # A pattern may match such a folder beside others.
    write(tmp_path, "all/pictures/a.png", "all/texts/a.txt", "all/zoo/a.png")
    found, (line,) = find(tmp_path, "all/[tpz]*")
    assert found == ["all/texts/a.txt"] and "1 file taken, 2 skipped (.png 2)" in line
    # What nobody would train on is no news; nor is a run's own log beside its text.
    write(tmp_path, "a/a.txt", "a/.DS_Store", "a/.git/config", "a/__pycache__/a.pyc")
    write(tmp_path, "a/.cache/x.bin", "a/run.metrics.jsonl")
    (tmp_path / "a/empty.pdf").touch()
    os.symlink("nowhere", tmp_path / "a/broken.pdf")
    assert find(tmp_path, "a") == (["a/a.txt"], [])


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (["my man/deep/CAT.1", "my man/x.1", "my man/x.png"], "'my man/**/*.1'"),
        (["[man]/cat", "[man]/dog"], "'[[]man]/**/*'"),
    ],
)
def test_a_folder_with_nothing_usable_says_what_reads_it(
    names, pattern, cache, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, *names)
    with pytest.raises(DataError) as error:
        find_files([Path(names[0]).parts[0]], "--train-data", print)
    assert "no text or token file in this folder (" in str(error.value)
    assert str(error.value).endswith(f"is read whatever its suffix: {pattern}")
    data = load(cache, *shlex.split(pattern))
    assert len(texts(data.train)) == 2 and texts(data.train)[0].startswith(b"this is ")


def said(cache: Path, *paths: str, val: list[str]) -> list[str]:
    lines: list[str] = []
    load(cache, *paths, val=val, say=lines.append)
    return [line for line in lines if not line.startswith("encoding")]


def test_lines_are_said_once_and_only_of_data_that_are_taken(cache, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, *(f"docs/{i}.txt" for i in range(30)), "docs/x.docx")
    for _ in range(2):  # when it is encoded, and when it has been
        flags = [line.split()[1] for line in said(cache, "docs", val=["docs"])]
        assert flags == ["--train-data", "--val-data", "--val-data"]
    write(tmp_path, "docs/y.bin")
    lines: list[str] = []
    with pytest.raises(DataError, match="both text and token files"):
        load(cache, "docs", say=lines.append)
    assert lines == []


# ---- Validation that is trained on


def test_validation_that_is_trained_on_is_noticed(cache, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "docs/a.txt", "docs/b.txt", "other/c.txt")
    os.symlink(tmp_path / "docs/a.txt", "link.txt")
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
        (["other.bin", "train.bin"], ["val.bin"], "val.bin", "train.bin"),
    ]:
        (line,) = said(cache, *train, val=val)
        assert line.startswith(f"warning  --val-data {file}: the same as {twin} in --train-data: ")
    Path("other/c.txt").write_text("that is docs/a.txt")  # another text of the same length
    assert said(cache, "docs", val=["other"]) == said(cache, "train.bin", val=["other.bin"]) == []


# ---- What is no text


PDF = b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\nBT (Hello) Tj ET\n"  # all ASCII
ZIP = b"PK\x03\x04\x14\0word/document.xml"
LFS = b"version https://git-lfs.github.com/spec/v1\noid"
PACKED = gzip.compress(b"{}")
TAR, BINARY = b"x" * 257 + b"ustar\0", "(a binary file, not text|not UTF-8 at byte)"
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
    **{("a.txt", other * 3): BINARY for other in (b"ID3\3\0", b"BZh91AY&SY\xff", b"\x28\xb5", TAR)},
}


@pytest.mark.parametrize(("file", "says"), NO_TEXT.items())
def test_a_file_that_is_no_text_is_refused(file, says, cache, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, content = file
    Path(name).write_bytes(content)
    with pytest.raises(
        DataError, match=f"^{name}: {says.replace(', .*', ', not text; .*')}"
    ) as error:
        load(cache, name)
    assert "\n" not in str(error.value) and not cache.exists()


def test_it_is_looked_for_before_anything_else(cache, tmp_path, monkeypatch) -> None:
    """In folders and in --val-data, too; and a missing tokenizer is not what is wrong."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "docs/a.txt", "b.txt", "pdfs/z.pdf", "pdfs/a.x", "pdfs/y.pdf")
    Path("docs/z.txt").write_bytes(PDF)
    Path("pdfs/z.pdf").write_bytes(PDF)
    with pytest.raises(DataError, match=r"z.pdf: a PDF, not text; .*`pdftotext"):
        find(tmp_path, "pdfs")  # a folder with nothing else
    monkeypatch.setattr("data.corpus.load_tokenizer", None)
    for train, val in (("docs", None), ("b.txt", ["docs"]), ("docs/z.txt", None)):
        lines: list[str] = []
        with pytest.raises(DataError, match="docs/z.txt: a PDF, not text"):
            load(cache, train, val=val, say=lines.append)
        assert lines == []


@pytest.mark.parametrize(
    "text", ["%PDF begins such a file, as %PDF-1.4", "PK\nand", "{\\rtfm}", "version https://a.org"]
)
def test_a_text_that_only_begins_so_is_read(text, cache, tmp_path) -> None:
    path = tmp_path / "notes.weird"
    path.write_text(text * 3)
    data = load(cache, path)
    assert b"".join(texts(data.train) + texts(data.val)).decode() == text * 3


@pytest.mark.parametrize(
    ("program", "name", "content", "text"),
    [
        ("iconv", "my notes.txt", "un caf\xe9 \u20ac ".encode("cp1252"), "un caf\xe9 \u20ac "),
        ("iconv", "x.txt", "\ufeff日本".encode("utf-16-le"), "日本"),
        ("jq", "x.jsonl", b'{"id": "3", "the \'text\'": "hello "}\n', "hello "),
    ],
)
def test_the_command_makes_text_of_it(program, name, content, text, cache, tmp_path, monkeypatch):
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    monkeypatch.chdir(tmp_path)
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
