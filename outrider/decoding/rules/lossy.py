"""Rules that change the text on purpose: each is an exact rule towards a law it declares.

A rule that keeps a drafted x with chance k(x), and otherwise draws from r, writes at each row the
law pi = q k + (1 - sum q k) r. Written down, pi is a target like any other: an exact rule towards
it keeps as much, and how far the text may be from the target's is a bound on TV(pi, p). Over T
tokens the bounds add up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from outrider import host
from outrider.decoding.children import Drawing, Unranked
from outrider.decoding.draft import Draft, RoundNoise, Verdict
from outrider.decoding.laws import Law
from outrider.decoding.rows import TargetRows
from outrider.decoding.rules.base import Rule
from outrider.decoding.rules.kseq import base_law
from outrider.decoding.rules.recursive import RecursiveRule
from outrider.decoding.rules.walking import children_of
from outrider.errors import InvalidConfig

if TYPE_CHECKING:
    from jaxtyping import Float, Int64


class Surrogate(ABC):
    """A law pi made of the target's p and the draft's q.

    Attributes:
        name: what its rule is called.
        source: where it was published.
    """

    name: ClassVar[str]
    source: ClassVar[str]

    @abstractmethod
    def law(self, p_nV: Float[Tensor, "n V"], q_nV: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        """Pi of rows of p and q."""

    @abstractmethod
    def bound(self, p_nV: Float[Tensor, "n V"]) -> Float[Tensor, " n"]:
        """What TV(pi, p) never exceeds, whatever q."""


@dataclass(frozen=True, slots=True)
class Lenience(Surrogate):
    """Keeps x with chance min(1, p / (l q)), as if the target had p / l.

    pi = k + (1 - sum k) norm(max(0, p - q)) with k = min(q, p / l). It is above p only where
    p < q, and there by k - p <= (1 - l) k: so TV(pi, p) <= 1 - l, and no token has more than p / l.

    Attributes:
        share: l, in (0, 1]; 1 is lossless.
    """

    name: ClassVar[str] = "lenience"
    source: ClassVar[str] = "Leviathan, Kalman, Matias, ICML 2023, arXiv 2211.17192, appendix A.5"
    share: float = 0.5

    def __post_init__(self) -> None:
        _check("share", self.share, 0 < self.share <= 1, "in (0, 1]")

    def law(self, p_nV: Tensor, q_nV: Tensor) -> Tensor:
        """What the tests keep, and the residual of the lossless rule for the rest."""
        kept_nV = torch.minimum(q_nV, p_nV / self.share)
        left_nV = (p_nV - q_nV).clamp(min=0)
        total_n1 = left_nV.sum(-1, keepdim=True)
        rest_n1 = (1 - kept_nV.sum(-1, keepdim=True)).clamp(min=0)
        return kept_nV + left_nV * torch.where(total_n1 > 0, rest_n1 / total_n1, 0)

    def bound(self, p_nV: Tensor) -> Tensor:
        """1 - l."""
        return torch.full_like(p_nV[:, 0], 1 - self.share)


class KeptSet(Surrogate):
    """Keeps the tokens of a set A that p alone decides, and writes nothing else.

    pi = q on A + q(not A) norm(p on A). Whatever q is, pi is a law on A, and such a law shares at
    least the least p in A with p: TV(pi, p) <= 1 - min p(A).
    """

    @abstractmethod
    def kept(self, p_nV: Tensor) -> Tensor:
        """Which tokens are in A; the likeliest always is."""

    def law(self, p_nV: Tensor, q_nV: Tensor) -> Tensor:
        """q on A, and the rest of q as p has it there."""
        kept_nV = self.kept(p_nV)
        from_q_nV, from_p_nV = q_nV * kept_nV, p_nV * kept_nV
        rest_n1 = (1 - from_q_nV.sum(-1, keepdim=True)).clamp(min=0)
        return from_q_nV + from_p_nV * (rest_n1 / from_p_nV.sum(-1, keepdim=True))

    def bound(self, p_nV: Tensor) -> Tensor:
        """1 - min p(A)."""
        return 1 - torch.where(self.kept(p_nV), p_nV, 1.0).amin(-1)


@dataclass(frozen=True, slots=True)
class Threshold(KeptSet):
    """Keeps what the target gives at least `least`, and its likeliest token.

    Attributes:
        least: a probability.
    """

    name: ClassVar[str] = "threshold"
    source: ClassVar[str] = "acceptance by the target's probability alone, as engines offer it"
    least: float = 0.25

    def __post_init__(self) -> None:
        _check("least", self.least, 0 <= self.least <= 1, "in [0, 1]")

    def kept(self, p_nV: Tensor) -> Tensor:
        """p >= least."""
        return (p_nV >= self.least) | (p_nV == p_nV.amax(-1, keepdim=True))


@dataclass(frozen=True, slots=True)
class TypicalAcceptance(KeptSet):
    """Keeps x where p(x) > min(epsilon, delta exp(-H(p))), H the entropy in nats.

    exp(-H) is at most the largest p, so with delta < 1 the likeliest token is kept. Where Medusa
    goes on from a refusal with a token of p, this goes on with one of p on the kept set: nothing
    atypical is written.

    Attributes:
        epsilon: the most that is ever asked of p.
        delta: in (0, 1).
    """

    name: ClassVar[str] = "typical-acceptance"
    source: ClassVar[str] = "Cai et al. (Medusa), ICML 2024, arXiv 2401.10774"
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        _check("epsilon", self.epsilon, 0 < self.epsilon <= 1, "in (0, 1]")
        _check("delta", self.delta, 0 < self.delta < 1, "in (0, 1)")

    def kept(self, p_nV: Tensor) -> Tensor:
        """p above what its entropy asks for."""
        entropy_n1 = torch.special.entr(p_nV).sum(-1, keepdim=True)
        return p_nV > (self.delta * (-entropy_n1).exp()).clamp(max=self.epsilon)


@dataclass(frozen=True, slots=True)
class Mixture(Surrogate):
    """Goes from p towards q by total variation epsilon: pi = p + min(1, epsilon / TV) (q - p).

    No law within epsilon of p is accepted more often: drafted tokens are refused with chance
    TV(p, q) - epsilon.

    Attributes:
        epsilon: the most TV(pi, p) may be; 0 is lossless.
    """

    name: ClassVar[str] = "mixture"
    source: ClassVar[str] = "Yin et al., NeurIPS 2024, arXiv 2411.00841, theorem 5"
    epsilon: float = 0.1

    def __post_init__(self) -> None:
        _check("epsilon", self.epsilon, 0 <= self.epsilon <= 1, "in [0, 1]")

    def law(self, p_nV: Tensor, q_nV: Tensor) -> Tensor:
        """p and q mixed."""
        apart_n1 = (p_nV - q_nV).abs().sum(-1, keepdim=True) / 2
        step_n1 = torch.where(apart_n1 > self.epsilon, self.epsilon / apart_n1, 1.0)
        return torch.lerp(p_nV, q_nV, step_n1)

    def bound(self, p_nV: Tensor) -> Tensor:
        """epsilon."""
        return torch.full_like(p_nV[:, 0], self.epsilon)


def _check(option: str, value: float, good: bool, due: str) -> None:
    if not good:
        raise InvalidConfig(f"{option}={value}: a number {due} is due")


class SurrogateRows(TargetRows):
    """Target rows with pi for p at every row that has children; the others stay p.

    q is the base law of a row's first child, of a draft without laws the certain token itself.
    """

    def __init__(self, draft: Draft, target: TargetRows, surrogate: Surrogate) -> None:
        self._target = target
        self._surrogate = surrogate
        self._law = base_law(draft)
        first_BT = children_of(draft.tree)[:, :, 0]
        self._inner_R = (first_BT > 0).flatten()
        rows_BT = torch.nn.functional.pad(draft.law_rows(), (1, 0))
        self._law_rows_R = rows_BT.gather(1, first_BT).flatten()

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, T and V."""
        return self._target.shape

    @property
    def device(self) -> torch.device:
        """The target's."""
        return self._target.device

    def probs(self, at_n: Int64[Tensor, " n"]) -> Float[Tensor, "n V"]:
        """Pi, or p at rows without children."""
        p_nV = self._target.probs(at_n)
        inner_n = self._inner_R[at_n]
        places = host.some(inner_n)
        if len(places) == 0 or len(self._law) == 0:
            return p_nV
        q_nV = self._law.select(self._law_rows_R[at_n[places]]).table(self.shape[2])
        dtype = torch.promote_types(p_nV.dtype, q_nV.dtype)
        pi_nV = self._surrogate.law(p_nV[places].to(dtype), q_nV.to(dtype))
        out_nV = p_nV.to(dtype, copy=True)
        out_nV[places] = torch.where(inner_n[places, None], pi_nV, out_nV[places])
        return out_nV

    def prob_of(
        self, at_n: Int64[Tensor, " n"], tokens_n: Int64[Tensor, " n"]
    ) -> Float[Tensor, " n"]:
        """One entry of `probs`, which is made whole: pi depends on all of the row."""
        return self.probs(at_n).gather(1, tokens_n[:, None]).squeeze(1).double()

    def argmax(self, at_n: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """The first largest entry of `probs`."""
        return self.probs(at_n).argmax(-1)


class LossyRule(Rule):
    """An exact rule towards a surrogate of the target's law.

    Args:
        surrogate: the law, with its bound.
        exact: a rule in law; None = `recursive`, which on chains is `token`.
    """

    guarantee = "surrogate"
    needs_draft_law = True

    def __init__(self, surrogate: Surrogate, exact: Rule | None = None) -> None:
        exact = RecursiveRule() if exact is None else exact
        if exact.guarantee != "law":
            raise InvalidConfig(
                f"exact={exact.name!r} is no rule in law: its text is {exact.guarantee}-exact; a "
                "surrogate needs a rule such as 'recursive', 'token' or 'block'"
            )
        self.surrogate = surrogate
        self.exact = exact
        self.name = surrogate.name
        self.source = surrogate.source
        self.trees = exact.trees
        self.kinds = exact.kinds
        self.reads = exact.reads
        # Which rows have children decides what their law is: that is no matter of what was drawn.
        self.drawing: Drawing = Unranked(exact.drawing)

    def check(self, draft: Draft) -> None:
        """Raises InvalidConfig for a draft the exact rule cannot verify."""
        self.exact.check(draft)

    def verify(self, draft: Draft, target: TargetRows, noise: RoundNoise) -> Verdict:
        """The exact rule's decision on the surrogate's rows, with the exact rule's noise."""
        draft = draft.to(target.device)
        return self.exact.verify(draft, SurrogateRows(draft, target, self.surrogate), noise)

    def draw(self, law: Law, noise_n: RoundNoise, index: int) -> Tensor:
        """As the exact rule wants drafts."""
        return self.exact.draw(law, noise_n, index)
