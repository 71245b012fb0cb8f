"""Nothing is left out silently: what transformers drops, and what cannot be honoured, is named."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import outrider
from outrider.drafters import NgramDrafter
from outrider.errors import InvalidConfig, OutriderWarning, VocabularyMismatch
from outrider.interop import fields
from tests.interop.tiny import near, padded, tiny

INPUTS = padded(lengths=(5, 7))
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": 96}


class Deaf(BaseStreamer):
    """A streamer that keeps nothing."""

    def put(self, value) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.fixture(scope="module")
def model():
    return tiny()


def test_what_transformers_drops_on_the_way_to_a_callable(model) -> None:
    """When this fails, transformers has changed what arrives: read `lost.py` again."""
    got: dict[str, object] = {}

    def catch(model, input_ids, streamer=None, assistant_model=None, tokenizer=None, **rest):
        got.update(rest, streamer=streamer, assistant_model=assistant_model, tokenizer=tokenizer)
        return input_ids

    model.generate(
        **INPUTS,
        **GREEDY,
        assistant_model=model,
        tokenizer=object(),
        assistant_tokenizer=object(),
        synced_gpus=False,
        prompt_lookup_num_tokens=3,
        custom_generate=catch,
    )
    lost = {"streamer", "assistant_model", "tokenizer", "assistant_tokenizer", "synced_gpus"}
    assert {name for name in lost if got.get(name) is not None} == set()
    handed = {"logits_processor", "stopping_criteria", "generation_config"}
    assert handed < set(got) <= handed | lost | fields.HANDED
    assert got["generation_config"].prompt_lookup_num_tokens == 3


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("name", ["assistant_model", "streamer", "synced_gpus"])
def test_what_is_dropped_is_found_and_named(name: str, positional: bool, model) -> None:
    value = {"assistant_model": model, "synced_gpus": True, "streamer": Deaf()}[name]
    ids = padded(lengths=(5,))["input_ids"]
    place = {"synced_gpus": 5, "assistant_model": 6, "streamer": 7}[name]
    given = [None] * place + [value] if positional else [None]
    told = {} if positional else {name: value}
    with pytest.raises(InvalidConfig, match=name):
        model.generate(
            ids, *given[1:], **GREEDY, **told, custom_generate=outrider.custom_generate()
        )


@pytest.mark.parametrize("name", ["tokenizer", "assistant_tokenizer"])
def test_tokenizers_that_are_dropped_are_found_and_named(name: str, model) -> None:
    with pytest.raises(InvalidConfig, match=rf"custom_generate\({name}=\.\.\.\)"):
        model.generate(
            **INPUTS, **GREEDY, **{name: object()}, custom_generate=outrider.custom_generate()
        )


def test_a_callable_called_by_hand_looks_into_no_frame(model) -> None:
    from outrider.interop.lost import check_lost

    def generate(assistant_model):
        check_lost()
        return assistant_model

    assert generate(3) == 3


def test_every_field_of_the_generation_config_is_sorted() -> None:
    """A new field of a new transformers must be read, refused, or known to change nothing."""
    sorted_ = [fields.READ, fields.ARRIVES, fields.UNREAD, frozenset(fields.REFUSED)]
    assert set(fields.defaults()) - frozenset().union(*sorted_) == set()
    assert sum(map(len, sorted_)) == len(frozenset().union(*sorted_))


def test_a_field_nobody_has_sorted_is_refused_once_it_is_set(monkeypatch) -> None:
    usual = {**fields.defaults(), "brand_new": None}
    monkeypatch.setattr(fields, "defaults", lambda: usual)
    config = GenerationConfig()
    fields.check_fields(config)
    config.brand_new = 3
    with pytest.raises(InvalidConfig, match=r"brand_new=3 cannot .* does not know"):
        fields.check_fields(config)


@pytest.mark.parametrize(
    "told",
    [
        {"num_beams": 2},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
        {"output_scores": True, "return_dict_in_generate": True},
        {"output_logits": True, "return_dict_in_generate": True},
        {"output_attentions": True, "return_dict_in_generate": True},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"cache_implementation": "static"},
        {"use_mtp": True},
        {"assistant_early_exit": 1},
        {"num_assistant_tokens_schedule": "heuristic"},
        {"past_key_values": DynamicCache()},
    ],
    ids=lambda told: next(iter(told)),
)
def test_what_cannot_be_honoured_is_named(told: dict, model) -> None:
    name = next(iter(told))
    if name == "use_mtp" and not hasattr(GenerationConfig(), name):
        pytest.skip("this transformers has no such field")
    with pytest.raises(InvalidConfig, match=name):
        model.generate(**INPUTS, **{**GREEDY, **told}, custom_generate=outrider.custom_generate())


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"k": 3}, "did you mean 'num_assistant_tokens'"),
        ({"asistant_model": 3}, "did you mean 'assistant_model'"),
        ({"rule": 5}, "^rule=5: the name of a rule"),
        ({"drafter": "suffix+int8"}, "'int8' is not offered inside generate"),
        ({"drafter": "ngram+draft:x"}, "a draft model guesses alone"),
        ({"drafter": "auto+ngram"}, "names one drafter twice"),
    ],
)
def test_what_the_factory_is_told_wrongly_is_named(told: dict, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        outrider.custom_generate(**told)


def test_a_forgotten_call_is_named(model) -> None:
    with pytest.raises(InvalidConfig, match=r"call it: .*custom_generate\(\)"):
        model.generate(**INPUTS, **GREEDY, custom_generate=outrider.custom_generate)


def test_several_drafters_without_a_model_guess_together(model) -> None:
    plain = model.generate(**INPUTS, **GREEDY)
    both = outrider.custom_generate(drafter="suffix+recycle")
    assert torch.equal(model.generate(**INPUTS, **GREEDY, custom_generate=both), plain)
    assert both.metrics.drafted > 0


@pytest.mark.parametrize(
    "told",
    [
        {"repetition_penalty": 1.6},
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [[72], [12, 59]]},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [1, 4, 7 + len(ids) % 3]},
        {"sequence_bias": {(4,): 3.0}},
    ],
    ids=lambda told: next(iter(told)),
)
def test_processors_see_the_drafted_path(told: dict, model) -> None:
    """One row at a time: beside padding transformers' own processors see the padding too."""
    inputs = {name: value[1:, :] for name, value in INPUTS.items()}
    assert inputs["attention_mask"].all()
    plain = model.generate(**inputs, **{**GREEDY, "max_new_tokens": 12}, **told)
    assert not torch.equal(plain, model.generate(**inputs, **{**GREEDY, "max_new_tokens": 12}))
    ours = model.generate(
        **inputs,
        **{**GREEDY, "max_new_tokens": 12},
        **told,
        custom_generate=outrider.custom_generate(drafter="ngram"),
    )
    assert torch.equal(ours, plain)


def test_typical_p_is_read(model) -> None:
    told = {**GREEDY, "do_sample": True, "typical_p": 1e-6, "top_k": 0}
    ours = model.generate(**INPUTS, **told, custom_generate=outrider.custom_generate())
    assert torch.equal(ours, model.generate(**INPUTS, **told))


def test_processors_that_keep_a_state_are_named(model) -> None:
    with pytest.raises(InvalidConfig, match="remembers"):
        model.generate(
            **INPUTS,
            **GREEDY,
            guidance_scale=2.0,
            custom_generate=outrider.custom_generate(),
        )


def test_processors_of_ones_own_are_read_or_named(model) -> None:
    class Mine(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    def ask(*processors, **told):
        return model.generate(
            **INPUTS,
            **{**GREEDY, **told},
            logits_processor=LogitsProcessorList(processors),
            custom_generate=outrider.custom_generate(),
        )

    plain = model.generate(**INPUTS, **GREEDY)
    assert torch.equal(ask(TemperatureLogitsWarper(0.7), TopKLogitsWarper(3)), plain)
    assert torch.equal(ask(Mine()), plain)
    with pytest.raises(InvalidConfig, match="another law"):
        ask(TopPLogitsWarper(0.9), do_sample=True, temperature=0.7, top_k=0)
    with pytest.raises(InvalidConfig, match="another law"):
        ask(TopKLogitsWarper(3), Mine(), do_sample=True, top_k=0)
    with pytest.raises(InvalidConfig, match="min_tokens_to_keep=2"):
        ask(TopPLogitsWarper(0.9, min_tokens_to_keep=2), do_sample=True, top_k=0)
    with pytest.raises(InvalidConfig, match="ends at"):
        ask(MinNewTokensLengthLogitsProcessor(7, 2, 5))


def test_inputs_that_are_no_rows_of_tokens_are_named(model) -> None:
    embeds = torch.zeros(1, 3, 32)
    with pytest.raises(InvalidConfig, match="inputs_embeds"):
        model.generate(inputs_embeds=embeds, **GREEDY, custom_generate=outrider.custom_generate())
    right = {name: value.flip(1) for name, value in INPUTS.items()}
    with pytest.raises(InvalidConfig, match="padding_side='left'"):
        model.generate(**right, **GREEDY, custom_generate=outrider.custom_generate())
    with pytest.raises(InvalidConfig, match="position_ids"):
        model.generate(
            **INPUTS,
            position_ids=torch.arange(7).repeat(2, 1),
            **GREEDY,
            custom_generate=outrider.custom_generate(),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"assistent_model": 1}, "did you mean"),
        ({"prompt_lookup": 3}, "did you mean 'prompt_lookup_num_tokens'"),
        ({"drafter": "ngrams"}, "did you mean 'ngram'"),
        ({"drafter": "draft"}, "use draft:PATH"),
        ({"assistant_model": 3}, "assistant_model=int"),
        ({"rule": "blok"}, "did you mean 'block'"),
        ({"max_texts": 0}, "max_texts=0"),
        ({"pack": 1}, "pack=1"),
    ],
)
def test_the_factory_refuses_what_cannot_be_meant(options: dict, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        outrider.custom_generate(**options)


@pytest.mark.parametrize(
    ("options", "told", "message"),
    [
        ({"num_assistant_tokens": -1}, {}, "num_assistant_tokens=-1"),
        ({"num_assistant_tokens": 3}, {"num_assistant_tokens": 4}, "contradict"),
        ({"drafter": NgramDrafter()}, {"prompt_lookup_num_tokens": 2}, "exclude each other"),
        ({"drafter": "none"}, {"max_matching_ngram_size": 2}, "max_matching_ngram_size=2 is for"),
        ({"drafter": "ngram"}, {"assistant_confidence_threshold": 0.3}, "is for an assistant"),
        ({"drafter": object()}, {}, "no propose"),
        ({"rule": "greedy"}, {"do_sample": True}, "would change the law"),
    ],
)
def test_numbers_that_fit_no_drafter_are_refused(options, told, message, model) -> None:
    with pytest.raises(InvalidConfig, match=message):
        model.generate(
            **INPUTS, **{**GREEDY, **told}, custom_generate=outrider.custom_generate(**options)
        )


def test_assistants_of_another_vocabulary_are_refused(model) -> None:
    class Tokens:
        def __init__(self, *tokens: str) -> None:
            self._ids = {token: i for i, token in enumerate(tokens)}

        def get_vocab(self) -> dict[str, int]:
            return dict(self._ids)

    wide = tiny(vocab=101)
    for options in (
        {"assistant_model": wide},
        {"assistant_model": wide, "tokenizer": Tokens("a"), "assistant_tokenizer": Tokens("b")},
    ):
        with pytest.raises(VocabularyMismatch):
            model.generate(**INPUTS, **GREEDY, custom_generate=outrider.custom_generate(**options))
    same = {"tokenizer": Tokens("a"), "assistant_tokenizer": Tokens("a")}
    callable_ = outrider.custom_generate(assistant_model=wide, **same)
    out = model.generate(**INPUTS, **GREEDY, custom_generate=callable_)
    assert torch.equal(out, model.generate(**INPUTS, **GREEDY))


def test_a_model_that_never_drafts_is_spoken_of_once(model) -> None:
    callable_ = outrider.custom_generate(assistant_model=near(model), num_assistant_tokens=0)
    with pytest.warns(OutriderWarning, match="never asked"):
        model.generate(**INPUTS, **GREEDY, custom_generate=callable_)
    out = model.generate(**INPUTS, **GREEDY, custom_generate=callable_)
    assert torch.equal(out, model.generate(**INPUTS, **GREEDY))


def test_an_assistants_own_numbers_are_read(model) -> None:
    draft = near(model)
    draft.generation_config.num_assistant_tokens = 2
    callable_ = outrider.custom_generate(assistant_model=draft)
    model.generate(**INPUTS, **{**GREEDY, "max_new_tokens": 9}, custom_generate=callable_)
    assert len(callable_.metrics.drafted_per_pos) == 2
