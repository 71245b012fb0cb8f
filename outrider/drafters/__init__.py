"""Who guesses: drafters behind one interface, and the spec strings that name them."""

from outrider.drafters.base import Drafter, RoundDraws
from outrider.drafters.combined import CombinedDrafter, SeveralDrafters
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.early_exit import EarlyExitDrafter
from outrider.drafters.grammar import GrammarDrafter
from outrider.drafters.medusa import MedusaDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import ProtocolDrafter
from outrider.drafters.recycle import RecycleDrafter
from outrider.drafters.specs import SPECS, DrafterSpec, alternatives, names_alternatives
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.suffix_store import SuffixStore

__all__ = [
    "SPECS",
    "CombinedDrafter",
    "Drafter",
    "DrafterSpec",
    "EagleDrafter",
    "EarlyExitDrafter",
    "GrammarDrafter",
    "MedusaDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "NoDrafter",
    "ProtocolDrafter",
    "RecycleDrafter",
    "RoundDraws",
    "SeveralDrafters",
    "SuffixDrafter",
    "SuffixStore",
    "alternatives",
    "names_alternatives",
]
