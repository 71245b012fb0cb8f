"""A draft of another tokenizer: the same guesses where only the numbering differs, exact texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from outrider import LLM, SamplingParams
from outrider.drafters import ModelDrafter, NoDrafter
from outrider.engine import Emitter, Engine, Requests
from outrider.errors import InvalidConfig, VocabularyMismatch
from outrider.llm.options import Speculation
from outrider.models.base import Rows
from outrider.models.bridge import BridgedModel, Dictionary
from outrider.models.bundled import bundled_path, eval_prompts
from outrider.models.hf import HuggingFaceTarget
from outrider.models.text import TextTokenizer
from outrider.types import Request


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled draft with its tokens numbered in another order."""
    folder = tmp_path_factory.mktemp("renumbered")
    shutil.copytree(bundled_path("draft"), folder, dirs_exist_ok=True)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    size = len(data["model"]["vocab"])
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1)).tolist()
    fixed = {token["id"] for token in data["added_tokens"]}
    free = [i for i in range(size) if i not in fixed]
    new = dict(zip(free, [i for i in order if i not in fixed], strict=True))
    vocab = data["model"]["vocab"]
    data["model"]["vocab"] = {token: new.get(i, i) for token, i in vocab.items()}
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    table = model.get_input_embeddings().weight
    moved = table.detach().clone()
    for old, place in new.items():
        moved[place] = table[old].detach()
    table.data.copy_(moved)
    if model.get_output_embeddings().weight is not table:
        head = model.get_output_embeddings().weight
        rows = head.detach().clone()
        for old, place in new.items():
            rows[place] = head[old].detach()
        head.data.copy_(rows)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a tokenizer of 400 tokens of its own."""
    folder = tmp_path_factory.mktemp("stranger")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(eval_prompts("prose"), trainer)
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def bridged(folder: Path) -> BridgedModel:
    draft = HuggingFaceTarget.load(folder, dtype=torch.float32)
    target = TextTokenizer(bundled_path("target"))
    return BridgedModel(draft, Dictionary.of(target, TextTokenizer(folder), 4096))


def texts(drafter, sampling: SamplingParams, rule: str | None = None):
    tokenizer = TextTokenizer(bundled_path("target"))
    target = HuggingFaceTarget.load(bundled_path("target"), dtype=torch.float32)
    engine = Engine(target, drafter, Emitter(tokenizer))
    requests = Requests(engine, depth=4, end_tokens=frozenset())
    prompts = [tuple(tokenizer.encode(text)[:40]) for text in eval_prompts("code")[:4]]
    done = requests.complete([Request(prompt, sampling, rule=rule) for prompt in prompts])
    return [one.token_ids for one in done], engine.metrics


def test_another_numbering_drafts_the_very_same(renumbered: Path) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=0.0)
    own = ModelDrafter(HuggingFaceTarget.load(bundled_path("draft"), dtype=torch.float32))
    theirs = ModelDrafter(bridged(renumbered))
    (one, metrics), (other, across) = texts(own, sampling), texts(theirs, sampling)
    assert one == other
    assert (metrics.drafted, metrics.accepted) == (across.drafted, across.accepted)
    assert metrics.acceptance_rate > 0.3


@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "coupled"])
def test_a_stranger_changes_no_text(stranger: Path, seed: int | None) -> None:
    sampling = SamplingParams(max_tokens=32, temperature=float(seed is not None), seed=seed)
    plain, _ = texts(NoDrafter(), sampling)
    speculative, metrics = texts(ModelDrafter(bridged(stranger)), sampling)
    assert speculative == plain and metrics.drafted > 0


def test_only_shared_tokens_are_drafted(stranger: Path) -> None:
    model = bridged(stranger)
    shared = model.dictionary.target_ids.tolist()
    assert 256 <= len(shared) < 400 < len(model.dictionary.pieces)
    long = next(i for i, piece in enumerate(model.dictionary.pieces) if len(piece) > 2)
    seq = model.open(64)
    logits = model.score(Rows((seq,), (3,), torch.tensor([shared[0], long, shared[1]])))
    assert logits.shape == (3, 4096)
    finite = logits.isfinite().all(0).nonzero().flatten().tolist()
    assert finite == sorted(shared)
    spelled = [model.dictionary.pieces[token] for token in (shared[0], long, shared[1])]
    own = model.model.open(64)
    flat = torch.tensor([token for piece in spelled for token in piece])
    rows = model.model.score(Rows((own,), (len(flat),), flat))
    ends = torch.tensor([len(piece) for piece in spelled]).cumsum(0) - 1
    theirs = rows[ends][:, model.dictionary.draft_ids]
    torch.testing.assert_close(logits[:, shared], theirs, rtol=0, atol=1e-5)
    assert (model.length(seq), model.num_staged(seq)) == (0, 3)
    model.commit(seq, 2)
    assert model.length(seq) == 2
    assert model.model.length(seq) == 1 + len(model.dictionary.pieces[long])
    model.close(seq)


def test_vocabularies_without_a_common_token_are_refused() -> None:
    class Odd(TextTokenizer):
        def vocabulary(self) -> dict[str, int]:
            return {"\x00only": 0}

    target = TextTokenizer(bundled_path("target"))
    with pytest.raises(VocabularyMismatch, match="no token in common"):
        Dictionary.of(target, Odd(bundled_path("draft")), 4096)


def test_the_spec_loads_it(renumbered: Path) -> None:
    llm = LLM.load("bundled", f"bridge:{renumbered}", dtype="float32")
    (done,) = llm.generate("def f(", SamplingParams(max_tokens=12, temperature=0.0))
    assert llm.info()["drafter"]["name"] == "bridge" and done.stats.accepted > 0
    config = {"model": str(renumbered), "use_heterogeneous_vocab": True}
    assert Speculation("auto").updated(config).drafter == f"bridge:{renumbered}"
    with pytest.raises(InvalidConfig, match="bridge:PATH"):
        LLM.load("bundled", "bridge")
