"""A bench record as one page that a browser shows: nothing to load, nothing to install.

write_report(Record.read(Path("result.json")), Path("report.html"))
"""

from pathlib import Path

from hierspec.paths import whole_file
from hierspec_bench.page.page import report_page
from hierspec_bench.record import Record

__all__ = ["report_page", "write_report"]


def write_report(record: Record, path: Path) -> None:
    """Writes the page of a bench record, whole or not at all."""
    page = report_page(record)
    with whole_file(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
