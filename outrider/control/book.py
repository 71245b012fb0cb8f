"""What was kept of one drafter's tokens, by what is known of a text before the round."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.control.acceptance import DISCOUNT, Acceptance, Counts, Prior
from outrider.control.confidence import Confidence
from outrider.sequence import Sequence as Text

LUCK_STEP = 0.35
"""Share of a text's luck that its last round makes."""
OVERALL_STEP = 0.05
DRIFT = 0.06
"""Share of a text's luck that a round without a draft takes back to that of all."""
ENOUGH = 12
"""Tokens of which the kept share says something: fewer are chance."""
COUNTED = 4
"""Tokens of a draft that its luck is the kept share of."""
CLASSES = (0.15, 0.4, 0.65, 0.88)
"""What is thought of a class of luck before anything is seen: its conditional acceptance, halfway
to that of all texts."""
START = 0.6


class Book:
    """Counts of one drafter under one rule, by a text's recent luck and the length of the offer.

    Luck is a running mean of the share of drafted tokens that were kept, of the first few of each
    round. A new text has the luck of all. Texts of equal luck share their counts, so that a text
    that turns from code to noise finds what is known of noise, and a new one need not be learned.

    Args:
        like: the book of smaller trees, or chains, of the same drafter: what is known of them is
            thought of these until they are seen.

    Attributes:
        drafted, kept: tokens, those of long ago forgotten.
        at: the round in which it saw something last.
        confidence: how what the drafter thinks of its drafts turned out.
    """

    def __init__(self, like: Book | None = None) -> None:
        self._like = like
        self.at = 0
        self.confidence = Confidence()
        self._cells: dict[int, Counts] = {}
        self._luck: dict[int, float] = {}
        self._classes: dict[int, int] = {}
        self._overall = START
        self.drafted = self.kept = 0.0

    def cell(self, text: int, offer: int = 0) -> int:
        """The class of a text, and of a certain draft of `offer` tokens."""
        own = self._classes.get(text)
        if own is None:
            own = _class_of(self._luck_of(text))
        return own + 4 * min(4, offer.bit_length()) if offer else own

    def cells(self, texts: Sequence[Text], idle: int = 0) -> list[int]:
        """The classes of some texts, without an offer, after so many rounds without a draft.

        Bad luck is forgotten, little by little: a text whose drafts were no good would otherwise
        never be drafted for again.
        """
        if idle and self._luck:
            left, overall = (1.0 - DRIFT) ** idle, self._overall
            for text in texts:
                luck = self._luck.get(text.key)
                if luck is not None:
                    self._set_luck(text.key, overall + left * (luck - overall))
        classes = self._classes
        if self._like is not None and not self.drafted:
            return [self.cell(text.key) for text in texts]
        usual = _class_of(self._overall)
        return [classes.get(text.key, usual) for text in texts]

    def _set_luck(self, text: int, luck: float) -> None:
        """Where it is asked for in each round the class is at hand."""
        self._luck[text] = luck
        self._classes[text] = _class_of(luck)

    def offered(self, text: int, tokens: int) -> tuple[int, list[float]]:
        """The class of a text's certain draft, and the chances of its tokens.

        Drafts of one class and length share the list.
        """
        cell = self.cell(text, tokens)
        return cell, self.counts(cell).first(tokens)

    def _luck_of(self, text: int) -> float:
        own = self._luck.get(text)
        if own is not None:
            return own
        if self._like is None or self.drafted:
            return self._overall
        return self._like._luck_of(text)

    def counts(self, cell: int) -> Counts:
        """The counts of a class."""
        found = self._cells.get(cell)
        if found is None:
            start = Acceptance(
                discount=DISCOUNT, prior=Prior((CLASSES[cell % 4] + self._overall) / 2, 3.0)
            )
            like = None if self._like is None else self._like.counts(cell)
            found = self._cells[cell] = Counts(start, like)
        return found

    def survival(self, text: int, depth: int, offer: int = 0) -> list[float]:
        """P(first i tokens kept) of a text's next draft; texts of one class share the list."""
        return self.counts(self.cell(text, offer)).survival(depth)

    def saw(
        self,
        cell: int,
        kept: int,
        offered: int,
        asked: int | None = None,
        *,
        part: float = 1.0,
    ) -> None:
        """A draft of `offered` tokens, of at most `asked`, had its first `kept` ones kept.

        `part` is the text's of the round: what is remembered are rounds, however many texts.
        The text's luck is not counted here.
        """
        self.counts(cell).saw(kept, offered if asked is None else asked, part)
        if not offered:
            return
        luck_now = min(kept, COUNTED) / min(offered, COUNTED)
        self._overall += OVERALL_STEP * part * (luck_now - self._overall)
        left = 1.0 - (1.0 - DISCOUNT) * part
        self.drafted = self.drafted * left + offered
        self.kept = self.kept * left + kept

    def felt(self, text: int, kept: int, offered: int) -> None:
        """The text's luck: of `offered` tokens the first `kept` were kept.

        A drafter that was asked and had nothing to say is bad luck of this text alone.
        """
        luck_now = min(kept, COUNTED) / min(offered, COUNTED) if offered else 0.0
        luck = self._luck_of(text)
        self._set_luck(text, luck + LUCK_STEP * (luck_now - luck))

    @property
    def rate(self) -> float | None:
        """The share of drafted tokens that was kept lately; None while these are too few."""
        return self.kept / self.drafted if self.drafted >= ENOUGH else None

    def close(self, text: int) -> None:
        """The text is over."""
        self._luck.pop(text, None)
        self._classes.pop(text, None)


def _class_of(luck: float) -> int:
    return min(3, int(luck * 4))
