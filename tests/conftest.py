"""Every test runs with the package's shape contracts switched on."""

from tests import shapes

shapes.install("outrider")
