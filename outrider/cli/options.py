"""Options that several commands share, and the records they become."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import terminal
from outrider.config import SamplingParams
from outrider.errors import InvalidConfig

if TYPE_CHECKING:
    from outrider.llm import LLM

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", help="A local model folder, a GGUF file, or 'bundled'.", metavar="MODEL"
    ),
]
Drafter = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        metavar="SPEC",
        help="Who guesses: auto, none, draft, draft:PATH, bridge:PATH, ngram, suffix, recycle, "
        "grammar, int8, early-exit, early-exit:L, early-exit:PATH, eagle:PATH, medusa:PATH, mtp, "
        "mtp:PATH, a+b, or a,b for the best of them in each round.",
    ),
]
ExitThreshold = Annotated[
    float | None,
    typer.Option(
        help="early-exit stops guessing where its confidence is below; by default what its head "
        "says, or never."
    ),
]
MinAcceptanceRate = Annotated[
    float | None,
    typer.Option(
        help="Leave a drafter of whose tokens a smaller share is kept; by default measured times "
        "alone decide.",
    ),
]
MaxDepth = Annotated[
    int | None, typer.Option(help="Tokens that auto and a,b let be guessed per round; 16.")
]
Fallback = Annotated[
    str | None,
    typer.Option(help="Who guesses where nobody pays: none (the default), or one of the drafters."),
]
Depth = Annotated[
    int | None,
    typer.Option(
        "--depth",
        "-k",
        help="Tokens guessed per round at most; 4 by default, of suffix 24, of auto 16.",
    ),
]
Rule = Annotated[
    str | None,
    typer.Option(
        "--rule",
        help="A verification rule of docs/rules.md. By default greedy at temperature 0, coupled "
        "under a given seed, otherwise block for chains and traversal for trees.",
    ),
]
Width = Annotated[
    int, typer.Option(help="Guesses beside each other: 1 drafts chains, more draft trees.")
]
Nodes = Annotated[
    int | None, typer.Option(help="Tokens of a drafted tree at most; by default width x depth.")
]
Shape = Annotated[
    str | None,
    typer.Option(
        help="One shape for all drafted trees: the row each node follows, such as 0,0,1 for two "
        "children and one grandchild; row 0 is the text.",
        metavar="ROWS",
    ),
]
Lossy = Annotated[
    bool,
    typer.Option("--lossy", help="Let rules through that change the law of the text."),
]
Strict = Annotated[
    bool | None,
    typer.Option(
        "--strict/--no-strict",
        help="One arithmetic class for everything: logits equal bit for bit.",
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Make machine code of the forwards, once, and keep it on disk; by default what is "
        "there is used. On a GPU: forwards of few rows as graphs.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="float32, bfloat16 or float16; by default what the device has."),
]
Device = Annotated[str | None, typer.Option("--device", help="Where the models run, e.g. cpu.")]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 takes the likeliest token each time.")
]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 = all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest of this mass.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this likely beside the likeliest.")]
TypicalP = Annotated[
    float, typer.Option(help="Keep the tokens nearest to the law's entropy, of this mass; 1 = all.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Make tokens of prompt and output dearer; 1 is off.")
]
PresencePenalty = Annotated[
    float, typer.Option(help="Taken from the logits of tokens in the output; 0 is off.")
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="The same, as many times as they stand there; 0 is off.")
]
NoRepeatNgram = Annotated[int, typer.Option(help="No run of so many tokens comes twice; 0 is off.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(help="Added to a token's logit; may be repeated.", metavar="TOKEN=NUMBER"),
]
BadWord = Annotated[list[str] | None, typer.Option(help="Text that may not come; may be repeated.")]
MinTokens = Annotated[int, typer.Option(help="No end before the text has so many new tokens.")]
JsonSchema = Annotated[
    str | None,
    typer.Option(help="Write JSON of this schema: a file's name, or the schema itself."),
]
Regex = Annotated[str | None, typer.Option(help="Write what matches this regular expression.")]
Grammar = Annotated[
    Path | None, typer.Option(help="Write a text of the grammar in this file, Lark or GBNF.")
]
Logprobs = Annotated[
    int | None,
    typer.Option(help="With --json: log-probabilities of each token and so many likeliest ones."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


Profile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Draft as `outrider plan --save` found best; options given beside it count instead.",
    ),
]


@dataclass(frozen=True, slots=True)
class Loading:
    """What `LLM.load` is given; of `bounds`, those of a controller, None is its default."""

    model: str
    drafter: str
    depth: int | None = None
    rule: str | None = None
    strict: bool | None = None
    dtype: str | None = None
    device: str | None = None
    width: int = 1
    nodes: int | None = None
    lossless: bool = True
    share_prefixes: bool = True
    compile: bool | None = None
    exit_threshold: float | None = None
    shape: tuple[int, ...] | None = None
    bounds: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def profiled(self, file: Path | None) -> Loading:
        """With what a profile says where nothing else was asked for."""
        if file is None:
            return self
        from outrider.llm.profile import read_profile

        said = read_profile(file)
        asked = {"drafter": "auto", "width": 1}
        names = {"k": "depth"}
        found = {names.get(name, name): value for name, value in said.items()}
        return replace(
            self,
            **{
                name: tuple(value) if name == "shape" else value
                for name, value in found.items()
                if getattr(self, name) == asked.get(name)
            },
        )

    def steady(self) -> Loading:
        """With the preferred drafter in place of `auto`, which may draft nothing for long."""
        if self.drafter != "auto":
            return self
        from outrider.llm.load import auto_specs

        return replace(self, drafter=auto_specs(self.model)[0])

    def load(self) -> LLM:
        """The model, ready; torch and transformers are imported here and not before."""
        if self.depth is not None and self.depth < 1:
            raise InvalidConfig(
                f"depth={self.depth}: at least 1 token is guessed per round; "
                "use --drafter none to guess none"
            )
        from outrider.llm import LLM

        options: dict[str, Any] = {
            "k": self.depth,
            "rule": self.rule,
            "width": self.width,
            "nodes": self.nodes,
            "shape": self.shape,
            "lossless": self.lossless,
            "share_prefixes": self.share_prefixes,
            "compile": "auto" if self.compile is None else self.compile,
            "exit_threshold": self.exit_threshold,
            **{name: value for name, value in self.bounds.items() if value is not None},
        }
        # Unless it was done before, compiling takes half a minute for each of two models.
        waiting = terminal.err().status("loading and compiling, once for each model ...")
        with waiting if self.compile else nullcontext():
            return LLM.load(
                self.model,
                self.drafter,
                device=self.device,
                dtype=self.dtype,
                strict=self.strict,
                **options,
            )


def read_prompt(
    argument: str | None, file: Path | None, remedy: str = "give a file of UTF-8 text"
) -> str:
    """The prompt of an argument, a file, or standard input (also named `-`).

    Raises:
        InvalidConfig: two prompts, none, or bytes that are no UTF-8 text.
    """
    if argument is not None and file is not None:
        raise InvalidConfig("a prompt and --file exclude each other; give one")
    source = "argument" if argument not in (None, "-") else str(file or "-")
    try:
        if argument not in (None, "-"):
            # Bytes that are no text arrive as lone surrogates, which no tokenizer takes.
            argument.encode("utf-8")
            return argument
        if file is not None and str(file) != "-":
            return file.read_text(encoding="utf-8")
        # A process started with its standard input closed has no object for it.
        closed = sys.stdin is None
        if closed or (argument is None and file is None and sys.stdin.isatty()):
            raise InvalidConfig(
                "no prompt; give one as argument, with --file, or on standard input"
            )
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeError as error:
        raise InvalidConfig(
            f"the prompt in {source!r} cannot be read: {error}; give UTF-8 text"
        ) from error
    except OSError as error:
        raise InvalidConfig(
            f"the prompt in {source!r} cannot be read: {error.strerror}; {remedy}"
        ) from error


def as_bias(pairs: list[str] | None) -> dict[int, float]:
    """The mapping that `TOKEN=NUMBER` options mean.

    Raises:
        InvalidConfig: something else.
    """
    biases: dict[int, float] = {}
    for pair in pairs or ():
        token, _, number = pair.partition("=")
        try:
            biases[int(token)] = float(number)
        except ValueError as error:
            raise InvalidConfig(
                f"logit-bias {pair!r}: a token id and a number are due, such as 42=-1.5"
            ) from error
    return biases


def as_shape(given: str | None) -> tuple[int, ...] | None:
    """The parent rows of a shape.

    Raises:
        InvalidConfig: something else than whole numbers and commas.
    """
    if given is None:
        return None
    try:
        return tuple(map(int, given.split(",")))
    except ValueError as error:
        raise InvalidConfig(
            f"shape {given!r}: the row each node follows is due, such as 0,0,1"
        ) from error


def words(option: str, given: str | None) -> tuple[str, ...]:
    """Words set apart by commas; none for nothing.

    Raises:
        InvalidConfig: an empty one among others.
    """
    found = tuple(word.strip() for word in (given or "").split(",")) if given else ()
    if "" in found:
        raise InvalidConfig(f"{option} {given!r}: words set apart by commas are due")
    return found


def whole(option: str, given: str) -> tuple[int, ...]:
    """Whole numbers set apart by commas.

    Raises:
        InvalidConfig: something else.
    """
    try:
        return tuple(int(word) for word in words(option, given))
    except ValueError as error:
        raise InvalidConfig(
            f"{option} {given!r}: whole numbers set apart by commas are due, such as 1,8"
        ) from error


def as_schema(given: str | None) -> str | None:
    """The text of a JSON schema, which begins with a brace, or of the file of this name.

    Raises:
        InvalidConfig: a file that cannot be read.
    """
    if given is None or given.lstrip().startswith("{"):
        return given
    return as_text("json-schema", Path(given))


def as_text(option: str, file: Path | None) -> str | None:
    """What stands in a file; None without one.

    Raises:
        InvalidConfig: a file that cannot be read.
    """
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidConfig(
            f"--{option} {str(file)!r} cannot be read: {error}; give a file of UTF-8 text"
        ) from error


def why_unequal(info: Mapping[str, Any]) -> str:
    """Why tokens of a lossless run are not the plain ones, and what to do; `info` is the LLM's."""
    if info["strict"]:
        return (
            "under --strict they must be equal, so this is a fault: run `outrider doctor`, and "
            "report it with what that says"
        )
    remedy = "--strict makes them equal"
    if info["attention"] == "libllama":
        remedy = "a GGUF file has no --strict, a model folder has"
    return (
        "a row scored beside guesses is rounded otherwise than alone: where two tokens are as good "
        f"as tied, or a draw falls between two, texts may part; {remedy}"
    )


def same_tokens(sampling: SamplingParams, rule: str) -> bool:
    """Whether speculation gives the very tokens of plain decoding, and not only their law."""
    return sampling.temperature == 0 or rule in ("greedy", "coupled")
