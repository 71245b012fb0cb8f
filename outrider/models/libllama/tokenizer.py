"""The tokenizer in a GGUF file, as the engine needs it."""

from __future__ import annotations

import ctypes
import importlib
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import InvalidConfig, ModelError
from outrider.models.base import check_tokens
from outrider.models.libllama.file import ModelFile
from outrider.models.text import Tokenizer, check_messages, whole

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_UNUSED = 1 << 1
"""libllama's attribute of tokens that only fill the vocabulary up."""
_NO_VOCABULARY = 0


class GgufTokenizer(Tokenizer):
    """Text to token ids and back, the ends of text, and the chat template, as the file says.

    Raises:
        ModelError: a file that cannot be read, or without a tokenizer.
        MissingExtra: llama-cpp-python is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path)
        self._file = ModelFile(path, vocabulary=True)
        self._bindings, self._vocab = self._file.bindings, self._file.vocab
        if self._bindings.llama_vocab_type(self._vocab) == _NO_VOCABULARY:
            raise ModelError(
                f"{str(path)!r} holds no tokenizer; convert the model again, with its tokenizer"
            )

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens the tokenizer adds by itself.

        Raises:
            InvalidConfig: text with a lone surrogate, which no bytes stand for.
        """
        return self._encoded(text, add_special=True)

    def spell(self, text: str) -> list[int]:
        """Token ids of a text in the middle of others, without special tokens."""
        return self._encoded(text, add_special=False)

    def _encoded(self, text: str, *, add_special: bool) -> list[int]:
        said = whole(text).encode()
        most = len(said) + 2
        while True:
            ids = (ctypes.c_int32 * most)()
            count = self._bindings.llama_tokenize(
                self._vocab, said, len(said), ids, most, add_special, True
            )
            if count >= 0:
                return ids[:count]
            most = -count

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens, spaces left as they are.

        libllama's own way would take spaces before signs away, for some vocabularies.

        Raises:
            TokenOutOfRange: an id the vocabulary does not hold.
        """
        said = b"".join(self._piece(token) for token in ids)
        if ids and self._adds_space and said.startswith(b" "):
            said = said[1:]
        return said.decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        """What a token stands for; nothing for a special one."""
        check_tokens([token], self._file.vocab_size)
        most = 16
        while True:
            said = ctypes.create_string_buffer(most)
            size = self._bindings.llama_token_to_piece(self._vocab, token, said, most, 0, False)
            if size >= 0:
                return said.raw[:size]
            most = -size

    @cached_property
    def _adds_space(self) -> bool:
        """Whether a text is given a space in front, which is not its own."""
        first = self.spell("a")[:1]
        said = ctypes.create_string_buffer(64)
        tokens = (ctypes.c_int32 * 1)(*first)
        size = self._bindings.llama_detokenize(
            self._vocab, tokens, len(first), said, len(said), False, False
        )
        apart = self._piece(first[0]) if first else b""
        return apart.startswith(b" ") and not said.raw[: max(0, size)].startswith(b" ")

    def vocabulary(self) -> dict[str, int]:
        """Every token's text and id, but those that only fill the vocabulary up."""
        bindings, vocab = self._bindings, self._vocab
        return {
            bindings.llama_vocab_get_text(vocab, i).decode("utf-8", "replace"): i
            for i in range(self._file.vocab_size)
            if not bindings.llama_vocab_get_attr(vocab, i) & _UNUSED
        }

    def end_tokens(self) -> frozenset[int]:
        """The ends of text and of a turn."""
        return self._ends

    @cached_property
    def _ends(self) -> frozenset[int]:
        ends = self._bindings.llama_vocab_is_eog
        return frozenset(i for i in range(self._file.vocab_size) if ends(self._vocab, i))

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be written with it."""
        return self._template is not None

    @cached_property
    def _template(self) -> str | None:
        found = self._bindings.llama_model_chat_template(self._file.handle, None)
        return None if found is None else found.decode("utf-8", "replace")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to the assistant's turn.

        Raises:
            InvalidConfig: a file without a chat template, or messages it refuses.
        """
        if self._template is None:
            raise InvalidConfig(f"{str(self.folder)!r} has no chat template; use generate(...)")
        check_messages(messages)
        formats = importlib.import_module("llama_cpp.llama_chat_format")
        try:
            formatter = formats.Jinja2ChatFormatter(
                self._template,
                eos_token=self._special(self._bindings.llama_vocab_eos(self._vocab)),
                bos_token=self._special(self._bindings.llama_vocab_bos(self._vocab)),
            )
            text = formatter(messages=[dict(message) for message in messages]).prompt
        except Exception as error:
            raise InvalidConfig(
                f"the chat template in {str(self.folder)!r} refuses these messages ({error}); "
                "give dictionaries with a role and a content it knows"
            ) from error
        return self.spell(text)

    def _special(self, token: int) -> str:
        """The text of a special token; empty where there is none."""
        if token < 0:
            return ""
        return self._bindings.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace")

    def for_grammars(self, ends: Sequence[int]) -> LLTokenizer:
        """llguidance's view of the vocabulary.

        Raises:
            ValueError: a vocabulary it cannot read.
        """
        from llguidance.llamacpp import lltokenizer_from_vocab

        with warnings.catch_warnings():
            # It asks libllama under names of before.
            warnings.simplefilter("ignore", DeprecationWarning)
            return lltokenizer_from_vocab(self._vocab, eos_token=list(ends))
