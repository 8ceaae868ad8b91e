"""python -m hierspec_bench.page RECORD.json report.html"""

import json
import sys
from pathlib import Path

from hierspec.core.errors import HierspecError
from hierspec_bench.page import write_report


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    record, page = map(Path, arguments)
    try:
        write_report(_read(record), page)
    except HierspecError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _read(record: Path) -> dict[str, object]:
    try:
        document = json.loads(record.read_text(encoding="utf-8"))
    except OSError as error:
        raise HierspecError(f"{record} cannot be read ({error.strerror}): give the JSON of hierspec bench.") from error
    except ValueError as error:
        raise HierspecError(f"{record} is not JSON: give what hierspec bench --output wrote.") from error
    return document if isinstance(document, dict) else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
