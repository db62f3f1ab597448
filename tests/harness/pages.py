"""Open an HTML page of this project in Chromium."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def opened(chromium: Any, file: Path, **how: Any) -> Iterator[Any]:
    """Yield the page. In the end the page has written nothing on its console, and has asked for no
    other file. `how`: settings of a browser context."""
    context, complaints, asked = chromium.new_context(**how), list[str](), set[str]()
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.add(request.url.partition("#")[0]))
    page.goto(file.as_uri())
    yield page  # (the browser's end ends the context of a test that failed)
    context.close()
    assert [words for words in complaints if not words.startswith("Canvas2D: Multiple read")] == []
    assert {url for url in asked if not url.startswith("data:")} == {file.as_uri()}


def shown(page: Any, selector: str) -> list[str]:
    """Return the text of each element."""
    return [words.strip() for words in page.locator(selector).all_text_contents()]
