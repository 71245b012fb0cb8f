"""Choosing: what a round costs, how much of it is kept, and who drafts next."""

from outrider.control.acceptance import Acceptance, Prior
from outrider.control.controller import Controller
from outrider.control.costs import Costs, DraftCost, ForwardCost
from outrider.control.settings import ControlSettings

__all__ = [
    "Acceptance",
    "ControlSettings",
    "Controller",
    "Costs",
    "DraftCost",
    "ForwardCost",
    "Prior",
]
