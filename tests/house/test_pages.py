"""What is shown is run: python blocks are executed, commands are parsed by what they name.

In README and docs, ```python always runs, one namespace per page; ```py quotes the package, and its
lines must follow each other there; lines of ```bash, and lines after `$ ` in ```console, must be
commands that exist with options that exist; other languages are only shown.
"""

from __future__ import annotations

import json
import re
import shlex
from itertools import dropwhile
from pathlib import Path

import pytest
import typer

from outrider.cli.app import app
from tests.house import layout
from tests.house.layout import ROOT
from tests.house.pages import Block, blocks_of, commands_of, pages

LANGUAGES = {"python", "py", "bash", "console", "text", "toml", "json"}
SHELL_WORDS = {"git", "cd", "pip", "python", "cat", "source"}
COMPILED = {"speed.md"}
"""Pages whose blocks compile two models, in half a minute each; tests of compiling do it anyway."""
PYTHON_PAGES = [
    pytest.param(page, marks=pytest.mark.slow if page.name in COMPILED else ())
    for page in pages()
    if any(b.language == "python" for b in blocks_of(page))
]
MAKE_TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
NUMBERS = [path for folder in ("docs", "benchmarks") for path in (ROOT / folder).rglob("*.json")]


def check_outrider(words: list[str]) -> None:
    """Parses an `outrider` command line without running it; raises what the parser raises."""
    command = typer.main.get_command(app)
    context = command.make_context("outrider", words[1:], resilient_parsing=False)
    while rest := [*context._protected_args, *context.args]:
        name, inner, rest = command.resolve_command(context, rest)
        assert inner is not None, name
        command, context = inner, inner.make_context(name, rest, parent=context)
        if not isinstance(command, typer.core.TyperGroup):
            return


def check_command(line: str) -> None:
    """One command line: every `outrider` in a pipe parses, targets and scripts exist."""
    for part in re.split(r"\s[|]\s|\s&&\s", line):
        # Variables stand in front; behind the program NAME=VALUE is an argument.
        words = list(dropwhile(lambda word: "=" in word, shlex.split(part)))
        program = words[0].removeprefix(".venv/bin/")
        if program == "outrider":
            check_outrider(words)
        elif program == "make":
            assert {word for word in words[1:] if "=" not in word} <= MAKE_TARGETS, (
                f"{line!r}: no such make target"
            )
        elif "/" in program:
            assert (ROOT / program).is_file(), f"{line!r}: no such script"
        else:
            assert program in SHELL_WORDS, f"{line!r}: unknown program"
            for word in words[1:]:
                if word.endswith(".py"):
                    assert (ROOT / word).is_file(), f"{line!r}: no such script"
            if "-m" in words:
                module = ROOT / words[words.index("-m") + 1].replace(".", "/")
                assert (module / "__main__.py").is_file(), f"{line!r}: no such module"


def test_every_block_names_its_language() -> None:
    wrong = [str(b) for page in pages() for b in blocks_of(page) if b.language not in LANGUAGES]
    assert wrong == []


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "outrider[gguf]" in page.read_text():
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    for block in blocks:
        # Empty lines in front, so that a traceback names the page's own line.
        exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
    assert blocks


def test_quotations_stand_in_the_package() -> None:
    """In this order in one file; lines may be left out."""
    sources = [[line.strip() for line in p.read_text().splitlines()] for p in layout.files()]
    for block in (b for page in pages() for b in blocks_of(page) if b.language == "py"):
        quoted = [line.strip() for line in block.text.splitlines() if line.strip()]
        assert any(_follow_each_other(quoted, lines) for lines in sources), (
            f"{block}: not in the package"
        )


def _follow_each_other(quoted: list[str], lines: list[str]) -> bool:
    rest = iter(lines)
    return all(line in rest for line in quoted)


def test_commands_exist() -> None:
    blocks = [b for page in pages() for b in blocks_of(page) if b.language in ("bash", "console")]
    lines = [(block, line) for block in blocks for line in commands_of(block)]
    for _, line in lines:
        check_command(line)
    assert lines


def test_help_examples_exist() -> None:
    """The examples in help texts are command lines like any other."""
    found = [
        line.strip()
        for path in sorted((ROOT / "outrider" / "cli").glob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"\s+(git log -1 \| )?outrider \w+", line)
    ]
    for line in found:
        check_command(line)
    assert len(found) > 10


@pytest.mark.parametrize(
    "line",
    [
        "outrider generte x",
        "outrider generate --tempo 1",
        "outrider train lm",
        "make lunch",
        "scripts/nothing",
        "python benchmarks/nothing.py",
        "python -m benchmarks.nothing",
        "frobnicate",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises((AssertionError, typer.BadParameter.__mro__[1])):
        check_command(line)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def test_published_numbers_stand_beside_their_command() -> None:
    """A page that shows a JSON's numbers names it and the command; the JSON names the machine."""
    for path in NUMBERS:
        report = json.loads(path.read_text(encoding="utf-8"))
        assert report.get("machine"), f"{path.name}: on which machine?"
        shown = [text for text in (p.read_text() for p in pages()) if path.name in text]
        assert shown, f"no page shows the numbers of {path.name}"
        command = r"python (benchmarks/\w+\.py|-m benchmarks\.\w+)|scripts/\w+|outrider \w+ --json"
        assert any(re.search(command, text) for text in shown), f"{path.name}: which command?"


def test_links_between_pages_lead_somewhere() -> None:
    for page in pages():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_a_block_knows_its_line() -> None:
    block = Block(ROOT / "README.md", 3, "bash", "# comment\noutrider demo \\\n  --json  # why\n")
    assert list(commands_of(block)) == ["outrider demo    --json"]
