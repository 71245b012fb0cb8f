"""The speed benchmark end to end on a tiny pair, and its single decisions."""

import json

import pytest
import torch

from benchmarks.speed import main
from outrider.bench.arms import Decoder, Generate
from outrider.bench.calibrate import Probe, choose_depth, cost_ratio, verify_costs
from outrider.bench.equality import differences
from outrider.bench.inflate import Size, inflate
from outrider.bench.paired import Run
from outrider.bench.settings import Settings, num_steps
from outrider.bench.speed import run
from outrider.drafters import ModelDrafter, NoDrafter
from outrider.errors import InvalidConfig
from outrider.models.checkpoint import load_llama
from outrider.models.hf import HuggingFaceTarget
from outrider.models.text import TextTokenizer
from tests.bench.conftest import TEXT

TEXTS = [TEXT[start:] for start in range(0, 50, 10)]


class Steps:
    """Counts what a progress bar would show."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, label: str) -> None:
        self.steps.append(label)

    def note(self, label: str) -> None:
        pass


def tiny(pair, **changes) -> Settings:
    """Everything, at sizes of a second."""
    return Settings(
        **{
            "target": pair.target,
            "draft": pair.draft,
            "vocabs": (300, 400),
            "costs": (0.5,),
            "num_layers": 4,
            "feed_forward": 256,
            "num_prompts": 2,
            "num_tokens": 8,
            "generate_prompts": 1,
            "generate_tokens": 4,
            "short": 8,
            "long": 64,
            "num_calibration": 2,
            "rounds": 2,
            **changes,
        }
    )


@pytest.fixture(scope="module")
def report(pair):
    steps = Steps()
    settings = tiny(pair)
    *parts, found = run(settings, TEXTS, steps, "command", 0.0)
    assert [len(part.speed) for part in parts] == [1, 2]
    assert len(steps.steps) == num_steps(settings)
    return found


def test_rows(report):
    assert [(row.pair, row.vocab) for row in report.speed] == [
        ("bundled", report.speed[0].vocab),
        ("inflated", 300),
        ("inflated", 400),
    ]
    assert [(row.target, row.prompt_tokens) for row in report.generate] == [
        ("bundled", 8),
        ("bundled", 64),
        ("inflated", 8),
        ("inflated", 64),
    ]


def test_the_same_model_drafts_what_the_target_says(report):
    for row in report.speed:
        assert row.same_tokens == row.as_small == row.num_prompts == 2
        assert row.widest_gap is None
        assert row.acceptance_rate == 1.0
        assert row.mean_acceptance_length > 1
    assert all(row.same_tokens == row.num_prompts for row in report.generate)
    assert report.acceptance_per_pos[0] == 1.0
    assert all(found.difference < 1e-5 and found.margin > 0 for found in report.faithful.values())


def test_a_stranger_is_refused_and_the_text_stays(pair):
    """The negative control of acceptance: another draft is mostly rejected, the text is equal."""
    settings = tiny(pair, draft=pair.stranger, rows=("bundled",), generate_prompts=0)
    steps = Steps()
    (report,) = run(settings, TEXTS, steps, "command", None)
    assert len(steps.steps) == num_steps(settings)
    assert not report.generate
    (row,) = report.speed
    assert row.acceptance_rate < 0.5
    assert row.same_tokens == 2


def test_tables(report):
    text = report.markdown()
    assert "| bundled |" in text
    assert "yes, 2/2" in text
    assert "`command`, float32" in text or "`command`, bfloat16" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables[:5]} == {13}
    assert json.loads(json.dumps(report.as_dict()))["speed"][0]["pair"] == "bundled"


def test_depth_is_the_best_of_the_formula():
    falling = [0.8**i for i in range(1, 9)]
    flat = [1.0] * 9
    assert choose_depth(falling, 0.2, flat)[0] < choose_depth(falling, 0.03, flat)[0]
    k, gain = choose_depth(falling, 0.1, flat)
    assert gain == pytest.approx((1 + sum(falling[:k])) / (1 + 0.1 * k))
    # Rows that cost as much as forwards leave nothing to win.
    assert choose_depth(falling, 0.1, list(range(1, 10)))[0] == 1
    with pytest.raises(InvalidConfig, match="no draft position"):
        choose_depth([], 0.1, flat)


class Paced:
    """A target that takes a given time for each row."""

    def __init__(self, seconds: float, forward_s: float = 0.0) -> None:
        self._seconds, self._forward_s = seconds, forward_s

    def time(self, num_rows: int) -> float:
        return self._forward_s + self._seconds * num_rows


def test_costs_are_ratios():
    assert cost_ratio(Paced(0.1), Paced(1.0), 3) == pytest.approx(0.1)
    costs = verify_costs(Paced(0.1, 0.9), 2, depth=3)
    assert costs == pytest.approx([1.0, 1.1, 1.2, 1.3])


def test_a_larger_model_costs_more(pair):
    """A probe measures forwards: hundredfold the weights take longer."""
    small = load_llama(pair.target)
    big = inflate(small, Size(4, 16384, 300), 0)
    probes = [Probe(HuggingFaceTarget(model), [1, 2, 3]) for model in (small, big)]
    assert cost_ratio(*probes, 5) < 0.8
    for probe in probes:
        probe.close()


def test_differences_show_the_gap(pair):
    """Texts that part at the second token: the gap is that of the two largest logits there."""
    model = load_llama(pair.target)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].topk(2).values
    runs = [[Run((7, 8, 9), 0.0, 1.0)]], [[Run((7, 3, 4), 0.0, 1.0)]]
    target = HuggingFaceTarget(model)
    same, gap = differences(target, [[5, 6]], *runs)
    assert same == 0
    assert gap == pytest.approx(float(logits[0] - logits[1]), abs=1e-5)
    assert differences(target, [[5, 6]], runs[0], runs[0]) == (1, None)


def test_arms_give_full_and_equal_texts(pair):
    tokenizer = TextTokenizer(pair.target)
    target = HuggingFaceTarget(load_llama(pair.target))
    draft = HuggingFaceTarget(load_llama(pair.draft))
    plain = Decoder("plain", target, tokenizer, NoDrafter(), k=1, max_tokens=12)
    speculative = Decoder("draft", target, tokenizer, ModelDrafter(draft), k=3, max_tokens=12)
    theirs = Generate("generate", load_llama(pair.target), max_tokens=12)
    runs = [arm.arm.decode([5, 6, 7]) for arm in (plain, speculative, theirs)]
    assert {len(run.tokens) for run in runs} == {12}
    assert len({run.tokens for run in runs}) == 1
    assert all(0 < run.first_s < run.total_s for run in runs)
    assert speculative.acceptance().rate == 1.0
    speculative.warm([5, 6, 7])
    assert speculative.acceptance().rounds == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": ("bundles",)}, "row 'bundles' does not exist"),
        ({"depths": (1, 2)}, "2 draft lengths were given for 1 cost"),
        ({"num_tokens": 1}, "at least 1 prompt and 2 tokens"),
    ],
)
def test_settings_that_cannot_be_meant(pair, changes, message):
    with pytest.raises(InvalidConfig, match=message):
        tiny(pair, **changes)


def test_too_few_prompts(pair):
    with pytest.raises(InvalidConfig, match="2 prompts were found and 2 are to be timed"):
        next(run(tiny(pair), TEXTS[:2], Steps(), "command", None))


def test_a_busy_machine_is_refused(pair, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("outrider.bench.script.busy_now", lambda _: 0.5)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), "utf-8")
    given = ["--target", str(pair.target), "--draft", str(pair.draft)]
    given += [
        "--prompts-from",
        str(prompts),
        "--rows",
        "bundled",
        "--prompts",
        "1",
        "--tokens",
        "2",
    ]
    assert main(given) == 2
    assert "other processes use 50% of the processors" in capsys.readouterr().err
