"""An engine in its own Python, as a subject: a worker process that is spoken with in JSON lines."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from outrider.certify.adapters import worker
from outrider.certify.model.book import CONTROLS
from outrider.certify.model.subject import Made, Prompts, Subject
from outrider.config import SamplingParams, nearest
from outrider.errors import InvalidConfig, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
ENGINES = "transformers", "vllm", "llama_cpp", "openvino"
"""Files of this folder; anything else is a file of the user's."""
SENT = (
    *(name for name in CONTROLS if name != "logits_processors"),
    *("max_tokens", "ignore_eos", "stop_token_ids", "logprobs"),
)
"""Fields of a request that an engine is told of."""
ASTRAY = "PYTHONPATH", "PYTHONHOME"
"""What would lead another Python into this one's packages."""
LAST = 6
"""Lines of its own words that a failed engine is quoted with."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What it takes to start an engine.

    Attributes:
        engine: one of ENGINES, or a file with `CONTROLS` and `load` (see `worker.py`).
        options: of its `load`.
        python: the interpreter it is installed for; None = this one.
        timeout_s: for one answer, loading included; None = as long as it takes.
    """

    engine: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    python: Path | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise InvalidConfig(f"engine-timeout={self.timeout_s}: seconds are due, more than 0")

    @property
    def file(self) -> Path:
        """The engine's file.

        Raises:
            InvalidConfig: there is none.
        """
        path = HERE / f"{self.engine}.py" if self.engine in ENGINES else Path(self.engine)
        if not path.is_file():
            raise InvalidConfig(
                f"engine {self.engine!r}: neither one of {', '.join(ENGINES)} nor a file"
                + nearest(self.engine, ENGINES)
            )
        return path


class Worker:
    """A process with an engine's models loaded, which continues prompts.

    Args:
        launch: what to start.
        plain: whether without speculation.

    Attributes:
        name: what the engine calls itself.
        controls: the fields of SamplingParams that it has.
        seeded: whether a seed is promised to give the same text again.

    Raises:
        InvalidConfig, ModelError: there is no such file or interpreter, or it does not load.
    """

    def __init__(self, launch: Launch, plain: bool = False) -> None:
        env = {name: value for name, value in os.environ.items() if name not in ASTRAY}
        python, file = launch.python or Path(sys.executable), launch.file.resolve()
        self._timeout_s = launch.timeout_s
        # Kept open as long as the process.
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._popen = subprocess.Popen(
                [str(python), str(worker.__file__), str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=env,
                # What the engine starts ends with it; Ctrl-C is for who asked to answer.
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise InvalidConfig(f"python {str(python)!r} does not start: {error}") from error
        try:
            told = self._ask({"do": "load", "options": dict(launch.options), "plain": plain})
        except ModelError:
            self.close()
            raise
        self.name: str = told["name"]
        self.controls = frozenset[str](told["controls"])
        self.seeded: bool = told["seeded"]

    def __call__(self, prompts: Prompts, params: SamplingParams, seed: int) -> Sequence[Made]:
        """What the engine continues prompts with.

        Raises:
            ModelError: it failed, in its own words.
        """
        sent = {name: getattr(params, name) for name in SENT}
        asked = {
            "prompts": [[int(x) for x in prompt] for prompt in prompts],
            "params": sent,
            "seed": seed,
        }
        texts = self._ask({"do": "generate", **asked})["texts"]
        return [Made(tuple(one["token_ids"]), one["logprobs"]) for one in texts]

    def close(self, patience_s: float = 10) -> None:
        """Ends the process, and what it started, which have some seconds to do it themselves."""
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        self._log.close()

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        try:
            self._popen.stdin.write(json.dumps(message) + "\n")
            self._popen.stdin.flush()
            # A line is asked for at a time, so that nothing waits in the stream's own buffer.
            if not select.select([self._popen.stdout], [], [], self._timeout_s)[0]:
                raise ModelError(
                    f"the engine gave no answer in {self._timeout_s:g} s; allow more with "
                    f"--engine-timeout. Its last words: {self._words()}"
                )
            line = self._popen.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._popen.wait()
            raise ModelError(f"the engine's process ended with code {code}: {self._words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ModelError(f"the engine failed: {answer['error']}")
        return answer

    def _words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " / ".join(lines[-LAST:]) or "it said nothing"


class Later:
    """The engine's plain decoding, started when it is first asked for."""

    def __init__(self, launch: Launch, stack: ExitStack) -> None:
        self._launch, self._stack = launch, stack
        self._worker: Worker | None = None

    def __call__(self, prompts: Prompts, params: SamplingParams, seed: int) -> Sequence[Made]:
        """What it continues prompts with."""
        if self._worker is None:
            self._worker = Worker(self._launch, plain=True)
            self._stack.callback(self._worker.close)
        return self._worker(prompts, params, seed)


@contextmanager
def subject(launch: Launch, like: Subject) -> Iterator[Subject]:
    """An engine to certify, ended on the way out.

    Args:
        launch: the engine.
        like: whose books it is held to: Outrider with the same models, `own.subject`.

    Raises:
        InvalidConfig, ModelError: it does not start.
    """
    with ExitStack() as stack:
        started = Worker(launch)
        stack.callback(started.close)
        yield Subject(
            name=started.name,
            generate=started,
            target=like.target,
            plain=Later(launch, stack),
            draft=like.draft,
            near_tie=like.near_tie,
            seeded=started.seeded,
            controls=started.controls,
        )


def options_of(texts: Sequence[str]) -> dict[str, Any]:
    """Options written `name=value`, each value JSON or else text.

    Raises:
        InvalidConfig: one without a name.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidConfig(f"engine option {text!r}: NAME=VALUE is due")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
