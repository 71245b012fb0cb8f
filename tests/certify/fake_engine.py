"""An engine as `outrider.certify.adapters.worker` runs it: a table, the standard library alone."""

from __future__ import annotations

import os
import random
import subprocess
import time
from math import exp

VOCAB, END = 12, 3
CONTROLS = {"temperature", "top_k", "ignore_eos"}
SPECULATION = ("fault",)


def rows():
    """Logits of the next token after each token."""
    chance = random.Random(5)
    return [[chance.gauss(0, 1.5) for _ in range(VOCAB)] for _ in range(VOCAB)]


def load(fault=None, name="fake"):
    """Draws from the table, with a fault or without."""
    print("loading, on standard output")
    if fault == "does not load":
        raise FileNotFoundError("no such table")
    return Fake(fault, name)


class Fake:
    """Draws token by token."""

    def __init__(self, fault, name):
        self.fault, self.name, self.table = fault, f"{name}, {fault}", rows()

    def __call__(self, prompts, params, seed):
        if self.fault == "dies":
            os.write(2, b"out of luck\n")
            os._exit(7)
        if self.fault == "hangs":
            child = subprocess.Popen(["sleep", "600"])
            os.write(2, f"child {child.pid}\n".encode())
            time.sleep(600)
        if self.fault == "raises":
            raise ValueError("not today")
        return [self.text(prompt, params, seed + i) for i, prompt in enumerate(prompts)]

    def text(self, prompt, params, seed):
        chance, out = random.Random(seed), []
        while len(out) < params.max_tokens and (params.ignore_eos or END not in out):
            law = self.law(self.table[[*prompt, *out][-1]], params)
            out.append(chance.choices(range(VOCAB), law)[0])
        return out

    def law(self, row, params):
        if params.temperature == 0:
            return [float(x == max(row)) for x in row]
        cut = sorted(row)[-params.top_k] if params.top_k and self.fault != "all" else min(row)
        return [exp(x / params.temperature) if x >= cut else 0.0 for x in row]
