"""Other engines' speculation on the bundled pair, held to the target's law by `certify model`.

    python -m benchmarks.arena setup
    python -m benchmarks.engines --json docs/certify-engines.json

The engines are those that the arena has set up (docs/arena.md); the pair is converted for each of
them, in float32, into the arena's folder. Each arm is one command, which is kept with what it says;
arms that OUT has already are left. Minutes each. See docs/certify.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.arena.convert import to_gguf, to_openvino
from benchmarks.arena.home import Home, default_home
from outrider.bench.script import exit_code, names, save
from outrider.models.bundled import bundled_path

FILES = "tokenizer.json", "tokenizer_config.json"
LIMIT_S = 1800
MODEST = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
"""The environment that commands run in, besides the user's own."""
DRAFTS = {
    "vllm": {"method": "draft_model", "model": "{pair}/draft", "num_speculative_tokens": 4},
    "llama.cpp": [
        *("--spec-type", "draft-simple", "-md", "{pair}/gguf/draft-f32.gguf"),
        *("--spec-draft-n-max", "4", "-ctkd", "f32", "-ctvd", "f32", "-td", "1"),
    ],
}
LOOKUPS = {
    "vllm": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "llama.cpp": [
        *("--spec-type", "ngram-mod", "--spec-ngram-mod-n-match", "2"),
        *("--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", "4"),
    ],
}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("transformers", {"model": "{pair}/target", "threads": 1}),
    "vllm": ("vllm", {"model": "{pair}/target", "max_model_len": 512}),
    "llama.cpp": ("llama_cpp", {"model": "{pair}/gguf/target-f32.gguf", "server": "{server}"}),
    "openvino": ("openvino", {"model": "{pair}/openvino/target-fp32"}),
}
"""What `--engine` calls them, and their options."""
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "transformers": {
        "draft": {"assistant_model": "{pair}/draft"},
        "lookup": {"prompt_lookup_num_tokens": 4},
    },
    "vllm": {
        "draft": {"speculative_config": DRAFTS["vllm"]},
        "drawn": {"speculative_config": {**DRAFTS["vllm"], "draft_sample_method": "probabilistic"}},
        "lookup": {"speculative_config": LOOKUPS["vllm"]},
    },
    "llama.cpp": {
        "draft": {"speculation": DRAFTS["llama.cpp"]},
        "lookup": {"speculation": LOOKUPS["llama.cpp"]},
    },
    "openvino": {
        "draft": {"draft": "{pair}/openvino/draft-fp32"},
        "lookup": {"prompt_lookup": True},
    },
}
LAWS = {"whole": (), "cut": ("-t", "0.8", "--top-k", "40", "--top-p", "0.9")}


def main(arguments: list[str] | None = None) -> int:
    """Certify and print; 2 on a user's mistake."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything found as JSON")
    parser.add_argument("--home", type=Path, default=default_home(), help="the arena's folder")
    parser.add_argument("--engines", type=names, default=tuple(ENGINES))
    parser.add_argument("--within", default="0.05")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    return exit_code(
        lambda: run(options, shlex.join(["python", "-m", "benchmarks.engines", *given]))
    )


def run(options: argparse.Namespace, command: str) -> None:
    """Every arm of the engines that are there."""
    home, out = Home(options.home), options.json
    found: dict[str, Any] = json.loads(out.read_text())["arms"] if out and out.is_file() else {}
    for engine in options.engines:
        why = home.missing(engine)
        if why is not None:
            print(f"{engine}: {why}")
            continue
        pair = converted(home, engine)
        for way in ("lookup", "plain", "draft", "drawn"):
            for law in LAWS:
                name = f"{engine}/{way}, {law} law"
                known = way == "plain" or way in WAYS[engine]
                if name not in found and known and not (way == "plain" and law == "cut"):
                    words = words_of(home, pair, engine, way, law, options.within)
                    found[name] = certified(words, pair, home)
                    print(f"{name}: {found[name].get('verdict', found[name])}", flush=True)
                    save(out, command, {"arms": found})


def converted(home: Home, engine: str) -> Path:
    """The bundled pair as the engine reads it."""
    pair = home.checkpoint("bundled")
    for name in ("target", "draft"):
        folder = pair / name
        if not folder.is_dir():
            model = AutoModelForCausalLM.from_pretrained(bundled_path(name), dtype=torch.float32)
            model.save_pretrained(folder)
            for file in FILES:
                shutil.copy(bundled_path(name) / file, folder / file)
        if engine == "llama.cpp":
            to_gguf(home, folder, "f32")
        if engine == "openvino":
            to_openvino(home, folder, "fp32")
    return pair


def words_of(home: Home, pair: Path, engine: str, way: str, law: str, within: str) -> list[str]:
    """The command line of one arm."""
    name, options = ENGINES[engine]
    # What `converted` makes has float32 weights, and a machine may have bfloat16, too.
    words = ["certify", "model", "--json", "--dtype", "float32", "--within", within]
    words += ["--engine", name]
    words += ["--python", str(home.python(engine))]
    # Texts that look up have to be long enough for something to come again.
    words += ["-d", "draft"] if way in ("draft", "drawn") else ["-d", "none"]
    words += ["-n", "32"] if way == "lookup" else []
    for key, value in {**options, **WAYS[engine].get(way, {})}.items():
        text = value if isinstance(value, str) else json.dumps(value)
        text = text.replace("{pair}", str(pair)).replace("{server}", str(home.llama_server))
        words += ["-o", f"{key}={text}"]
    return [*words, *LAWS[law]]


def certified(words: list[str], pair: Path, home: Home) -> dict[str, Any]:
    """What the command says, and the command, folders left out of it."""
    shown = shlex.join(["outrider", *words]).replace(str(pair), "pair")
    shown = shown.replace(str(home.root) + "/", "")
    code = "from outrider.cli.app import main; main()"
    try:
        ran = subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True, text=True, check=False, timeout=LIMIT_S,
            env={**os.environ, **MODEST},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"command": shown, "error": f"not done in {LIMIT_S} s"}
    if not ran.stdout.strip():
        return {"command": shown, "error": ran.stderr.strip().splitlines()[-1][-500:]}
    return {"command": shown, **json.loads(ran.stdout)}


if __name__ == "__main__":
    sys.exit(main())
