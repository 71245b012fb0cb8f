"""The command lines with which other engines speculate in the same way, where they can."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from typing import Any

from outrider.drafters import DrafterSpec
from outrider.llm.options import METHODS, RULES

ENGINES = ("vLLM", "SGLang", "llama.cpp")
_GGUF = "GGUF files of both models"


@dataclass(frozen=True, slots=True)
class Speculating:
    """How to speculate: what the planner found best, in names of this project.

    Attributes:
        model: the target's folder.
        drafter: a spec; `none` decodes plainly.
        depth: levels drafted.
        rule: what verifies.
        width, nodes: of drafted trees; None for chains.
        draft: the folder of the draft model or head; None where there is none.
        batch: texts at a time; None leaves it to the engine.
    """

    model: str
    drafter: str
    depth: int
    rule: str
    width: int | None = None
    nodes: int | None = None
    draft: str | None = None
    batch: int | None = None

    def at_a_time(self, option: str) -> list[str]:
        """An engine's option of how many texts it decodes at a time."""
        return [] if self.batch is None else [option, str(self.batch)]

    @property
    def kind(self) -> str:
        """The drafter, or several, without their paths."""
        return "+".join(one.kind for one in DrafterSpec.parse_all(self.drafter))


@dataclass(frozen=True, slots=True)
class Equivalent:
    """An engine's command line; None where it has none, and what it does otherwise."""

    engine: str
    command: str | None
    note: str = ""


def equivalents(how: Speculating) -> tuple[Equivalent, ...]:
    """The command lines of vLLM, SGLang and llama.cpp."""
    found = tuple(make(how) for make in (_vllm, _sglang, _llama_cpp))
    if how.rule not in ("coupled", "match"):
        return found
    said = f"it has no rule {how.rule!r}: texts have the same law, and are others"
    return tuple(
        one
        if one.command is None or how.drafter == "none"
        else replace(one, note=f"{one.note}; {said}" if one.note else said)
        for one in found
    )


def speculative_config(how: Speculating) -> dict[str, Any] | None:
    """vLLM's dictionary, which `LLM.load(speculative_config=...)` takes too; None: it has none."""
    methods = {drafter: method for method, drafter in METHODS.items() if method != "ngram_gpu"}
    method = methods.get(how.kind)
    # MTP modules it takes out of the target's own checkpoint alone.
    if method is None or method == "none" or (method == "mtp" and how.draft is not None):
        return None
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": how.depth}
    if how.draft is not None and method in ("draft_model", "eagle3", "medusa"):
        config["model"] = how.draft
    if method == "ngram":
        config |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    names = {rule: name for name, rule in RULES.items()}
    if how.rule in names:
        config["rejection_sample_method"] = names[how.rule]
    if how.rule != "greedy" and method in ("draft_model", "eagle", "eagle3", "mtp"):
        # Its own choice is the draft's likeliest token, of which little is kept in a drawn text.
        config["draft_sample_method"] = "probabilistic"
    return config


def _vllm(how: Speculating) -> Equivalent:
    words = ["vllm", "serve", how.model, *how.at_a_time("--max-num-seqs")]
    if how.drafter == "none":
        return Equivalent("vLLM", shlex.join(words))
    config = speculative_config(how)
    if config is None:
        return _without("vLLM", how)
    note = "chains alone: it drafts no trees" if how.nodes is not None else ""
    words += ["--speculative-config", json.dumps(config)]
    return Equivalent("vLLM", shlex.join(words), note)


def _sglang(how: Speculating) -> Equivalent:
    words = ["python", "-m", "sglang.launch_server", "--model-path", how.model]
    words += how.at_a_time("--max-running-requests")
    if how.drafter == "none":
        return Equivalent("SGLang", shlex.join(words))
    algorithms = {"draft": "STANDALONE", "eagle": "EAGLE3", "ngram": "NGRAM"}
    if how.kind not in algorithms:
        return _without("SGLang", how)
    words += ["--speculative-algorithm", algorithms[how.kind]]
    if how.kind == "ngram":
        return Equivalent(
            "SGLang", shlex.join([*words, "--speculative-num-draft-tokens", str(how.depth + 1)])
        )
    if how.draft is not None:
        words += ["--speculative-draft-model-path", how.draft]
    # The token that the target has still to read counts as one of the drafted ones there.
    drafted = how.depth if how.nodes is None else how.nodes
    words += ["--speculative-num-steps", str(how.depth)]
    words += ["--speculative-eagle-topk", str(how.width or 1)]
    words += ["--speculative-num-draft-tokens", str(drafted + 1)]
    return Equivalent("SGLang", shlex.join(words))


def _llama_cpp(how: Speculating) -> Equivalent:
    words = ["llama-server", "-m", _gguf(how.model), *how.at_a_time("-np")]
    if how.drafter == "none":
        return Equivalent("llama.cpp", shlex.join(words), "needs a GGUF file of the model")
    most = ["--spec-draft-n-max", str(how.depth), "--spec-draft-n-min", "0"]
    types = {"draft": "draft-simple", "eagle": "draft-eagle3"}
    if how.kind in types and how.draft is not None:
        words += ["--spec-type", types[how.kind], "-md", _gguf(how.draft), *most]
        words += ["--spec-draft-p-min", "0"]
        note = f"needs {_GGUF}" + ("; it drafts chains" if how.nodes is not None else "")
        return Equivalent("llama.cpp", shlex.join(words), note)
    if how.kind == "ngram":
        words += ["--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "4"]
        words += ["--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", str(how.depth)]
        return Equivalent("llama.cpp", shlex.join(words), "needs a GGUF file of the model")
    return _without("llama.cpp", how)


def _gguf(model: str) -> str:
    """A GGUF file, or the one that a folder would be converted to."""
    return model if model.endswith(".gguf") else f"{model}.gguf"


def _without(engine: str, how: Speculating) -> Equivalent:
    return Equivalent(engine, None, f"{engine} has nothing like drafter {how.kind!r}")
