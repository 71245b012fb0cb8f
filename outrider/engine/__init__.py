"""The engine: scheduler, the step, text assembly, and the token-level decoder on top of them."""

from outrider.engine.decoder import SpeculativeDecoder
from outrider.engine.emit import Emitter
from outrider.engine.engine import Engine
from outrider.engine.propose import propose_from_hidden
from outrider.engine.requests import Requests
from outrider.engine.settings import SpeculativeDecoderConfig

__all__ = [
    "Emitter",
    "Engine",
    "Requests",
    "SpeculativeDecoder",
    "SpeculativeDecoderConfig",
    "propose_from_hidden",
]
