"""A folder with a saved model: whether it is one, which class loads it, and what an error says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

from outrider.errors import ModelError, UnsupportedModel


def model_folder(path: str | Path) -> Path:
    """The folder at `path`, if it can be a model's.

    Raises:
        ModelError: no folder, or one without a configuration.
    """
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{str(path)!r} is no model folder: it has no config.json; "
            "give a folder saved by save_pretrained"
        )
    return folder


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing its own bar on the terminal."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def silent() -> Iterator[None]:
    """Keep transformers from its bar and from saying which weights it missed."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_progress_bar():
            yield
    finally:
        logging.set_verbosity(level)


def unreadable(folder: Path, error: Exception) -> ModelError:
    """Return the typed error for a folder that transformers could not load."""
    family = _saved_config(folder).get("model_type")
    known = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if family is not None and family not in known:
        return UnsupportedModel(
            f"the model in {str(folder)!r} is of type {family!r}, which transformers does not know "
            "as a causal language model (a model's own code is not run); give a decoder-only model"
        )
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return ModelError(
        f"the model in {str(folder)!r} cannot be loaded: {reason[0]}; "
        "save it again with save_pretrained"
    )


def auto_class(folder: Path) -> Any:
    """Return the class of transformers that loads the folder's language model.

    Raises:
        UnsupportedModel: an encoder-decoder.
    """
    saved = _saved_config(folder)
    family = saved.get("model_type")
    # Of some of these transformers would load the decoder alone, which is no language model.
    if saved.get("is_encoder_decoder"):
        raise UnsupportedModel(
            f"the {family} model in {str(folder)!r} cannot be used: it is an encoder-decoder; "
            "only decoder-only language models can be a target or a draft model"
        )
    if family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForCausalLM
    # The language model of an image-text model is used with its text alone.
    pictures = family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if pictures else AutoModelForCausalLM


def _saved_config(folder: Path) -> dict[str, Any]:
    try:
        saved = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}
