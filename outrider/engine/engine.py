"""The step: admit, propose, score, verify, commit, emit. Nothing else drives the models.

Plain decoding is the drafter that proposes nothing, reading a prompt is a text with many pending
tokens, and an exception anywhere before `commit` leaves every text as it was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from outrider.decoding import Draft, Verdict, rule_named
from outrider.drafters.base import Drafter
from outrider.engine.choice import Choice
from outrider.engine.draws import GroupDraws
from outrider.engine.emit import Emitter, Gained
from outrider.engine.group import Group, Scores, alphas, score
from outrider.engine.laps import Laps
from outrider.engine.memory import out_of_memory
from outrider.engine.observe import show_rows
from outrider.engine.reading import Turn
from outrider.engine.scheduler import Scheduler
from outrider.engine.told import Told, added_source, asks, names_of, told
from outrider.errors import UnsupportedModel
from outrider.models.base import Target
from outrider.sequence import Sequence
from outrider.tree import TreeBudget
from outrider.types import Source, SpeculativeMetrics

log = logging.getLogger(__name__)


class Engine:
    """Makes texts with one target and one drafter, a ragged batch of them at a time.

    Any thread may submit texts and call `step`; a step serves every active text, whoever asked.

    Args:
        target: the model whose law the texts follow.
        drafter: who guesses.
        emitter: where texts end and what readers get.
        max_texts: texts that hold a cache at a time; the others wait.
        chunk: rows of prompts read in one step at most, all texts together.
        trees: how large drafted trees may be, where the rule takes trees; None = chains.

    Raises:
        UnsupportedModel: trees with a target that scores chains only; a target that the drafter
            cannot draft for.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        emitter: Emitter,
        *,
        max_texts: int = 64,
        chunk: int = 512,
        trees: TreeBudget | None = None,
    ) -> None:
        if trees is not None and not target.scores_trees:
            raise UnsupportedModel(
                f"width={trees.width}: {type(target).__name__} scores chains only; use width=1"
            )
        self.target = target = drafter.attach(target)
        self.drafter = drafter
        self.choice = Choice(drafter)
        self.trees = trees
        self.metrics = SpeculativeMetrics()
        self._lock = threading.RLock()
        self._emitter = emitter
        self._chunk = chunk
        self._scheduler = Scheduler(target, max_texts)
        self._groups: dict[tuple[int, str], Group] = {}
        # Whether a long prompt is under way, a chunk in each step.
        self._reads = False

    def step(self) -> None:
        """One round of every active text; one with a long prompt reads a chunk of it instead."""
        with self._lock, self._measured(), torch.inference_mode():
            # An interrupt may have come between a text's end and its release.
            self._release_finished()
            for group in self._admit():
                if any(text.handle is None for text in group.texts):
                    # One was sent back to the queue meanwhile; the next step groups anew.
                    continue
                try:
                    self._round(group)
                except Exception as error:
                    if out_of_memory(error):
                        self._spare(group, error)
                    else:
                        self._isolate(group, error)
            self._release_finished()

    def _round(self, group: Group) -> None:
        """The route of one group: propose, score, verify, commit, emit."""
        with self._all_or_nothing(group):
            lap = Laps(self.metrics, group.texts)
            noise_B = group.noise()
            expect = partial(self._expect, group)
            draws = GroupDraws(group, noise_B, self.target.vocab_size, expect)
            draft = group.drafter.propose(group.texts, group.depths(), draws)
            lap("draft_s")
            scores = score(self.target, group, draft, self._chunk)
            lap("score_s")
            laws = scores.laws(group)
            verdict = group.rule.verify(draft, laws, noise_B)
            read = scores.reading(verdict, alphas(group, draft, laws, verdict))
            if self._goes_on(group):
                self.target.expect(group.handles, [1] * len(group.texts), verdict.token_B)
            elif self._drafts_on(group):
                group.drafter.foresee(group.texts[0], verdict.num_accepted_B, verdict.token_B)
            verdict, alphas_B = read()
            lap("verify_s")
            told_B = told(group, draft, scores, laws, verdict, lap.times)
            lap.skip()
            if group.drafter.wants_rows:
                show_rows(group, draft, scores, verdict)
            self._commit(group, draft, scores, verdict, alphas_B, told_B)
            self._emit(group)
            lap("commit_s")
        try:
            group.drafter.timed(group.texts, lap.times)
        except Exception:
            # The round is committed: bookkeeping ends no text.
            log.exception("drafter %s failed to note a round", group.drafter.name)

    def _goes_on(self, group: Group) -> bool:
        """Whether each text's next round reads the token that this one adds, and nothing else.

        It is begun before this one's is known, behind which what somebody asks to be told of it
        would have to wait; and what is read between the two would make it one for nothing.
        """
        drafter = group.drafter
        if not self.target.takes_unread or drafter.taps or drafter.wants_rows:
            return False
        if self._reads or len(self._groups) > 1:
            return False
        ends = any(asks(text) or text.remaining <= 1 for text in group.texts)
        return not ends and drafter.pauses(group.texts)

    def _drafts_on(self, group: Group) -> bool:
        """Whether a text's drafter may begin the next round before this one's end is known."""
        if not self.target.takes_unread or group.drafter.wants_rows:
            return False
        if self._reads or len(self._groups) > 1 or len(group.texts) > 1:
            return False
        return not asks(group.texts[0]) and group.texts[0].remaining > 1

    def _expect(self, group: Group, member: int, tokens_K: Tensor) -> None:
        """Tells the target of a text's drafted tokens, which it is to score alone."""
        text = group.texts[member]
        if len(group.texts) > 1 or text.handle is None or group.drafter.taps:
            return
        pending = text.tokens[self.target.length(text.handle) :]
        if len(pending) == 1:
            last_1 = tokens_K.new_full((1,), pending[0])
            self.target.expect([text.handle], [1 + len(tokens_K)], torch.cat((last_1, tokens_K)))

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Adds the time of a step to the metrics, whatever becomes of it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.metrics.wall_s += time.perf_counter() - started

    def _admit(self) -> list[Group]:
        """Active texts in groups of equal drafter and rule; a group that stays together is kept."""
        turn = Turn.of(self._scheduler.admit(), self._unread, self._chunk)
        if turn.reader is not None:
            self._read(turn.reader)
        self._reads = turn.reader is not None
        drafters = [self._drafter(text) for text in turn.ready]
        at_work = {(id(own), text.rule) for own, text in zip(drafters, turn.ready, strict=True)}
        members: dict[tuple[int, str], tuple[Drafter, list[Sequence]]] = {}
        for own, text in zip(drafters, turn.ready, strict=True):
            drafter = own
            begun = text.depth and text.num_output
            if begun and len(at_work) > 1 and own is self.choice.plain:
                # Its last token comes with the others' round: one forward for all of them.
                asked = self.choice.of(text.request.drafter)
                drafter = asked if (id(asked), text.rule) in at_work else own
            members.setdefault((id(drafter), text.rule), (drafter, []))[1].append(text)
        groups: dict[tuple[int, str], Group] = {}
        for key, (drafter, texts) in members.items():
            kept = self._groups.get(key)
            if kept is None or kept.texts != texts:
                kept = Group(texts, drafter, rule_named(key[1], lossless=False), self.trees)
            kept.followed = bool(self._scheduler.waiting)
            groups[key] = kept
        self._groups = groups
        return list(groups.values())

    def _drafter(self, text: Sequence) -> Drafter:
        """Who drafts for a text: nobody where it wants no draft, or has room for one token."""
        alone = min(text.depth, text.remaining - 1) < 1
        return self.choice.plain if alone else self.choice.of(text.request.drafter)

    def _close_draft(self, text: Sequence) -> None:
        """Has the drafter that its request asked for forget a text."""
        self.choice.of(text.request.drafter).close(text)

    def _unread(self, text: Sequence) -> int:
        """Tokens of an active text that the target, or its drafter, has not read."""
        assert text.handle is not None
        rows = len(text.tokens) - self.target.length(text.handle)
        try:
            return max(rows, self._drafter(text).unread(text))
        except Exception:
            # It will fail in the round too, which knows what to do about it.
            return rows

    def _read(self, text: Sequence) -> None:
        """Reads one chunk of a long text. It is settled, so the caches keep it at once."""
        assert text.handle is not None
        piece = text.tokens[self.target.length(text.handle) : -1][: self._chunk]
        group = Group([text], self._drafter(text), rule_named(text.rule, lossless=False))
        lap = Laps(self.metrics, [text])
        try:
            with self._all_or_nothing(group):
                with self.target.tapping(group.drafter.taps) as taps:
                    first = self.target.length(text.handle)
                    if piece:
                        self.target.read(text.handle, piece)
                if taps.parts:
                    group.drafter.notice(text, first, taps.of(text.handle))
                lap("score_s")
        except Exception as error:
            give_up = self._give_way if out_of_memory(error) else self._fail
            give_up(group, error)
            return
        try:
            with self._all_or_nothing(group):
                group.drafter.read(text, self._chunk)
                lap("draft_s")
        except Exception as error:
            if not out_of_memory(error):
                self._fail(group, error)
            # No memory for drafts: the text goes on without.
            group.drafter.close(text)
            text.depth = 0

    def _commit(
        self,
        group: Group,
        draft: Draft,
        scores: Scores,
        verdict: Verdict,
        alphas_B: list[float] | None,
        told_B: list[Told],
    ) -> None:
        """Settles what each text keeps, and moves the caches after it."""
        tree = draft.tree
        tokens, drafted = tree.tokens_BN.tolist(), tree.counts_B.tolist()
        paths, extra = verdict.path_BD.tolist(), verdict.token_B.tolist()
        accepted, parents = verdict.num_accepted_B.tolist(), tree.parents_BN.tolist()
        levels = drafted if tree.is_chain else tree.levels().tolist()
        for b, text in enumerate(group.texts):
            assert text.handle is not None
            path = paths[b][: accepted[b]]
            text.error = scores.broken(b, path)
            if text.error is not None:
                continue
            drafts: list[Source] = ["draft"] * len(path)
            gained = Gained(
                [*(tokens[b][row - 1] for row in path), extra[b]],
                [*drafts, added_source(parents[b][: drafted[b]], path)],
                [*(names_of(group, draft, b, path)), None],
                told_B[b],
            )
            kept = self._emitter.keep(text, gained)
            staged = self.target.num_staged(text.handle)
            pending = staged - drafted[b]
            rows = [*range(pending), *(pending + row - 1 for row in path)]
            if group.drafter.taps:
                hidden_nF = scores.hidden(text.handle, staged, rows)
                read = self.target.length(text.handle) + len(rows)
                group.drafter.notice(text, read - len(hidden_nF), hidden_nF)
            self.target.commit(text.handle, len(rows) if tree.is_chain else rows)
            group.drafter.commit(text, len(path))
            for metrics in (self.metrics, text.stats):
                metrics.record_round(drafted[b], min(len(path), kept), kept, levels[b])
                if alphas_B is not None:
                    metrics.record_alpha(alphas_B[b], min(len(path) + 1, drafted[b]))

    def _emit(self, group: Group) -> None:
        """Hands each text's reader the tokens settled and not handed out yet."""
        for text in group.texts:
            self._emitter.emit(text)

    @contextmanager
    def _all_or_nothing(self, group: Group) -> Iterator[None]:
        """Whatever was staged and not committed is forgotten when the round breaks off."""
        try:
            yield
        except BaseException:
            for text in group.texts:
                if text.handle is not None:
                    self.target.discard(text.handle)
                group.drafter.discard(text)
            # What some texts had settled before the break is theirs.
            self._emit(group)
            raise

    def _spare(self, group: Group, error: Exception) -> None:
        """Out of memory: drop the drafts first, then admit less, then give the text up."""
        if group.drafter is not self.choice.plain:
            going = [text for text in group.texts if not text.finished]
            plain = Group(going, self.choice.plain, group.rule)
            try:
                self._round(plain)
            except Exception as again:
                error = again
            else:
                return
            if not out_of_memory(error):
                self._isolate(plain, error)
                return
        self._give_way(group, error)

    def _give_way(self, group: Group, error: Exception) -> None:
        """Out of memory without drafts: the newest text waits, a text alone fails."""
        suspended = self._scheduler.suspend_last()
        if suspended is None:
            self._fail(group, error)
        else:
            self._close_draft(suspended)

    def _isolate(self, group: Group, error: Exception) -> None:
        """A failure ends the text that caused it: each goes through the round by itself."""
        if len(group.texts) == 1:
            self._fail(group, error)
            return
        num = len(group.texts)
        log.warning("a round of %d texts failed, and each is tried alone", num, exc_info=error)
        for text in [text for text in group.texts if not text.finished]:
            alone = Group([text], group.drafter, group.rule, group.trees)
            try:
                self._round(alone)
            except Exception as own:
                self._fail(alone, own)

    def _fail(self, group: Group, error: Exception) -> None:
        """Ends every text of the group that goes on; whoever waits for one gets the error."""
        for text in group.texts:
            if not text.finished:
                text.error = error

    def submit(self, texts: list[Sequence]) -> None:
        """Queues new texts; `step` until they are finished, then read their outboxes."""
        with self._lock:
            for text in texts:
                text.started_s = time.perf_counter()
                text.stats.prompt_tokens = text.num_prompt
                self.metrics.prompt_tokens += text.num_prompt
                text.stats.cost_ratio = self.metrics.cost_ratio
                self._emitter.open(text)
            self._scheduler.submit(texts)

    def settled(self, texts: list[Sequence]) -> bool:
        """Whether all are finished, with their last deltas in their outboxes: never mid-step."""
        with self._lock:
            return all(text.finished for text in texts)

    @contextmanager
    def without_caches(self) -> Iterator[None]:
        """A time between rounds at which no text has a cache; each builds its own anew afterwards.

        It is for changing the target's weights, which the drafters are told of.
        """
        with self._lock:
            for text in self._scheduler.withdraw():
                self._close_draft(text)
            try:
                yield
            finally:
                self.choice.target_changed()

    def cancel(self, text: Sequence) -> None:
        """Takes a text out, finished or not; safe to call twice."""
        with self._lock:
            self._scheduler.release(text)
            self._close_draft(text)
            self._emitter.close(text)

    def _release_finished(self) -> None:
        for text in [text for text in self._scheduler.active if text.finished]:
            self.cancel(text)
