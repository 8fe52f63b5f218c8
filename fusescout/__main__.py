"""`python -m fusescout`."""

from __future__ import annotations

from fusescout.cli import console

if __name__ == "__main__":
    console()
