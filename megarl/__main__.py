"""`python -m megarl` is the command `megarl`."""

import sys

from megarl.cli import main

sys.exit(main())
