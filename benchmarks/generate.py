"""Outrider beside transformers' own generation: the same checkpoints, prompts and tokens.

    python benchmarks/generate.py --json docs/generate.json

One text at a time against its assisted generation; eight at a time against its batched `generate`,
its `generate_batch` and its assisted generation in a loop. Needs an otherwise idle machine, half an
hour on two cores and 12 GB of memory; `--smoke` needs half a minute. See docs/transformers.md.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from rich.progress import Progress
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from outrider import LLM, SamplingParams
from outrider.bench.inflate import Size, inflate, size_of, weights_read
from outrider.bench.machine import Neighbours
from outrider.bench.paired import Interval, order
from outrider.bench.script import (
    command_of,
    exit_code,
    ints,
    names,
    others_at_work,
    parser_of,
    save,
)
from outrider.drafters import ModelDrafter, NoDrafter
from outrider.errors import ModelError
from outrider.models.bundled import bundled_path, eval_prompts
from outrider.models.checkpoint import load_llama
from outrider.models.hf import HuggingFaceTarget, default_dtype
from outrider.models.text import TextTokenizer

Texts: TypeAlias = list[list[int]]
Way: TypeAlias = Callable[[Texts], Texts]
OURS, THEIRS = "outrider, ", "transformers, "
PLAIN = OURS + "none"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to decode, on one pair at one batch size.

    Attributes:
        tok_s: new tokens over seconds, prompts' reading included; None where it does not run.
        same: how many texts have the tokens of Outrider's plain decoding.
        ahead: the fastest of Outrider's ways over this one, in tokens per second, per batch.
        why: what it says where it does not run.
    """

    pair: str
    batch: int
    way: str
    tok_s: float | None
    same: int
    texts: int
    ahead: Interval | None
    why: str | None = None


class Pair:
    """Target and draft model, each twice: as Outrider lays it out, and as transformers does."""

    def __init__(
        self, name: str, make: Callable[[], tuple[nn.Module, nn.Module]], *, compiled: bool
    ) -> None:
        dtype = default_dtype(torch.device("cpu"))
        self.name = name
        self.their_target, self.their_draft = (model.to(dtype) for model in make())
        self.weights = weights_read(self.their_target), weights_read(self.their_draft)
        # Every run reads its prompts.
        self.target, self.draft = (
            HuggingFaceTarget(model.to(dtype), share_prefixes=False) for model in make()
        )
        for model in (self.target, self.draft) if compiled else ():
            model.compile()
        self.tokenizer = TextTokenizer(bundled_path("target"))

    def ours(self, depths: Sequence[int], tokens: int) -> dict[str, Way]:
        """Plain, and with the draft model at several depths."""
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

        def way(llm: LLM) -> Way:
            return lambda prompts: [list(done.token_ids) for done in llm.generate(prompts, params)]

        ways = {PLAIN: way(LLM(self.target, self.tokenizer, NoDrafter()))}
        for k in depths:
            llm = LLM(self.target, self.tokenizer, ModelDrafter(self.draft), k=k)
            ways[f"{OURS}draft, k={k}"] = way(llm)
        # The settings that transformers' assisted generation comes with.
        sure = ModelDrafter(self.draft, confidence=0.4)
        ways[f"{OURS}draft, k=20, confidence 0.4"] = way(
            LLM(self.target, self.tokenizer, sure, k=20)
        )
        return ways

    def theirs(self, depths: Sequence[int], tokens: int, batch: int) -> dict[str, Way]:
        """Plain, assisted as it comes and at several depths, and what it has for batches."""
        model: Any = self.their_target
        model.generation_config.eos_token_id = None
        common = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}

        def generate(prompts: Texts, **more: Any) -> Texts:
            longest = max(map(len, prompts))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
            made = model.generate(ids, attention_mask=mask, **common, **more)
            return made[:, longest:].tolist()

        def assisted(prompts: Texts, k: int | None) -> Texts:
            draft: Any = self.their_draft
            config = draft.generation_config
            config.eos_token_id = None
            as_it_comes = type(config)()
            config.num_assistant_tokens = as_it_comes.num_assistant_tokens if k is None else k
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = (
                as_it_comes.assistant_confidence_threshold if k is None else 0.0
            )
            return [text for p in prompts for text in generate([p], assistant_model=draft)]

        def batched(prompts: Texts) -> Texts:
            # Kept from call to call, with room for these texts: setting up is not timed.
            made = model.generate_batch(
                inputs=prompts,
                generation_config=GenerationConfig(**common, eos_token_id=-1),
                continuous_batching_config=ContinuousBatchingConfig(
                    num_blocks=64, max_batch_tokens=2048
                ),
                persistent_manager=True,
            )
            return [list(made[key].generated_tokens) for key in sorted(made, key=_number)]

        ways: dict[str, Way] = {THEIRS + "generate": generate}
        ways[f"{THEIRS}assisted"] = lambda prompts: assisted(prompts, None)
        for k in depths:
            ways[f"{THEIRS}assisted, k={k}"] = lambda prompts, k=k: assisted(prompts, k)
        if batch > 1:
            ways[f"{THEIRS}generate_batch"] = batched
        return ways


def makers(options: argparse.Namespace) -> Iterator[Pair]:
    """The bundled pair as it is, and inflated copies; one at a time is in memory."""
    target, draft = (load_llama(bundled_path(name)) for name in ("target", "draft"))
    if "bundled" in options.pairs:
        yield Pair(
            "bundled",
            lambda: (copy.deepcopy(target), copy.deepcopy(draft)),
            compiled=options.compile,
        )
    if "inflated" in options.pairs:
        big = Size(options.layers, options.feed_forward, size_of(target).vocab)
        small = Size(options.draft_layers, options.draft_feed_forward, size_of(draft).vocab)
        yield Pair(
            "inflated",
            lambda: (inflate(target, big, 0), inflate(draft, small, 1)),
            compiled=options.compile,
        )


def compared(
    pair: Pair, batch: int, groups: Sequence[Texts], options: argparse.Namespace, bar: Progress
) -> list[Row]:
    """Every group of prompts by every way before the next, every other time backwards."""
    ways = pair.ours(options.k, options.tokens) | pair.theirs(options.k, options.tokens, batch)
    broken: dict[str, str] = {}
    for name, way in list(ways.items()):
        try:
            made = way(groups[0])
            if not all(len(text) == options.tokens for text in made):
                raise ModelError(f"texts of {sorted({len(text) for text in made})} tokens")
        except Exception as error:
            if name.startswith(OURS):
                raise
            broken[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            del ways[name]
    known = list(ways)
    seconds: dict[str, list[float]] = {name: [] for name in known}
    texts: dict[str, Texts] = {name: [] for name in known}
    task = bar.add_task(f"{pair.name}, batch {batch}", total=len(groups) * len(known))
    for i, prompts in enumerate(groups):
        for which in order(len(known), i, False):
            bar.update(task, description=f"{pair.name}, batch {batch}: {known[which]}")
            start = time.perf_counter()
            made = ways[known[which]](prompts)
            seconds[known[which]].append(time.perf_counter() - start)
            texts[known[which]] += made
            bar.advance(task)
    best = min((name for name in known if name.startswith(OURS)), key=lambda n: sum(seconds[n]))
    rows = [
        Row(
            pair.name,
            batch,
            name,
            options.tokens * batch * len(groups) / sum(seconds[name]),
            sum(a == b for a, b in zip(texts[name], texts[PLAIN], strict=True)),
            len(texts[name]),
            None
            if name == best
            else Interval.of([a / b for a, b in zip(seconds[name], seconds[best], strict=True)]),
        )
        for name in known
    ]
    return rows + [
        Row(pair.name, batch, name, None, 0, 0, None, why) for name, why in broken.items()
    ]


def run(options: argparse.Namespace) -> list[Row]:
    """All pairs and batch sizes."""
    rows: list[Row] = []
    texts = eval_prompts("code")
    with Progress(transient=True) as bar:
        for pair in makers(options):
            ids = [pair.tokenizer.encode(text) for text in texts]
            for batch in options.batches:
                num = options.prompts if batch == 1 else options.groups
                groups = [ids[i * batch : (i + 1) * batch] for i in range(num)]
                rows += compared(pair, batch, groups, options, bar)
            del pair
            gc.collect()
    return rows


def table(rows: Sequence[Row]) -> str:
    """Everything in one table."""
    lines = ["| pair | batch | way | tok/s | tokens equal | Outrider's best over it |"]
    lines.append("|" + " --- |" * 6)
    for row in rows:
        ahead = (
            ""
            if row.ahead is None
            else (f"{row.ahead.mean:.2f} [{row.ahead.low:.2f}, {row.ahead.high:.2f}]")
        )
        speed = "does not run here" if row.tok_s is None else f"{row.tok_s:.1f}"
        same = f"{row.same}/{row.texts}" if row.texts else ""
        lines.append(f"| {row.pair} | {row.batch} | {row.way} | {speed} | {same} | {ahead} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake or a busy machine."""
    options = _parser().parse_args(arguments)
    if options.smoke:
        options.pairs, options.batches, options.k = ("bundled",), (1, 2), (2,)
        options.prompts, options.groups, options.tokens, options.compile = 1, 1, 8, False
    return exit_code(lambda: measured(options, command_of("generate", arguments)))


def measured(options: argparse.Namespace, command: str) -> None:
    """Measures, prints, and saves."""
    others, neighbours = others_at_work(options), Neighbours()
    warnings.filterwarnings("ignore", module="transformers")
    rows = run(options)
    print(table(rows))
    found = {
        "dtype": str(default_dtype(torch.device("cpu"))).removeprefix("torch."),
        "others_before": others,
        "others_during": neighbours.share(),
        "rows": [asdict(row) for row in rows],
    }
    save(options.json, command, found)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--pairs", type=names, default=("bundled", "inflated"), help="bundled,inflated")
    add("--batches", type=ints, default=(1, 8), help="texts at a time (1,8)")
    add("--k", type=ints, default=(2, 6), help="tokens drafted a round (2,6)")
    add(
        "--no-compile", dest="compile", action="store_false", help="Outrider's forwards as they are"
    )
    add("--prompts", type=int, default=8, help="prompts one at a time")
    add("--groups", type=int, default=4, help="groups of prompts where several go at a time")
    add("--tokens", type=int, default=64, help="new tokens a prompt")
    add("--layers", type=int, default=24, help="blocks of the inflated target")
    add("--feed-forward", type=int, default=16384, help="width of its feed-forwards")
    add("--draft-layers", type=int, default=2, help="blocks of the inflated draft model")
    add("--draft-feed-forward", type=int, default=8192, help="width of its feed-forwards")
    return parser


def _number(key: str) -> int:
    """That of a request, which transformers numbers as they come."""
    return int(key.rpartition("_")[2])


if __name__ == "__main__":
    raise SystemExit(main())
