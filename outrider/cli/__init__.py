"""The command line: `outrider generate`, `demo`, `doctor`, `profile`, `certify` and `train`."""

from outrider.cli.app import main, run

__all__ = ["main", "run"]
