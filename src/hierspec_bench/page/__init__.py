"""A bench record as one page that a browser shows: nothing to load, nothing to install.

write_report(document, Path("report.html"))
"""

from pathlib import Path
from typing import Any

from hierspec.paths import whole_file
from hierspec_bench.page.page import report_page

__all__ = ["report_page", "write_report"]


def write_report(document: dict[str, Any], path: Path) -> None:
    """Writes the page of a bench record, whole or not at all."""
    page = report_page(document)
    with whole_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
