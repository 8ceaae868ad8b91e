"""A process to be killed, started by store_soak.py: writes batches to an archive and prints which are committed."""

import importlib.util
import os
import struct
import sys
from pathlib import Path
from types import ModuleType

import hierspec

DOCUMENTS = 3  # per batch


def document(batch: int, number: int, size: int) -> bytes:
    """A document: its two numbers, then numbers computed from them, `size` in all."""
    return struct.pack(f"<{size}i", batch, number, *(batch ^ number ^ index for index in range(2, size)))


def archive_module() -> ModuleType:
    """Imports only this module: the package imports numpy, which would take most of this process's time."""
    spec = importlib.util.spec_from_file_location("archive", Path(hierspec.__file__).parent / "stores" / "archive.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["archive"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    path, limit, namespace, first, count, size = sys.argv[1:]
    archive = archive_module().Archive(Path(path), int(limit), "v")
    for batch in range(int(first), int(first) + int(count)):
        archive.write([(namespace.encode(), document(batch, number, int(size))) for number in range(DOCUMENTS)])
        os.write(1, b"%d\n" % batch)
    archive.close()


if __name__ == "__main__":
    main()
