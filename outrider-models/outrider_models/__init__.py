"""Outrider's bundled models: where their checkpoints, heads, recipes and prompts lie."""

from pathlib import Path

__all__ = ["HEADS", "MODELS", "PROMPT_SETS", "path", "prompts", "recipe"]
__version__ = "0.1.0"

MODELS = ("target", "draft")
HEADS = ("eagle", "mtp", "early-exit")
"""Of the target."""
PROMPT_SETS = ("code", "prose", "foreign")

_ROOT = Path(__file__).parent


def path(name: str) -> Path:
    """The folder of `target`, `draft` or a head."""
    return _known(name, (*MODELS, *HEADS), "model", _ROOT / name)


def prompts(name: str) -> Path:
    """The JSONL file of an evaluation set: `code` (held out), `prose` or `foreign`."""
    return _known(name, PROMPT_SETS, "prompt set", _ROOT / "eval" / f"{name}.jsonl")


def recipe(name: str) -> Path:
    """The TOML file of a recipe; the corpus manifest lies beside it."""
    names = sorted(p.stem for p in (_ROOT / "recipes").glob("*.toml"))
    return _known(name, names, "recipe", _ROOT / "recipes" / f"{name}.toml")


def _known(name: str, names: tuple[str, ...] | list[str], kind: str, found: Path) -> Path:
    if name not in names:
        raise ValueError(f"no bundled {kind} {name!r}; there are {', '.join(names)}")
    return found
