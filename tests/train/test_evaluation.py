"""The evaluation sets are well formed, and agreement means what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.errors import InvalidConfig
from outrider.models.tokenizer import load_tokenizer
from outrider.train import load_recipe
from outrider.train.evaluate import Prompt, agreement, load_prompts
from outrider.train.prepare import build_model
from outrider.train.writing import continue_rows
from tests.train.train_recipes import RECIPE, prepared_in

BUNDLE = Path(__file__).parents[2] / "outrider-models" / "outrider_models"


@pytest.mark.parametrize(("name", "least"), [("code", 200), ("prose", 60), ("foreign", 60)])
def test_sets_are_well_formed(name: str, least: int) -> None:
    prompts = load_prompts(BUNDLE / "eval" / f"{name}.jsonl")
    assert len(prompts) >= least
    assert len({p.id for p in prompts}) == len(prompts)
    assert all(64 <= p.num_tokens <= 200 and 0 <= p.overlap <= 1 for p in prompts)
    tokenizer = load_tokenizer(BUNDLE / "target")
    assert all(len(tokenizer.encode(p.text).ids) == p.num_tokens for p in prompts)


def test_code_prompts_come_from_held_out_files() -> None:
    held_out = load_recipe(BUNDLE / "recipes" / "target.toml").corpus.held_out
    for prompt in load_prompts(BUNDLE / "eval" / "code.jsonl"):
        assert prompt.source.startswith(held_out)


def test_a_line_that_is_no_prompt(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "x"}\n', "utf-8")
    with pytest.raises(InvalidConfig, match=r"line 1 of bad\.jsonl is no prompt"):
        load_prompts(path)


def test_a_model_agrees_with_itself(tmp_path: Path) -> None:
    prepared = prepared_in(tmp_path)
    model = build_model(RECIPE, prepared.tokenizer.get_vocab_size()).eval()
    prompts = [Prompt(str(i), "x", "def f(self):\n" * n, 0, 0.5) for i, n in enumerate((1, 1, 2))]
    found = agreement(model, model, prepared.tokenizer, prompts, max_tokens=5)
    assert (found.num_prompts, found.num_tokens) == (3, 15)
    assert found.greedy == pytest.approx(1.0)
    assert found.sampled == pytest.approx(1.0, abs=1e-5)
    assert found.overlap == pytest.approx(0.5)


def test_greedy_rows_take_the_likeliest_token(tmp_path: Path) -> None:
    prepared = prepared_in(tmp_path)
    model = build_model(RECIPE, prepared.tokenizer.get_vocab_size()).eval()
    prompts_BT = torch.arange(12).view(2, 6)
    draw = torch.Generator().manual_seed(1)
    text_BT = continue_rows(model, prompts_BT, 4, torch.tensor([True, True]), draw)
    assert torch.equal(text_BT[:, :6], prompts_BT)
    with torch.no_grad():
        expected_BT = model(text_BT).logits.argmax(-1)[:, 5:-1]
    assert torch.equal(text_BT[:, 6:], expected_BT)
