"""Heads exported to other engines: the folders hold what was trained, the lines say how."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.cli.app import run
from outrider.errors import (
    InvalidConfig,
    ModelError,
    TargetShapeMismatch,
    UnsupportedModel,
    VocabularyMismatch,
)
from outrider.interop.export import ENGINES, Exported, export_head
from outrider.models.bundled import bundled_path
from outrider.models.eagle import EagleHead, EagleShape
from outrider.models.exit_head import ExitHead, ExitShape, save_exit_head
from outrider.models.head_files import fingerprint
from outrider.models.hf import HuggingFaceTarget
from outrider.models.originals import load_eagle
from outrider.models.speculators import load_head, made_for, save_head
from tests.house.test_pages import check_command
from tests.models.families import random_model

SHAPE = EagleShape(97, 40, 32, 48, 4, 2, 8, (1, 2, 3))


def trained(folder: Path, shape: EagleShape = SHAPE, **said: str) -> EagleHead:
    """A random head in float16, in the folder that training writes."""
    head = EagleHead(shape, torch.arange(shape.draft_vocab_size) * 2)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0.0, 0.5, generator=draw)
    head = head.to(torch.float16).float().requires_grad_(False)
    names = {"verifier": "models/my target", "architecture": "LlamaForCausalLM", **said}
    save_head(head, folder, dtype=torch.float16, embeddings=False, **names)
    return head


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_written_is_loaded_again_with_equal_tensors(engine: str, tmp_path: Path) -> None:
    head = trained(tmp_path / "head")
    exported = export_head(tmp_path / "head", to=engine, out=tmp_path / "out", k=5)
    written = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if engine == "sglang":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
        assert (config["draft_vocab_size"], config["vocab_size"]) == (40, 97)
        assert config["num_hidden_layers"] == 1 and config["torch_dtype"] == "float16"
        again = load_eagle(tmp_path / "out", HuggingFaceTarget(random_model("llama")))
    else:
        assert config["speculators_model_type"] == "eagle3"
        assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
        again = load_head(tmp_path / "out")
    assert isinstance(again, EagleHead) and again.shape == head.shape
    assert torch.equal(again.d2t, head.d2t)
    for name, value in head.state_dict().items():
        own = name.replace("layers.0.", "midlayer.") if engine == "sglang" else name
        assert torch.equal(written[own].to(value.dtype), value), name
    assert written["t2d"].nonzero().flatten().tolist() == head.tokens.tolist()
    assert {value.dtype for value in written.values()} == {torch.float16, torch.int64, torch.bool}
    said = (tmp_path / "out" / "README.md").read_text()
    assert said == exported.said() and all(command in said for command in exported.commands)


def options(exported: Exported, which: int = -1) -> list[str]:
    """The words of a command line, as a shell splits them."""
    return shlex.split(exported.commands[which].replace("\\\n", " "))


def test_the_command_lines_say_how_guesses_are_drawn_and_tested(tmp_path: Path) -> None:
    trained(tmp_path / "head")
    done = {
        engine: export_head(tmp_path / "head", to=engine, out=tmp_path / engine, k=5)
        for engine in ENGINES
    }
    words = options(done["vllm"])
    assert words[:3] == ["vllm", "serve", "models/my target"]
    assert json.loads(words[-1]) == {
        "method": "eagle3",
        "model": str(tmp_path / "vllm"),
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "standard",
    }
    words = options(done["sglang"])
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given["--speculative-num-draft-tokens"] == "6" and given["--model-path"]
    assert given["--speculative-accept-threshold-single"] == "1.0"
    assert [options(done["gguf"], i)[0] for i in range(3)] == ["python", "python", "llama-server"]
    assert "--target-model-dir" in options(done["gguf"], 1)
    assert "stops at those of one's own making" in done["gguf"].notes[0]
    for exported in done.values():
        line = exported.acceptance_test.replace("\\\n", " ")
        check_command(line)
        assert shlex.split(line)[-1] == "models/my target"


def test_both_are_converted_in_their_own_precision(tmp_path: Path) -> None:
    """And of the bundled target it is said that the converter has no name for its tokenizer."""

    def types(head: Path, target: str | None = None) -> tuple[list[str], str]:
        out = tmp_path / f"out {len(list(tmp_path.iterdir()))}"
        done = export_head(head, to="gguf", out=out, target=target)
        words = [options(done, which) for which in (0, 1)]
        return [one[one.index("--outtype") + 1] for one in words], done.notes[0]

    trained(tmp_path / "head")
    assert types(tmp_path / "head")[0] == ["auto", "f16"], "nobody knows where the target lies"
    model = tmp_path / "model"
    model.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 32}
    config |= {"num_hidden_layers": 4}
    for said, due in (
        ({"dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float32"}, "f32"),
        ({"text_config": {**config, "dtype": "float16"}}, "f16"),
        ({"dtype": "int8"}, "auto"),
        ({}, "auto"),
    ):
        (model / "config.json").write_text(json.dumps({**config, **said}))
        assert types(tmp_path / "head", str(model))[0] == [due, "f16"]
    trained(tmp_path / "own", EagleShape(4096, 40, 384, 48, 4, 2, 8, (1, 2, 3)), verifier="bundled")
    found, note = types(tmp_path / "own")
    assert found == ["f16", "f16"] and "do not work as they stand" in note


def test_what_cannot_be_exported_is_refused_by_name(tmp_path: Path) -> None:
    trained(tmp_path / "head")
    out = tmp_path / "out"
    with pytest.raises(InvalidConfig, match=r"to='vlm' does not exist.*did you mean 'vllm'"):
        export_head(tmp_path / "head", to="vlm", out=out)
    with pytest.raises(InvalidConfig, match="k=0"):
        export_head(tmp_path / "head", to="vllm", out=out, k=0)
    two = EagleShape(97, 40, 32, 48, 4, 2, 8, (1, 2))
    trained(tmp_path / "two", two)
    with pytest.raises(
        UnsupportedModel, match=r"reads 2 layers \(1, 2\), and gguf serves heads ov"
    ):
        export_head(tmp_path / "two", to="gguf", out=out)
    first = EagleShape(97, 40, 32, 48, 4, 2, 8, (1, 2, 3), norm_before_residual=True)
    trained(tmp_path / "first", first)
    with pytest.raises(UnsupportedModel, match="norm_before_residual=True, which sglang has no"):
        export_head(tmp_path / "first", to="sglang", out=out)
    save_exit_head(
        ExitHead(ExitShape(97, 32, 1, 4)), tmp_path / "exit", verifier="x", architecture="y"
    )
    with pytest.raises(UnsupportedModel, match="is an early-exit head, and vllm runs no target in"):
        export_head(tmp_path / "exit", to="vllm", out=out)
    with pytest.raises(ModelError, match="does not say for which target"):
        export_head(trained_for_nobody(tmp_path), to="vllm", out=out)
    assert not out.exists(), "refused before anything is written"
    out.mkdir()
    (out / "other").write_text("")
    with pytest.raises(InvalidConfig, match="is not empty; give a new folder"):
        export_head(tmp_path / "head", to="vllm", out=out)


def test_the_target_is_held_against_the_head(tmp_path: Path) -> None:
    """Refused by its configuration alone, naming both, before anything is written."""
    out, bundled = tmp_path / "out", EagleShape(4096, 40, 384, 48, 4, 2, 8, (1, 2, 5))

    def refused(error: type[Exception], says: str, shape=SHAPE, target="bundled", **said) -> None:
        trained(tmp_path / "head", shape, **said)
        with pytest.raises(error, match=says):
            export_head(tmp_path / "head", to="vllm", out=out, target=target)
        assert not out.exists()

    refused(VocabularyMismatch, r"made for a vocabulary of 97 tokens, the target '.*' has 4096")
    refused(VocabularyMismatch, "of 97 tokens", target=None, verifier="bundled")
    refused(InvalidConfig, "target='/nowhere/at all' is no folder", target="/nowhere/at all")
    wide = dataclasses.replace(bundled, hidden_size=32)
    refused(TargetShapeMismatch, r"of width 32, those of the target '.*' are 384 wide", wide)
    last = dataclasses.replace(bundled, taps=(1, 2, 6))
    refused(TargetShapeMismatch, r"reads behind layer 6, and of the target '.*', with 6 lay", last)
    refused(
        ModelError,
        r"made for 'models/my target', a Qwen3ForCausalLM, and the target '.*' is a LlamaForCausal",
        bundled,
        architecture="Qwen3ForCausalLM",
    )
    refused(ModelError, "has other weights or another config.json", bundled, fingerprint="0" * 64)
    known = fingerprint(bundled_path("target"))
    trained(tmp_path / "head", bundled, fingerprint=known)
    export_head(tmp_path / "head", to="vllm", out=out, target="bundled")
    assert made_for(out).fingerprint == known
    # What is not here is the engine's to find.
    export_head(tmp_path / "head", to="vllm", out=tmp_path / "hub", target="some/model-7B")


def trained_for_nobody(folder: Path) -> Path:
    trained(folder / "nobody")
    path = folder / "nobody" / "config.json"
    config = json.loads(path.read_text())
    del config["speculators_config"]
    path.write_text(json.dumps(config))
    return folder / "nobody"


def test_the_command_prints_what_serves_the_head(tmp_path: Path, capsys) -> None:
    shape = EagleShape(4096, 40, 384, 48, 4, 2, 8, (1, 2, 3))
    trained(tmp_path / "head", shape, verifier="bundled")
    assert run(["export", str(tmp_path / "head"), "--to", "vllm", "-o", str(tmp_path / "o")]) == 0
    printed = capsys.readouterr().out
    assert "vllm serve" in printed and "outrider certify endpoint" in printed
    assert "bundled" not in printed, "another engine is given the folder"
    assert (tmp_path / "o" / "README.md").is_file()
