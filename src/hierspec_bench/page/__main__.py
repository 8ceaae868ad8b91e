"""python -m hierspec_bench.page RECORD.json report.html"""

import sys
from pathlib import Path

from hierspec.core.errors import HierspecError
from hierspec_bench.page import write_report
from hierspec_bench.record import Record


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    record, page = map(Path, arguments)
    try:
        write_report(Record.read(record), page)
    except HierspecError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
