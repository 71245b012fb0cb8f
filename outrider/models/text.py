"""A checkpoint's tokenizer, as the engine needs it."""

from __future__ import annotations

import json
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.config import as_tokens
from outrider.errors import InvalidConfig, ModelError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
"""Files of which a saved tokenizer has one at least."""


class Tokenizer(ABC):
    """Text to token ids and back, the ends of text, and the chat template."""

    folder: Path
    """Where it was read from: a folder, or a file."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens the tokenizer adds by itself.

        Raises:
            InvalidConfig: text with a lone surrogate, which no bytes stand for.
        """

    @abstractmethod
    def spell(self, text: str) -> list[int]:
        """Token ids of a text in the middle of others, without special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens, spaces left as they are."""

    @abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """Every token's text and id."""

    @abstractmethod
    def end_tokens(self) -> frozenset[int]:
        """The ends of text."""

    @property
    @abstractmethod
    def has_chat_template(self) -> bool:
        """Whether conversations can be written with it."""

    @abstractmethod
    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to the assistant's turn.

        Raises:
            InvalidConfig: a tokenizer without a chat template, or messages it refuses.
        """

    @abstractmethod
    def for_grammars(self, ends: Sequence[int]) -> LLTokenizer:
        """llguidance's view of it, with these ends of text.

        Raises:
            InvalidConfig: a tokenizer of Python code alone.
            ValueError: a tokenizer that llguidance cannot read.
        """

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The token ids of a word as it stands and, where that is another one, after a space."""
        forms = [word] if word[:1].isspace() else [word, f" {word}"]
        return list(dict.fromkeys(tuple(ids) for form in forms if (ids := self.spell(form))))


class TextTokenizer(Tokenizer):
    """A checkpoint's: text to token ids and back, the ends of text, and the chat template.

    Raises:
        ModelError: a folder without a tokenizer that can be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not any((self.folder / name).is_file() for name in TOKENIZER_FILES):
            raise ModelError(
                f"{str(folder)!r} holds no tokenizer: tokenizer.json is missing; save the model's "
                "tokenizer into the folder with save_pretrained, or decode token ids with "
                "SpeculativeDecoder and outrider.models.HuggingFaceTarget"
            )
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise ModelError(
                f"{str(folder)!r} holds no tokenizer that can be read ({error}); save the "
                "model's tokenizer into the folder with save_pretrained"
            ) from error
        self._decoder = _decoder_of(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens the tokenizer adds by itself.

        Raises:
            InvalidConfig: text with a lone surrogate, which no bytes stand for.
        """
        # Without a word on its length, which is checked where it matters.
        return list(self._tokenizer.encode(whole(text), verbose=False))

    def spell(self, text: str) -> list[int]:
        """Token ids of a text in the middle of others, without special tokens."""
        return list(self._tokenizer.encode(whole(text), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens, spaces left as they are."""
        if self._decoder is not None:
            return self._decoder.decode(ids, skip_special_tokens=True)
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def serialised(self) -> str:
        """The tokenizer as one JSON text, without padding and truncation.

        Raises:
            InvalidConfig: a tokenizer of Python code alone.
        """
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise InvalidConfig(
                f"the tokenizer in {str(self.folder)!r} has no tokenizer.json; save it as a fast "
                "tokenizer with save_pretrained"
            )
        bare = copy(fast)
        bare.no_padding()
        bare.no_truncation()
        return bare.to_str()

    def for_grammars(self, ends: Sequence[int]) -> LLTokenizer:
        """llguidance's view of it, with those of these ends of text that are tokens of it.

        Raises:
            InvalidConfig: a tokenizer of Python code alone.
            ValueError: a tokenizer that llguidance cannot read.
        """
        from llguidance import LLTokenizer

        num_tokens = max(self.vocabulary().values()) + 1
        known = [end for end in ends if end < num_tokens]
        return LLTokenizer(self.serialised(), eos_token=known or None)

    def vocabulary(self) -> dict[str, int]:
        """Every token's text and id."""
        return dict(self._tokenizer.get_vocab())

    def end_tokens(self) -> frozenset[int]:
        """The ends of text: what generation_config.json, config.json or the tokenizer says first.

        Raises:
            ModelError: a configuration that cannot be read.
        """
        for name in ("generation_config.json", "config.json"):
            ends = _stated_ends(self.folder / name)
            if ends is not None:
                return ends
        end = self._tokenizer.eos_token_id
        return frozenset() if end is None else frozenset([end])

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be written with it."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to the assistant's turn.

        Raises:
            InvalidConfig: a tokenizer without a chat template, or messages it refuses.
        """
        if not self.has_chat_template:
            raise InvalidConfig(
                f"the tokenizer in {str(self.folder)!r} has no chat template; use generate(...)"
            )
        check_messages(messages)
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            raise InvalidConfig(
                f"the chat template in {str(self.folder)!r} refuses these messages ({error}); "
                "give dictionaries with a role and a content it knows"
            ) from error
        return list(self._tokenizer.encode(whole(text), add_special_tokens=False))


def _decoder_of(tokenizer: Any) -> Any | None:
    """What decodes behind transformers' own code; None where a family's tokenizer does it itself.

    Every token of every text is decoded, and looking at what was given takes longer than that.
    """
    own, plain = type(tokenizer), PreTrainedTokenizerFast
    if not isinstance(tokenizer, plain):
        return None
    same = own.decode is plain.decode and own._decode is plain._decode
    return tokenizer.backend_tokenizer if same else None


def check_messages(given: Any) -> None:
    """Refuses what is no conversation.

    Raises:
        InvalidConfig: no list, an empty one, or something in it that is no message.
    """
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise InvalidConfig(
            f"messages={reprlib.repr(given)}: a list of dictionaries with role and content is due"
        )
    messages = cast("Sequence[Any]", given)
    if len(messages) == 0:
        raise InvalidConfig(f"messages={messages!r}: at least one message is due")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise InvalidConfig(
                f"messages[{i}]={reprlib.repr(message)}: a dictionary with role and content is "
                "due, such as {'role': 'user', 'content': 'Hello'}"
            )


def whole(text: str) -> str:
    """The text itself, which tokenizers read as UTF-8.

    Raises:
        InvalidConfig: a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidConfig(
            f"the prompt holds a lone surrogate ({text[error.start]!r} at {error.start}), which is "
            "no character; decode its bytes with errors='replace'"
        ) from error
    return text


def _stated_ends(file: Path) -> frozenset[int] | None:
    """The `eos_token_id` a configuration file states, one or several; None where it states none."""
    if not file.is_file():
        return None
    try:
        # The file and not transformers' record of it, which fills in the family's default id.
        stated = json.loads(file.read_text(encoding="utf-8"))
        parts = (stated, stated.get("text_config") or {})
        ends = next(
            (part["eos_token_id"] for part in parts if part.get("eos_token_id") is not None), None
        )
        if ends is None:
            return None
        return frozenset(as_tokens("eos_token_id", ends if isinstance(ends, list) else [ends]))
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{str(file)!r} cannot be read ({error}); save it again with save_pretrained"
        ) from error
