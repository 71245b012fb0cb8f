"""The front door on the bundled pair: text in, text out, the same with and without a drafter."""

from __future__ import annotations

import threading

import pytest

from outrider import LLM, SamplingParams
from outrider.errors import (
    EmptyPrompt,
    InvalidConfig,
    ModelError,
    PromptTooLong,
    TokenOutOfRange,
)
from outrider.models.bundled import bundled_path, eval_prompts

GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
PROMPTS = [prompt[:200] for prompt in eval_prompts("code")[:6]]


@pytest.fixture(scope="module")
def spec() -> LLM:
    return LLM.load("bundled", "draft")


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM.load("bundled", drafter="none")


@pytest.mark.parametrize("drafter", ["draft", "ngram", "suffix"])
@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(max_tokens=40, seed=7, top_p=0.95)], ids=["greedy", "seed"]
)
def test_every_drafter_gives_the_text_of_plain_decoding(drafter, params, plain: LLM) -> None:
    llm = LLM.load("bundled", drafter=drafter)
    ours, theirs = llm.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    # Without strict a near tie may fall either way: see docs/exactness.md.
    assert sum(a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True)) >= 5
    assert all(c.text == llm.tokenizer.decode(c.token_ids) for c in ours)
    assert llm.metrics.accepted > 0 and plain.metrics.drafted == 0


def test_samples_come_prompt_major_and_differ(spec: LLM) -> None:
    params = SamplingParams(max_tokens=12, n=3, seed=1)
    done = spec.generate(PROMPTS[:2], params)
    assert [c.index for c in done] == [0, 1, 2, 0, 1, 2]
    assert len({c.token_ids for c in done}) > 2
    assert spec.generate(PROMPTS[:1], params)[2].token_ids == done[2].token_ids


def test_a_mixed_batch_gives_what_each_gives_alone(spec: LLM) -> None:
    each = [
        SamplingParams(max_tokens=9, temperature=0.0),
        SamplingParams(max_tokens=21, seed=4),
        SamplingParams(max_tokens=30, seed=5, top_k=20, temperature=0.7),
        SamplingParams(max_tokens=14, seed=6, min_p=0.1),
    ]
    strict = LLM.load("bundled", strict=True)
    together = strict.generate(PROMPTS[:4], each)
    for prompt, params, done in zip(PROMPTS, each, together, strict=False):
        assert strict.generate(prompt, params)[0].token_ids == done.token_ids


def test_a_stream_is_the_completion_in_pieces(spec: LLM) -> None:
    (whole,) = spec.generate(PROMPTS[0], GREEDY)
    deltas = list(spec.stream(PROMPTS[0], GREEDY))
    assert "".join(d.text for d in deltas) == whole.text
    assert sum((d.token_ids for d in deltas), ()) == whole.token_ids
    assert sum((d.sources for d in deltas), ()) == whole.sources
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == whole.finish_reason == "length"
    assert "draft" in whole.sources


def test_stop_strings_end_the_text_where_plain_decoding_would(spec: LLM, plain: LLM) -> None:
    (free,) = plain.generate(PROMPTS[1], GREEDY)
    stop = free.text[10:13]
    params = SamplingParams(max_tokens=40, temperature=0.0, stop=(stop,))
    ours, theirs = spec.generate(PROMPTS[1], params)[0], plain.generate(PROMPTS[1], params)[0]
    assert ours.text == theirs.text == free.text[: free.text.index(stop)]
    assert ours.finish_reason == "stop" and ours.stop_reason == stop
    assert ours.token_ids == theirs.token_ids


def test_speculation_can_be_off_for_one_request(spec: LLM) -> None:
    (done,) = spec.generate(PROMPTS[0], GREEDY, depth=0)
    assert done.stats.drafted == 0 and set(done.sources) == {"bonus"}


def test_threads_share_one_llm(spec: LLM) -> None:
    alone = [spec.generate(p, GREEDY)[0].token_ids for p in PROMPTS[:3]]
    out: dict[int, tuple[int, ...]] = {}

    def work(i: int) -> None:
        out[i] = spec.generate(PROMPTS[i], GREEDY)[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [out[i] for i in range(3)] == alone


def test_it_says_what_it_is(spec: LLM) -> None:
    info = spec.info()
    assert repr(spec) == (
        f"LLM({info['model']!r}, backend='transformers', dtype={info['dtype']!r}, device='cpu', "
        f"drafter='draft', k={info['k']})"
    )


def test_bad_requests_are_named(spec: LLM) -> None:
    with pytest.raises(EmptyPrompt):
        spec.generate("")
    with pytest.raises(PromptTooLong, match="context holds 2048"):
        spec.generate([5] * 2048)
    with pytest.raises(TokenOutOfRange):
        spec.generate([[1, 10_000_000]])
    for wrong, error in (
        ("", EmptyPrompt), ([5] * 2048, PromptTooLong), ([10_000_000], TokenOutOfRange),
        (None, InvalidConfig), (7.5, InvalidConfig),
    ):  # fmt: skip
        with pytest.raises(error, match=r"^prompts\[2\]: ") as found:
            spec.generate([*PROMPTS[:2], wrong])
        assert type(found.value) is error
    with pytest.raises(InvalidConfig, match=r"^prompts\[1\]: depth=-1"):
        spec.generate(PROMPTS[:2], depth=[None, -1])
    with pytest.raises(InvalidConfig, match="2 prompts came with 1"):
        spec.generate(PROMPTS[:2], [GREEDY])
    with pytest.raises(InvalidConfig, match="n=2"):
        spec.stream(PROMPTS[0], SamplingParams(n=2))
    with pytest.raises(InvalidConfig, match="chat template"):
        spec.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"drafter": "ngrm"}, InvalidConfig, "did you mean 'ngram'"),
        ({"drafter": "draft:"}, InvalidConfig, "take a folder"),
        ({"k": 0}, InvalidConfig, "k=0"),
        ({"rules": "block"}, InvalidConfig, "did you mean 'rule'"),
        ({"dtype": "float33"}, InvalidConfig, "dtypes are"),
        ({"model": "/nowhere"}, ModelError, "no folder"),
        ({"speculative_config": {"metod": "ngram"}}, InvalidConfig, "did you mean 'method'"),
        ({"speculative_config": {"method": "dflash"}}, InvalidConfig, "methods are"),
    ],
)
def test_bad_options_are_named(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM.load(**options)


def test_a_folder_that_is_no_model_is_named(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"config\.json|tokenizer"):
        LLM.load(tmp_path)


def test_vllm_configs_are_read() -> None:
    config = {
        "method": "draft_model",
        "model": str(bundled_path("draft")),
        "num_speculative_tokens": 2,
        "rejection_sample_method": "standard",
    }
    llm = LLM.load("bundled", speculative_config=config)
    assert llm.info()["k"] == 2 and llm.info()["rule"] == "token"
    assert llm.info()["drafter"]["name"] == "draft"
    ngram = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    assert LLM.load("bundled", speculative_config=ngram).info()["drafter"]["name"] == "ngram"
