"""A GGUF file: whether it is one, whether it holds a model that can be decoded with, and its facts.

Only causal language models of attention are taken. What libllama would run and cannot roll back,
or what is no language model, is refused by name.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path
from typing import Any

from outrider.errors import ModelError, UnsupportedModel
from outrider.models.libllama.library import (
    CHANGING,
    complaint,
    forget_complaints,
    interrupted,
    library,
)
from outrider.models.libllama.products import Products

MAGIC = b"GGUF"


def is_gguf(path: str | Path) -> bool:
    """Whether a path names a GGUF file: by its ending, or by its first bytes."""
    file = Path(path).expanduser()
    if file.suffix.lower() == ".gguf":
        return not file.is_dir()
    try:
        with file.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


class ModelFile:
    """A loaded GGUF file; its weights stay in the file and are read as they are needed (mmap).

    Those that are laid out for products are copied into memory; the file's pages stay mapped, and
    the system drops them where memory is short.

    Attributes:
        laid_out_bytes: of weights that were laid out in memory for Outrider's own products.

    Args:
        path: the file, or the first part of a model in several.
        vocabulary: True loads the tokenizer alone.
        products: which lay out the weights they are for; None leaves all of them to libllama.

    Raises:
        ModelError: nothing is there, or nothing that libllama can read.
        UnsupportedModel: no causal language model, or one that cannot be rolled back.
        MissingExtra: llama-cpp-python is not installed.
    """

    def __init__(
        self, path: str | Path, *, vocabulary: bool = False, products: Products | None = None
    ) -> None:
        self.path, self.products = Path(path).expanduser(), products
        self.bindings = library()
        self.handle, self.laid_out_bytes = self._loaded(vocabulary)
        free: Any = self.bindings.llama_model_free
        self.close = weakref.finalize(self, free, self.handle)
        self.vocab: Any = self.bindings.llama_model_get_vocab(self.handle)
        self.vocab_size = int(self.bindings.llama_vocab_n_tokens(self.vocab))
        self.family = self.fact("general.architecture") or "unnamed"
        if not vocabulary:
            self._refuse()

    def _loaded(self, vocabulary: bool) -> tuple[Any, int]:
        """The model, and how many bytes of its weights were laid out."""

        def load() -> Any:
            return _load(self.bindings, self.path, vocabulary)

        with CHANGING:
            return (load(), 0) if self.products is None else self.products.load(load)

    def fact(self, key: str) -> str | None:
        """A value of the file's metadata, as text; None where it states none."""
        size = int(self.bindings.llama_model_meta_val_str(self.handle, key.encode(), None, 0))
        if size < 0:
            return None
        buffer = ctypes.create_string_buffer(size + 1)
        self.bindings.llama_model_meta_val_str(self.handle, key.encode(), buffer, size + 1)
        return buffer.value.decode("utf-8", "replace")

    def own_fact(self, key: str) -> str | None:
        """A value under the name of the model's family."""
        return self.fact(f"{self.family}.{key}")

    @property
    def num_parameters(self) -> int:
        """Weights, all tensors together."""
        return int(self.bindings.llama_model_n_params(self.handle))

    @property
    def quantisation(self) -> str:
        """The kind of most of its weights, such as Q4_K - Medium."""
        kind = self.bindings.llama_model_ftype(self.handle)
        name = self.bindings.llama_ftype_name(kind)
        return "unknown" if name is None else name.decode("utf-8", "replace")

    @property
    def window(self) -> int:
        """Tokens a sliding window reaches back; 0 where no layer has one."""
        return int(self.bindings.llama_model_n_swa(self.handle))

    @property
    def context(self) -> int:
        """Tokens a text may hold."""
        whole = int(self.bindings.llama_model_n_ctx_train(self.handle))
        return whole if self.first_context is None else self.first_context

    @property
    def first_context(self) -> int | None:
        """Tokens a `longrope` model was first trained for; None of another.

        Its rotary frequencies are others where a context of libllama, all texts together, is
        longer. A context grows here, and what is cached must not change meanwhile: it keeps to
        this length.
        """
        kind = self.own_fact("rope.scaling.type")
        first = int(self.own_fact("rope.scaling.original_context_length") or 0)
        return first if first and kind not in ("yarn", "linear", "none") else None

    def _refuse(self) -> None:
        """Raise for what is no causal language model of attention."""
        reasons = {
            "it is an encoder-decoder": self.bindings.llama_model_has_encoder,
            "it has no decoder": lambda model: not self.bindings.llama_model_has_decoder(model),
            "it is a diffusion model": self.bindings.llama_model_is_diffusion,
            "its recurrent state cannot be rolled back in libllama": (
                self.bindings.llama_model_is_recurrent
            ),
            "its layers of recurrent state cannot be rolled back in libllama": (
                self.bindings.llama_model_is_hybrid
            ),
            "its attention is not causal: it makes embeddings, no text": (
                lambda _: self.own_fact("attention.causal") == "false"
            ),
        }
        for reason, holds in reasons.items():
            if holds(self.handle):
                raise UnsupportedModel(
                    f"the {self.family} model in {str(self.path)!r} cannot be used: {reason}; give "
                    "a causal language model of attention layers"
                )


def _load(bindings: Any, path: Path, vocabulary: bool) -> Any:
    if not path.is_file():
        raise ModelError(
            f"model={str(path)!r} is no file; give the path of a GGUF file "
            "(`hf download NAME FILE --local-dir DIR` fetches one)"
        )
    params = bindings.llama_model_default_params()
    params.vocab_only = vocabulary
    params.n_gpu_layers = 0
    forget_complaints()
    try:
        handle = bindings.llama_model_load_from_file(os.fsencode(path), params)
    except OSError as error:  # A ctypes call that met a fault.
        raise ModelError(f"{str(path)!r} cannot be loaded ({error}); fetch it again") from error
    if (interrupt := interrupted()) is not None:
        if handle:
            bindings.llama_model_free(handle)
        raise interrupt
    if not handle:
        raise ModelError(
            f"{str(path)!r} cannot be loaded as a GGUF file: {complaint()}; fetch or convert it "
            "again, or update llama-cpp-python for a newer architecture"
        )
    return handle
