"""llama.cpp: its own server on a port of this machine, one for each arm, over a mapped file."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import wire

CACHES = {"f32": ("-ctk", "f32", "-ctv", "f32", "-fa", "off"), "bf16": ()}
DRAFT_CACHES = {"f32": ("-ctkd", "f32", "-ctvd", "f32"), "bf16": ()}
"""Keys and values as everybody has them: beside bfloat16 its own default, which is float16."""


class LlamaCpp:
    """A server, and as many slots as the largest batch."""

    def __init__(self, task: dict[str, Any]) -> None:
        (arm,) = task["arms"]
        self._slots: int = task["batch"]
        self._port = _free_port()
        target = _precision(arm, task)
        self._version = _version(task["server"])
        self._process = subprocess.Popen(
            [
                task["server"],
                *("-m", converted(task["target"], target)),
                *("--host", "127.0.0.1", "--port", str(self._port), "--no-webui"),
                *("-t", str(task["threads"]), "-tb", str(task["threads"])),
                *("-np", str(self._slots), "-c", str(self._slots * task["context"])),
                # Prompts are read every time.
                *(*CACHES[task["kind"]], "--cache-ram", "0"),
                *_speculation(arm, task),
            ],
            stdin=subprocess.DEVNULL,
            stdout=2,
            preexec_fn=wire.die_with_parent,
        )
        self._wait()

    def about(self) -> dict[str, Any]:
        """Its version."""
        return {"version": self._version}

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Decodes a job; see `wire.Worker`."""
        with ThreadPoolExecutor(len(job["prompts"])) as pool:
            start = time.perf_counter()
            made = list(pool.map(lambda row: self._complete(job, row), range(len(job["prompts"]))))
            seconds = time.perf_counter() - start
        timings = [one["timings"] for one in made]
        drafted = sum(one.get("draft_n", 0) for one in timings)
        accepted = sum(one.get("draft_n_accepted", 0) for one in timings)
        texts = [one["tokens"][: job["tokens"]] for one in made]
        # Each round adds one token of the target's own.
        rounds = sum(map(len, texts)) - accepted if drafted else None
        return {
            "texts": texts,
            "seconds": seconds,
            "first_s": max(one["prompt_ms"] for one in timings) / 1000,
            "rounds": rounds,
            "drafted": drafted if rounds else None,
            "accepted": accepted if rounds else None,
        }

    def _complete(self, job: dict[str, Any], row: int) -> dict[str, Any]:
        chain = {"samplers": ["top_k", "temperature"], "top_k": job["top_k"]}
        return self._ask(
            "/completion",
            {
                "prompt": job["prompts"][row],
                "n_predict": job["tokens"],
                "temperature": job["temperature"],
                "seed": job["seed"] + row,
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
                **(chain if job["temperature"] else {"samplers": ["top_k"], "top_k": 1}),
            },
        )

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


def _speculation(arm: str, task: dict[str, Any]) -> list[str]:
    k, kind = str(task["k"]), _precision(arm, task)
    if arm.endswith("draft"):
        given = [
            *("--spec-type", "draft-simple", "-md", converted(task["draft"], kind)),
            *("--spec-draft-n-max", k, "--spec-draft-n-min", "0", "--spec-draft-p-min", "0"),
            *DRAFT_CACHES[task["kind"]],
            *("-td", str(task["threads"])),
        ]
        if task["alpha"] is not None:
            rates = [f"{task['alpha'] ** (i + 1):.6f}" for i in range(task["k"])]
            given += ["--spec-synth-rates", ",".join(rates)]
        return given
    if arm.endswith("lookup"):
        return [
            *("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "4"),
            *("--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", k),
        ]
    if arm == "ngram-cache":
        return ["--spec-type", "ngram-cache", "--spec-draft-n-max", k]
    return []


def _precision(arm: str, task: dict[str, Any]) -> str:
    """Of the files of target and draft model."""
    return "q8_0" if arm.startswith("q8_0") else task["kind"]


def converted(folder: str, precision: str) -> str:
    """Where the arena has put the converted model."""
    model = Path(folder)
    return str(model.parent / "gguf" / f"{model.name}-{precision}.gguf")


def _version(server: str) -> str:
    told = subprocess.run([server, "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in (told.stdout + told.stderr).splitlines() if "version" in line]
    return f"llama.cpp {lines[0].partition(':')[2].strip()}" if lines else "llama.cpp"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


if __name__ == "__main__":
    wire.serve(LlamaCpp)
