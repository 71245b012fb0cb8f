"""`hybrid`: one child from the tail of the draft's law, then the likeliest tokens."""

from __future__ import annotations

from outrider.decoding.children import Drawing, TailThenTop
from outrider.decoding.rules.recursive import RecursiveRule


class HybridRule(RecursiveRule):
    """Children are the K - 1 likeliest tokens T and one drawn from the rest, which is tested first.

    Verified as `recursive` does, one row keeps a child with chance `p(T) + sum min(p, q~)` over
    the tokens outside T, q~ being the law of the rest: the most any rule can keep of such children.
    Trees may be shaped by the mass of the tail, never by the token it gave.
    """

    name = "hybrid"
    source = "Hu et al., ICLR 2025, arXiv 2502.18779; shaped by values: RheoSampling, 2609.21827"
    drawing: Drawing = TailThenTop()
