"""README.md and README.zh-CN.md say the same: what needs no translation is equal in both.

Compared section by section, in order: code blocks to the letter; tables cell by cell; in prose,
what is in backticks, where links lead, and numbers, each as often as in the other but in any order,
because Chinese has another. "1,000" equals "1000", and "15 %" equals "15%". A number in words ("two
cores") is not seen, so what is in digits here has to be in digits there.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

import pytest
from harness.runs import ROOT

ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
HAN = "[\u4e00-\u9fff]"


@dataclass
class Section:
    title: str
    level: int = 1
    code: list[str] = field(default_factory=list)  # fenced or indented, line by line
    rows: list[str] = field(default_factory=list)  # of tables
    prose: list[str] = field(default_factory=list)  # all other lines, the heading included


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")  # Windows would take its own


def sections(text: str) -> list[Section]:
    found = [Section("(before the first heading)")]
    fenced = False
    for line in text.splitlines():
        fence = line.startswith("```")
        heading = None if fenced else re.match(r"(##+) (.*)", line)
        if fence or fenced or line.startswith("    "):
            found[-1].code.append(line)
            fenced ^= fence
        elif heading:
            found.append(Section(heading[2], len(heading[1]), prose=[line, ""]))
        else:
            (found[-1].rows if line.startswith("|") else found[-1].prose).append(line)
    return found


def facts(text: str, places: dict[str, int]) -> dict[str, Counter]:
    """What has no language: `places` tells the section that an anchor of this page leads to."""
    code = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    text = re.sub(r"`[^`]+`", "", text)
    links = []
    for link in re.findall(r"\]\(([^)]*)\)", text):
        if link.startswith("#"):
            link = f"section {places.get(link[1:], f'that does not exist: {link}')} of this page"
        links.append("the other language" if link in (ENGLISH, CHINESE) else link)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    number = r"(?:(?<!\w)[-+])?\d+(?:[.,]\d+)*(?: ?(?:%|[KMG]i?B\b))?"
    numbers = [re.sub("[ ,]", "", found) for found in re.findall(number, text)]
    return {"backticks": Counter(code), "links": Counter(links), "numbers": Counter(numbers)}


def anchors(page: list[Section]) -> dict[str, int]:
    """What GitHub makes of headings (more in test_readme.py), and which section has it."""
    bare = [re.sub(r"[^\w\- ]", "", section.title.lower()) for section in page]
    return {title.replace(" ", "-"): i for i, title in enumerate(bare)}


def listed(counter: Counter) -> str:
    return ", ".join(f"{what} ({n} times)" if n > 1 else what for what, n in counter.items())


def compare_texts(where: str, texts: list[str], places: list[dict[str, int]]) -> list[str]:
    english, chinese = map(facts, texts, places)
    found = []
    for kind in english:
        if missing := english[kind] - chinese[kind]:
            found.append(f"{where}: {kind} that only {ENGLISH} has: {listed(missing)}")
        if missing := chinese[kind] - english[kind]:
            found.append(f"{where}: {kind} that only {CHINESE} has: {listed(missing)}")
    return found


def compare_lines(where: str, english: list[str], chinese: list[str]) -> list[str]:
    for en, zh in zip(english, chinese, strict=False):
        if en != zh:
            return [f"{where}: code differs, first in {ENGLISH}: {en!r}, {CHINESE}: {zh!r}"]
    if len(english) != len(chinese):
        longer = ENGLISH if len(english) > len(chinese) else CHINESE
        line = max(english, chinese, key=len)[min(len(english), len(chinese))]
        return [f"{where}: code that only {longer} has, from {line!r} on"]
    return []


def compare_tables(where: str, rows: list[list[str]], places: list[dict[str, int]]) -> list[str]:
    if len(rows[0]) != len(rows[1]):
        return [f"{where}: {len(rows[0])} table rows in {ENGLISH}, {len(rows[1])} in {CHINESE}"]
    found = []
    for i, row in enumerate(zip(*rows, strict=True), 1):
        cells = [line.strip("|").split("|") for line in row]
        if len(cells[0]) != len(cells[1]):
            found.append(f"{where}, table row {i}: {len(cells[0])} and {len(cells[1])} cells")
            continue
        for j, cell in enumerate(zip(*cells, strict=True), 1):
            found += compare_texts(f"{where}, table row {i}, cell {j}", list(cell), places)
    return found


def compare(english: str, chinese: str) -> list[str]:
    """Every difference, as a line that says where it is."""
    pages = [sections(english), sections(chinese)]
    if [s.level for s in pages[0]] != [s.level for s in pages[1]]:
        titles = [" / ".join(section.title for section in page[1:]) for page in pages]
        return [f"other sections: {ENGLISH}: {titles[0]}\n{CHINESE}: {titles[1]}"]
    places = [anchors(page) for page in pages]
    found = []
    for en, zh in zip(*pages, strict=True):
        where = f'"{en.title}"' if en.level == 1 else f'"{en.title}", "{zh.title}"'
        found += compare_lines(where, en.code, zh.code)
        found += compare_tables(where, [en.rows, zh.rows], places)
        found += compare_texts(where, [" ".join(en.prose), " ".join(zh.prose)], places)
    return found


def test_both_say_the_same():
    found = compare(read(ENGLISH), read(CHINESE))
    assert not found, f"{len(found)} differences\n" + "\n".join(found)


def test_each_leads_to_the_other():
    for page, other in ((ENGLISH, CHINESE), (CHINESE, ENGLISH)):
        top = sections(read(page))[0]
        assert f"]({other})" in " ".join(top.prose), f"{page} does not link to {other} at its top"


def test_it_stays_short():
    assert len(read(CHINESE).splitlines()) <= 230


# ---- What makes Chinese text readable, on this page


def misprints(text: str) -> list[str]:
    found = []
    for section in sections(text):
        for line, after in zip(section.prose, [*section.prose[1:], ""], strict=True):
            if line and after and not re.match(r"- |\d+\. |#", after):
                found.append(f"a line break is shown as a blank; one line a paragraph: {after}")
        for line in [*section.prose, *section.rows]:
            plain = re.sub(r"!?\[([^]]*)\]\([^)]*\)|\*\*", r"\1", line)
            for what, pattern in {
                "no blank between Chinese and Latin": rf"{HAN}[\w`](?<!{HAN})|[a-zA-Z0-9`%]{HAN}",
                "half-width punctuation": rf"{HAN}[,;:!?()]|[,;:!?()]{HAN}",
                "检查点 alone means both (激活检查点, 快照)": "(?<!激活)检查点",
            }.items():
                for hit in re.finditer(pattern, plain):
                    around = plain[max(hit.start() - 10, 0) : hit.end() + 10]
                    found.append(f"{what}: {around}")
    return found


def test_no_misprints():
    found = misprints(read(CHINESE))
    assert not found, "\n".join(found)


# ---- These tests can fail: two small pages, and what is done to the second one

SAMPLE = """# Cat

One of 1,000 ([中文](README.zh-CN.md)), -96 % with `--purr`; [more](docs/cat.md#fur), [below](#fed).

| fur | weight |
|---|---|
| `long` | 3.5 MiB |

## Fed

    python cat.py --milk

```
meow 12
```
"""
SAMPLE_ZH = """# 猫

用 `--purr` 是 -96%，1000 只的一只（[English](README.md)），[详情](docs/cat.md#fur)[下文](#喂了吗)。

| 毛 | 重量 |
|---|---|
| `long` | 3.5 MiB |

## 喂了吗？

    python cat.py --milk

```
meow 12
```
"""


def test_equal_samples_are_equal():
    assert compare(SAMPLE, SAMPLE_ZH) == [] == misprints(SAMPLE_ZH)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("1000", "1001", "numbers that only README.md has: 1000"),
        ("-96%", "96%", "numbers that only README.zh-CN.md has: 96%"),
        ("96%", "96", "numbers that only README.md has: -96%"),
        ("`--purr`", "`--pur`", "backticks that only README.md has: --purr"),
        ("一只", "一只 `x`", "backticks that only README.zh-CN.md has: x"),
        ("#fur", "#tail", "links that only README.md has: docs/cat.md#fur"),
        ("README.md", "LICENSE", "links that only README.md has: the other language"),
        ("#喂了吗", "#fed", "section that does not exist: #fed of this page"),
        ("3.5 MiB", "3.5 GiB", "table row 3, cell 2: numbers that only README.md has: 3.5MiB"),
        ("`long`", "`short`", "table row 3, cell 1: backticks that only README.md has: long"),
        ("| `long` | 3.5 MiB |\n", "", "3 table rows in README.md, 2 in README.zh-CN.md"),
        ("3.5 MiB |", "3.5 MiB | |", "table row 3: 2 and 3 cells"),
        ("--milk", "--tea", "code differs, first in README.md: '    python cat.py --milk'"),
        ("meow 12", "meow 13", "code differs, first in README.md: 'meow 12'"),
        ("meow 12\n```\n", "meow 12\n```\n\n    ls\n", "code that only README.zh-CN.md has"),
        ("## 喂了吗？\n", "", "other sections"),
        ("## 喂了吗？", "### 喂了吗？", "other sections"),
        ("用 `", "用`", "no blank"),
        ("，[详情]", ",[详情]", "half-width"),
        ("用", "（\n用", "line break"),
        ("一只", "一只检查点", "激活检查点"),
    ],
)
def test_a_difference_is_seen(old, new, message):
    assert old in SAMPLE_ZH
    changed = SAMPLE_ZH.replace(old, new)
    assert message in "\n".join(compare(SAMPLE, changed) + misprints(changed))
