"""A small OpenAI-compatible server for tests, right or with a planted fault.

    python tests/certify/server.py --port 8123 [--bias 0.05] [--rule block] [--style silent]

serves the bundled pair, speculatively unless a request says `"speculate": false`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from outrider import LLM, SamplingParams

CONTROLS = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip
STYLES = "vllm", "llama.cpp", "text", "silent"
"""Token ids beside the text; in the log-probabilities; token texts alone; nothing but text."""


@dataclass(frozen=True, slots=True)
class Written:
    """A text, and what is told of each of its tokens: the likeliest ones and their logprobs."""

    ids: tuple[int, ...]
    text: str
    finish: str
    tops: list[dict[int, float]]
    own: list[float]


Engine = Callable[[Any, SamplingParams, int, bool], Written]


@dataclass(slots=True)
class Settings:
    """How the server is served."""

    engine: Engine
    prompt_ids: Callable[[str], list[int]]
    spell: Callable[[int], str]
    style: str = "vllm"
    refused: tuple[str, ...] = ()
    key: str | None = None
    busy: int = 0
    faults: tuple[str, ...] = ()
    seen: list[dict[str, Any]] = field(default_factory=list)


def handler(settings: Settings) -> type[BaseHTTPRequestHandler]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "tested"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                settings.seen.append(body)
                settings.busy -= 1
                busy = settings.busy >= 0
            if settings.key and self.headers.get("Authorization") != f"Bearer {settings.key}":
                return self._answer(401, {"error": {"message": "no key"}})
            if busy:
                return self._answer(429, {"error": {"message": "later"}})
            for name in settings.refused:
                if body.get(name) not in (None, 0, 0.0, 1.0, -1):
                    return self._answer(400, {"error": {"message": f"{name} is not known"}})
            return self._answer(200, completion(settings, body))

        def _answer(self, status: int, told: Mapping[str, Any]) -> None:
            raw = json.dumps(told).encode()
            with contextlib.suppress(ConnectionError):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

    return Handler


def completion(settings: Settings, body: dict[str, Any]) -> dict[str, Any]:
    controls = {name: body[name] for name in CONTROLS if body.get(name) is not None}
    controls["top_k"] = max(0, controls.get("top_k", 0))
    stop, seed = tuple(body.get("stop") or ()), int(body.get("seed") or 0)
    for fault in settings.faults:
        controls.pop(fault.removesuffix(" ignored"), None)
        stop = () if fault == "stop ignored" else stop
    num = body["max_tokens"] + ("max_tokens ignored" in settings.faults)
    wanted = body.get("logprobs")
    params = SamplingParams(
        **controls,
        max_tokens=num,
        stop=stop,
        logprobs=wanted,
        logit_bias={int(x): number for x, number in (body.get("logit_bias") or {}).items()}
        if "logit_bias ignored" not in settings.faults
        else (),
    )
    given = body["prompt"]
    prompt = settings.prompt_ids(given) if isinstance(given, str) else given
    written = settings.engine(prompt, params, seed, body.get("speculate", True))
    choice: dict[str, Any] = {"index": 0, "text": written.text, "finish_reason": written.finish}
    if settings.style == "vllm":
        choice |= {"token_ids": list(written.ids), "prompt_token_ids": list(prompt)}
    if wanted is not None and settings.style != "silent":
        choice["logprobs"] = told(settings, written, wanted)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(written.ids)}
    return {"object": "text_completion", "choices": [choice], "usage": usage}


def told(settings: Settings, written: Written, wanted: int) -> dict[str, Any]:
    name = settings.spell
    if settings.style == "vllm":
        name = "token_id:{}".format
    pairs = list(zip(written.ids, written.own, written.tops, strict=True))
    if settings.style == "llama.cpp":
        return {
            "content": [
                {
                    "id": token, "token": name(token), "logprob": own,
                    "top_logprobs": [
                        {"id": x, "token": name(x), "logprob": number} for x, number in top.items()
                    ],
                }
                for token, own, top in pairs
            ]
        }  # fmt: skip
    return {
        "tokens": [name(token) for token in written.ids],
        "token_logprobs": written.own,
        # The token itself is told beside the likeliest ones.
        "top_logprobs": [
            {name(x): number for x, number in (top | {token: own}).items()}
            for token, own, top in pairs
        ],
    }


@dataclass(slots=True)
class Bundled:
    """The bundled pair; with speculation on, laws may be off by a mean total variation."""

    llm: LLM
    rule: str | None = None
    bias: float = 0.0

    def __call__(
        self, prompt: list[int], params: SamplingParams, seed: int, speculate: bool
    ) -> Written:
        options: dict[str, Any] = {
            name: getattr(params, name) for name in SamplingParams.__dataclass_fields__
        }
        options["seed"] = seed
        if self.bias and speculate and params.temperature > 0:
            options["logits_processors"] = (self._bent,)
        rule = None if params.temperature == 0 else self.rule
        depth = None if speculate else 0
        made = self.llm.generate([prompt], SamplingParams(**options), depth=depth, rule=rule)[0]
        entries = made.logprobs or ()
        return Written(
            made.token_ids,
            made.text,
            made.finish_reason,
            [dict(entry.top) for entry in entries],
            [entry.logprob for entry in entries],
        )

    def _bent(self, _: Any, scores_1V: torch.Tensor) -> torch.Tensor:
        """Each row moves `bias` of its mass to its likeliest token, as far as there is as much."""
        p_1V = scores_1V.double().softmax(1)
        top_1 = p_1V.argmax(1, keepdim=True)
        rest = float(1 - p_1V.gather(1, top_1))
        share = min(1.0, self.bias / max(rest, 1e-9))
        bent_1V = (1 - share) * p_1V + share * torch.zeros_like(p_1V).scatter(1, top_1, 1.0)
        return bent_1V.log().to(scores_1V.dtype)


@contextlib.contextmanager
def serving(settings: Settings, port: int = 0) -> Iterator[str]:
    """The address of a server that runs meanwhile."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler(settings))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def bundled(
    bias: float = 0.0, rule: str | None = None, style: str = "vllm", dtype: str | None = None
) -> Settings:
    llm = LLM.load("bundled", drafter="draft", dtype=dtype)
    return Settings(
        Bundled(llm, rule, bias), llm.tokenizer.encode, lambda x: llm.tokenizer.decode([x]), style
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--bias", type=float, default=0.0, help="mean total variation, planted")
    parser.add_argument("--rule", default=None, help="a verification rule; coupled by default")
    parser.add_argument("--style", choices=STYLES, default="vllm", help="what is told of tokens")
    parser.add_argument("--dtype", help="of the weights; what the device has by default")
    options = parser.parse_args()
    settings = bundled(options.bias, options.rule, options.style, options.dtype)
    with serving(settings, options.port) as url, contextlib.suppress(KeyboardInterrupt):
        print(f"serving the bundled pair at {url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
