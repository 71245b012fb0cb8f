"""vLLM's `speculative_config`, key by key: honoured, harmless, or refused with the reason."""

from __future__ import annotations

import pytest

from outrider.errors import InvalidConfig
from outrider.llm import options
from outrider.llm.options import Speculation

HONOURED = {
    "method": ("ngram", Speculation("ngram", 4)),
    "model": ("/some/draft", Speculation("draft:/some/draft", 4)),
    "num_speculative_tokens": (2, Speculation("auto", 2)),
    "prompt_lookup_max": (5, Speculation("auto", 4, None, 2, 5)),
    "prompt_lookup_min": (1, Speculation("auto", 4, None, 1, 4)),
    "rejection_sample_method": ("block", Speculation("auto", 4, "block")),
    "use_heterogeneous_vocab": (True, Speculation("auto", 4)),
}
# Of one method: tests/llm/test_options.py has their values.
OF_SUFFIX = {key for key in options.KEYS if key.startswith("suffix_decoding_")}
# A value of each refused key that asks for something.
ASKING = {
    "attention_backend": "FLASHINFER",
    "code_revision": "main",
    "disable_eagle_block_drop": True,
    "draft_load_config": {"load_format": "dummy"},
    "draft_sample_method": "greedy",
    "draft_tensor_parallel_size": 2,
    "dspark_draft_topk": 8,
    "enable_adaptive_verification": True,
    "index_share_for_mtp_iteration": True,
    "kv_cache_dtype": "fp8",
    "max_model_len": 2048,
    "moe_backend": "triton",
    "num_speculative_tokens_per_batch_size": [(1, 8, 4)],
    "parallel_drafting": True,
    "quantization": "fp8",
    "revision": "main",
    "synthetic_acceptance_length": 2.5,
    "synthetic_acceptance_rates": [0.9, 0.8],
    "tensor_parallel_size": 2,
}
ALWAYS_HARMLESS = {"disable_padded_drafter_batch", "enforce_eager", "use_local_argmax_reduction"}
METHODS = """ngram medusa mlp_speculator draft_model suffix custom_class eagle eagle3
    extract_hidden_states mtp dflash ngram_gpu dspark""".split()  # noqa: SIM905


def read(config: dict) -> Speculation:
    return Speculation("auto", 4).updated(config)


def test_every_key_is_sorted() -> None:
    assert set(options.KEYS) == set(HONOURED) | OF_SUFFIX and len(OF_SUFFIX) == 4
    assert set(options.REFUSED) == set(ASKING) | ALWAYS_HARMLESS
    assert not set(options.KEYS) & set(options.REFUSED)


@pytest.mark.parametrize("key", HONOURED)
def test_a_key_that_is_honoured(key: str) -> None:
    value, wanted = HONOURED[key]
    assert read({key: value}) == wanted


@pytest.mark.parametrize("key", options.REFUSED)
def test_a_key_that_asks_for_nothing_changes_nothing(key: str) -> None:
    for value in (None, *options.REFUSED[key][0]):
        assert read({key: value}) == read({})


@pytest.mark.parametrize("key", ASKING)
def test_a_key_that_cannot_be_honoured_says_why(key: str) -> None:
    with pytest.raises(InvalidConfig, match=rf"{key}=.* cannot be honoured: \w+"):
        read({key: ASKING[key]})


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_known(method: str) -> None:
    if method in options.METHODS:
        assert read({"method": method}).drafter == options.METHODS[method]
    else:
        with pytest.raises(InvalidConfig, match=rf"method '{method}' is not supported \(\w+"):
            read({"method": method})


def test_a_head_is_named_by_its_folder() -> None:
    for method, kind in (
        ("eagle", "eagle"),
        ("eagle3", "eagle"),
        ("medusa", "medusa"),
        ("mtp", "mtp"),
    ):
        assert read({"method": method, "model": "runs/head"}).drafter == f"{kind}:runs/head"
    assert read({"method": "mtp"}).drafter == "mtp"


@pytest.mark.parametrize("rule", ["synthetic", "fly"])
def test_verification_that_is_not_lossless_says_so(rule: str) -> None:
    with pytest.raises(InvalidConfig, match="changes the law of the text"):
        read({"rejection_sample_method": rule})


def test_a_key_vllm_does_not_have_gets_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match="did you mean 'draft_tensor_parallel_size'"):
        read({"draft_tensor_paralel_size": 1})
