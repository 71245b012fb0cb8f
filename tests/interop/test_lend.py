"""A model is lent and given back: attention, layers, modes, gradients, life time, threads."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import outrider
from outrider.errors import PromptTooLong, UnsupportedModel
from outrider.interop import lend
from tests.interop.tiny import near, padded, tiny

INPUTS = padded()
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def test_models_are_given_back_as_they_were() -> None:
    models = [tiny(), near(tiny())]
    models[0].train()
    models[0].model.layers[0].eval()
    before = [(m.config._attn_implementation, [type(x) for x in m.modules()],
               [x.training for x in m.modules()], copy.deepcopy(m.state_dict()))
              for m in models]  # fmt: skip
    with torch.no_grad():
        wanted = [m(**INPUTS).logits for m in models]
    callable_ = outrider.custom_generate(assistant_model=models[1])
    for _ in range(2):
        models[0].generate(**INPUTS, **GREEDY, custom_generate=callable_)
    for model, (attention, types, modes, weights), logits in zip(
        models, before, wanted, strict=True
    ):
        assert model.config._attn_implementation == attention == "sdpa"
        assert [type(x) for x in model.modules()] == types
        assert [x.training for x in model.modules()] == modes
        assert all(torch.equal(w, weights[n]) for n, w in model.state_dict().items())
        with torch.no_grad():
            assert torch.equal(model(**INPUTS).logits, logits)
    models[0](**INPUTS, labels=INPUTS["input_ids"]).loss.backward()
    assert all(p.grad is not None for p in models[0].parameters())
    pickle.loads(pickle.dumps(copy.deepcopy(models[0])))


def test_a_model_is_tried_out_once_and_again_when_it_has_changed() -> None:
    model = tiny()
    model.generate(**INPUTS, **GREEDY, custom_generate=outrider.custom_generate())
    first = lend.lent(model)
    model.generate(**INPUTS, **GREEDY, custom_generate=outrider.custom_generate(drafter="none"))
    assert lend.lent(model) is first
    model.double()
    plain = model.generate(**INPUTS, **GREEDY)
    out = model.generate(**INPUTS, **GREEDY, custom_generate=outrider.custom_generate())
    assert torch.equal(out, plain)
    assert lend.lent(model) is not first


def test_weights_changed_in_between_are_used() -> None:
    model = tiny()
    callable_ = outrider.custom_generate()
    before = model.generate(**INPUTS, **GREEDY, custom_generate=callable_)
    model.load_state_dict(tiny(seed=7).state_dict())
    out = model.generate(**INPUTS, **GREEDY, custom_generate=callable_)
    assert torch.equal(out, model.generate(**INPUTS, **GREEDY))
    assert not torch.equal(out, before)


def test_nothing_keeps_a_model_alive() -> None:
    model, draft = tiny(), near(tiny())
    callable_ = outrider.custom_generate(assistant_model=draft)
    model.generate(**INPUTS, **GREEDY, custom_generate=callable_)
    seen = [weakref.ref(model), weakref.ref(draft)]
    del model
    gc.collect()
    assert seen[0]() is None and seen[1]() is draft
    del draft, callable_
    gc.collect()
    assert seen[1]() is None


def test_a_model_that_cannot_be_used_is_left_as_it_was() -> None:
    size = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=50, decoder_start_token_id=0, **size))
    attention = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=3,
                       custom_generate=outrider.custom_generate())  # fmt: skip
    assert model.config._attn_implementation == attention and model.training


def test_a_refused_prompt_leaves_the_model_as_it_was() -> None:
    model = tiny(max_position_embeddings=12)
    with pytest.raises(PromptTooLong):
        model.generate(**INPUTS, **GREEDY, custom_generate=outrider.custom_generate())
    assert model.config._attn_implementation == "sdpa"


def test_threads_share_models_in_any_order() -> None:
    models = [tiny(), near(tiny())]
    wanted = [model.generate(**INPUTS, **GREEDY) for model in models]
    got: dict[int, torch.Tensor] = {}

    def work(index: int) -> None:
        model, other = models[index % 2], models[1 - index % 2]
        callable_ = outrider.custom_generate(assistant_model=other)
        got[index] = model.generate(**INPUTS, **GREEDY, custom_generate=callable_)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(got[index], wanted[index % 2]) for index in range(4))


def test_a_model_that_assists_itself() -> None:
    model = tiny()
    callable_ = outrider.custom_generate(assistant_model=model)
    out = model.generate(**INPUTS, **GREEDY, custom_generate=callable_)
    assert torch.equal(out, model.generate(**INPUTS, **GREEDY))
    assert callable_.metrics.acceptance_rate == 1.0


def test_packing_is_for_good_and_changes_no_token() -> None:
    model = tiny()
    plain = model.generate(**INPUTS, **GREEDY)
    callable_ = outrider.custom_generate(pack=True)
    assert torch.equal(model.generate(**INPUTS, **GREEDY, custom_generate=callable_), plain)
    assert any(type(x).__module__ == "outrider.models.packing" for x in model.modules())
    assert torch.equal(model.generate(**INPUTS, **GREEDY), plain)
