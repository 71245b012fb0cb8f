"""Options that the commands of `outrider certify` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

WITHIN, ALPHA, TEXT_TOKENS = 0.02, 0.01, 16
"""How far from its law a subject may be, how sure to be, and how long texts are, by default."""

PromptFile = Annotated[
    Path | None,
    typer.Option("--file", "-f", help="Prompts, one a line; by default the bundled ones."),
]
Within = Annotated[float, typer.Option(help="Total variation per token that counts as lossless.")]
Alpha = Annotated[
    float, typer.Option(help="Chance of a false alarm, and of a bound that is too low.")
]
TextTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens per text.")]
Seed = Annotated[int, typer.Option(help="Of the first text.")]
