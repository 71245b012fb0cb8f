"""The command line: `outrider generate`, `demo`, `doctor`, `certify` and `train`."""

from outrider.cli.app import main, run

__all__ = ["main", "run"]
