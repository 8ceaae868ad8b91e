"""`python -m hierspec` is `hierspec`."""

import sys

from hierspec.cli.main import main

sys.exit(main())
