"""What is looked at in a token whose law is known: numbers that average to 0 where it was drawn."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.certify.model.signatures import Page

FloatArray = NDArray[np.float64]
WAVES = 1, 2, 3
"""Half turns of the cosines that a token's place among its law is looked at with."""


def names(with_draft: bool, with_ends: bool) -> list[str]:
    """What `looks` returns, in its order."""
    return [
        "likeliest token",
        *(f"place by probability, {wave}" for wave in WAVES),
        *(f"place by id, {wave}" for wave in WAVES),
        "place of neighbours",
        "came before",
        *(["end of text"] if with_ends else []),
        *(["where target exceeds draft", "draft's likeliest token"] if with_draft else []),
    ]


def looks(page: Page, tokens_N: Tensor, uniforms_N: FloatArray) -> FloatArray:
    """One row of payoffs per token `[N, F]`, each within [-1, 1].

    Each has a mean of 0 given the tokens before it. A law that is off by a total variation of d
    moves the mean of any of them by at most d.

    Args:
        page: the texts and their laws.
        tokens_N: what came, or is tried in the place of what came.
        uniforms_N: fresh uniforms in [0, 1) that choose a point within each token's own mass.
    """
    p_NV = page.p_NV
    own_N1 = p_NV.gather(1, tokens_N[:, None])
    ids_V = torch.arange(p_NV.shape[1])
    earlier_NV = ids_V < tokens_N[:, None]
    likelier_NV = (p_NV > own_N1) | ((p_NV == own_N1) & earlier_NV)
    own_N = own_N1.squeeze(1).numpy()
    by_mass_N = (p_NV * likelier_NV).sum(1).numpy() + uniforms_N * own_N
    by_id_N = (p_NV * earlier_NV).sum(1).numpy() + uniforms_N * own_N
    columns = [_surprise(p_NV, tokens_N, p_NV.argmax(1, keepdim=True))]
    for place_N in (by_mass_N, by_id_N):
        columns += [np.cos(np.pi * wave * place_N) / 2 for wave in WAVES]
    turn_N = np.cos(np.pi * by_id_N)
    columns.append(np.where(page.firsts().numpy(), 0.0, turn_N * np.roll(turn_N, 1) / 2))
    columns.append(_seen(page, tokens_N))
    if page.target.ends:
        ends_1E = torch.tensor([list(page.target.ends)]).expand(len(tokens_N), -1)
        columns.append(_surprise(p_NV, tokens_N, ends_1E))
    if page.q_NV is not None:
        over_NV = p_NV > page.q_NV
        came_N = over_NV.gather(1, tokens_N[:, None]).squeeze(1).double()
        columns.append((came_N - (p_NV * over_NV).sum(1)).numpy())
        columns.append(_surprise(p_NV, tokens_N, page.q_NV.argmax(1, keepdim=True)))
    return np.stack(columns, 1)


def _surprise(p_NV: Tensor, tokens_N: Tensor, among_NE: Tensor) -> FloatArray:
    """Whether one of some tokens came, less the chance of it."""
    came_N = (among_NE == tokens_N[:, None]).any(1).double()
    return (came_N - p_NV.gather(1, among_NE).sum(1)).numpy()


def _seen(page: Page, tokens_N: Tensor) -> FloatArray:
    """Whether a token came that had come before, less the chance of it."""
    out: list[float] = []
    tokens, laws = tokens_N.tolist(), page.p_NV.numpy()
    for text in page.texts:
        seen = dict.fromkeys(text.prompt)
        for _ in text.output:
            token, law_V = tokens[len(out)], laws[len(out)]
            out.append((token in seen) - float(law_V[list(seen)].sum()))
            seen[token] = None
    return np.array(out)
