"""`python -m fusescout`."""

from __future__ import annotations

import sys

from fusescout.cli import main

if __name__ == "__main__":
    sys.exit(main())
