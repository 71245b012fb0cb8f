"""Runs an engine in its own Python: lines of JSON on standard input and output.

Nothing but the standard library: the interpreter that an engine is installed for runs this file,
`python worker.py FILE.py`. FILE.py is one of this folder or a user's own and has

    CONTROLS                            names of SamplingParams it has, as a mapping or a set
    SPECULATION                         options that plain decoding leaves out
    load(**options) -> generate         with the models loaded
    generate(prompts, params, seed)     one text per prompt: token ids, or an object of `token_ids`
                                        and `logprobs`; `params` has the fields of SamplingParams

What an engine prints goes to standard error. The lines:

    {"do": "load", "options": {...}, "plain": false}    -> {"name": ..., "controls": [...], ...}
    {"do": "generate", "prompts": [[...]], "params": {...}, "seed": 1}  -> {"texts": [...]}
    anything that goes wrong                            -> {"error": "..."}
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def main(file: str) -> None:
    """Answers lines until standard input ends."""
    # Beside this file stand others with the names of the engines that they drive.
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module: ModuleType | None = None
    generate: Any = None
    try:
        for line in sys.stdin:
            message = json.loads(line)
            try:
                if message["do"] == "load":
                    module = loaded(Path(file))
                    generate = module.load(**kept(module, message["options"], message["plain"]))
                    answer = about(module, generate)
                else:
                    answer = {"texts": texts(generate, message)}
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"[:500]}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        # Whoever asked may be gone; what the engine started ends all the same.
        if hasattr(generate, "close"):
            generate.close()


def loaded(file: Path) -> ModuleType:
    """The engine's file as a module."""
    spec = util.spec_from_file_location(f"engine_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def kept(module: ModuleType, options: dict[str, Any], plain: bool) -> dict[str, Any]:
    """The options, those of speculation left out where decoding is to be plain."""
    off = getattr(module, "SPECULATION", ()) if plain else ()
    return {name: value for name, value in options.items() if name not in off}


def about(module: ModuleType, generate: Any) -> dict[str, Any]:
    """What the certifier asks of an engine."""
    return {
        "name": getattr(generate, "name", module.__name__),
        "controls": list(module.CONTROLS),
        "seeded": getattr(generate, "seeded", True),
    }


def texts(generate: Callable[..., Any], message: dict[str, Any]) -> list[dict[str, Any]]:
    """What an engine continues prompts with, as JSON has it."""
    params = SimpleNamespace(**message["params"])
    made = generate(message["prompts"], params, message["seed"])
    return [
        {
            "token_ids": [int(token) for token in getattr(one, "token_ids", one)],
            "logprobs": getattr(one, "logprobs", None),
        }
        for one in made
    ]


if __name__ == "__main__":
    main(sys.argv[1])
