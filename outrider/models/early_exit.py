"""A target whose first layers draft for it, on its own cache (LayerSkip: Elhoushi et al. 2024).

`draft` stages rows that have passed the first layers alone, and keeps their hidden states; `score`
lets them pass the rest. Keys and values of the first layers are written once, by whichever comes
first, and lie where the target's always lie: there is no second cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.errors import InvalidConfig, UnsupportedModel, warn
from outrider.models.base import MAX_TREE_NODES, Rows, Target
from outrider.models.capability import has_experts, is_close, row_errors
from outrider.models.exit_head import ExitHead, check_exit_fits
from outrider.models.hf import EXPERT_TRIALS, HuggingFaceTarget
from outrider.models.layer_gate import LayerGate
from outrider.models.layer_parts import LayerParts
from outrider.models.plan import check_rows
from outrider.models.trial import TrialTexts, trial_rows, trial_texts
from outrider.noise import signed

if TYPE_CHECKING:
    from jaxtyping import Float

NONE = torch.empty(0, dtype=torch.int64)
TEXT = -1
"""The parent of a row that follows the committed text itself."""


@dataclass(slots=True)
class _Drafted:
    """The staged rows of a sequence, all of which have passed the first layers.

    `hidden` are their states behind these, in parts; `tokens` and `masks` their tokens and
    ancestors; `rows` finds one by its parent and token. `places` says which of them holds each row
    of the sequence that was scored; None as long as none was.
    """

    hidden: list[Tensor] = field(default_factory=list[Tensor])
    tokens: list[int] = field(default_factory=list[int])
    masks: list[int] = field(default_factory=list[int])
    rows: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    is_chain: bool = True
    places: list[int] | None = None

    def add(self, parent: int, token: int) -> int:
        """Counts in one more row and returns its number."""
        row = len(self.tokens)
        self.tokens.append(token)
        self.masks.append((self.masks[parent] if parent >= 0 else 0) | 1 << row)
        self.rows[parent, token] = row
        self.is_chain &= parent == row - 1
        return row


@dataclass(frozen=True, slots=True)
class Guess:
    """What comes out of the exit after n wanted rows: logits, and the states behind them."""

    logits_nV: Float[Tensor, "n V"]
    hidden_nD: Float[Tensor, "n D"]


class EarlyExit(Target):
    """A Hugging Face target with an exit behind its first `layers` layers.

    It is the target, and scores as it does. Rows that `draft` has staged need not pass the first
    layers again: `score` finds them by their tokens and paths, in whatever order they come and
    whatever else was drafted, and its `commit` keeps what the scored rows name. The first layers'
    share of the next `score` is what a draft has cost less.

    Args:
        target: the model; it may be used without the exit as before.
        layers: how many layers draft, 1 to one less than there are.
        head: adapts what leaves them; None leaves it as it is.

    Raises:
        InvalidConfig: another number of layers.
        VocabularyMismatch, TargetShapeMismatch: the head of another target.
        UnsupportedModel: a target that is no Hugging Face model with a cache of blocks; a model
            whose first layers and rest are not the whole, by a trial.
    """

    def __init__(self, target: Target, layers: int, head: ExitHead | None = None) -> None:
        self.target = gated_target(target)
        if head is not None:
            check_exit_fits(head, self.target)
            # Whoever gave it may have another target for it.
            head = head.copied().to(self.target.device, self.target.dtype)
        self.head = head
        self.gate = LayerGate(self.target)
        whole = isinstance(layers, int) and not isinstance(layers, bool)
        if not whole or not 1 <= layers < self.gate.num_layers:
            raise InvalidConfig(
                f"early-exit:{layers}: the {self.target.model.config.model_type} model has "
                f"{self.gate.num_layers} layers; give a number from 1 to {self.gate.num_layers - 1}"
            )
        self.layers = layers
        self.vocab_size = target.vocab_size
        self.max_length = target.max_length
        self.scores_trees = target.scores_trees
        self.prefix_block = target.prefix_block
        self._drafted: dict[int, _Drafted] = {}
        self._parts = LayerParts(self.target, self.gate, layers, adapted=head is not None)
        if self._parts.folders and not self._is_as_its_layers():
            warn(
                "the model's own layers run: packages of some of them give other rows; remove "
                f"{', '.join(self._parts.folders)}"
            )
            self._parts.forget()
        self._check()

    def _is_as_its_layers(self) -> bool:
        """Whether packages guess, and make of what was drafted, what the model's own layers do."""
        model, error = self.target.model, float("inf")
        for attempt in range(EXPERT_TRIALS if has_experts(model) else 1):
            texts = trial_texts(self.vocab_size, self.target.device, attempt)
            found = torch.cat((trial_rows(self, texts, self._in_parts), self._tried(texts)))
            with self.target.uncompiled():
                own = torch.cat((trial_rows(self, texts, self._in_parts), self._tried(texts)))
            error = min(error, float(row_errors(found, own).max()))
            if is_close(model, error):
                return True
        return False

    def _tried(self, texts: TrialTexts) -> Tensor:
        """The guesses behind some rows of a text."""
        seq = self.open(len(texts.main))
        try:
            return self.guess(Rows((seq,), (len(texts.main),), texts.main.cpu())).logits_nV
        finally:
            self.close(seq)

    def _check(self) -> None:
        """Refuses a model whose first layers and rest are not the whole.

        A mixture of experts has several tries: a last bit may send a row to another expert.
        """
        model, strict, error = self.target.model, self.target.strict, float("inf")
        for attempt in range(EXPERT_TRIALS if has_experts(model) else 1):
            texts = trial_texts(self.vocab_size, self.target.device, attempt)
            whole = trial_rows(self.target, texts)
            parts = trial_rows(self, texts, self._in_parts)
            error = float(row_errors(parts, whole).max())
            if torch.equal(parts, whole) if strict else is_close(model, error):
                return
        raise UnsupportedModel(
            f"early exit cannot be used with the {model.config.model_type} model "
            f"{type(model).__name__}: its first {self.layers} layers and the rest give rows that "
            f"differ from the whole model's by {error:.1e} of the largest logit; use another "
            "drafter"
        )

    def _in_parts(self, rows: Rows) -> Tensor:
        """Drafts each sequence's rows but the last, and scores all."""
        firsts = torch.tensor([0, *rows.counts[:-1]]).cumsum(0).tolist()
        spans = zip(firsts, rows.counts, strict=True)
        early = torch.tensor([i for first, n in spans for i in range(first, first + n - 1)])
        masks_R = None if rows.ancestors_R is None else rows.ancestors_R[early]
        counts = tuple(count - 1 for count in rows.counts)
        self.draft(Rows(rows.seqs, counts, rows.tokens_R[early], masks_R))
        return self.score(rows)

    def open(self, reserve: int, prefix: Sequence[int] = ()) -> int:
        """Return the handle of a new sequence of the target's."""
        return self.target.open(reserve, prefix)

    def length(self, seq: int) -> int:
        """Return the number of committed tokens."""
        return self.target.length(seq)

    def num_staged(self, seq: int) -> int:
        """Return the rows staged since the last commit: those scored, else those drafted."""
        text = self._drafted.get(seq)
        places = None if text is None else text.places
        return self.target.num_staged(seq) if places is None else len(places)

    def draft(self, rows: Rows) -> Float[Tensor, "wanted V"]:
        """Stage rows that have passed the first layers, and return logits behind these.

        Ancestors are bits of the rows drafted since the last commit or discard.

        Raises:
            InvalidConfig: rows that were scored are not committed yet; and whatever `score` raises.
        """
        return self.guess(rows).logits_nV

    def guess(self, rows: Rows) -> Guess:
        """Stage rows as `draft` does, and return the states too that `confidence` asks for.

        When it raises in a forward, nothing of the sequences is staged, earlier drafts included.

        Raises:
            InvalidConfig: as `draft`.
        """
        texts = [self._drafted.get(seq, _Drafted()) for seq in rows.seqs]
        for seq, text in zip(rows.seqs, texts, strict=True):
            self._check_due(seq, text)
        try:
            hidden, left, logits = self._guessed(rows)
        except BaseException:
            # Rows may be staged that nobody would know as drafted.
            for seq in rows.seqs:
                self.discard(seq)
            raise
        known = [len(text.tokens) for text in texts]
        for text, (parents, tokens) in zip(texts, _told(rows, known), strict=True):
            for parent, token in zip(parents, tokens, strict=True):
                text.add(parent, token)
        _hand_out(hidden, texts, rows.counts)
        self._drafted.update(zip(rows.seqs, texts, strict=True))
        return Guess(logits, _wanted(left, rows))

    def _guessed(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """The states behind the first layers, what leaves them by the head, and its logits."""
        if self.head is None:
            with self._parts.first(logits=True) as passed:
                logits = self.target.score(rows)
            return passed.hidden[0], passed.hidden[0], logits
        if self._parts.has_ends:
            with self._parts.first(logits=False) as passed:
                self.target.score(replace(rows, logits_rows=NONE))
            left = self._adapted(passed.hidden[0])
            return passed.hidden[0], left, self._parts.behind(_wanted(left, rows))
        gone: list[Tensor] = []

        def leaving(hidden: Tensor) -> Tensor:
            gone.append(self._adapted(hidden))
            return gone[0]

        with self.gate.running(0, self.layers, kept=(self.layers - 1,), leaving=leaving) as passed:
            logits = self.target.score(rows)
        return passed.hidden[0], gone[0], logits

    @torch.inference_mode()
    def _adapted(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(hidden)

    @torch.inference_mode()
    def confidence(self, guess: Guess) -> Float[Tensor, " n"]:
        """How likely the guesses stay: by the head, or the likeliest token's own probability."""
        if self.head is None:
            return guess.logits_nV.float().softmax(-1).amax(-1)
        return self.head.confidence_logits(guess.hidden_nD, guess.logits_nV).sigmoid()

    def _check_due(self, seq: int, text: _Drafted) -> None:
        if text.places is not None or self.target.num_staged(seq) != len(text.tokens):
            raise InvalidConfig(
                f"sequence {seq} has rows that were scored and are staged still; commit or discard "
                "them before more are drafted, or scored beside drafted ones"
            )

    def score(self, rows: Rows) -> Float[Tensor, "wanted V"]:
        """Stage the rows and return the target's logits; drafted ones pass the rest alone.

        When it raises, nothing of the sequences is staged, drafted rows included.

        Raises:
            InvalidConfig: rows that contradict each other, or follow others scored and not
                committed that were drafted for.
        """
        if not any(seq in self._drafted for seq in rows.seqs):
            return self.target.score(rows)
        try:
            return self._finished(rows)
        except BaseException:
            for seq in rows.seqs:
                self.discard(seq)
            raise

    def _finished(self, rows: Rows) -> Tensor:
        """Lets what was not drafted pass the first layers, then everything the rest."""
        check_rows(rows)
        texts = self._placed(rows)
        self._run_first(rows.seqs, texts)
        # The cache forgets which rows are staged, not what was written of them: the same rows get
        # the same slots again.
        for seq in rows.seqs:
            self.target.discard(seq)
        counts = tuple(len(text.tokens) for text in texts)
        starts = torch.tensor([0, *counts[:-1]]).cumsum(0).tolist()
        spread = zip(starts, texts, strict=True)
        flat = torch.tensor([at + place for at, text in spread for place in text.places or ()])
        wanted = flat if rows.logits_rows is None else flat[rows.logits_rows]
        kept, back = wanted.unique(return_inverse=True)
        entering = torch.cat([part for text in texts for part in text.hidden], -2)
        every = None if len(kept) == sum(counts) else kept
        with self._parts.rest(entering):
            logits = self.target.score(_rows(rows.seqs, texts, counts, every))
        in_order = torch.equal(back, torch.arange(len(kept)))
        return logits if in_order else logits[back.to(logits.device)]

    def _placed(self, rows: Rows) -> list[_Drafted]:
        """Finds each row among those drafted, or counts it in."""
        texts: list[_Drafted] = []
        for seq in rows.seqs:
            text = self._drafted.setdefault(seq, _Drafted())
            self._check_due(seq, text)
            texts.append(text)
        told = list(_told(rows, [0] * len(texts)))
        for text, (parents, tokens) in zip(texts, told, strict=True):
            text.places = []
            for parent, token in zip(parents, tokens, strict=True):
                above = text.places[parent] if parent >= 0 else TEXT
                row = text.rows.get((above, token))
                text.places.append(text.add(above, token) if row is None else row)
        longest = max(len(text.tokens) for text in texts)
        fits = longest <= MAX_TREE_NODES or all(text.is_chain for text in texts)
        if fits or not any(text.hidden for text in texts):
            return texts
        # More nodes than a bitmask has bits, for the guesses that came to nothing.
        for seq in rows.seqs:
            self.discard(seq)
        return self._placed(rows)

    def _run_first(self, seqs: Sequence[int], texts: Sequence[_Drafted]) -> None:
        """Lets the rows that were not drafted pass the first layers."""
        staged = [self.target.num_staged(seq) for seq in seqs]
        new = tuple(len(text.tokens) - n for text, n in zip(texts, staged, strict=True))
        behind = [i for i, count in enumerate(new) if count]
        if not behind:
            return
        some = [texts[i] for i in behind]
        counts = tuple(new[i] for i in behind)
        with self._parts.first(logits=False) as passed:
            self.target.score(_rows([seqs[i] for i in behind], some, counts, NONE))
        _hand_out(passed.hidden[0], some, counts)

    def commit(self, seq: int, path: int | Sequence[int]) -> None:
        """Keep the first `path` scored rows, or those it names; forget the others.

        Raises:
            InvalidConfig: rows that are not staged, or have not passed all layers.
        """
        text = self._drafted.get(seq)
        if text is None:
            self.target.commit(seq, path)
            return
        nodes = range(path) if isinstance(path, int) else path
        num_scored = len(text.places or ())
        if (isinstance(path, int) and path < 0) or any(not 0 <= n < num_scored for n in nodes):
            raise InvalidConfig(
                f"commit of {path!r} with {num_scored} rows scored; drafted rows must be scored "
                "first"
            )
        places = [(text.places or [])[node] for node in nodes]
        self.target.commit(seq, len(places) if places == list(range(len(places))) else places)
        del self._drafted[seq]

    def discard(self, seq: int) -> None:
        """Forget every staged row of the sequence, drafted or scored."""
        self._drafted.pop(seq, None)
        self.target.discard(seq)

    def read_all(self, pieces: Mapping[int, Sequence[int]]) -> None:
        """Make tokens part of some sequences; what was drafted after these is forgotten."""
        for seq in self._drafted.keys() & pieces.keys():
            self.discard(seq)
        self.target.read_all(pieces)

    def close(self, seq: int) -> None:
        """Give back the sequence's memory."""
        self._drafted.pop(seq, None)
        self.target.close(seq)


def gated_target(target: Target) -> HuggingFaceTarget:
    """Return the target if its layers can be run in two parts.

    Raises:
        UnsupportedModel: it is no Hugging Face model with one cache of blocks.
    """
    if not isinstance(target, HuggingFaceTarget):
        raise UnsupportedModel(
            "drafter='early-exit' runs the first layers of a Hugging Face model with a cache of "
            f"keys and values, and the target is a {type(target).__name__}; use drafter='ngram'"
        )
    if target.switches_regime:
        raise UnsupportedModel(
            f"drafter='early-exit' cannot be used with the {target.model.config.model_type} model: "
            "its rotary frequencies change with a text's length, and its cache with them; use "
            "drafter='ngram'"
        )
    return target


def _wanted(states: Tensor, rows: Rows) -> Float[Tensor, "n D"]:
    """Those of the wanted rows, of states `[..., R, D]` with padding behind."""
    wanted = slice(len(rows.tokens_R)) if rows.logits_rows is None else rows.logits_rows
    return states.flatten(0, -2)[wanted]


def _told(rows: Rows, known: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Each sequence's parents and tokens, where `known` of its rows were staged before.

    Raises:
        InvalidConfig: ancestors that are no path to the row.
    """
    tokens = rows.tokens_R.tolist()
    masks = None if rows.ancestors_R is None else rows.ancestors_R.tolist()
    first = 0
    for before, count in zip(known, rows.counts, strict=True):
        numbers = range(before, before + count)
        if masks is None:
            parents = [number - 1 for number in numbers]
        else:
            own = [mask % (1 << 64) for mask in masks[first : first + count]]
            if any(mask >> number != 1 for number, mask in zip(numbers, own, strict=True)):
                raise InvalidConfig(
                    "a row's ancestors must hold the row itself as their highest bit; give bit j "
                    "for the j-th row of its sequence"
                )
            parents = [
                (mask ^ 1 << number).bit_length() - 1
                for number, mask in zip(numbers, own, strict=True)
            ]
        yield parents, tokens[first : first + count]
        first += count


def _rows(
    seqs: Sequence[int],
    texts: Sequence[_Drafted],
    counts: tuple[int, ...],
    wanted: Tensor | None,
) -> Rows:
    """The last `counts[b]` rows of each text, as chains where all are."""
    pairs = list(zip(texts, counts, strict=True))
    tokens = [token for text, count in pairs for token in text.tokens[-count:]]
    ancestors_R = None
    if not all(text.is_chain for text in texts):
        masks = [mask for text, count in pairs for mask in text.masks[-count:]]
        ancestors_R = torch.tensor([signed(mask) for mask in masks])
    return Rows(tuple(seqs), counts, torch.tensor(tokens), ancestors_R, wanted)


def _hand_out(hidden: Tensor, texts: Sequence[_Drafted], counts: Sequence[int]) -> None:
    """Gives each text the hidden states `[..., count, D]` of its rows; padding is behind them."""
    first = 0
    for text, count in zip(texts, counts, strict=True):
        text.hidden.append(hidden[..., first : first + count, :])
        first += count
