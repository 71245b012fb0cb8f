"""GGUF files as targets and draft models, through libllama as llama-cpp-python carries it."""

from outrider.models.libllama.file import ModelFile, is_gguf
from outrider.models.libllama.target import LibllamaTarget
from outrider.models.libllama.tokenizer import GgufTokenizer

__all__ = ["GgufTokenizer", "LibllamaTarget", "ModelFile", "is_gguf"]
