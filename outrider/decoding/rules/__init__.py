"""The verification rules: one file each, one registry."""

from outrider.decoding.rules.base import Rule
from outrider.decoding.rules.block import BlockRule
from outrider.decoding.rules.coupled import CoupledRule
from outrider.decoding.rules.greedy import GreedyRule
from outrider.decoding.rules.match import MatchRule
from outrider.decoding.rules.token import TokenRule

RULES: dict[str, Rule] = {
    "greedy": GreedyRule(),
    "match": MatchRule(),
    "token": TokenRule(),
    "block": BlockRule(),
    "coupled": CoupledRule(),
}

__all__ = ["RULES", "Rule"]
