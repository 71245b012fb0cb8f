"""The verification rules: one file each, one registry."""

from outrider.config import check_rule, nearest
from outrider.decoding.rules.base import Rule
from outrider.decoding.rules.block import BlockRule
from outrider.decoding.rules.coupled import CoupledRule
from outrider.decoding.rules.gbv import GbvRule
from outrider.decoding.rules.greedy import GreedyRule
from outrider.decoding.rules.hybrid import HybridRule
from outrider.decoding.rules.kseq import KseqRule
from outrider.decoding.rules.lossy import (
    Lenience,
    LossyRule,
    Mixture,
    Threshold,
    TypicalAcceptance,
)
from outrider.decoding.rules.match import MatchRule
from outrider.decoding.rules.recursive import RecursiveRule
from outrider.decoding.rules.token import TokenRule
from outrider.decoding.rules.traversal import HybridTraversalRule, TraversalRule
from outrider.errors import InvalidConfig

RULES: dict[str, Rule] = {
    "greedy": GreedyRule(),
    "match": MatchRule(),
    "token": TokenRule(),
    "block": BlockRule(),
    "coupled": CoupledRule(),
    "recursive": RecursiveRule(),
    "hybrid": HybridRule(),
    "traversal": TraversalRule(),
    "hybrid-traversal": HybridTraversalRule(),
    "kseq": KseqRule(),
    "gbv": GbvRule(),
}

LOSSY: dict[str, LossyRule] = {
    "lenience": LossyRule(Lenience()),
    "typical-acceptance": LossyRule(TypicalAcceptance()),
    "threshold": LossyRule(Threshold()),
    "mixture": LossyRule(Mixture()),
}
"""Rules that change the output law, at their usual settings; other settings are other objects."""


def rule_named(name: str, *, lossless: bool = True) -> Rule:
    """The rule of a name.

    Raises:
        InvalidConfig: no name or an unknown one, or a lossy rule's without `lossless=False`.
    """
    check_rule(name)
    if name in RULES:
        return RULES[name]
    if name not in LOSSY:
        known = [*RULES, *LOSSY]
        raise InvalidConfig(
            f"rule={name!r} does not exist; rules are {', '.join(known)}" + nearest(name, known)
        )
    if lossless:
        raise InvalidConfig(
            f"rule={name!r} changes the law of the text; say lossless=False (--lossy) if that is "
            f"meant, or take one of {', '.join(RULES)}"
        )
    return LOSSY[name]


__all__ = ["LOSSY", "RULES", "Rule", "rule_named"]
