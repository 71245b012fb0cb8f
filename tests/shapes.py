"""Shape contracts at test time: jaxtyping annotations of the package become checks by beartype.

The package imports jaxtyping under TYPE_CHECKING alone, so that running it needs neither. `install`
puts a hook before the import system: when a module of the package has been executed and before
anyone takes names from it, the jaxtyping names it mentions are put into its namespace, and every
function, method and dataclass whose annotations use one is replaced by its checked form.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from typing import Any

import jaxtyping
from beartype import beartype

checked: dict[str, list[str]] = {}
"""Module name -> qualified names of what is checked, for the test that it is not nothing."""


def jaxtyping_names(source: str) -> set[str]:
    """The names a module imports from jaxtyping, guarded or not."""
    return {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping"
        for alias in node.names
    }


def mentions(function: Any, names: set[str]) -> bool:
    """Whether an annotation (a string: the package postpones them) uses one of the names."""
    return isinstance(function, FunctionType) and any(
        f"{name}[" in annotation
        for annotation in function.__annotations__.values()
        if isinstance(annotation, str)
        for name in names
    )


def check_module(module: ModuleType, source: str) -> None:
    """Replaces what uses jaxtyping names in a freshly executed module by its checked form."""
    names = jaxtyping_names(source)
    if not names:
        return
    for name in names:
        setattr(module, name, getattr(jaxtyping, name))
    done = checked.setdefault(module.__name__, [])
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if mentions(value, names):
            setattr(module, name, _checked(value, done))
        elif inspect.isclass(value):
            _check_class(value, names, done)


def _check_class(cls: type, names: set[str], done: list[str]) -> None:
    for name, member in list(vars(cls).items()):
        if name == "__init__" and not dataclasses.is_dataclass(cls) and not mentions(member, names):
            continue
        if isinstance(member, (classmethod, staticmethod)):
            if mentions(member.__func__, names):
                setattr(cls, name, type(member)(_checked(member.__func__, done)))
        elif isinstance(member, property):
            if mentions(member.fget, names):
                setattr(cls, name, property(_checked(member.fget, done), doc=member.__doc__))
        elif mentions(member, names):
            setattr(cls, name, _checked(member, done))


def _checked(function: Any, done: list[str]) -> Any:
    done.append(function.__qualname__)
    return jaxtyping.jaxtyped(typechecker=beartype)(function)


class _CheckingLoader(Loader):
    """Another loader, and the checks after it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        check_module(module, self._inner.get_source(module.__name__))


class _CheckingFinder(MetaPathFinder):
    """Finds the modules of one package as usual and gives them a checking loader."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != self._package or path is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None and spec.origin is not None:
            spec.loader = _CheckingLoader(spec.loader)
        return spec


def install(package: str) -> None:
    """Checks every module of `package` imported from now on.

    Raises:
        RuntimeError: one was imported before, and would stay unchecked.
    """
    early = [name for name in sys.modules if name.startswith(f"{package}.")]
    if early:
        raise RuntimeError(f"imported before the shape checks: {', '.join(early)}")
    sys.meta_path.insert(0, _CheckingFinder(package))
