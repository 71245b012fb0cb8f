"""Reading a recipe: a TOML file becomes records, and a typo an error that names the key meant."""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from outrider.errors import InvalidConfig
from outrider.train.recipe import (
    CorpusRecipe,
    DistilRecipe,
    EagleRecipe,
    ExitRecipe,
    HeadRecipe,
    ModelRecipe,
    MtpRecipe,
    Recipe,
    TokenizerRecipe,
    TrainRecipe,
)

T = TypeVar("T")

SECTIONS: Mapping[str, type[Any]] = {
    "corpus": CorpusRecipe,
    "tokenizer": TokenizerRecipe,
    "model": ModelRecipe,
    "train": TrainRecipe,
    "distil": DistilRecipe,
    "eagle": EagleRecipe,
    "mtp": MtpRecipe,
    "exit": ExitRecipe,
}


def load_recipe(path: Path) -> Recipe:
    """The recipe in a TOML file; InvalidConfig for whatever in it cannot be meant."""
    return parse_recipe(_table(path))


def load_head_recipe(path: Path) -> HeadRecipe:
    """The recipe of a head in a TOML file; InvalidConfig for whatever in it cannot be meant."""
    return _build(HeadRecipe, _sections(_table(path)), "recipe")


def _table(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise InvalidConfig(
            f"no recipe at {path}; give a TOML file or the name of a bundled recipe"
        )
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"recipe {path} is not TOML: {error}; correct the file") from error


def parse_recipe(table: Mapping[str, Any]) -> Recipe:
    """The recipe of a parsed TOML table."""
    return _build(Recipe, _sections(table), "recipe")


def _sections(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with its known sections as records."""
    return {
        key: _build(SECTIONS[key], value, key)
        if key in SECTIONS and isinstance(value, Mapping)
        else value
        for key, value in table.items()
    }


def _build(kind: type[T], table: Mapping[str, Any], section: str) -> T:
    """A record from a table whose keys are checked against the record's fields."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(fields))}"
            )
            raise InvalidConfig(f"unknown key {key!r} in [{section}]; {hint}")
    missing = [
        name
        for name, f in fields.items()
        if name not in table
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InvalidConfig(f"[{section}] lacks {', '.join(missing)}; add them to the recipe")
    values = {key: _frozen(value) for key, value in table.items()}
    for key, value in values.items():
        _check_type(fields[key].type, value, f"{section}.{key}")
    return kind(**values)


def _frozen(value: Any) -> Any:
    """Lists become tuples, at every depth."""
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


_PLAIN_TYPES: Mapping[Any, tuple[type, ...]] = {
    int: (int,),
    float: (int, float),
    str: (str,),
    bool: (bool,),
    int | None: (int,),
}


def _check_type(annotation: Any, value: Any, name: str) -> None:
    """Plain fields hold what their annotation says; a bool is no number."""
    allowed = _PLAIN_TYPES.get(annotation)
    if allowed is not None and type(value) not in allowed:
        raise InvalidConfig(
            f"{name} is {value!r}, a {type(value).__name__}; give a {allowed[-1].__name__}"
        )
