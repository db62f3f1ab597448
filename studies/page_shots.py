"""scripts.memory_page's page in Chromium: how fast it is, and its picture in the README.

python -m studies.page_shots                                                    # times
python -m studies.page_shots --readme studies/results/memory_page.png           # the picture

Says how long it took until there was a first picture (as Chromium itself reports it, the median of
several visits), and how long a change of policy takes until its first picture is drawn: numbers of
this machine, as it is now. Needs playwright (pip install playwright) and Chromium (apt install
chromium, say).
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from scripts.style import use_few_colors
from studies.common import run_study, study_parser
from trainer.flags import UsageError, output_file

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# A root user's Chromium has no sandbox of its own; and none should call home.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update")  # fmt: skip
VISITS = 7
# Until Chromium has drawn what came of it: the second frame begins when the first one is out.
TIME_OF_A_CHANGE = """async (i) => {
    const start = performance.now();
    choose(i);
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    return performance.now() - start;
}"""
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')"


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
    page.wait_for_function(f"{FIRST_PAINT}.length")
    milliseconds = page.evaluate(f"{FIRST_PAINT}[0].startTime")
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
    if find_spec("PIL"):
        use_few_colors(file, {})
    print(f"wrote {file}")


def study(argv: list[str]) -> None:
    """Raises UsageError."""
    parser = study_parser("studies.page_shots", __doc__)
    add = parser.add_argument
    add("page", type=Path, nargs="?", default=Path("out/memory_page.html"), metavar="PAGE",
        help="what scripts.memory_page wrote (default: %(default)s)")  # fmt: skip
    add("--readme", type=output_file, metavar="FILE.png", help="make the README's picture")
    args = parser.parse_args(argv)
    if not args.page.is_file() or b'<canvas id="chart"' not in args.page.read_bytes():
        raise UsageError(f"{args.page} is not a page by python -m scripts.memory_page")
    url = args.page.absolute().as_uri()
    with chromium() as browser:
        if args.readme:
            shoot(browser, url, args.readme)
            return
        paint = median(first_paint(browser, url) for _ in range(VISITS))
        changes = time_changes(browser, url)
        print(f"first paint {paint:.0f} ms (median of {VISITS}); a change of policy "
              f"{median(changes):.0f} ms, {max(changes):.0f} at most")  # fmt: skip


main = partial(run_study, study)


if __name__ == "__main__":
    sys.exit(main())
