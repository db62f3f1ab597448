"""What makes the numbers and pictures of our documents: `python -m studies.NAME`."""

import scripts  # noqa: F401  (what a user may do to any tool at any time: Ctrl-C, `| head`)
