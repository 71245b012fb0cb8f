"""The law of texts under several controls is plain decoding's, whatever was guessed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import control_laws
from tests.engine.control_laws import BLIND, LAWS, RULE_OF, RULES
from tests.engine.control_rows import EACH


def fitted(given: dict[str, Any], rule: str, count: int) -> float:
    """How often chance alone gives such counts of the first three tokens of eight."""
    return control_laws.fit(control_laws.samples(given, rule, count), control_laws.due(given)).p


@pytest.mark.parametrize("number", LAWS)
def test_the_law_is_that_of_plain_decoding(number: int) -> None:
    """`scripts/prove controls` takes 200,000 samples."""
    assert fitted(LAWS[number], RULE_OF[number], 8_000) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("number", LAWS)
def test_the_law_is_that_of_plain_decoding_under_every_rule(number: int, rule: str) -> None:
    assert fitted(LAWS[number], rule, 20_000) > 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_rows_blind_to_their_path_have_another_law(rule: str) -> None:
    assert fitted(BLIND, rule, 3_000) > 1e-4
    with control_laws.blind():
        assert fitted(BLIND, rule, 3_000) < 1e-4


def test_every_control_comes_in_the_laws() -> None:
    named = {name for given in LAWS.values() for name in given}
    assert named == {name for given in EACH.values() for name in given}
