"""The numpy engine behind the test server, right or with one of its faults."""

from __future__ import annotations

from typing import Any

import numpy as np

from outrider import SamplingParams
from outrider.certify.endpoint.remote import Reference
from outrider.certify.model.subject import Subject
from tests.certify.faulty import END, VOCAB, models, subject
from tests.certify.server import Settings, Written

LETTERS = "abcdefghijklmnopqrstuvwxyz"
UNKNOWN = ("top_p", "repetition_penalty", "logit_bias")
"""Controls that the engine does not have."""


class Numpy:
    """The engine with a fault where speculation is on, and right where it is off."""

    def __init__(self, fault: str | None = None) -> None:
        self.on, self.off = subject(fault).generate, subject(fault).plain
        target_VV, draft_VV = models()
        self.told_VV = draft_VV if fault == "logprobs of the draft" else target_VV

    def __call__(
        self, prompt: list[int], params: SamplingParams, seed: int, speculate: bool
    ) -> Written:
        engine = self.on if speculate else self.off
        assert engine is not None
        ids = tuple(engine([prompt], params, seed)[0].token_ids)
        text, finish = text_of(ids), "stop" if END in ids[-1:] else "length"
        for stop in params.stop:
            if stop in text:
                text, finish = text[: text.index(stop)], "stop"
        source_VV = self.told_VV if speculate else models()[0]
        rows_NV = source_VV[[prompt[-1], *ids[:-1]]] if ids else np.zeros((0, VOCAB))
        rows_NV = rows_NV - np.logaddexp.reduce(rows_NV, axis=1)[:, None]
        # A first token is the target's own, whatever drafts.
        if len(rows_NV):
            first_V = models()[0][prompt[-1]]
            rows_NV[0] = first_V - np.logaddexp.reduce(first_V)
        count = params.logprobs or 0
        tops = [
            {int(x): float(row_V[x]) for x in np.argsort(-row_V, kind="stable")[:count]}
            for row_V in rows_NV
        ]
        own = [float(row_V[x]) for row_V, x in zip(rows_NV, ids, strict=True)]
        return Written(ids, text, finish, tops, own)


def text_of(ids: tuple[int, ...]) -> str:
    return "".join(LETTERS[x] for x in ids if x != END)


def ids_of(text: str) -> list[int]:
    return [LETTERS.index(x) for x in text]


def settings(fault: str | None = None, style: str = "vllm", **options: Any) -> Settings:
    return Settings(Numpy(fault), ids_of, LETTERS.__getitem__, style, UNKNOWN, **options)


def reference() -> Reference:
    own: Subject = subject()
    return Reference("numpy", own.target, None, own.draft)
