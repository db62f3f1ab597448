"""The README's picture of scripts.memory_page's page, as Chromium shows it.

python -m studies.page_shots --readme studies/results/memory_page.png

Needs playwright (pip install playwright pillow) and Chromium (apt install chromium, say).
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts import tool
from scripts.style import use_few_colors
from studies.common import study_parser
from trainer.flags import UsageError, output_file

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A root user's Chromium has no sandbox of its own; and none should call home.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update")  # fmt: skip


@contextmanager
def chromium() -> Iterator[Any]:
    """A playwright Browser. Raises UsageError where there is none."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise UsageError("page_shots needs playwright: pip install playwright") from None
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        raise UsageError("page_shots needs Chromium: apt install chromium, or Chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


def shoot(browser: Any, url: str, file: Path) -> None:
    """The page as somebody sees it who points at a tensor, down to its end."""
    size = {"width": 1200, "height": 800}
    page = browser.new_page(viewport=size, color_scheme="light", reduced_motion="reduce")
    page.goto(url)
    box, frame = page.locator("#chart").bounding_box(), page.evaluate("chart.frame")
    x = box["x"] + frame["left"] + 0.3 * frame["width"]
    page.mouse.move(x, box["y"] + frame["top"] + 0.4 * frame["height"])
    panel = page.locator(".card").first.bounding_box()
    end = max(part["y"] + part["height"] for part in (box, panel))
    upper = {"x": 0, "y": 0, "width": 1200, "height": end + 12}
    page.screenshot(path=file, clip=upper, full_page=True)
    page.close()
    use_few_colors(file, {})
    print(f"wrote {file}")


@tool
def main(argv: list[str]) -> None:
    parser = study_parser("studies.page_shots", __doc__)
    add, made = parser.add_argument, Path("out/memory_page.html")
    add("page", type=Path, nargs="?", default=made, help="the page (default: %(default)s)")
    add("--readme", type=output_file, required=True, metavar="FILE.png", help="the picture")
    args = parser.parse_args(argv)
    if not args.page.is_file() or b'<canvas id="chart"' not in args.page.read_bytes():
        raise UsageError(f"{args.page} is not a page by python -m scripts.memory_page")
    with chromium() as browser:
        shoot(browser, args.page.absolute().as_uri(), args.readme)


if __name__ == "__main__":
    sys.exit(main())
