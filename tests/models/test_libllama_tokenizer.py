"""A file's tokenizer: the tokens of the folder's, whole characters, ends of text, conversations."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from outrider.bench import gguf_file
from outrider.errors import InvalidConfig, ModelError, TokenOutOfRange
from outrider.models.bundled import bundled_path
from outrider.models.libllama import GgufTokenizer
from outrider.models.text import TextTokenizer
from tests.models.families import one_thread
from tests.models.libllama_models import bundled_file, needs_libllama, random_file

pytestmark = needs_libllama
single = pytest.fixture(scope="module", autouse=True)(one_thread)
TEXT = "def größe(x):\n    return 'ἀρετή 🙂', x\n"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|endoftext|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def ours() -> GgufTokenizer:
    return GgufTokenizer(bundled_file("target"))


@pytest.fixture(scope="module")
def theirs() -> TextTokenizer:
    return TextTokenizer(bundled_path("target"))


def with_facts(file: Path, **facts: object) -> Path:
    """A file of the bundled tokenizer and no tensors, with some facts in place of others."""
    from transformers import AutoConfig

    folder = bundled_path("target")
    config = AutoConfig.from_pretrained(folder)
    known = {"general.architecture": "llama"} | gguf_file._vocabulary(folder, config)
    gguf_file.write(file, known | {k.replace("__", "."): v for k, v in facts.items()}, {})
    return file


def test_tokens_and_texts_are_the_folders(ours, theirs) -> None:
    # Signs may be split otherwise: libllama has a fixed number of ways.
    for text in ("def mean", "größe", "ἀρετή 🙂"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(TEXT)) == TEXT
    assert ours.vocabulary() == theirs.vocabulary()
    assert ours.end_tokens() == theirs.end_tokens() == {0}
    assert ours.spellings("return") == theirs.spellings("return")
    assert ours.decode([0, *ours.encode("x"), 0]) == "x"
    assert ours.encode("") == [] and ours.decode([]) == ""
    assert len(ours.decode(ours.encode(TEXT * 50))) == 50 * len(TEXT)


def test_half_a_character_is_marked(ours) -> None:
    tokens = ours.encode("🙂")
    assert len(tokens) > 1
    assert ours.decode(tokens[:-1]).endswith("\ufffd") and ours.decode(tokens) == "🙂"


def test_a_lone_surrogate_is_refused(ours) -> None:
    with pytest.raises(InvalidConfig, match="lone surrogate"):
        ours.encode("a\udcffb")


def test_conversations_go_through_the_files_template(ours, tmp_path) -> None:
    assert not ours.has_chat_template
    with pytest.raises(InvalidConfig, match="no chat template"):
        ours.chat([{"role": "user", "content": "Hi"}])
    told = GgufTokenizer(with_facts(tmp_path / "chat.gguf", tokenizer__chat_template=TEMPLATE))
    assert told.has_chat_template
    tokens = told.chat([{"role": "user", "content": "Hi"}])
    assert tokens[0] == 0 and told.decode(tokens) == "user: Hi\nassistant:"
    with pytest.raises(InvalidConfig, match=r"refuses these messages.*no tools"):
        told.chat([{"role": "tool", "content": "Hi"}])
    with pytest.raises(InvalidConfig, match="at least one message"):
        told.chat([])


def test_what_only_fills_the_vocabulary_is_no_token(tmp_path) -> None:
    tokens = [*gguf_file._vocabulary(bundled_path("target"), _config())["tokenizer.ggml.tokens"]]
    kinds = [1] * len(tokens) + [5]
    file = with_facts(
        tmp_path / "wide.gguf",
        tokenizer__ggml__tokens=[*tokens, "[PAD4096]"],
        tokenizer__ggml__token_type=kinds,
    )
    assert "[PAD4096]" not in GgufTokenizer(file).vocabulary()


def _config():
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(bundled_path("target"))


def test_a_file_without_a_tokenizer_is_told() -> None:
    _, file = random_file()
    with pytest.raises(ModelError, match="holds no tokenizer"):
        GgufTokenizer(file)


def test_the_writer_writes_what_the_format_says(tmp_path) -> None:
    file = with_facts(tmp_path / "head.gguf", flag=True, number=1.5)
    data = file.read_bytes()
    assert data[:4] == b"GGUF" and struct.unpack("<IQ", data[4:16]) == (3, 0)


def test_spaces_before_signs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """libllama's own way takes them away for this kind of vocabulary."""
    monkeypatch.setattr(gguf_file, "_SPLIT", "llama-bpe")
    folder = bundled_path("draft")
    file = tmp_path / "spaces.gguf"
    model = LlamaForCausalLM.from_pretrained(folder)
    gguf_file.write_gguf(model, file, tokenizer=folder)
    tokenizer = GgufTokenizer(file)
    for text in ("a . b ? c , d 's", "x = y . z", " led", TEXT):
        ids = tokenizer.spell(text)
        assert tokenizer.decode(ids) == text
        # What has been told stays when more comes, but for a character's missing bytes.
        for end in range(len(ids)):
            assert text.startswith(tokenizer.decode(ids[:end]).rstrip("\ufffd"))


@pytest.mark.parametrize("token", [-1, 100_000])
def test_an_id_there_is_not(ours: GgufTokenizer, token: int) -> None:
    with pytest.raises(TokenOutOfRange, match=f"token {token} "):
        ours.decode([5, token])
