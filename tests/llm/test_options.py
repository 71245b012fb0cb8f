"""What the front door accepts and refuses: prompts, parameters, vLLM's dictionary, budgets."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.decoding import RULES
from outrider.drafters import NoDrafter
from outrider.errors import InvalidConfig, ModelError, VocabularyMismatch
from outrider.llm.options import Speculation, SuffixOptions
from outrider.models.bundled import bundled_path, eval_prompts
from outrider.models.tabular import FixedDistDraftModel
from outrider.models.text import TextTokenizer

PARAMS = SamplingParams(max_tokens=6, seed=3)
PROMPT = eval_prompts("code")[0][:80]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.load("bundled", strict=True)


def test_token_ids_come_in_any_holder(llm: LLM) -> None:
    ids = llm.tokenizer.encode(PROMPT)
    (wanted,) = llm.generate(PROMPT, PARAMS)
    for one in (ids, tuple(ids), np.array(ids), torch.tensor(ids), [np.int64(i) for i in ids]):
        (done,) = llm.generate(one, PARAMS)
        assert done.token_ids == wanted.token_ids
        assert len(llm.generate([one, PROMPT], PARAMS)) == 2
    assert len(llm.generate(np.array([ids, ids]), PARAMS)) == 2
    assert llm.generate([], PARAMS) == []


@pytest.mark.parametrize(
    "prompts",
    [None, 5, [[1.5, 2.0]], [True, False], {"a": 1}, [None], b"x", np.array([1.5]), [["a"]],
     "a\udcff"],
)  # fmt: skip
def test_prompts_of_other_types_are_refused(prompts, llm: LLM) -> None:
    with pytest.raises(InvalidConfig, match="prompt"):
        llm.generate(prompts, PARAMS)


def test_streams_and_parameters_of_other_types_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidConfig, match="a stream carries one prompt; use generate"):
        llm.stream(["a", "b"], PARAMS)  # type: ignore[list-item]
    with pytest.raises(InvalidConfig, match="lone surrogate"):
        llm.stream("x\udcff", PARAMS)
    for params in ({"max_tokens": 3}, [{"max_tokens": 3}], 7):
        with pytest.raises(InvalidConfig, match="sampling_params"):
            llm.generate(PROMPT, params)  # type: ignore[arg-type]
        with pytest.raises(InvalidConfig, match="sampling_params"):
            llm.stream(PROMPT, params)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="1 prompt came with 0"):
        llm.generate([PROMPT], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "model=None"),
        ({"drafter": None}, "drafter=None"),
        ({"model": torch.nn.Linear(1, 1)}, "^model=Linear: .*HuggingFaceTarget"),
        ({"drafter": "auto+draft"}, "names one drafter twice"),
        ({"depth": 3}, "did you mean 'k'"),
        ({"num_speculative_tokens": 3}, "did you mean 'k'"),
        ({"num_assistant_tokens": 3}, "did you mean 'k'"),
        ({"dtyp": "float32"}, "did you mean 'dtype'"),
        ({"rule": 5}, "^rule=5: the name of a rule is due; put a rule of your own into"),
        ({"rule": [1]}, r"^rule=\[1\]: the name"),
        ({"rule": RULES["block"]}, "^rule=BlockRule: the name"),
        ({"strict": "no"}, "strict='no'"),
        ({"k": True}, "k=True"),
        ({"k": 17}, "k=17 exceeds max_depth=16.*'auto'.*give max_depth=17 too, or k=16 at most"),
        ({"k": 3, "max_depth": 2, "drafter": "draft"}, "k=3 exceeds max_depth=2"),
        ({"shape": (0, 0, *range(2, 18))}, "k=17 exceeds max_depth=16"),
        ({"pack": "yes"}, "pack='yes'"),
        ({"cache_bytes": "1GB"}, "cache_bytes='1GB'"),
        ({"cache_bytes": 1}, "cache_bytes=1"),
        ({"dtype": ["float32"]}, "dtypes are"),
        ({"device": "gpu"}, "device 'gpu' is not to be had"),
        ({"device": "meta"}, "device 'meta' is not to be had"),
        ({"speculative_config": ["ngram"]}, "dictionary"),
        ({"speculative_config": {"method": "ngram"}, "drafter": NoDrafter()}, "contradict"),
        ({"speculative_config": {"method": "ngram"}, "drafter": "none"}, "contradict"),
        ({"speculative_config": {"num_speculative_tokens": 2}, "k": 3}, "k and .* contradict"),
        ({"speculative_config": {"rejection_sample_method": "block"}, "rule": "token"}, "rule and"),
    ],
)
def test_options_that_cannot_be_meant_are_named(options: dict, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        LLM.load(**options)


def test_rules_of_a_call_are_named(llm: LLM) -> None:
    for rule in (5, RULES["block"], [[1]]):
        with pytest.raises(InvalidConfig, match="the name of a rule is due"):
            llm.generate(PROMPT, PARAMS, rule=rule)  # type: ignore[arg-type]


def test_a_draft_model_of_ones_own_guesses(llm: LLM) -> None:
    width = len(llm.tokenizer.vocabulary())
    own = LLM.load("bundled", FixedDistDraftModel([1 / width] * width), strict=True)
    assert own.generate(PROMPT, PARAMS)[0].token_ids == llm.generate(PROMPT, PARAMS)[0].token_ids
    assert own.info()["drafter"] == {"name": "FixedDistDraftModel", "trusted": True}
    with pytest.raises(VocabularyMismatch, match="predicts 2 tokens"):
        LLM.load("bundled", FixedDistDraftModel([0.5, 0.5]))


def test_a_missing_folder_is_named_with_its_remedy(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"^drafter='\./nope' is no folder"):
        LLM.load("bundled", "draft:./nope")
    with pytest.raises(ModelError, match="`hf download someone/small --local-dir DIR` first"):
        LLM.load("someone/small")
    shutil.copy(bundled_path("target") / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing.*HuggingFaceTarget"):
        LLM.load(tmp_path)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "a list of dictionaries"),
        (["hello"], r"messages\[0\]='hello'"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], r"messages\[1\]="),
    ],
)
def test_messages_of_other_forms_are_named(messages, said: str, tmp_path) -> None:
    for file in bundled_path("target").iterdir():
        if file.suffix in (".json", ".txt"):
            shutil.copy(file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(InvalidConfig, match=said):
        TextTokenizer(tmp_path).chat(messages)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "ngram", "model": "/some/draft"}, "'ngram' and model '/some/draft' contradict"),
        ({"method": "none", "model": "/some/draft"}, "contradict"),
        ({"method": ["ngram"]}, "method .* is not supported"),
        ({"model": 3}, "model 3"),
        ({"prompt_lookup_max": 3.9}, "prompt_lookup_max=3.9"),
        ({"prompt_lookup_min": "abc"}, "prompt_lookup_min='abc'"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min=5 exceeds"),
        ({"method": "draft_model", "prompt_lookup_max": 3}, "prompt_lookup_max is for"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({"rejection_sample_method": 1}, "rejection_sample_method 1"),
    ],
)
def test_vllm_values_that_cannot_be_meant_are_named_as_written(config: dict, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        Speculation("auto", 4).updated(config)


def test_vllm_values_that_are_left_out_follow_the_others() -> None:
    read = Speculation("auto", 4).updated
    assert read({"prompt_lookup_min": 5}) == Speculation("auto", 4, None, 5, 5)
    assert read({"method": "ngram", "prompt_lookup_max": 1}) == Speculation("ngram", 4, None, 1, 1)
    assert read({"model": "[ngram]", "prompt_lookup_max": None}).drafter == "ngram"
    assert read({"model": "/some/draft"}).drafter == "draft:/some/draft"


def test_vllms_suffix_options_are_read_and_named_as_written() -> None:
    read = Speculation("auto").updated
    plain = read({"method": "suffix"})
    assert plain.suffix == SuffixOptions(cached_requests=10_000) and plain.depth() == 24
    drafter = plain.suffix.drafter()
    assert drafter.store is not None and drafter.store.max_requests == 10_000
    config = {
        "method": "suffix",
        "suffix_decoding_max_tree_depth": 12,
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 2,
        "suffix_decoding_min_token_prob": 0.3,
    }
    asked = read(config)
    assert asked.suffix == SuffixOptions(12, 2, 0.3, 0) and asked.depth() == 12
    made = asked.suffix.drafter()
    assert (made.longest, made.spec_factor, made.min_prob, made.store) == (12, 2, 0.3, None)
    assert read({**config, "num_speculative_tokens": 5}).depth() == 5
    assert Speculation("suffix").depth() == 24 and Speculation("suffix", 3).depth() == 3
    assert Speculation("suffix").suffix.drafter().store is None, "remembers nothing unless asked"
    assert Speculation("suffix+draft").depth() == Speculation("auto").depth() == 4
    assert Speculation("suffix").depth(4) == 15, "as far as trees of that width may go"
    for key, value in (
        ("suffix_decoding_max_tree_depth", 0),
        ("suffix_decoding_max_cached_requests", -1),
        ("suffix_decoding_max_spec_factor", "x"),
        ("suffix_decoding_min_token_prob", 1.5),
    ):
        with pytest.raises(InvalidConfig, match=f"{key}={value!r}"):
            read({**config, key: value})
    with pytest.raises(InvalidConfig, match="max_tree_depth is for method 'suffix'"):
        read({"method": "ngram", "suffix_decoding_max_tree_depth": 3})
    with pytest.raises(InvalidConfig, match="did you mean 'suffix_decoding_max_tree_depth'"):
        read({"suffix_decoding_tree_depth": 3})


def test_a_conversation_goes_through_the_chat_template() -> None:
    llm = LLM.load("bundled", drafter="none")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<a>"
    llm.tokenizer._tokenizer.chat_template = template
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    (done,) = llm.chat([{"role": "u", "content": "import os"}], greedy)
    assert done.token_ids == llm.generate("<u>import os\n<a>", greedy)[0].token_ids
    (again,) = llm.chat(
        [{"role": "u", "content": "import os"}], greedy, drafter="ngram", trace=True
    )
    assert again.token_ids == done.token_ids and again.trace is not None
    with pytest.raises(InvalidConfig, match="at least one message"):
        llm.chat([])
    llm.tokenizer._tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(InvalidConfig, match=r"refuses these messages .*no such role"):
        llm.chat([{"role": "u", "content": "x"}])


def test_one_budget_bounds_both_caches_together(llm: LLM) -> None:
    plenty = llm.generate([PROMPT] * 3, PARAMS)
    budget = 2_000_000
    tight = LLM.load("bundled", "draft", strict=True, cache_bytes=budget)
    assert [d.token_ids for d in tight.generate([PROMPT] * 3, PARAMS)] == [
        d.token_ids for d in plenty
    ]
    target, draft = tight._target, tight._requests.engine.drafter.model
    assert 0 < target._cache.cache_bytes + draft._cache.cache_bytes <= budget
    assert target._cache._max_bytes + draft._cache._max_bytes <= budget


def test_options_that_change_speed_alone_change_no_token(llm: LLM) -> None:
    wanted = [done.token_ids for done in llm.generate([PROMPT, PROMPT[:30]], PARAMS)]
    for options in ({"max_texts": 1}, {"prefill_chunk": 7}, {"pack": True}):
        other = LLM.load("bundled", strict=True, **options)
        done = other.generate([PROMPT, PROMPT[:30]], PARAMS)
        assert [d.token_ids for d in done] == wanted, options


def copied(part: str, folder, *, without: str):
    shutil.copytree(bundled_path(part), folder / part)
    (folder / part / without).unlink()
    return folder / part


def test_the_end_of_text_comes_from_the_first_file_that_states_it(tmp_path) -> None:
    folder = copied("target", tmp_path, without="generation_config.json")
    config = (folder / "config.json").read_text()
    assert '"eos_token_id": 0' in config
    (folder / "config.json").write_text(config.replace('"eos_token_id": 0', '"eos_token_id": 7'))
    assert TextTokenizer(folder).end_tokens() == {7}
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert TextTokenizer(folder).end_tokens() == {3, 5}
    (folder / "generation_config.json").write_text("{}")
    (folder / "config.json").write_text(config.replace('"eos_token_id": 0', '"eos_token_id": null'))
    assert TextTokenizer(folder).end_tokens() == {0}
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        TextTokenizer(folder).end_tokens()


def test_an_end_beyond_the_models_width_does_no_harm(tmp_path) -> None:
    folder = copied("draft", tmp_path, without="generation_config.json")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 10000000]}')
    llm = LLM.load(folder, drafter="none")
    params = SamplingParams(max_tokens=6, min_tokens=5, seed=1)
    assert llm.generate(PROMPT, params)[0].token_ids


def test_a_folder_without_configuration_is_refused_before_its_tokenizer(tmp_path) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        LLM.load(tmp_path)
    with pytest.raises(ModelError, match="no model folder"):
        LLM.load("bundled", drafter=f"draft:{tmp_path}")
