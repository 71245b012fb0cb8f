"""Laws, draws and verification rules: the mathematics of losslessness, on torch and numpy alone.

Everything here is pure: no state, no device choice, and chance is passed in as noise addresses.
"""

from outrider.decoding.draft import Draft, Kind, RoundNoise, Verdict
from outrider.decoding.draw import Draws
from outrider.decoding.laws import Law, check_logits, processed_probs
from outrider.decoding.rows import TargetBest, TargetFew, TargetLaws, TargetLogits, TargetRows
from outrider.decoding.rules import LOSSY, RULES, Rule, rule_named
from outrider.decoding.rules.base import chain_probs
from outrider.decoding.verify import (
    Verification,
    accept,
    adjusted_distribution,
    compute_acceptance_probs,
    compute_expected_tokens,
    resample_from_adjusted_target,
    sample_from_logprobs,
    sample_index,
    verify_speculative_tokens,
)
from outrider.decoding.verify_trees import TreeVerification, verify_token_trees

__all__ = [
    "LOSSY",
    "RULES",
    "Draft",
    "Draws",
    "Kind",
    "Law",
    "RoundNoise",
    "Rule",
    "TargetBest",
    "TargetFew",
    "TargetLaws",
    "TargetLogits",
    "TargetRows",
    "TreeVerification",
    "Verdict",
    "Verification",
    "accept",
    "adjusted_distribution",
    "chain_probs",
    "check_logits",
    "compute_acceptance_probs",
    "compute_expected_tokens",
    "processed_probs",
    "resample_from_adjusted_target",
    "rule_named",
    "sample_from_logprobs",
    "sample_index",
    "verify_speculative_tokens",
    "verify_token_trees",
]
