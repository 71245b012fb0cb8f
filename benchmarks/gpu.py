"""Plain and speculative decoding of a model of three billion weights on a GPU, beside a bare read.

    python benchmarks/gpu.py --json docs/gpu.json

Weights are random, made on the GPU; residual paths are scaled down, so that the greedy text has no
near ties. The draft model is sized for a cost ratio of about 0.08, and its acceptance is imposed
(`arena/oracle.py`). `--smoke` takes tiny models, and the processor where there is no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.arena.oracle import OracleDrafter
from outrider import SamplingParams, SpeculativeDecoder, SpeculativeDecoderConfig
from outrider.bench.script import command_of, exit_code, ints, parser_of, save
from outrider.control.runs import bootstrapped
from outrider.drafters import Drafter, ModelDrafter
from outrider.errors import InvalidConfig
from outrider.models.base import Rows
from outrider.models.hf import HuggingFaceTarget
from outrider.types import SpeculativeMetrics

SHAPES = {
    "target": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
    },
    "draft": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 2,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    },
}
"""The target is Llama-3.2-3B's shape."""
SMOKE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
VOCAB, SMOKE_VOCAB = 128_256, 256
ROWS = (1, 8)
CONTEXTS = (512, 8192, 32_768)
CHAINED = 16
"""Rows of a chain that is timed."""
BEGUN = 16
"""Tokens of a text that are not timed."""
TRIES = 8
"""Times that a text is timed at most, where its beginning took longer than the whole."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured over so many cached tokens.

    Attributes:
        forward_ms: of a forward of so many rows, the host's part in it, medians.
        draft_ms: of a row of the draft model in a chain, a token being chosen behind each.
        read_ms: what reading the weights and the cached tokens once takes at the read bandwidth.
        plain: tokens a second, text by text; `speculative` likewise, by draft length.
        tokens_per_round: by draft length.
        parts_ms: of the last text, where a round's time went, by draft length: drafting,
            scoring, verifying, committing, other.
    """

    context: int
    forward_ms: dict[int, float]
    draft_ms: float
    read_ms: float
    plain: list[float]
    speculative: dict[int, list[float]]
    tokens_per_round: dict[int, float]
    parts_ms: dict[int, dict[str, float]]

    def line(self) -> str:
        """A row of the table."""
        one, many = (self.forward_ms[rows] for rows in ROWS)
        plain = statistics.harmonic_mean(self.plain)
        rates = {k: statistics.harmonic_mean(rates) for k, rates in self.speculative.items()}
        best = max(rates, key=rates.__getitem__)
        _, ratio = bootstrapped(self._runs(self.speculative[best]), self._runs(self.plain))
        cells = (
            self.context,
            f"{self.read_ms:.2f}",
            f"{one:.2f}",
            f"{many / one:.2f}",
            f"{plain:.0f}",
            f"{plain * self.read_ms / 1e3:.0%}",
            f"{self.draft_ms / one:.3f}",
            f"{rates[best]:.0f} (k = {best}, {self.tokens_per_round[best]:.2f} a round)",
            f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        )
        return "| " + " | ".join(map(str, cells)) + " |"

    def _runs(self, rates: list[float]) -> list[tuple[float, float]]:
        """Tokens and seconds of each text."""
        return [(1.0, 1 / rate) for rate in rates]


HEAD = (
    "| cached tokens | one read, ms | forward of one row, ms | 8 rows / one | plain, tokens/s "
    "| of the reads' rate | draft / target | speculative, tokens/s | speculative / plain |\n"
    + "|---" * 9
    + "|"
)


def model_of(shape: dict[str, int], vocab: int, context: int, device: torch.device, seed: int):
    """A Llama of random weights that goes on with the token it has read."""
    config = LlamaConfig(
        **shape,  # pyright: ignore[reportArgumentType]
        vocab_size=vocab,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.01)
    return HuggingFaceTarget(model)


def waits(device: torch.device) -> None:
    """Waits for what the device has to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds that a call takes, until all of it is done."""
    times: list[float] = []
    for at in range(3 + repeats):
        waits(device)
        start = time.perf_counter()
        run()
        waits(device)
        if at >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes a second of a bare read: the best of a sum and a product with a vector."""
    numbers = torch.rand(num_bytes // 4, device=device)
    matrix = numbers.view(-1, 1024).to(torch.bfloat16)
    vector = torch.rand(1024, device=device, dtype=torch.bfloat16)
    seconds = median_s(numbers.sum, device, 10), median_s(lambda: matrix @ vector, device, 10)
    return max(num_bytes / seconds[0], num_bytes / 2 / seconds[1])


def forward_s(target: HuggingFaceTarget, prompt: list[int], rows: int, repeats: int) -> float:
    """Seconds of a forward of a few rows behind a prompt."""
    seq = target.open(len(prompt) + rows)
    try:
        for first in range(0, len(prompt), 2048):
            target.read(seq, prompt[first : first + 2048])

        def run() -> None:
            target.score(Rows((seq,), (rows,), torch.arange(rows)))
            target.discard(seq)

        return median_s(run, target.device, repeats)
    finally:
        target.close(seq)


def chained_s(draft: HuggingFaceTarget, prompt: list[int], repeats: int) -> float:
    """Seconds of a row of a chain, each token the likeliest of the row before."""
    seq, rows = draft.open(len(prompt) + CHAINED), CHAINED
    try:
        for first in range(0, len(prompt), 2048):
            draft.read(seq, prompt[first : first + 2048])

        def run() -> None:
            # The processor's tiny models, of a smoke run, have no chains.
            chain = draft.chain(seq, rows)
            token_1 = torch.zeros(1, dtype=torch.int64, device=draft.device)
            for _ in range(rows):
                row = draft.score(Rows((seq,), (1,), token_1)) if chain is None else chain(token_1)
                token_1 = row.argmax(-1)
            if chain is not None:
                chain.stage([0] * rows)
            draft.discard(seq)

        return median_s(run, draft.device, repeats) / rows
    finally:
        draft.close(seq)


def decoder(target: HuggingFaceTarget, drafter: Drafter | None, k: int) -> SpeculativeDecoder:
    """Greedy texts."""
    sampling = SamplingParams(temperature=0.0)
    return SpeculativeDecoder(drafter, target, SpeculativeDecoderConfig(k=k, sampling=sampling))


def rate(made: SpeculativeDecoder, prompt: list[int], num_tokens: int) -> float:
    """Tokens a second of a text in its course: what its first tokens take goes off.

    Where the machine stalled in these, so that they took longer than all, both are timed again.

    Raises:
        InvalidConfig: a machine that does so again and again.
    """
    for _ in range(TRIES):
        times: list[float] = []
        for tokens in (BEGUN, BEGUN + num_tokens):
            waits(made.target.device)  # pyright: ignore[reportAttributeAccessIssue]
            start = time.perf_counter()
            made.generate(prompt, tokens, seed=0)
            times.append(time.perf_counter() - start)
        if times[1] > times[0]:
            return num_tokens / (times[1] - times[0])
    raise InvalidConfig(
        f"{TRIES} times the first {BEGUN} tokens took longer than {num_tokens} more with them; "
        "time it on a machine with less at work, or more --tokens"
    )


def parts_of(metrics: SpeculativeMetrics) -> dict[str, float]:
    """Milliseconds of a round."""
    rounds = max(1, metrics.rounds + metrics.plain_rounds)
    names = "draft", "score", "verify", "commit", "other", "wall"
    return {name: getattr(metrics, f"{name}_s") / rounds * 1e3 for name in names}


@torch.inference_mode()
def measured(
    target: HuggingFaceTarget, draft: HuggingFaceTarget, options: argparse.Namespace, read: float
) -> list[Cell]:
    """A cell for each context."""
    cells: list[Cell] = []
    for context in options.contexts:
        draw = torch.Generator().manual_seed(context)
        prompt = torch.randint(target.vocab_size, (context,), generator=draw).tolist()
        forwards = {n: forward_s(target, prompt, n, options.repeats) * 1e3 for n in ROWS}
        draft_ms = chained_s(draft, prompt, options.repeats) * 1e3
        # A text's corruption is drawn anew each time it is decoded, the same for all lengths.
        oracles = [
            OracleDrafter(ModelDrafter(draft), options.alpha, seed=context + at)
            for at in range(options.rounds)
        ]
        plain = decoder(target, None, 1)
        taught = plain.generate(prompt, BEGUN + options.tokens, seed=0)
        for oracle in oracles:
            oracle.learn(prompt, taught)
        made = {k: [decoder(target, oracle, k) for oracle in oracles] for k in options.k}
        rates: list[float] = []
        speculative: dict[int, list[float]] = {k: [] for k in options.k}
        # What is captured when it is first met is met before anything is timed.
        for one in [one for ones in made.values() for one in ones]:
            one.generate(prompt, BEGUN + options.tokens, seed=0)
            one.reset_metrics()
        for at in range(options.rounds):
            rates.append(rate(plain, prompt, options.tokens))
            for k, ones in made.items():
                speculative[k].append(rate(ones[at], prompt, options.tokens))
        weights = target.num_parameters * target.dtype.itemsize
        size = weights + context * target.cache_plan()["bytes_per_token"]
        lengths = {
            k: statistics.mean(one.metrics.mean_acceptance_length for one in ones)
            for k, ones in made.items()
        }
        parts = {k: parts_of(one.metrics) for k, (*_, one) in [(0, (plain,)), *made.items()]}
        cells.append(
            Cell(context, forwards, draft_ms, size / read * 1e3, rates, speculative, lengths, parts)
        )
        if len(cells) == 1:
            print(HEAD)
        print(cells[-1].line(), flush=True)
    return cells


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 2 on a user's mistake."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--contexts", type=ints, default=CONTEXTS, help="cached tokens (512,8192,32768)")
    add("--k", type=ints, default=(6, 7), help="draft lengths (6,7)")
    add("--alpha", type=float, default=0.8, help="imposed acceptance (0.8)")
    add("--tokens", type=int, default=128, help="of a text (128)")
    add("--rounds", type=int, default=24, help="texts of each (24)")
    add("--repeats", type=int, default=30, help="forwards timed (30)")
    options = parser.parse_args(arguments)
    return exit_code(lambda: _run(options, command_of("gpu", arguments)))


def _run(options: argparse.Namespace, command: str) -> None:
    there = torch.cuda.is_available()
    if not there and not options.smoke:
        raise InvalidConfig("no GPU is to be had here; --smoke runs on the processor")
    device = torch.device("cuda" if there else "cpu")
    if options.smoke:
        options.contexts, options.tokens, options.rounds, options.repeats = (70,), 8, 3, 1
    vocab = SMOKE_VOCAB if options.smoke else VOCAB
    room = max(options.contexts) + options.tokens + 64
    read = read_bandwidth(device, 1 << 22 if options.smoke else 1 << 31)
    target, draft = (
        model_of(SMOKE if options.smoke else shape, vocab, room, device, seed)
        for seed, shape in enumerate(SHAPES.values())
    )
    took: dict[str, float] = {}
    for name, model in (("target", target), ("draft", draft)):
        start = time.perf_counter()
        if there:
            model.compile()
        took[name] = time.perf_counter() - start
    gpu = torch.cuda.get_device_name() if there else "none"
    print(f"{gpu}, {read / 1e12:.2f} TB/s read; compiled in {took['target']:.0f} s, draft model in")
    print(f"{took['draft']:.0f} s; {target.num_parameters / 1e9:.2f} billion weights\n")
    cells = measured(target, draft, options, read)
    found = {"gpu": gpu, "read": read, "compiled_s": took, "cells": [asdict(c) for c in cells]}
    save(options.json, command, found)


if __name__ == "__main__":
    raise SystemExit(main())
