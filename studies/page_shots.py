"""Look at scripts.memory_page's page in Chromium: pictures of it, and how fast it is.

python -m studies.page_shots                  # pictures in out/, light and dark, and times
python -m studies.page_shots --readme studies/results/memory_page.png

    out/page_1400_light.png ...    at 1,400, 800 and 390 pixels: a laptop, a tablet, a phone

Says how long it took until there was a first picture (as Chromium itself reports it, the median of
several visits), and how long a change of policy takes until its first picture is drawn: numbers of
this machine, as it is now. Needs playwright (pip install playwright) and Chromium (apt install
chromium, say).
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from scripts.memory_timeline_pictures import use_few_colors
from studies.common import run_study
from trainer.flags import OneLineParser, UsageError, output_file, output_folder

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A root user's Chromium has no sandbox of its own; and none should call home.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update")  # fmt: skip
WIDTHS = {1400: 900, 800: 1000, 390: 844}
VISITS = 7
# Until Chromium has drawn what came of it: the second frame begins when the first one is out.
TIME_OF_A_CHANGE = """async (i) => {
    const start = performance.now();
    choose(i);
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    return performance.now() - start;
}"""


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


def first_paint(browser: Any, url: str) -> float:
    """Milliseconds from the begin of the navigation on."""
    page = browser.new_page()
    page.goto(url)
    page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
    milliseconds = page.evaluate(
        "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    )
    page.close()
    return milliseconds


def time_changes(browser: Any, url: str) -> list[float]:
    """Milliseconds of a change to each policy."""
    page = browser.new_page()
    page.goto(url)
    n = page.evaluate("steps.length")
    times = [page.evaluate(TIME_OF_A_CHANGE, i) for _ in range(3) for i in range(n)]
    page.close()
    return times


def shoot(browser: Any, url: str, folder: Path) -> None:
    for width, height in WIDTHS.items():
        for scheme in ("light", "dark"):
            size = {"width": width, "height": height}
            page = browser.new_page(viewport=size, color_scheme=scheme, reduced_motion="reduce")
            page.goto(url)
            file = folder / f"page_{width}_{scheme}.png"
            page.screenshot(path=file, full_page=True)
            page.close()
            print(f"wrote {file}")


def shoot_for_readme(browser: Any, url: str, file: Path) -> None:
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
    if find_spec("PIL"):
        use_few_colors(file, {})
    print(f"wrote {file}")


def check(args: argparse.Namespace) -> None:
    """Raises UsageError."""
    if not args.page.is_file():
        raise UsageError(f"there is no page {args.page}: python -m scripts.memory_page")
    if b'<canvas id="chart"' not in args.page.read_bytes():
        raise UsageError(f"{args.page} was not written by python -m scripts.memory_page")
    if args.readme and args.readme.suffix != ".png":
        raise UsageError(f"--readme {args.readme}: must end in .png")


def study(argv: list[str]) -> None:
    """Raises UsageError."""
    parser = OneLineParser(prog="python -m studies.page_shots", description=__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    # fmt: off
    add("page", type=Path, nargs="?", default=Path("out/memory_page.html"), metavar="PAGE",
        help="what scripts.memory_page wrote (default: %(default)s)")
    add("--out", type=output_folder, default=Path("out"), metavar="FOLDER",
        help="where the pictures go (default: %(default)s)")
    add("--readme", type=output_file, metavar="FILE.png",
        help="make the README's picture, no other")
    # fmt: on
    args = parser.parse_args(argv)
    check(args)
    url = args.page.absolute().as_uri()
    with chromium() as browser:
        if args.readme:
            shoot_for_readme(browser, url, args.readme)
            return
        args.out.mkdir(parents=True, exist_ok=True)
        shoot(browser, url, args.out)
        paint = median(first_paint(browser, url) for _ in range(VISITS))
        changes = time_changes(browser, url)
        print(f"first paint {paint:.0f} ms (median of {VISITS}); a change of policy "
              f"{median(changes):.0f} ms, {max(changes):.0f} at most")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    return run_study(study, argv)


if __name__ == "__main__":
    sys.exit(main())
