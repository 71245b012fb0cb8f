"""Sampling controls of one group of texts: logits in, the requests' own processed laws out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Sequenced

import torch
from torch import Tensor

from outrider.decoding import Law, processed_probs
from outrider.decoding.laws import law_of_few, tempered
from outrider.engine.places import Places
from outrider.engine.steps import ORDER, Stand, Step, steps_of
from outrider.sequence import Sequence


class Controls:
    """The sampling parameters of B texts as tensors, one processed law per row.

    Draft and target rows go through the same object, so that one definition serves sampling and the
    acceptance test.
    """

    def __init__(self, texts: Sequenced[Sequence]) -> None:
        self.texts = texts
        params = [text.request.sampling for text in texts]
        self.temperature_B = torch.tensor([p.temperature for p in params], dtype=torch.float64)
        self.top_k_B = torch.tensor([p.top_k for p in params])
        self.top_p_B = torch.tensor([p.top_p for p in params], dtype=torch.float64)
        self.min_p_B = torch.tensor([p.min_p for p in params], dtype=torch.float64)
        self.typical_p_B = torch.tensor([p.typical_p for p in params], dtype=torch.float64)
        # Under a temperature alone nothing has to be looked for in the rows.
        off = (0, 1.0, 0.0, 1.0)
        self._bare = all(
            p.temperature > 0 and (p.top_k, p.top_p, p.min_p, p.typical_p) == off for p in params
        )
        self._scaled = any(p.temperature != 1 for p in params)
        self._guided = frozenset(b for b, text in enumerate(texts) if _steps(text))

    @property
    def act(self) -> bool:
        """Whether a row's logits may be changed by the text before it; mostly nobody asks."""
        guided = (self.texts[b] for b in self._guided)
        return any(step.acts(text) for text in guided for step in _steps(text))

    def adjusted(self, logits_RV: Tensor, places: Places) -> Tensor:
        """Logits after the controls that come before temperature, each row given its path.

        A copy, float32 (float64 stays float64), in which rows of texts without such controls stay
        as they are; the logits themselves where no text has any.
        """
        if not self.act:
            return logits_RV
        dtype = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
        out_RV = logits_RV.to(dtype, copy=True)
        placed: dict[type[Step], list[_Placed]] = {}
        for owner, rows in places.runs():
            if owner not in self._guided:
                continue
            text = self.texts[owner]
            for step in _following(text):
                if step.acts(text):
                    stand = Stand(step, text, places.paths[rows])
                    placed.setdefault(type(step), []).append((rows, stand))
        for kind in ORDER:
            for rows, stands in _together(placed.get(kind, ())):
                kind.apply(out_RV[rows], stands)
        return out_RV

    def few(self, adjusted_RV: Tensor, owners: Sequenced[int]) -> Law | None:
        """Processed laws of adjusted logits on the few tokens that top_k leaves; None: of more."""
        return None if self._bare else law_of_few(adjusted_RV, self._of(owners))

    def law(self, adjusted_RV: Tensor, owners: Sequenced[int]) -> Law:
        """Processed laws, on few tokens where top_k leaves few of each row."""
        few = self.few(adjusted_RV, owners)
        return Law.dense(self.probs(adjusted_RV, owners)) if few is None else few

    def probs(self, adjusted_RV: Tensor, owners: Sequenced[int]) -> Tensor:
        """The same as a table `[R, V]`, float32 (float64 stays float64)."""
        if not self._bare:
            return processed_probs(adjusted_RV, *self._of(owners))
        if not self._scaled:
            return tempered(adjusted_RV)
        return tempered(adjusted_RV, self.temperature_B[torch.tensor(owners, dtype=torch.int64)])

    def _of(self, owners: Sequenced[int]) -> list[Tensor]:
        """Each row's controls."""
        rows = torch.tensor(owners, dtype=torch.int64)
        every = self.temperature_B, self.top_k_B, self.top_p_B, self.min_p_B, self.typical_p_B
        return [control_B[rows] for control_B in every]


def _steps(text: Sequence) -> tuple[Step, ...]:
    """The text's own steps, made once; they stay with it from group to group."""
    if text.steps is None:
        text.steps = steps_of(text)
    return text.steps


def _following(text: Sequence) -> tuple[Step, ...]:
    """The text's steps, which have read all of it."""
    steps = _steps(text)
    # Taken out meanwhile: an interrupt may come between two counts, and then they are made anew.
    text.steps = None
    for step in steps:
        step.follow(text)
    text.steps = steps
    return steps


_Placed = tuple[slice, Stand[Step]]


def _together(placed: Iterable[_Placed]) -> Iterator[tuple[slice, list[Stand[Step]]]]:
    """Runs of rows whose steps, of one class, are alike."""
    first, last, stands = 0, 0, list[Stand[Step]]()
    for rows, stand in placed:
        if stands and (rows.start != last or stand.step.alike != stands[0].step.alike):
            yield slice(first, last), stands
            stands = []
        first = first if stands else rows.start
        last = rows.stop
        stands.append(stand)
    if stands:
        yield slice(first, last), stands
