"""`python -m outrider.train RECIPE --out DIR`: a run without the command line's progress bar."""

import argparse
import logging

from outrider.errors import OutriderError
from outrider.train import run_recipe
from outrider.train.loop import Progress

log = logging.getLogger(__name__)


def report(p: Progress) -> None:
    """One line a step; the held-out figure where it was measured."""
    held_out = "" if p.held_out is None else f"  {p.figure} {p.held_out:.2f}"
    log.info(
        "step %d/%d  loss %.3f  %.0f tok/s  %.0f s%s",
        p.step,
        p.steps,
        p.loss,
        p.rate_tok_s,
        p.elapsed_s,
        held_out,
    )


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.train", description="Train the model of a recipe."
    )
    parser.add_argument("recipe", help="a TOML file, or the name of a bundled recipe")
    parser.add_argument("--out", required=True, help="the folder of the checkpoint")
    parser.add_argument(
        "--max-minutes", type=float, default=None, help="stop and keep the state after so long"
    )
    parser.add_argument("--fresh", action="store_true", help="do not resume the run in the folder")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run_recipe(
            options.recipe,
            out=options.out,
            resume=not options.fresh,
            max_minutes=options.max_minutes,
            progress=report,
        )
    except OutriderError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
