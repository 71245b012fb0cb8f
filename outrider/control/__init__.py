"""Choosing: what a round costs, how much of it is kept, and who drafts next."""

from outrider.control.acceptance import Acceptance, Prior
from outrider.control.costs import Costs, DraftCost, ForwardCost

__all__ = ["Acceptance", "Costs", "DraftCost", "ForwardCost", "Prior"]
