"""llama.cpp's own server, with any kind of speculation, or plain.

Run by `worker.py`; needs no Python but this one, and imports nothing of Outrider.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

CONTROLS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "ignore_eos": "ignore_eos",
}
"""What `/completion` calls them. Its penalties count the prompt too, so they are others."""
SAMPLERS = "temperature", "top_k", "top_p", "min_p", "typ_p"
"""In the order of docs/sampling.md, and none besides."""
SPECULATION = ("speculation",)
F32 = "-ctk", "f32", "-ctv", "f32", "-fa", "off"


def load(
    model: str,
    server: str = "llama-server",
    speculation: Sequence[str] = (),
    arguments: Sequence[str] = F32,
    slots: int = 4,
    context: int = 1024,
    threads: int = 1,
) -> LlamaCpp:
    """A server on a port of this machine.

    Args:
        model: the target's GGUF file, of float32 if rounding is to decide nothing.
        server: the program.
        speculation: its arguments for that, such as `--spec-type draft-simple -md draft.gguf`.
        arguments: any others; by default keys and values in float32.
        slots: texts at once.
        context: tokens that each of them may have.
        threads: of the processor.
    """
    rooms = ["-np", str(slots), "-c", str(slots * context)]
    given = ["-m", model, *rooms, "-t", str(threads), "-tb", str(threads), *arguments, *speculation]
    return LlamaCpp(server, given, slots)


class LlamaCpp:
    """A running server, ended with this object's process."""

    def __init__(self, server: str, arguments: Sequence[str], slots: int) -> None:
        self.name = _version(server)
        self._port, self._slots = _free_port(), slots
        self._process = subprocess.Popen(
            [
                server,
                *arguments,
                *("--host", "127.0.0.1", "--port", str(self._port), "--no-webui"),
                *("--cache-ram", "0"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
        self._wait()

    def __call__(self, prompts: Any, params: Any, seed: int) -> list[Any]:
        """The texts of some prompts; each request has a seed of its own."""
        with ThreadPoolExecutor(self._slots) as pool:
            asked = enumerate(prompts)
            return list(pool.map(lambda one: self._text(one[1], params, seed + one[0]), asked))

    def close(self) -> None:
        """Ends the server."""
        self._process.kill()
        self._process.wait()

    def _text(self, prompt: Any, params: Any, seed: int) -> Any:
        chain = {theirs: getattr(params, name) for name, theirs in CONTROLS.items()}
        if params.temperature == 0:
            chain |= {"samplers": ["top_k"], "top_k": 1}
        else:
            chain["samplers"] = list(SAMPLERS)
        told = params.logprobs is not None
        made = self._ask(
            "/completion",
            {
                "prompt": list(prompt),
                "n_predict": params.max_tokens,
                # Seeds are 32 bits wide there, and the largest one means none.
                "seed": seed % (2**32 - 1),
                "cache_prompt": False,
                "return_tokens": True,
                **({"n_probs": 1, "post_sampling_probs": False} if told else {}),
                **chain,
            },
        )
        logprobs = [one["logprob"] for one in made["completion_probabilities"]] if told else None
        return SimpleNamespace(token_ids=made["tokens"], logprobs=logprobs)

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def _wait(self) -> None:
        while self._process.poll() is None:
            try:
                self._ask("/health")
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
            else:
                return
        raise RuntimeError(f"llama-server ended with code {self._process.returncode}")


def _version(server: str) -> str:
    told = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in (told.stdout + told.stderr).splitlines() if "version" in line]
    return f"llama.cpp {lines[0].partition(':')[2].strip()}" if lines else "llama.cpp"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
