"""The figures of the model card: `python -m outrider.train.report` prints them as JSON."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.models.bundled import EVAL_SETS, bundled_path
from outrider.models.checkpoint import load_llama
from outrider.models.tokenizer import END_OF_TEXT_ID, load_tokenizer
from outrider.train.corpus import load_corpus
from outrider.train.evaluate import Agreement, agreement, load_prompts
from outrider.train.lm import perplexity
from outrider.train.recipe_file import load_recipe
from outrider.train.stream import TokenStream

PERPLEXITY_TOKENS = 65_536
ROW = 512


@dataclass(frozen=True, slots=True)
class Report:
    """Parameters and held-out perplexity (rows of 512) of both models, agreement per set."""

    parameters: Mapping[str, int]
    perplexity: Mapping[str, float]
    agreement: Mapping[str, Agreement]


def evaluate_pair(
    target: Path, draft: Path, recipe: Path, prompts: Path, max_tokens: int
) -> Report:
    """Measure the pair in two checkpoint folders on held-out text and the sets in `prompts`."""
    models = {"target": load_llama(target), "draft": load_llama(draft)}
    tokenizer = load_tokenizer(target)
    settings = load_recipe(recipe)
    held_out = load_corpus(settings.corpus, recipe.parent / settings.corpus.manifest).held_out
    documents = [e.ids for e in tokenizer.encode_batch([d.text for d in held_out])]
    stream = TokenStream(documents, END_OF_TEXT_ID, settings.seed)
    rows = stream.rows(0, min(stream.epoch_tokens, PERPLEXITY_TOKENS) // ROW * ROW, ROW)
    return Report(
        {name: sum(p.numel() for p in m.parameters()) for name, m in models.items()},
        {name: perplexity(m, *rows) for name, m in models.items()},
        {
            name: agreement(
                models["target"],
                models["draft"],
                tokenizer,
                load_prompts(prompts / f"{name}.jsonl"),
                max_tokens=max_tokens,
            )
            for name in EVAL_SETS
        },
    )


def main() -> None:
    """Read the arguments and print the report."""
    bundle = bundled_path("target").parent
    parser = argparse.ArgumentParser(prog="python -m outrider.train.report", description=__doc__)
    parser.add_argument("target", type=Path, nargs="?", default=bundle / "target")
    parser.add_argument("draft", type=Path, nargs="?", default=bundle / "draft")
    parser.add_argument("--recipe", type=Path, default=bundle / "recipes" / "target.toml")
    parser.add_argument("--prompts", type=Path, default=bundle / "eval")
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()
    report = evaluate_pair(given.target, given.draft, given.recipe, given.prompts, given.max_tokens)
    sys.stdout.write(json.dumps(asdict(report), indent=1) + "\n")


if __name__ == "__main__":
    main()
