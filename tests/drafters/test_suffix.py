"""Suffix drafts and the store of earlier outputs: what is guessed, kept, saved and kept apart."""

from __future__ import annotations

import stat
from dataclasses import dataclass

import numpy as np
import pytest

from outrider import SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.decoding import Draft
from outrider.drafters import SuffixDrafter, SuffixStore
from outrider.drafters.points import Budget, PointTree, grow_likeliest, merged, ordered
from outrider.drafters.suffix_store import MAX_OTHERS, VERSION
from outrider.engine import Emitter, Engine, Requests
from outrider.engine.draws import GroupDraws
from outrider.errors import InvalidConfig
from outrider.models.protocol import ProtocolTarget
from outrider.sequence import Sequence
from outrider.tree import TreeBudget
from outrider.types import Request
from tests.engine.toys import markov


@dataclass
class Draws:
    """A round's draws that keep what they get."""

    trees: TreeBudget | None = None

    @property
    def max_certain(self) -> int:
        return 0 if self.trees is None else self.trees.nodes

    def points(self, tokens):
        self.tokens, self.parents = [list(row) for row in tokens], None
        return tokens

    def point_trees(self, tokens, parents) -> Draft:
        self.tokens, self.parents = tokens, parents
        return GroupDraws.point_trees(None, tokens, parents)  # type: ignore[arg-type]


def text(tokens: list[int], key: int = 0, num_prompt: int | None = None) -> Sequence:
    prompt = tuple(tokens[:num_prompt])
    return Sequence(
        key=key,
        request=Request(prompt, SamplingParams(max_tokens=9)),
        seed=0,
        rule="greedy",
        depth=8,
        max_tokens=9,
        end_tokens=frozenset(),
        tokens=list(tokens),
    )


def drafted(drafter: SuffixDrafter, tokens: list[int], depth: int = 8, key: int = 0) -> list[int]:
    draws = Draws()
    drafter.propose([text(tokens, key)], [depth], draws)
    return draws.tokens[0]


def finish(drafter: SuffixDrafter, tokens: list[int], num_prompt: int, key: int = 0) -> None:
    done = text(tokens, key, num_prompt)
    drafter.propose([done], [1], Draws())
    done.finish_reason = "length"
    drafter.close(done)


def test_it_copies_what_followed_the_longest_match() -> None:
    #        [1 2 3] 9        [2 3] 5      [1 2 3]
    tokens = [1, 2, 3, 9, 8, 0, 2, 3, 5, 7, 1, 2, 3]
    assert drafted(SuffixDrafter(), tokens) == [9, 8, 0]
    assert drafted(SuffixDrafter(longest=2), tokens)[0] == 5, "of equals the latest"
    assert drafted(SuffixDrafter(spec_factor=1.5), tokens) == [9, 8, 0, 2]
    assert drafted(SuffixDrafter(spec_factor=9.0), tokens, depth=2) == [9, 8]
    assert drafted(SuffixDrafter(), [1, 2, 3]) == []


def test_a_periodic_text_goes_on() -> None:
    drafter = SuffixDrafter(spec_factor=2.0, longest=6)
    assert drafted(drafter, [1, 2, 3, 1, 2, 3, 1, 2], depth=9) == [3, 1, 2, 3, 1, 2, 3, 1, 2]
    assert drafted(SuffixDrafter(spec_factor=3.0), [4] * 5, depth=7) == [4] * 7


def test_counts_decide_and_unlikely_paths_are_left_out() -> None:
    # After 1: 2 three times (then 5, 6, 7 in turn), 3 once, lately.
    tokens = [1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 3, 8, 1]
    longest = SuffixDrafter(longest=1, spec_factor=8.0, min_prob=0.5)
    assert drafted(longest, tokens) == [2]
    assert drafted(SuffixDrafter(longest=1, spec_factor=8.0, min_prob=0.8), tokens) == []
    assert len(drafted(SuffixDrafter(longest=1, spec_factor=8.0, min_prob=0.0), tokens)) == 8


def test_trees_hold_the_likeliest_paths_within_the_budget() -> None:
    tokens = [1, 2, 5, 1, 2, 6, 1, 2, 5, 1, 3, 8, 1]
    drafter = SuffixDrafter(longest=1, spec_factor=99.0, min_prob=0.0)
    for max_nodes in (2, 4, 8):
        draws = Draws(TreeBudget(4, max_nodes))
        draft = drafter.propose([text(tokens, key=max_nodes)], [3], draws)
        (got,), (parents,) = draws.tokens, draws.parents
        assert len(got) == max_nodes and draft.tree.depth <= 3
        assert len(set(zip(parents, got, strict=True))) == max_nodes, "no child twice"
        assert got[0] == 2 and parents[:1] == [0]
    assert {t for t, p in zip(got, parents, strict=True) if p == 0} == {2, 3}


def test_best_first_is_what_sorting_all_paths_gives() -> None:
    shares = ((0, 0.6), (1, 0.3), (2, 0.1))
    paths = {(): 1.0}
    for _ in range(4):
        paths |= {(*p, t): c * s for p, c in paths.items() for t, s in shares if len(p) < 4}
    wanted = sorted((c for p, c in paths.items() if p), reverse=True)[:11]
    grown = grow_likeliest((), lambda p: [(t, s, (*p, t)) for t, s in shares], Budget(11, 4))
    nodes: list[tuple[int, ...]] = [()]
    for token, parent in zip(grown.tokens, grown.parents, strict=True):
        nodes.append((*nodes[parent], token))
    assert sorted((paths[n] for n in nodes[1:]), reverse=True) == pytest.approx(wanted)
    assert grown.chain == [0, 0, 0, 0][: len(grown.chain)] and len(grown.chain) >= 3
    least = grow_likeliest((), lambda p: [(t, s, (*p, t)) for t, s in shares], Budget(99, 9, 0.25))
    assert len(least.tokens) == sum(1 for p, c in paths.items() if p and c >= 0.25)


def test_merged_trees_hold_each_path_once_and_first_comes_first() -> None:
    a, b = ordered([1, 2, 3], [0, 1, 0]), ordered([1, 4, 5], [0, 1, 0])
    both = merged([a, b], 9)
    assert both == PointTree((1, 2, 4, 3, 5), (0, 1, 1, 0, 0))
    assert merged([a, b], 4) == PointTree((1, 2, 4, 3), (0, 1, 1, 0))
    assert merged([PointTree(), a], 3) == a and merged([], 3) == PointTree()


def test_outputs_of_finished_texts_are_drafted_from_and_prompts_are_not() -> None:
    drafter = SuffixDrafter(store=SuffixStore())
    assert drafted(drafter, [5, 6], key=9) == []
    finish(drafter, [1, 2, 5, 6, 7, 8], num_prompt=2)
    assert drafted(drafter, [5, 6], key=9) == [7, 8]
    assert drafted(drafter, [9, 1], key=10) == []
    assert drafter.store is not None and drafter.store.num_requests == 1
    given_up = text([1, 5, 9, 9, 9], 3, 1)
    drafter.propose([given_up], [1], Draws())
    drafter.close(given_up)
    drafter.close(given_up)
    assert drafter.store.num_requests == 1


def test_the_longer_match_wins_wherever_it_is() -> None:
    drafter = SuffixDrafter(store=SuffixStore())
    finish(drafter, [0, 1, 2, 3, 7, 7], num_prompt=1)
    assert drafted(drafter, [2, 3, 5, 5, 1, 2, 3], key=4) == [7, 7], "three in the store"
    assert drafted(drafter, [9, 3, 5, 5, 9, 3], key=5) == [5, 5], "two in the text"


def test_the_oldest_requests_go_first() -> None:
    store = SuffixStore(max_requests=4)
    for n in range(9):
        store.add([n, n])
        assert store.num_requests <= 4
    assert list(store.requests()) == [[n, n] for n in (5, 6, 7, 8)]
    store = SuffixStore(max_tokens=10)
    for n in range(9):
        store.add([n] * (n % 4 + 1))
        assert store.num_tokens <= 10
        assert list(store.requests())[-1] == [n] * (n % 4 + 1)
    store.add(list(range(40)))
    assert list(store.requests()) == [list(range(30, 40))]
    store.clear()
    assert store.num_requests == 0 and list(store.requests()) == []


def test_a_store_is_the_same_after_a_round_trip(tmp_path) -> None:
    store = SuffixStore(max_requests=6, max_tokens=99, longest=7, tenant="ä", shared=True)
    for n in range(5):
        store.add([n, 1, 2, n + 1, 3])
    path = tmp_path / "store.npz"
    store.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    store.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and list(tmp_path.iterdir()) == [path]
    again = SuffixStore.load(path, tenant="ä")
    assert list(again.requests()) == list(store.requests())
    for name in ("max_requests", "max_tokens", "longest", "tenant", "shared"):
        assert getattr(again, name) == getattr(store, name)
    for end in ([1, 2], [3, 1], [4, 1, 2]):
        assert drafted(SuffixDrafter(store=again), end) == drafted(SuffixDrafter(store=store), end)
    SuffixStore().save(path)
    assert SuffixStore.load(path).num_requests == 0


def test_a_failed_save_leaves_the_file_as_it_was(tmp_path, monkeypatch) -> None:
    path, store = tmp_path / "store.npz", SuffixStore()
    store.add([1, 2])
    store.save(path)
    before = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        store.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_files_that_are_no_store_are_refused(tmp_path) -> None:
    path, store = tmp_path / "store.npz", SuffixStore()
    store.add(list(range(500)))
    store.save(path)
    good = path.read_bytes()
    damaged = {
        "cut": good[: len(good) // 2],
        "flipped": good[:4000] + bytes([good[4000] ^ 1]) + good[4001:],
        "empty": b"",
        "text": b"hello",
        "pickle": b"\x80\x04K\x01.",
    }
    for name, data in damaged.items():
        path.write_bytes(data)
        with pytest.raises(InvalidConfig, match="no store of suffixes, or it is damaged"):
            SuffixStore.load(path)
        assert name
    with pytest.raises(InvalidConfig, match="no store"):
        SuffixStore.load(tmp_path / "absent.npz")
    with np.load(__import__("io").BytesIO(good)) as file:
        parts = dict(file)
    for name, value, message in (
        ("version", np.int64(VERSION + 1), "of version 2"),
        ("lengths", np.array([7]), "contradict"),
        ("tokens", -parts["tokens"], "contradict"),
        ("limits", np.array([1, 2]), "contradict"),
        ("tenant", np.array(["x"]), "contradict"),
        ("tokens", np.array([object()]), "damaged"),
    ):
        np.savez(path, **{**parts, name: value})
        with pytest.raises(InvalidConfig, match=message):
            SuffixStore.load(path)


def test_tenants_never_see_each_others_texts(tmp_path) -> None:
    ours, theirs = SuffixStore(tenant="a"), SuffixStore(tenant="b")
    first = SuffixDrafter(store=ours, tenant="a")
    second = SuffixDrafter(store=theirs, tenant="b")
    third = SuffixDrafter()
    finish(first, [0, 5, 6, 7, 8], num_prompt=1)
    assert drafted(first, [5, 6], key=1) == [7, 8]
    assert drafted(second, [5, 6], key=1) == drafted(third, [5, 6], key=1) == []
    for tenant in ("b", ""):
        with pytest.raises(InvalidConfig, match="of another tenant"):
            SuffixDrafter(store=ours, tenant=tenant)
    ours.save(tmp_path / "a.npz")
    with pytest.raises(InvalidConfig, match="of another tenant"):
        SuffixStore.load(tmp_path / "a.npz", tenant="b")
    common = SuffixStore(tenant="a", shared=True)
    finish(SuffixDrafter(store=common, tenant="a"), [0, 5, 6, 7, 8], num_prompt=1)
    assert drafted(SuffixDrafter(store=common, tenant="b"), [5, 6]) == [7, 8]


@pytest.mark.parametrize("shared", [False, True])
def test_requests_of_one_batch_draft_from_their_own_tenant_alone(shared: bool) -> None:
    """The same request of two tenants, one of whom has made it before; shared, both are helped."""
    store = SuffixStore(shared=shared)
    target = ProtocolTarget(markov(40, 3, seed=2))
    engine = Engine(target, SuffixDrafter(store=store), Emitter(None))
    requests = Requests(engine, depth=16, end_tokens=frozenset())
    params = SamplingParams(seed=3, max_tokens=60)
    asked = {who: Request((1, 2, 3), params, tenant=who) for who in ("anna", "bert", None)}
    (alone,) = requests.complete([asked["anna"]])
    again, other, own = requests.complete([asked["anna"], asked["bert"], asked[None]])
    assert alone.token_ids == again.token_ids == other.token_ids == own.token_ids
    assert again.stats.accepted > 40 > alone.stats.accepted
    helped = again if shared else alone
    assert other.stats.drafted == own.stats.drafted == helped.stats.drafted
    assert store.num_requests == (4 if shared else 1)
    assert store.of("bert").num_requests == (4 if shared else 1)


def test_stores_of_other_tenants_are_bounded_and_forgotten() -> None:
    store = SuffixStore(max_requests=7, max_tokens=70, longest=5)
    first = store.of("0")
    assert (first.max_requests, first.max_tokens, first.longest) == (7, 70, 5)
    first.add([1, 2])
    assert store.of("0") is first and store.of("") is store and store.num_requests == 0
    for number in range(1, MAX_OTHERS):
        store.of(str(number))
    assert store.of("0") is first
    store.of("one more")
    assert store.of("0") is first, "the one not asked for longest goes"
    store.clear()
    assert store.of("0").num_requests == 0


def test_a_tenant_is_text() -> None:
    engine = Engine(ProtocolTarget(markov(5, 1, seed=2)), SuffixDrafter(), Emitter(None))
    with pytest.raises(InvalidConfig, match="tenant=7: text is due"):
        Requests(engine, depth=2, end_tokens=frozenset()).check(
            Request((1,), SamplingParams(max_tokens=2), tenant=7)  # type: ignore[arg-type]
        )


def test_a_store_pays_and_changes_no_token() -> None:
    """The same request again is drafted from its first output; a fresh drafter has less."""
    target = markov(40, 3, seed=2)
    config = SpeculativeDecoderConfig(k=16, sampling=SamplingParams(seed=3))
    plain = SpeculativeDecoder(None, target, config).generate([1, 2, 3], 60)
    spec = SpeculativeDecoder(SuffixDrafter(store=SuffixStore()), target, config)
    assert spec.generate([1, 2, 3], 60) == plain
    first = spec.metrics.accepted
    assert spec.generate([1, 2, 3], 60) == plain
    assert spec.metrics.accepted - first > 40 > first


@pytest.mark.parametrize(
    "options",
    [{"longest": 0}, {"spec_factor": -1}, {"spec_factor": "x"}, {"min_prob": 1.5},
     {"min_prob": float("nan")}],
)  # fmt: skip
def test_options_that_cannot_be_meant_are_named(options: dict) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        SuffixDrafter(**options)


@pytest.mark.parametrize(
    "options", [{"max_requests": 0}, {"max_tokens": 2.5}, {"tenant": None}, {"shared": 1}]
)
def test_bounds_that_cannot_be_meant_are_named(options: dict) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        SuffixStore(**options)
