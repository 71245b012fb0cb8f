"""The tables of drafters and of transformers' ways: they run, and their figures belong together."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from outrider_models import HEADS

from benchmarks import (
    attention,
    control,
    drafters,
    generate,
    gpu,
    grown,
    heads,
    learned,
    linears,
    logprobs,
    planner,
    start,
)
from outrider import SamplingParams
from outrider.bench.paired import Interval
from outrider.control.runs import Spread
from outrider.errors import InvalidConfig
from outrider.models.bundled import EVAL_SETS
from outrider.models.hf import default_dtype
from tests.house.layout import ROOT


def test_drafters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "drafters.json"
    given = ["--smoke", "--anyway", "--shapes", "tree", "--temperatures", "0", "--json", str(out)]
    assert drafters.main(given) == 0
    whole = json.loads(out.read_text())
    cells = whole["cells"]
    assert [c["drafter"] for c in cells] == ["none", "draft", "suffix+recycle", "eagle:bundled"]
    plain, draft, *_ = cells
    assert plain["kept"] == 1 and plain["rounds"] == 8 and plain["speedup"]["mean"] == 1
    # Eight tokens in rounds of one and what was kept.
    assert draft["kept"] > 1 and draft["rounds"] < 8
    assert draft["acceptance"] > 0
    said = capsys.readouterr().out
    assert "`draft` | tree" in said and "`eagle:bundled` | tree" in said
    # What was cut off goes on with what is missing, and what is whole is only printed.
    out.write_text(json.dumps({**whole, "cells": cells[:2]}))
    assert drafters.main(given) == 0
    again = json.loads(out.read_text())
    assert again["cells"][:2] == cells[:2] and again["command"] == whole["command"]
    assert [c["kept"] for c in again["cells"]] == [c["kept"] for c in cells]
    capsys.readouterr()
    before = out.read_bytes()
    assert drafters.main(given) == 0 and out.read_bytes() == before
    assert "`eagle:bundled` | tree" in capsys.readouterr().out
    assert drafters.main([*given, "--deep", "2"]) == 2
    assert "was measured with deep=5, this would be with 2" in capsys.readouterr().err


def test_every_shipped_head_is_a_line_of_the_table() -> None:
    options = drafters._parser().parse_args([])
    assert {("eagle:bundled", "chain"), ("mtp:bundled", "tree")} <= set(drafters.lines(options))
    assert {f"{head}:bundled" for head in HEADS} <= set(drafters.HEADS)
    for spec in drafters.HEADS:
        llm = drafters.loaded(spec, "tree", options).llm
        (done,) = llm.generate("import ", SamplingParams(max_tokens=6, temperature=0.0))
        assert done.stats.drafted > 0


def test_a_busy_machine_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outrider.bench.script.busy_now", lambda _: 0.5)
    for script in (drafters, generate):
        assert script.main(["--smoke"]) == 2
        assert "50%" in capsys.readouterr().err


@pytest.mark.slow
def test_generate(tmp_path: Path) -> None:
    out = tmp_path / "generate.json"
    assert generate.main(["--smoke", "--anyway", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["batch"] for row in rows} == {1, 2}
    assert any(row["way"] == "transformers, generate_batch" for row in rows)
    for row in rows:
        assert row["tok_s"] is None or row["same"] == row["texts"] == row["batch"]
    best = [row for row in rows if row["ahead"] is None and row["tok_s"]]
    assert [row["way"].split(",")[0] for row in best] == ["outrider", "outrider"]


@pytest.mark.slow
def test_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "heads.json"
    assert heads.main(["--smoke", "--anyway", "--temperatures", "0", "--json", str(out)]) == 0
    record = json.loads(out.read_text())
    assert len(record["cells"]) == 1 + len(heads.DRAFTED) + len(heads.OF_HEADS)
    plain, *others = (heads.Cell.read(cell) for cell in record["cells"])
    assert heads.kept(plain.texts) == 1 and all(len(cell.texts) == 2 for cell in others)
    assert all(heads.kept(cell.texts) > 1 < heads.draft_ms(cell.texts) for cell in others)
    assert "| prompts | temperature | draft model | ms |" in capsys.readouterr().out


def cell_of(way: heads.Way, *texts: tuple[int, int, float]) -> heads.Cell:
    drafted = tuple(drafters.Drafted(*text) for text in texts)
    return heads.Cell(way, "code", 0.0, drafted, 1.0, Interval.of([1.0]))


def test_heads_are_compared_at_equal_time() -> None:
    """The first prompt chooses: the tree takes too long there; the second alone is judged."""
    chain = cell_of(heads.DRAFTED[0], (10, 10, 0.09), (10, 10, 0.02))
    own = cell_of(heads.OF_HEADS[0], (15, 10, 0.08), (30, 20, 0.08))
    tree = cell_of(heads.OF_HEADS[1], (30, 10, 0.1), (60, 20, 0.02))
    said = heads.equal_time([chain, own, tree]).splitlines()
    assert said[2:] == [
        "| code | 0 | draft, k = 2 | 2.0 | 2.00 | eagle, k = 4 | 4.0 | 2.50 | 1.25 [1.25, 1.25] |"
    ]
    assert heads.chosen(chain, [tree]) is None


def test_a_ratio_of_accepted_lengths_has_an_interval_over_prompts() -> None:
    """The mean is that of all rounds together; what differs from prompt to prompt is its doubt."""
    chain = [drafters.Drafted(10, 10, 0.0), drafters.Drafted(20, 20, 0.0)] * 8
    head = [drafters.Drafted(20, 10, 0.0), drafters.Drafted(20, 20, 0.0)] * 8
    found = heads.kept_ratio(head, chain)
    assert found.num == 16 and found.mean == pytest.approx((40 / 30 + 1) / 2)
    assert 1.0 <= found.low < found.mean < found.high <= 1.5
    same = heads.kept_ratio(chain, chain)
    assert same.low == same.mean == same.high == 1


@pytest.mark.slow
def test_grown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "grown.json"
    assert grown.main(["--smoke", "--json", str(out)]) == 0
    chain, *trees = json.loads(out.read_text())["cells"]
    assert chain["rule"] == "block" and chain["ratio"]["mean"] == 1
    assert [tree["rule"] for tree in trees] == [*grown.GROWING] * len(grown.BUDGETS)
    assert all(tree["kept"] >= 1 for tree in trees)
    assert "| `draft` | k = 4, 4 wide, 12 nodes | `traversal` |" in capsys.readouterr().out


@pytest.mark.slow
def test_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped head beside itself keeps as much; a text of one's own is one more set."""
    out = tmp_path / "learned.json"
    given = ["eagle:bundled", "--text", str(ROOT / "outrider" / "engine")]
    assert learned.main(["--smoke", *given, "--json", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [cell["prompts"] for cell in cells[::2]] == [learned.HELD_OUT, *EVAL_SETS]
    for cell in cells:
        assert cell["head"] == cell["shipped"] >= 1 and cell["kept_ratio"]["mean"] == 1
        assert cell["accepted_ratio"] == (1.0 if cell["head"] > 1 else None)
    assert "| code | 0 | " in capsys.readouterr().out


@pytest.mark.slow
def test_planner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "planner.json"
    assert planner.main(["--smoke", "--anyway", "--json", str(out)]) == 0
    (found,) = json.loads(out.read_text())["workloads"].values()
    assert len(found["verified"]) == 3
    names = {one["policy"] for one in found["replayed"]}
    assert names == {"draft:1", "draft:2", "ngram:2", "auto"}
    for one in found["replayed"]:
        assert one["measured_tok_s"]["low"] <= one["measured_tok_s"]["mean"]
    assert "none" in found["advice"]["speedups"] and len(found["advice"]["speedups"]) >= 4
    assert "the advice is" in capsys.readouterr().out


def test_advice_can_be_wrong() -> None:
    def of(mean: float, doubt: float = 0.02) -> Spread:
        return Spread(mean, mean - doubt, mean + doubt, 6)

    plain = of(1.0, 0.0)
    slower, near, faster = of(0.9), of(1.04), of(1.3)
    assert planner.right("none", {"none": plain, "draft": slower, "ngram": near})
    assert not planner.right("none", {"none": plain, "draft": faster})
    assert planner.right("draft", {"none": plain, "draft": faster, "ngram": of(1.35)})
    assert not planner.right("draft", {"none": plain, "draft": faster, "ngram": of(1.4)})
    assert not planner.right("draft", {"none": plain, "draft": slower})
    assert not planner.right("draft", {"none": plain, "draft": of(1.04, 0.05)})


def test_seconds_of_two_threads_are_not_those_of_one(tmp_path: Path) -> None:
    out = str(tmp_path / "planner.json")
    words = ["--smoke", "--anyway", "--clock", "cpu", "--threads", "2", "--json", out]
    assert planner.main(words) == 2


@pytest.mark.slow
def test_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "start.json"
    assert start.main(["--smoke", "--anyway", "--json", str(out)]) == 0
    found = json.loads(out.read_text())["medians"]
    assert 0 < found["load_s"] < found["first_token_s"]
    held = found["weights_bytes"] + found["cache_held_bytes"]
    # However small the model, oneDNN keeps some 40 MB of code for products in bfloat16.
    code = 48e6 if default_dtype(torch.device("cpu")) == torch.bfloat16 else 0
    assert 0.8 * held < found["anonymous_bytes"] < 1.5 * held + code
    assert "first token after the imports" in capsys.readouterr().out


def test_logprobs(tmp_path: Path) -> None:
    out = tmp_path / "logprobs.json"
    assert logprobs.main(["--prompts", "2", "--tokens", "8", "--json", str(out)]) == 0
    loose, half, *strict = json.loads(out.read_text())["drift"]
    assert 0 < loose["most"] < 1e-4 and loose["tokens"] == 16
    assert half["dtype"] == "bfloat16" and 0 <= half["most"] < 0.1
    assert [one["most"] for one in strict] == [0, 0]


def test_linears_and_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE_DIR", str(tmp_path))
    out = tmp_path / "found.json"
    given = ["--smoke", "--anyway", "--json", str(out)]
    assert linears.main([*given, "--rows", "1,5"]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [cell["rows"] for cell in cells] == [1, 5]
    assert {"plain", "arranged", "product"} <= set(cells[0]["rates"])
    assert all(rate > 0 for cell in cells for rate in cell["rates"].values())
    assert attention.main([*given, "--dtypes", "float32"]) == 0
    cases = json.loads(out.read_text())["cases"]
    assert [(case["cached"], case["rows"]) for case in cases] == [(64, 1), (64, 8), (64, 16)]
    assert "64 cached, float32: 8 rows cost" in capsys.readouterr().out


def test_what_the_controller_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "costs.json"
    assert control.main(["--smoke", "--anyway", "--costs", "2", "--json", str(out)]) == 0
    first, second = json.loads(out.read_text())["overheads"]
    for batch, one, other in zip((1, 8, 32), first, second, strict=True):
        assert one["batch"] == other["batch"] == batch
        assert one["allowed_us"] == 50 + 2 * one["rows_per_step"] > 52
        assert 0 < one["us_per_step"] <= one["us_per_step_asked"]
    *_, one, eight, _ = capsys.readouterr().out.splitlines()
    assert one.startswith("| 1 | ") and eight.startswith("| 8 | ")
    assert f" {first[0]['us_per_step']:.0f}, {second[0]['us_per_step']:.0f} | " in one


def test_a_stall_in_a_texts_beginning_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine that stalls each time nothing is told."""
    took = iter([3.0, 1.0, 1.0, 1.5])
    now = [0.0]

    def generate(prompt: list[int], tokens: int, seed: int) -> None:
        now[0] += next(took)

    made = SimpleNamespace(target=SimpleNamespace(device=torch.device("cpu")), generate=generate)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert gpu.rate(made, [1], 8) == 16.0  # pyright: ignore[reportArgumentType]
    took = itertools.cycle([3.0, 1.0])
    with pytest.raises(InvalidConfig, match="8 times the first 16 tokens took longer than 8 more"):
        gpu.rate(made, [1], 8)  # pyright: ignore[reportArgumentType]


def test_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the processor where there is no GPU."""
    out = tmp_path / "gpu.json"
    assert gpu.main(["--smoke", "--anyway", "--k", "2,3", "--json", str(out)]) == 0
    (cell,) = json.loads(out.read_text())["cells"]
    assert set(cell["forward_ms"]) == {"1", "8"} and set(cell["speculative"]) == {"2", "3"}
    assert all(1 < length <= 1 + int(k) for k, length in cell["tokens_per_round"].items())
    assert all(parts["wall"] > 0 for parts in cell["parts_ms"].values())
    assert "| 70 | " in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert gpu.main([]) == 2
        assert "no GPU is to be had here; --smoke" in capsys.readouterr().err
