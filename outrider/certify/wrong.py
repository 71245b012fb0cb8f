"""Chain rules broken on purpose, as real implementations were: certification must catch them.

Names in brackets say where such a defect was reported or read; they say nothing about what is
there today.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from outrider.certify.enumerate import Addresses, Scheme, Speculation, Text
from outrider.certify.misplaced import by_position, one_for_all, same_every_round, taken_from
from outrider.certify.pairs import Pair, fixed, fractions_of, small
from outrider.certify.reference import (
    IN_LAW,
    Noise,
    Outcome,
    ReferenceRule,
    Round,
    argmax,
    block_share,
    block_weights,
    excess,
    inverse_cdf,
)
from outrider.certify.reference_trees import normalised
from outrider.certify.surrogates import SURROGATES, towards
from outrider.decoding.theory import LawRow, Model, Number
from outrider.noise import STREAM_ACCEPT, STREAM_DRAFT, STREAM_EXTRA


@dataclass(frozen=True, slots=True)
class Wrong:
    """A broken scheme, the rule it was made from, and a pair on which it shows.

    Attributes:
        right: the scheme without the defect, exact on the same pair.
        reported: where such a defect was met, or nothing.
    """

    rule: str
    scheme: Speculation
    pair: Pair
    right: Speculation
    reported: str = ""

    @property
    def name(self) -> str:
        """Rule, defect, and where it was met."""
        met = f" [{self.reported}]" if self.reported else ""
        return f"{self.rule}: {self.scheme.name}{met}"


def wrong_chains() -> list[Wrong]:
    """Broken variants of the chain rules in law."""
    broken = [*_of_the_residual(), *_of_the_test(), *_of_the_noise(), *_of_the_laws()]
    return [
        Wrong(rule, scheme, pair, Scheme("right", IN_LAW[rule]), *reported)
        for rule, scheme, pair, *reported in broken
    ]


Entry = tuple[str, Scheme, Pair] | tuple[str, Scheme, Pair, str]


def _sun() -> Pair:
    return fixed("sun", [1, 2], [2, 1], depth=2, length=4)


def _of_the_residual() -> list[Entry]:
    """The token that is added comes from the wrong law."""
    pair, token, block, match = small(), IN_LAW["token"], IN_LAW["block"], IN_LAW["match"]
    openvino = "OpenVINO GenAI validate_candidate, as read"
    return [
        ("token", Scheme("residual replaced by p", _added_from(token, "target")), pair),
        ("token", Scheme("added token drawn from q", _added_from(token, "draft")), pair),
        ("token", Scheme("likeliest token added", _adds_likeliest), pair, "mistral.rs#2424"),
        ("token", Scheme("q(x) / p(fresh draw), no residual", _ratio_upside_down), pair, openvino),
        ("block", Scheme("residual replaced by p", _added_from(block, "target")), pair),
        ("block", Scheme("added token drawn from q", _added_from(block, "draft")), pair),
        ("block", Scheme("residual of the token rule", _block_unscaled), pair),
        ("match", Scheme("redrawn from p after a miss", _added_from(match, "target")), pair),
        ("match", Scheme("residual after a miss", _residual_after_miss), pair),
    ]


def _of_the_test() -> list[Entry]:
    """What is kept is decided by the wrong test, or behind its back."""
    pair, sun = small(), _sun()
    forbidden = fixed("a token the target forbids", [0, 1], [1, 1], depth=2, length=3)
    token, block = IN_LAW["token"], IN_LAW["block"]
    lenient = towards(SURROGATES["lenience"], token)
    typical = towards(SURROGATES["typical-acceptance"], token)
    coin = "SGLang#35771"
    return [
        ("token", Scheme("every draft kept", _keeps_all), pair, "transformers#28166"),
        ("token", Scheme("non-strict test", _token_not_strict, grid=2**24), forbidden, coin),
        ("block", Scheme("non-strict test", _block_not_strict, grid=2**24), forbidden),
        ("match", Scheme("non-strict draw", _match_not_strict, grid=2**24), forbidden, coin),
        ("block", Scheme("last test uncapped", _block_uncapped), sun, "HSD, released code as read"),
        ("token", Scheme("last draft dropped for its value", token, dropped=_unlikely), pair),
        ("block", Scheme("last draft dropped for its value", block, dropped=_unlikely), pair),
        ("token", Scheme("lenience taken for lossless", lenient), pair),
        ("token", Scheme("typical acceptance taken for lossless", typical), pair, "Medusa"),
        (
            "token",
            Scheme("the likelier of two draws told as one", token, draw=_likelier_of_two),
            pair,
            "ml-recurrent-drafter#6",
        ),
    ]


def _of_the_noise() -> list[Entry]:
    """An address is used for two things, or twice."""
    pair, sun = small(), _sun()
    token, block, match = IN_LAW["token"], IN_LAW["block"], IN_LAW["match"]
    as_draft, as_test = (
        Addresses(test=taken_from(STREAM_DRAFT)),
        Addresses(extra=taken_from(STREAM_ACCEPT)),
    )
    same_tests, same_drafts = (
        Addresses(test=same_every_round(STREAM_ACCEPT)),
        Addresses(draft=same_every_round(STREAM_DRAFT)),
    )
    vllm = "vLLM#47386"
    return [
        ("token", Scheme("draft noise used again to test", token, at=as_draft), pair),
        ("block", Scheme("draft noise used again to test", block, at=as_draft), pair),
        ("token", Scheme("test noise used again to add", token, at=as_test), sun),
        ("block", Scheme("test noise used again to add", block, at=as_test), sun),
        (
            "token",
            Scheme("draft noise used again to add", _added_by_race, draw=_raced),
            pair,
            vllm,
        ),
        ("token", Scheme("tests at one address in every round", token, at=same_tests), sun),
        ("block", Scheme("tests at one address in every round", block, at=same_tests), sun),
        ("token", Scheme("drafts at one address in every round", token, at=same_drafts), sun),
        (
            "block",
            Scheme("keyed by token position", block, at=Addresses(test=by_position(STREAM_ACCEPT))),
            sun,
        ),
        (
            "match",
            Scheme(
                "one address for every row", match, at=Addresses(extra=one_for_all(STREAM_EXTRA))
            ),
            pair,
        ),
    ]


def _of_the_laws() -> list[Entry]:
    """A law told to the rule is not the law that was sampled, or not the one asked for."""
    pair, token, block = small(), IN_LAW["token"], IN_LAW["block"]
    raw, gemma, rounded = "transformers#47932", "transformers#32867, #47932", "DeepSpec#31"
    controls = "LiteRT-LM#3017; SGLang on CPU, as read"
    truncated, joint = _truncated(pair), _joint_pair()
    broken: list[Entry] = []
    for name, rule in (("token", token), ("block", block)):
        broken += [
            (name, Scheme("argmax draft, softmax law", rule, draw=_likeliest), pair, gemma),
            (name, Scheme("truncated draft, raw law", rule, sampled=_top_two), pair, raw),
            (name, Scheme("raw draft, truncated law", rule, reported=_top_two), pair, raw),
            (name, Scheme("draft law not the one sampled", rule, reported=_flattened), pair),
        ]
    return [
        *broken,
        ("token", Scheme("draft from a rounded law", token, sampled=_rounded), pair, rounded),
        (
            "token",
            Scheme("controls ignored", token, rows=_rows_of(pair.target)),
            truncated,
            controls,
        ),
        (
            "token",
            Scheme("top-k, then top-p of the rest", token, rows=_one_by_one),
            joint,
            "SGLang#36173",
        ),
        (
            "token",
            Scheme("penalties counted once per round", token, rows=_penalised_at_start),
            _penalised_pair(),
            "SGLang#33643",
        ),
    ]


def _added_from(rule: ReferenceRule, side: str) -> ReferenceRule:
    """The rule with the token after a refusal drawn from the whole law of one side."""

    def broken(round: Round) -> Outcome:
        outcome = rule(round)
        if outcome.kept == len(round.tokens):
            return outcome
        laws = round.target if side == "target" else round.draft
        # Fresh noise: the defect is the law alone.
        return Outcome(outcome.kept, inverse_cdf(laws[outcome.kept], round.noise.extra(7)))

    return broken


def _residual_after_miss(round: Round) -> Outcome:
    outcome = IN_LAW["match"](round)
    if outcome.kept == len(round.tokens):
        return outcome
    left = excess(round.target[outcome.kept], round.draft[outcome.kept])
    return Outcome(outcome.kept, inverse_cdf(left, round.noise.extra(7)))


def _token_not_strict(round: Round) -> Outcome:
    for i, x in enumerate(round.tokens):
        if not round.noise.test(i) * round.draft[i][x] <= round.target[i][x]:
            left = excess(round.target[i], round.draft[i])
            return Outcome(i, inverse_cdf(left, round.noise.extra(0)))
    return _add(round, [], len(round.tokens))


def _block_not_strict(round: Round) -> Outcome:
    b = block_weights(round)
    for length in range(len(round.tokens), 0, -1):
        h = block_share(round, b, length)
        if round.noise.test(length - 1) * h.whole <= h.part:
            return _add(round, b, length)
    return _add(round, b, 0)


def _block_uncapped(round: Round) -> Outcome:
    """The last test against min(1, prod p/q), as in a released hierarchical rule."""
    b = block_weights(round)
    product: Number = Fraction(1)
    for x, p, q in zip(round.tokens, round.target, round.draft, strict=False):
        product *= p[x] / q[x]
    for length in range(len(round.tokens), 0, -1):
        h = block_share(round, b, length)
        part = product if length == len(round.tokens) else h.part
        if round.noise.test(length - 1) * h.whole < part:
            return _add(round, b, length)
    return _add(round, b, 0)


def _block_unscaled(round: Round) -> Outcome:
    b = block_weights(round)
    for length in range(len(round.tokens), 0, -1):
        h = block_share(round, b, length)
        if round.noise.test(length - 1) * h.whole < h.part:
            return _add(round, [Fraction(1)] * len(b), length)
    return _add(round, [Fraction(1)] * len(b), 0)


def _add(round: Round, scales: list[Number], kept: int) -> Outcome:
    """Keeps `kept` tokens and draws from what `scales` leave of the target's law there."""
    weights = round.target[kept]
    if kept < len(round.tokens):
        weights = excess(weights, round.draft[kept], scales[kept])
    return Outcome(kept, inverse_cdf(weights, round.noise.extra(0)))


def _flattened(law: LawRow) -> LawRow:
    """Half way to uniform."""
    return tuple((x + Fraction(1, len(law))) / 2 for x in law)


def _keeps_all(round: Round) -> Outcome:
    return _add(round, [], len(round.tokens))


def _adds_likeliest(round: Round) -> Outcome:
    outcome = IN_LAW["token"](round)
    if outcome.kept == len(round.tokens):
        return outcome
    return Outcome(
        outcome.kept, argmax(excess(round.target[outcome.kept], round.draft[outcome.kept]))
    )


def _ratio_upside_down(round: Round) -> Outcome:
    for i, x in enumerate(round.tokens):
        y = inverse_cdf(round.target[i], round.noise.extra(i + 1))
        if not round.noise.test(i) * round.target[i][y] < round.draft[i][x]:
            return Outcome(i, inverse_cdf(round.target[i], round.noise.extra(0)))
    return _add(round, [], len(round.tokens))


def _match_not_strict(round: Round) -> Outcome:
    """The draw takes the first token whose cumulative mass is at least u, so u = 0 takes any."""
    for i, p in enumerate(round.target):
        upto: Number = Fraction(0)
        y = -1
        while y < 0 or not round.noise.extra(i) <= upto:
            y += 1
            upto += p[y]
        if i == len(round.tokens) or round.tokens[i] != y:
            return Outcome(i, y)
    raise AssertionError("the target has one row more than drafted tokens")


def _added_by_race(round: Round) -> Outcome:
    """The token rule whose added token wins the race its draft was drawn by."""
    outcome = IN_LAW["token"](round)
    i = outcome.kept
    if i == len(round.tokens):
        return outcome
    left = excess(round.target[i], round.draft[i])
    return Outcome(i, round.noise.race(i, left, 1)[0])


def _raced(noise: Noise, i: int, law: LawRow) -> int:
    return noise.race(i, law, 1)[0]


def _likeliest(noise: Noise, i: int, law: LawRow) -> int:
    return argmax(law)


def _likelier_of_two(noise: Noise, i: int, law: LawRow) -> int:
    drawn = [inverse_cdf(law, noise.draft(2 * i + j)) for j in (0, 1)]
    return max(drawn, key=lambda x: law[x])


def _unlikely(law: LawRow, drawn: int) -> bool:
    return law[drawn] < max(law)


def _top_two(law: LawRow) -> LawRow:
    """The two likeliest tokens, as far as there are two."""
    least = sorted(law)[-2]
    kept = [x for x in range(len(law)) if law[x] >= least][:2]
    return normalised([law[x] if x in kept else Fraction(0) for x in range(len(law))])


def _rounded(law: LawRow) -> LawRow:
    """To whole quarters, as a short float rounds."""
    return normalised([Fraction(round(x * 4), 4) for x in law])


def _truncated(pair: Pair) -> Pair:
    """The pair whose target keeps its two likeliest tokens."""
    return Pair(
        "top 2", pair.vocab_size, 2, 3, lambda text: _top_two(pair.target(text)), pair.draft
    )


def _rows_of(model: Model) -> Callable[[Model, Text, Text], LawRow]:
    return lambda p, text, drafted: model(text + drafted)


def _joint_pair() -> Pair:
    """(4, 3, 2, 1) / 10 under top_k = 3 and top_p = 3/4 together: three tokens stay."""
    return fixed("top-k and top-p", [4, 3, 2, 0], [1, 2, 3, 4], depth=1, length=2)


def _one_by_one(p: Model, text: Text, drafted: Text) -> LawRow:
    """Renormalised between the two, the third token falls: 7/9 is more than 3/4."""
    return normalised([*p(text)[:2], Fraction(0), Fraction(0)])


def _penalised_pair() -> Pair:
    p, q = fractions_of([3, 2, 1]), fractions_of([1, 2, 3])
    return Pair("penalised", 3, 2, 3, lambda text: _penalised(p, text), lambda _: q)


def _penalised(law: LawRow, text: Text) -> LawRow:
    """Tokens of the text have a quarter of their weight."""
    return normalised([x / 4 if token in text else x for token, x in enumerate(law)])


def _penalised_at_start(p: Model, text: Text, drafted: Text) -> LawRow:
    return p(text)
