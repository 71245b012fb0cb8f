"""Rows of logits: accurate, read on demand, and the same decisions on every path through them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from outrider import host, noise
from outrider.decoding import (
    RULES,
    Draft,
    Law,
    RoundNoise,
    TargetBest,
    TargetLaws,
    TargetLogits,
    TargetRows,
    sampling,
)
from outrider.decoding import rows as rows_module
from outrider.decoding.draft import Kind
from outrider.decoding.laws import softmax
from outrider.decoding.rules import base, greedy
from outrider.decoding.rules.greedy import GreedyRule
from outrider.decoding.sampling import gumbel_race, inverse_cdf
from outrider.tree import TokenTree
from tests.house.layout import ROOT

WIDE = 40_000
HALVES = [torch.bfloat16, torch.float16]


def noise_of(num_texts: int, seed: int = 0) -> RoundNoise:
    return RoundNoise(
        noise.as_key(range(seed, seed + num_texts)),
        torch.zeros(num_texts, dtype=torch.int64),
        torch.full((num_texts,), 5),
    )


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("temperature", [None, 0.7])
def test_rows_are_the_softmax_in_double(dtype: torch.dtype, temperature: float | None):
    logits = normal(2, 3, WIDE, dtype=dtype)
    logits[0, 1, 100:9000] = -torch.inf
    heat = None if temperature is None else torch.tensor([1.0, temperature])
    rows = TargetLogits(logits, heat)
    scale = torch.ones(2, 1, 1) if heat is None else heat[:, None, None]
    exact = torch.softmax(logits.double() / scale.double(), -1).flatten(0, 1)
    at, tokens = torch.tensor([5, 0, 1, 1]), torch.tensor([3, 7, 100, 9001])
    probs = rows.probs(at)
    assert probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(probs.double(), exact[at], rtol=4e-6, atol=0)
    assert float((probs.double().sum(-1) - 1).abs().max()) < 1e-6
    assert torch.equal(rows.prob_of(at, tokens), probs.gather(1, tokens[:, None])[:, 0].double())
    assert torch.equal(rows.argmax(at), logits.flatten(0, 1)[at].argmax(-1))


def test_torch_alone_would_not_sum_to_one():
    """The negative control of the sum above: what `softmax` sets right is there to be set right."""
    wide = normal(20, 152_064)
    assert float((torch.softmax(wide, -1).double().sum(-1) - 1).abs().max()) > 1e-6
    assert float((softmax(wide).double().sum(-1) - 1).abs().max()) < 1e-6


@pytest.mark.parametrize("rule", ["token", "block", "match", "coupled", "greedy"])
def test_rows_nobody_needs_are_not_read(rule: str):
    """Junk behind the first refusal, and behind the last token, changes nothing but `block`."""
    target, law, tokens = _drafted(8, 3, 50)
    lengths = torch.tensor([0, 1, 2, 3, 3, 3, 2, 1])
    draft, chance = Draft.chain(tokens, lengths, law), noise_of(8)
    clean = RULES[rule].verify(draft, TargetLogits(target), chance)
    last = lengths if rule == "block" else clean.num_accepted_B
    junk = target.masked_fill((torch.arange(4) > last[:, None])[:, :, None], torch.nan)
    after = RULES[rule].verify(draft, TargetLogits(junk), chance)
    assert torch.equal(clean.num_accepted_B, after.num_accepted_B)
    assert torch.equal(clean.token_B, after.token_B)
    needed = target.masked_fill((torch.arange(4) == last[:, None])[:, :, None], torch.nan)
    spoilt = RULES[rule].verify(draft, TargetLogits(needed), chance)
    assert not torch.equal(clean.token_B, spoilt.token_B)


@pytest.fixture(params=["host", "elsewhere"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways through the rules: with host reads, and as where they would cost a wait."""
    if request.param == "elsewhere":
        _go_elsewhere(monkeypatch)
    return request.param


def _go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "reads_free", lambda device: False)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("form", ["dense", "sparse", "certain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("width", [7, 700])
def test_both_ways_decide_alike(
    rule: str, form: str, dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
):
    target, law, tokens = _drafted(300, 4, width, dtype)
    lengths = torch.arange(300) % 5
    if form == "sparse":
        best = law.probs.topk(5, -1)
        tokens = best.indices[:, 1].view(300, 4)
        law = Law.sparse(best.indices, best.values / best.values.sum(-1, keepdim=True))
    draft = Draft.chain(tokens, lengths, None if form == "certain" else law)
    for rows in (TargetLogits(target), TargetLaws(torch.softmax(target, -1))):
        monkeypatch.undo()
        here = RULES[rule].verify(draft, rows, noise_of(300))
        monkeypatch.setattr(rows_module, "_CACHED", 3 * width)
        chunked = RULES[rule].verify(draft, rows, noise_of(300))
        _go_elsewhere(monkeypatch)
        there = RULES[rule].verify(draft, rows, noise_of(300))
        assert 0 < float(here.num_accepted_B.float().mean()) < float(lengths.float().mean())
        for other in (chunked, there):
            assert torch.equal(here.num_accepted_B, other.num_accepted_B)
            assert torch.equal(here.token_B, other.token_B)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_elsewhere_the_host_reads_nothing(rule: str, monkeypatch: pytest.MonkeyPatch):
    target, law, tokens = _drafted(6, 3, 20)
    draft = Draft.chain(tokens, torch.full((6,), 3), law)
    tests, _ = base.round_uniforms(noise_of(6), 3, torch.device("cpu"))

    def refused(self: torch.Tensor, *_: object) -> bool:
        raise AssertionError("the host read a tensor")

    _go_elsewhere(monkeypatch)
    for name in ("nonzero", "item", "tolist", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    sifted = RULES[rule].sift(draft, TargetLogits(target), tests)  # type: ignore[attr-defined]
    monkeypatch.undo()
    again = RULES[rule].sift(draft, TargetLogits(target), tests)  # type: ignore[attr-defined]
    assert torch.equal(sifted.num_accepted_B, again.num_accepted_B)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_laws_are_found_through_their_rows_and_kinds(rule: str, place: str):
    """A chain whose laws stand elsewhere in the table, and one with certain tokens among drawn."""
    target, law, tokens = _drafted(200, 3, 6, torch.float64)
    lengths = torch.full((200,), 3)
    plain = RULES[rule].verify(
        Draft.chain(tokens, lengths, law), TargetLogits(target), noise_of(200)
    )
    order = torch.randperm(600, generator=torch.Generator().manual_seed(1))
    chains, iid = TokenTree.chain(tokens, lengths), frozenset({Kind.IID})
    moved = Draft(chains, Law.dense(law.probs[order]), order.argsort().view(200, 3), kinds=iid)
    again = RULES[rule].verify(moved, TargetLogits(target), noise_of(200))
    assert torch.equal(plain.num_accepted_B, again.num_accepted_B)
    assert torch.equal(plain.token_B, again.token_B)
    kinds = torch.where(torch.arange(3) == 1, int(Kind.POINT), int(Kind.IID)).expand(200, 3)
    mixed = Draft(chains, law, None, kinds, frozenset({Kind.POINT, Kind.IID}))
    hot = torch.nn.functional.one_hot(tokens.flatten(), 6).double()
    probs = torch.where((kinds == Kind.POINT).flatten()[:, None], hot, law.probs)
    wanted = RULES[rule].verify(
        Draft.chain(tokens, lengths, Law.dense(probs)), TargetLogits(target), noise_of(200)
    )
    got = RULES[rule].verify(mixed, TargetLogits(target), noise_of(200))
    assert torch.equal(wanted.num_accepted_B, got.num_accepted_B)
    assert torch.equal(wanted.token_B, got.token_B)
    assert not torch.equal(plain.token_B, got.token_B)


@pytest.mark.parametrize("width", [512, 513, 5000, 40_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inverse_cdf_in_blocks_is_the_one_of_whole_rows(width: int, dtype: torch.dtype):
    weights = torch.softmax(normal(60, width, seed=width, dtype=dtype), -1)
    weights[:20, width // 3 : 2 * width // 3] = 0
    weights[20, :] = 0
    weights[21, : width - 1] = 0
    weights[22, 1:] = 0
    uniform = torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    uniform[:3], uniform[3] = torch.tensor([0.0, 1.0 - 2.0**-53, 1.0]), 0.5
    drawn = inverse_cdf(weights, uniform)
    upto = weights.double().cumsum(-1)
    point = uniform[:, None] * upto[:, -1:]
    rounding = 1e-13 if dtype == torch.float64 else 1e-6
    before = torch.where(drawn[:, None] > 0, upto.gather(1, (drawn[:, None] - 1).clamp(min=0)), 0)
    assert (before <= point * (1 + rounding)).all()
    inside = upto.gather(1, drawn[:, None]) >= point * (1 - rounding)
    assert inside.all()
    full = weights.sum(-1) > 0
    assert (weights.gather(1, drawn[:, None])[full] > 0).all()
    assert drawn[20:23].tolist() == [width - 1, width - 1, 0]
    if dtype == torch.float64:
        wanted = torch.searchsorted(upto, point, right=True).clamp(max=width - 1)[:, 0]
        assert torch.equal(drawn[3:20], wanted[3:20])
    assert not torch.equal(drawn, inverse_cdf(weights, uniform.flip(0)))


@pytest.mark.parametrize("spread", [0.0, 1.0, 9.0])
@pytest.mark.parametrize(("rows", "width"), [(3000, 3), (300, 200), (4, 33_333)])
def test_the_race_in_bounds_has_the_same_winner(rows: int, width: int, spread: float):
    probs = torch.softmax(normal(rows, width, seed=width) * spread / 3, -1)
    chance = noise_of(rows, seed=int(spread))
    address = chance.seed_B, chance.sample_B, chance.anchor_B
    whole = sampling._race_everywhere(probs, None, *address)
    assert torch.equal(sampling._race_in_bounds(probs, *address), whole)
    assert torch.equal(gumbel_race(probs, None, *address), whole)
    other = chance.anchor_B + 1
    assert not torch.equal(sampling._race_in_bounds(probs, *address[:2], other), whole)


def test_shortfalls_bound_the_noise():
    chance = noise_of(3, seed=2)
    address = chance.seed_B, chance.sample_B, chance.anchor_B
    short = noise.shortfall_rows(*address, 5001).double() * 2.0**-32
    gumbels = noise.gumbel_rows(*address, 5001)
    assert (gumbels <= -short.log() + 1e-6).all()
    # Near 1 the float32 of a shortfall is too coarse for its logarithm's sake.
    far = -(-torch.log1p(-(short + 2.0**-31))).log() - 1e-5
    assert (gumbels >= far)[short < 0.9].all()


def test_the_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Every rule of the registry is timed, on chains or trees, and the JSON names the machine."""
    main = runpy.run_path(str(ROOT / "benchmarks" / "verification.py"))["main"]
    assert main(["--smoke", "--anyway", "--json", str(tmp_path / "out.json")]) == 0
    record = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert record["machine"]["torch"] == torch.__version__
    timed = {subject["name"] for cell in record["cells"] for subject in cell["subjects"]}
    assert set(RULES) <= timed
    assert {"logsumexp", "transformers"} <= timed
    assert capsys.readouterr().out.count("\n") == 3 + len(record["cells"])


def test_the_benchmark_sees_every_row_that_is_read():
    """`block` reads as many rows as it kept and one more at least, whichever method it asks."""
    bench = runpy.run_path(str(ROOT / "benchmarks" / "verification.py"))
    pool = bench["Pool"].random(500)
    for name in ("token", "block", "traversal"):
        draft = bench["chain"](pool, RULES[name], 8, 4)
        rows = bench["Watched"](pool.logits(8, 5, torch.float32))
        verdict = RULES[name].verify(draft, rows, bench["noise_of"](8))
        assert len(rows.asked) >= int(verdict.num_accepted_B.sum()) + 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_laws_are_read_as_float32(dtype: torch.dtype):
    laws = torch.softmax(normal(2, 3, 9, seed=4), -1).to(dtype)
    half, whole = TargetLaws(laws), TargetLaws(laws.float())
    at, tokens = torch.tensor([0, 4]), torch.tensor([1, 2])
    assert half.probs(at).dtype == torch.float32
    assert torch.equal(half.probs(at), whole.probs(at))
    assert torch.equal(half.prob_of(at, tokens), whole.prob_of(at, tokens))


def _drafted(
    num_texts: int, depth: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, Law, torch.Tensor]:
    """Target logits, a drafter's laws near them, and tokens it drew."""
    chance = torch.Generator().manual_seed(width)
    target = normal(num_texts, depth + 1, width, seed=1, dtype=dtype)
    error = normal(num_texts, depth, width, seed=2, dtype=dtype) / 4
    probs = torch.softmax(target[:, :depth] + error, -1).flatten(0, 1)
    tokens = torch.multinomial(probs, 1, generator=chance).view(num_texts, depth)
    return target, Law.dense(probs), tokens


def test_the_abstract_rows_say_where_they_are():
    rows: TargetRows = TargetLaws(torch.ones(2, 3, 4))
    assert rows.on_host
    assert [part.stop - part.start for part in rows.parts(7)] == [7]
    assert list(TargetLogits(torch.zeros(1, 1, 300_000)).parts(3)) == [
        slice(0, 1),
        slice(1, 2),
        slice(2, 3),
    ]


def test_rows_whose_likeliest_tokens_are_known():
    laws = TargetLaws(torch.softmax(normal(2, 3, 50), -1))
    asked = list[int]()

    def rows() -> TargetRows:
        asked.append(1)
        return laws

    known = TargetBest(laws.likeliest(), 50, rows)
    at, tokens = torch.tensor([5, 0, 1]), torch.tensor([3, 7, 49])
    assert known.shape == laws.shape and known.device == laws.device
    assert torch.equal(known.argmax(at), laws.argmax(at))
    assert torch.equal(known.likeliest(), laws.probs(torch.arange(6)).argmax(-1).view(2, 3))
    assert not asked
    assert torch.equal(known.probs(at), laws.probs(at))
    assert torch.equal(known.prob_of(at, tokens), laws.prob_of(at, tokens))
    assert len(asked) == 1


def test_known_tokens_of_wide_rows_are_compared_at_once(monkeypatch: pytest.MonkeyPatch):
    """Rows that fill no cache are walked along; tokens that are known are not."""
    monkeypatch.setattr(rows_module, "_CACHED", 100)
    laws = TargetLaws(torch.softmax(normal(2, 3, 50), -1))
    known = TargetBest(laws.likeliest(), 50, lambda: laws)
    tokens = laws.likeliest()[:, :2].clone()
    tokens[1, 1] += 1
    draft, chance = Draft.chain(tokens, torch.tensor([2, 2]), None), noise_of(2)
    walked = GreedyRule().verify(draft, laws, chance)
    monkeypatch.setattr(greedy, "follow", lambda *_: pytest.fail("rows were walked along"))
    found = GreedyRule().verify(draft, known, chance)
    assert found.num_accepted_B.tolist() == walked.num_accepted_B.tolist() == [2, 1]
    assert torch.equal(found.token_B, walked.token_B)
