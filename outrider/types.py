"""The records that travel outside the step: Request in, Delta and Completion out, metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Sequenced
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider.config import SamplingParams

Compile: TypeAlias = Literal["auto"] | bool
"""Whether forwards are compiled: "auto" where an earlier call with True has left them on disk.

On a GPU True makes graphs of them, and "auto" takes Triton's attention alone.
"""
Source = Literal["draft", "correction", "bonus"]
FinishReason = Literal["stop", "length"]


class Guide(Protocol):
    """What a grammar lets come next in one text, and after tokens drafted from there."""

    def follow(self, tokens: Sequenced[int]) -> None:
        """Reads what the text, prompt and output, has gained; it comes before the others."""
        ...

    def allowed(self, paths: Sequenced[Sequenced[int]]) -> NDArray[np.uint8]:
        """Bits `[n, ceil(V / 8)]` of the tokens that may come after each drafted path.

        Token t is bit t % 8 of byte t // 8. After a path that may not come all bits are set.
        """
        ...

    def forced(self, most: int) -> list[int]:
        """The next tokens, at most so many, while each is the only one that may come."""
        ...


class Grammar(Protocol):
    """A compiled grammar, which any number of texts may follow."""

    def guide(self, num_prompt: int, ends: Iterable[int]) -> Guide:
        """One text's guide; the text may also end with `ends`, where the grammar may end."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how it is to be continued.

    Attributes:
        prompt: token ids, at least one.
        sampling: the law and the end of the text.
        sample: index among the `n` samples of the prompt; part of every noise address.
        rule: verification rule of this request; None chooses by `sampling`.
        depth: tokens drafted per round at most; 0 switches speculation off for this request.
        drafter: who drafts instead of the engine's own: `none`, a part of its combination, or one
            that needs no model.
        trace: note every round (`RoundTrace`).
        grammar: the json_schema, regex, grammar or choice of `sampling`, compiled.
        tenant: whose request it is: drafts come from earlier requests of the same tenant alone,
            but where a store is shared. None is the drafter's own tenant.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    sample: int = 0
    rule: str | None = None
    depth: int | None = None
    drafter: str | None = None
    trace: bool = False
    grammar: Grammar | None = None
    tenant: str | None = None


@dataclass(slots=True)
class StageTimes:
    """Seconds of one round by stage; all there when the round is over."""

    draft_s: float = 0.0
    score_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0


@dataclass(slots=True)
class SpeculativeMetrics:
    """Counts of speculation and what they mean; `definitions()` spells every figure out.

    Counts cover what was kept after stop rules. A round without a draft counts in `plain_rounds`
    alone, so that acceptance figures speak of speculation only.
    """

    rounds: int = 0
    plain_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    drafted_per_pos: list[int] = field(default_factory=list[int])
    accepted_per_pos: list[int] = field(default_factory=list[int])
    reached_per_pos: list[int] = field(default_factory=list[int])
    alpha_sum: float = 0.0
    tested: int = 0
    prompt_tokens: int = 0
    draft_s: float = 0.0
    score_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    wall_s: float = 0.0
    cost_ratio: float = 0.125

    def record_round(
        self, drafted: int, accepted: int, committed: int, levels: int | None = None
    ) -> None:
        """Counts one round of one sequence: drafted, kept accepted and kept tokens in all.

        Positions are the `levels` of a drafted tree, as many as drafted tokens for a chain.
        """
        self.committed += committed
        if drafted == 0:
            self.plain_rounds += 1
            return
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        levels = drafted if levels is None else levels
        missing = levels - len(self.drafted_per_pos)
        self.drafted_per_pos.extend([0] * missing)
        self.accepted_per_pos.extend([0] * missing)
        self.reached_per_pos.extend([0] * missing)
        for i in range(levels):
            self.drafted_per_pos[i] += 1
            self.accepted_per_pos[i] += i < accepted
            self.reached_per_pos[i] += i <= accepted

    def record_alpha(self, total: float, tested: int) -> None:
        """Adds min(1, p(x)/q(x)) summed over `tested` drafted tokens."""
        self.alpha_sum += total
        self.tested += tested

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted, trees with all their nodes; the target's own token is in neither."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds: tokens per speculative round, the target's own included."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 1.0

    @property
    def alpha(self) -> float:
        """Mean of min(1, p(x)/q(x)) over drafted tokens of chains whose prefix was accepted."""
        return self.alpha_sum / self.tested if self.tested else 0.0

    @property
    def acceptance_per_pos(self) -> list[float]:
        """Unconditional: P(position i accepted | position i drafted)."""
        pairs = zip(self.accepted_per_pos, self.drafted_per_pos, strict=True)
        return [accepted / drafted for accepted, drafted in pairs]

    @property
    def conditional_acceptance_per_pos(self) -> list[float]:
        """P(position i accepted | drafted, and positions before it accepted), while any was."""
        pairs = zip(self.accepted_per_pos, self.reached_per_pos, strict=True)
        return [accepted / before for accepted, before in pairs if before]

    @property
    def tokens_per_step_avg(self) -> float:
        """committed / all rounds, plain ones included."""
        steps = self.rounds + self.plain_rounds
        return self.committed / steps if steps else 0.0

    @property
    def speedup_estimate(self) -> float:
        """committed / (rounds + cost_ratio * drafted): tokens per plain step's cost."""
        cost = self.rounds + self.plain_rounds + self.cost_ratio * self.drafted
        return self.committed / cost if cost else 1.0

    @property
    def tokens_per_s(self) -> float:
        """committed / wall seconds, prompt reading included."""
        return self.committed / self.wall_s if self.wall_s else 0.0

    @property
    def other_s(self) -> float:
        """wall_s less draft, score, verify and commit seconds; the five sum to wall_s."""
        return max(0.0, self.wall_s - self.draft_s - self.score_s - self.verify_s - self.commit_s)

    def as_dict(self) -> dict[str, Any]:
        """Every count and figure, ready for JSON."""
        return {
            "rounds": self.rounds,
            "plain_rounds": self.plain_rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "committed": self.committed,
            "prompt_tokens": self.prompt_tokens,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "alpha": self.alpha,
            "acceptance_per_pos": self.acceptance_per_pos,
            "conditional_acceptance_per_pos": self.conditional_acceptance_per_pos,
            "tokens_per_step_avg": self.tokens_per_step_avg,
            "speedup_estimate": self.speedup_estimate,
            "tokens_per_s": self.tokens_per_s,
            "draft_s": self.draft_s,
            "score_s": self.score_s,
            "verify_s": self.verify_s,
            "commit_s": self.commit_s,
            "other_s": self.other_s,
            "wall_s": self.wall_s,
        }

    @classmethod
    def definitions(cls) -> dict[str, str]:
        """Name of each derived figure and its definition, for printing beside the numbers."""
        names = (
            "acceptance_rate",
            "mean_acceptance_length",
            "alpha",
            "acceptance_per_pos",
            "conditional_acceptance_per_pos",
            "tokens_per_step_avg",
            "speedup_estimate",
            "tokens_per_s",
            "other_s",
        )
        return {**{name: str(getattr(cls, name).__doc__) for name in names}, **SECONDS}


SECONDS = {
    "draft_s": "drafters at work; a text counts every round it took part in whole, and its prompt",
    "score_s": "the target's forwards, those that read prompts too; texts count as for draft_s",
    "verify_s": "laws, sampling controls and the rule; texts count as for draft_s",
    "commit_s": "caches moved, text assembled, stop rules; texts count as for draft_s",
    "wall_s": "in all, steps of the engine; of a text, from its request to the end of its last "
    "round, waiting for others and for its reader included; of a command, as its user waits",
}
"""What the measured seconds are."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely an emitted token was, in nats.

    Attributes:
        token: the token.
        logprob: its log-probability.
        rank: 1 + how many tokens were likelier.
        top: the likeliest tokens and their log-probabilities, likeliest first, as many as were
            asked for; those without mass are left out.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class TokenProvenance:
    """Where one token of a text came from.

    Attributes:
        source: `draft` is accepted, `correction` and `bonus` are the target's own.
        drafter: who guessed it, in a combination which part; None for the target's own.
        depth: its level in the round's tree, 1 for the first; None for the target's own.
        round: which of the text's rounds, from 0.
    """

    source: Source
    drafter: str | None
    depth: int | None
    round: int


def _provenance(
    sources: Sequenced[Source], drafters: Sequenced[str | None], first: int
) -> Iterator[TokenProvenance]:
    """One record per token; a round goes down one path and ends with the target's own token."""
    depth, number = 0, first
    for source, drafter in zip(sources, drafters or [None] * len(sources), strict=True):
        depth += 1
        if source == "draft":
            yield TokenProvenance(source, drafter, depth, number)
        else:
            yield TokenProvenance(source, None, None, number)
            depth, number = 0, number + 1


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """One round of one text as it went: candidates, their laws in short, the path kept, times.

    Row 0 is the text as it stood and drafted token j is row j + 1.

    Attributes:
        round: which of the text's rounds, from 0.
        position: tokens of the text, its prompt included, before the round.
        rule: the verification rule.
        allowed: levels the text might draft.
        tokens: the drafted tokens.
        parents: the row each of them follows.
        drafters: who drafted each.
        kinds: how each was drawn: `point` (certain), `iid`, `without` or `tail`.
        draft_probs: each token's probability under the law it was drawn from, before any sibling is
            left out of it; None where it is certain.
        target_probs: its probability under the target's law at its parent's row, after the
            request's sampling controls.
        overlaps: 1 - TV of the two laws at its parent's row, which is the most that a rule can keep
            of one token drawn there; None where it is certain.
        entropies: of the target's law at its parent's row, in nats.
        draft_entropies: of the law it was drawn from; None where it is certain.
        worths: what each node of a tree grown to a budget was judged by; of a chain that ends where
            its drafter is less sure, how likely that thought the chain up to each token; None in
            other drafts.
        path: rows that were accepted, from the root down.
        added: the token the target adds behind them.
        added_prob: its probability under the target's law.
        added_draft_prob: its probability under the law that a guess beside it was drawn from; None
            where there is none, or it was certain.
        source: `correction` or `bonus`, what that one is.
        kept: how many of path and added token stayed after stop rules.
        num_texts: texts that went through the round together and share its times.
        num_rows: of all of them: a row of each, and one for each drafted token.
        times: the round's seconds.
    """

    round: int
    position: int
    rule: str
    allowed: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    drafters: tuple[str, ...]
    kinds: tuple[str, ...]
    draft_probs: tuple[float | None, ...]
    target_probs: tuple[float, ...]
    overlaps: tuple[float | None, ...]
    entropies: tuple[float, ...]
    draft_entropies: tuple[float | None, ...]
    worths: tuple[float, ...] | None
    path: tuple[int, ...]
    added: int
    added_prob: float
    added_draft_prob: float | None
    source: Source
    kept: int
    num_texts: int
    num_rows: int
    times: StageTimes

    def as_dict(self) -> dict[str, Any]:
        """The record, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> RoundTrace:
        """The record of `as_dict`, as JSON gives it back.

        Raises:
            KeyError, TypeError: something else.
        """
        named: dict[str, Any] = {field.name: found[field.name] for field in fields(cls)}
        for name, one in named.items():
            named[name] = tuple(one) if isinstance(one, list) else one
        named["times"] = StageTimes(**found["times"])
        return cls(**named)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one round added to one text.

    Attributes:
        index: which sample of the prompt.
        text: the new text; whole characters only, and nothing a stop string may still take back.
        token_ids: the new tokens.
        sources: where each token came from: `draft` (guessed and accepted), `correction` (the
            target's, in place of a rejected guess), `bonus` (the target's, after all guesses).
        finish_reason: None while the text goes on.
        stop_reason: the stop string or stop token id that ended the text; None for the end of text.
        lossless: False where the rule that verifies the text changes its law.
        logprobs: one record per new token; None where the request did not ask.
        drafters: who guessed each token; None for the target's own.
        round: which of the text's rounds this was, from 0.
        trace: the round as it went; None where the request did not ask.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[Source, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    lossless: bool = True
    logprobs: tuple[TokenLogprob, ...] | None = None
    drafters: tuple[str | None, ...] = ()
    round: int = 0
    trace: RoundTrace | None = None

    @property
    def provenance(self) -> tuple[TokenProvenance, ...]:
        """Where each token came from, made when it is asked for."""
        return tuple(_provenance(self.sources, self.drafters, self.round))


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished text: the fields of its deltas put together, and the request's own metrics.

    `seed` is the one the text was made with, also where the system drew it: asking for it gives the
    text again (with `rule`, which made it, as a given seed means `coupled` by default; under a rule
    in law also with the drafter and depth, which `auto` and `a,b` choose anew). `lossless` is False
    where that rule changes the law of the text.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[Source, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    stats: SpeculativeMetrics
    seed: int
    rule: str
    lossless: bool = True
    logprobs: tuple[TokenLogprob, ...] | None = None
    drafters: tuple[str | None, ...] = ()
    trace: tuple[RoundTrace, ...] | None = None

    @property
    def provenance(self) -> tuple[TokenProvenance, ...]:
        """Where each token came from, made when it is asked for."""
        return tuple(_provenance(self.sources, self.drafters, 0))

    @classmethod
    def of(
        cls, deltas: Sequenced[Delta], stats: SpeculativeMetrics, seed: int, rule: str
    ) -> Completion:
        """Joins the deltas of one finished text."""
        last = deltas[-1]
        assert last.finish_reason is not None
        return cls(
            index=last.index,
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            sources=tuple(source for delta in deltas for source in delta.sources),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            stats=stats,
            seed=seed,
            rule=rule,
            lossless=last.lossless,
            logprobs=None
            if last.logprobs is None
            else tuple(one for delta in deltas for one in delta.logprobs or ()),
            drafters=tuple(name for delta in deltas for name in delta.drafters),
            trace=None
            if last.trace is None
            else tuple(delta.trace for delta in deltas if delta.trace is not None),
        )
