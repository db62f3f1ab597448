"""README.md and README.zh-CN.md say the same: what needs no translation is equal in both.

Compared section by section, in order: code blocks to the letter; tables cell by cell; in prose,
what is in backticks, where links lead, and numbers, each as often as in the other but in any order,
because Chinese has another. "1,000" equals "1000", and "15 %" equals "15%". A number in words ("two
cores") is not seen, so what is in digits here has to be in digits there.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest

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


def sections(name: str) -> list[Section]:
    found = [Section("(before the first heading)")]
    fenced = False
    for line in (ROOT / name).read_text("utf-8").splitlines():
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


def facts(text: str) -> list[str]:
    """What has no language. (A link to a section of its own page would need more.)"""
    code = [f"`{' '.join(span.split())}`" for span in re.findall(r"`([^`]+)`", text)]
    text = re.sub(r"`[^`]+`", "", text)
    links = re.findall(r"\]\(([^)]*)\)", text)
    links = ["the other language" if link in (ENGLISH, CHINESE) else link for link in links]
    number = r"(?:(?<!\w)[-+])?\d+(?:[.,]\d+)*(?: ?(?:%|[KMG]i?B\b))?"
    numbers = re.findall(number, re.sub(r"\]\([^)]*\)", "]", text))
    return [*code, *links, *(re.sub("[ ,]", "", found) for found in numbers)]


def things(section: Section) -> Counter[str]:
    found = Counter(f"line {i} of the code, {line!r}" for i, line in enumerate(section.code, 1))
    for i, row in enumerate(section.rows, 1):
        for j, cell in enumerate(row.strip("|").split("|"), 1):
            where = f"row {i}, cell {j}"
            found.update([where, *(f"{where}: {fact}" for fact in facts(cell))])
    found.update(facts(" ".join(section.prose)))
    return found


def test_both_say_the_same():
    found = []
    for en, zh in zip_longest(sections(ENGLISH), sections(CHINESE), fillvalue=Section("(none)", 0)):
        where = f'"{en.title}", "{zh.title}"'
        if en.level != zh.level:
            found.append(f"{where}: another level")
        found += [f"{where}: only {ENGLISH} has {what}" for what in things(en) - things(zh)]
        found += [f"{where}: only {CHINESE} has {what}" for what in things(zh) - things(en)]
    assert not found, f"{len(found)} differences\n" + "\n".join(found)


def test_no_misprints():
    """What makes Chinese text readable, on this page."""
    found = []
    for section in sections(CHINESE):
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
    assert not found, "\n".join(found)
