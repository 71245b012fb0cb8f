"""Where texts end: end tokens, the user's criteria in the middle of accepted runs, streamers."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import (
    AutoTokenizer,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

import outrider
from outrider.errors import InvalidConfig, OutriderWarning
from outrider.models.bundled import bundled_path
from tests.interop.tiny import near, padded, tiny

GREEDY = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


class Sum(StoppingCriteria):
    """Ends a text once its last three tokens sum to a multiple; notes what it was asked."""

    def __init__(self, multiple: int) -> None:
        self.multiple = multiple
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.extend(tuple(row.tolist()) for row in input_ids)
        return input_ids[:, -3:].sum(1) % self.multiple == 0


class Notes(BaseStreamer):
    """Keeps every call."""

    def __init__(self) -> None:
        self.calls: list[list] = []
        self.ended = 0

    def put(self, value) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def both(model, asked: dict, **options):
    """Plain and through the callable, with the criteria and streamer each of its own."""
    plain = model.generate(**asked)
    return plain, model.generate(**asked, custom_generate=outrider.custom_generate(**options))


@pytest.mark.parametrize("end", [None, 96])
@pytest.mark.parametrize("multiple", [3, 7, 11])
def test_criteria_end_texts_where_plain_decoding_does(end: int | None, multiple: int) -> None:
    """With an end token ended texts are padded; without one they go on until the last ends."""
    model, inputs = tiny(), padded()
    asked = {**inputs, **GREEDY, "eos_token_id": end}
    asked["stopping_criteria"] = StoppingCriteriaList([Sum(multiple)])
    for options in ({"assistant_model": model}, {"assistant_model": near(model)}, {}):
        plain, out = both(model, asked, **options)
        assert torch.equal(out, plain)
    longest = model.generate(**inputs, **GREEDY, eos_token_id=end)
    assert plain.shape != longest.shape or not torch.equal(plain, longest)


def test_criteria_see_every_token_of_a_text_in_order_and_none_beyond() -> None:
    """The draft is the target itself: every run is accepted whole, and the end lies inside one."""
    model = tiny()
    ids = padded()["input_ids"][2:3]
    asked = {"input_ids": ids, **GREEDY, "eos_token_id": 96}
    plain, ours = Sum(7), Sum(7)
    model.generate(**asked, stopping_criteria=StoppingCriteriaList([plain]))
    callable_ = outrider.custom_generate(assistant_model=model, num_assistant_tokens=5)
    out = model.generate(
        **asked, stopping_criteria=StoppingCriteriaList([ours]), custom_generate=callable_
    )
    assert ours.asked == plain.asked
    assert (out.shape[1] - ids.shape[1]) % 6, "an end between two rounds would show nothing"


def test_a_shorter_length_of_ones_own_wins() -> None:
    model, inputs = tiny(), padded()
    asked = {**inputs, **GREEDY}
    asked["stopping_criteria"] = StoppingCriteriaList([MaxLengthCriteria(17)])
    plain, out = both(model, asked)
    assert plain.shape[1] == 17
    assert torch.equal(out, plain)


def test_a_failing_criterion_raises_its_own_error_and_leaves_nothing_behind() -> None:
    class Broken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise LookupError("mine")

    model, inputs = tiny(), padded()
    with pytest.raises(LookupError, match="mine"):
        model.generate(
            **inputs,
            **GREEDY,
            stopping_criteria=StoppingCriteriaList([Broken()]),
            custom_generate=outrider.custom_generate(),
        )
    assert model.config._attn_implementation == "sdpa"
    plain, out = both(model, {**inputs, **GREEDY})
    assert torch.equal(out, plain)


@pytest.mark.parametrize("end", [None, 96])
def test_a_streamer_gets_the_calls_plain_decoding_makes(end: int | None) -> None:
    model, inputs = tiny(), padded()
    asked = {**inputs, **GREEDY, "eos_token_id": end}
    asked["stopping_criteria"] = StoppingCriteriaList([Sum(7)])
    plain, ours = Notes(), Notes()
    model.generate(**asked, streamer=plain)
    model.generate(
        **asked,
        custom_generate=outrider.custom_generate(assistant_model=near(model), streamer=ours),
    )
    assert ours.calls == plain.calls
    assert ours.ended == plain.ended == 1


def test_tokens_are_streamed_as_they_are_settled() -> None:
    """The streamer sees a round's tokens before the next round is made."""
    model, inputs = tiny(), padded(lengths=(9,))
    made_at: list[int] = []

    class Watch(Notes):
        def put(self, value) -> None:
            super().put(value)
            made_at.append(callable_.metrics.committed)

    callable_ = outrider.custom_generate(assistant_model=near(model), streamer=Watch())
    model.generate(**inputs, **GREEDY, custom_generate=callable_)
    assert made_at[0] == 0 and made_at[1] < made_at[-1] == 16


def test_text_streamers(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_path("target"))
    model = tiny(vocab=4096)
    inputs = tokenizer("def mean(values):\n", return_tensors="pt")
    model.generate(**inputs, **GREEDY, streamer=TextStreamer(tokenizer))
    wanted = capsys.readouterr().out
    callable_ = outrider.custom_generate(streamer=TextStreamer(tokenizer))
    model.generate(**inputs, **GREEDY, custom_generate=callable_)
    assert capsys.readouterr().out == wanted != ""
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    asked = {**inputs, **GREEDY, "custom_generate": outrider.custom_generate(streamer=streamer)}
    thread = threading.Thread(target=model.generate, kwargs=asked)
    thread.start()
    assert "".join(streamer) + "\n" == wanted
    thread.join()


def test_stop_strings_need_the_factory() -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_path("target"))
    model = tiny(vocab=4096)
    inputs = tokenizer("def mean(values):\n", return_tensors="pt")
    text = tokenizer.decode(model.generate(**inputs, **GREEDY)[0, inputs["input_ids"].shape[1] :])
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    plain = model.generate(**inputs, **GREEDY, stop_strings=[stop], tokenizer=tokenizer)
    callable_ = outrider.custom_generate(tokenizer=tokenizer, stop_strings=[stop])
    assert torch.equal(model.generate(**inputs, **GREEDY, custom_generate=callable_), plain)
    assert plain.shape[1] < inputs["input_ids"].shape[1] + 16
    with pytest.raises(InvalidConfig, match="needs tokenizer="):
        outrider.custom_generate(stop_strings=[stop])


def test_the_context_ends_a_text_with_a_word() -> None:
    model = tiny(max_position_embeddings=24)
    inputs = padded(lengths=(12, 12))
    asked = {**inputs, **GREEDY, "max_new_tokens": 20}
    plain = model.generate(**asked, eos_token_id=96)
    with pytest.warns(OutriderWarning, match="at the model's context of 24"):
        out = model.generate(**asked, eos_token_id=96, custom_generate=outrider.custom_generate())
    assert torch.equal(out, plain[:, :24])
    with pytest.raises(InvalidConfig, match="without an eos_token_id"):
        model.generate(**asked, custom_generate=outrider.custom_generate())
