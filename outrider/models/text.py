"""A checkpoint's tokenizer, as the engine needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from outrider.errors import InvalidConfig, ModelError


class TextTokenizer:
    """Text to token ids and back, the ends of text, and the chat template.

    Raises:
        ModelError: a folder without a tokenizer that can be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise ModelError(
                f"{str(folder)!r} holds no tokenizer that can be read ({error}); save the "
                "model's tokenizer into the folder with save_pretrained"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens the tokenizer adds by itself."""
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens, spaces left as they are."""
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def vocabulary(self) -> dict[str, int]:
        """Every token's text and id."""
        return dict(self._tokenizer.get_vocab())

    def end_tokens(self) -> frozenset[int]:
        """The ends of text: the generation configuration's, or else the tokenizer's."""
        try:
            ends = GenerationConfig.from_pretrained(self.folder).eos_token_id
        except OSError:
            ends = None
        ends = self._tokenizer.eos_token_id if ends is None else ends
        if ends is None:
            return frozenset()
        return frozenset(ends if isinstance(ends, list) else [ends])

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to the assistant's turn.

        Raises:
            InvalidConfig: a tokenizer without a chat template.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidConfig(
                f"the tokenizer in {str(self.folder)!r} has no chat template; use generate(...)"
            )
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False))
