"""What a command works on: ``path/to/file.py:callable`` or ``pkg.module:callable`` -> ``PlanTarget``.

The callable takes nothing and returns ``(fn, args)`` or ``al.PlanTarget(fn, args, ...)``. Modules are looked up from the
current folder too, and a file's neighbours can be imported from it, as when Python runs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from alpa_lite.api import PlanTarget
from alpa_lite.errors import AlpaLiteError

_FORMS = "'path/to/file.py:callable' or 'pkg.module:callable'"


class TargetError(AlpaLiteError):
    """The text names no callable that returns a step and its arguments."""


def load_target(text: str) -> PlanTarget:
    """Import what ``text`` names and call it.

    Raises:
        TargetError: for every way in which that can go wrong but errors inside the user's own callable.
    """
    made = call_target(text, "(fn, args) or al.PlanTarget(...)")
    if isinstance(made, PlanTarget):
        return made
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list):
        return PlanTarget(made[0], tuple(made[1]))
    raise TargetError(
        f"the target {text!r} returned {type(made).__name__}. It must return (fn, args), a function and the tuple of its "
        "arguments, or al.PlanTarget(fn, args, ...). Correct its return statement; abstract arguments are made by "
        "jax.eval_shape or jax.ShapeDtypeStruct."
    )


def call_target(text: str, wanted: str) -> Any:
    """What the callable that ``text`` names returns; arguments and errors as of ``find_target``."""
    return find_target(text, wanted)()


def find_target(text: str, wanted: str) -> Callable[[], Any]:
    """The callable that ``text`` names.

    Args:
        wanted: what it should return, for messages.

    Raises:
        TargetError: it cannot be imported, or needs arguments.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        example = f"{place or text}:{(place and name) or 'target'}"
        raise TargetError(f"the target {text!r} cannot be read. A target is {_FORMS}. Write for example {example}.")
    module = _file(place, text) if place.endswith(".py") else _module(place, text)
    make = getattr(module, name, None)
    if not callable(make):
        own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        found = [n for n in own if not n.startswith("_") and _takes_nothing(vars(module)[n])]
        raise TargetError(
            f"the target {text!r}: {place} has no callable {name!r}. A target names a function that takes nothing and "
            f"returns {wanted}. Functions that take nothing there: {', '.join(found[:8]) or 'none'}. Correct the name."
        )
    _check_takes_nothing(make, text, wanted)
    return make


def _takes_nothing(value: Any) -> bool:
    try:
        return callable(value) and all(
            p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            for p in inspect.signature(value).parameters.values()
        )
    except ValueError:  # a builtin without a signature
        return False


def _check_takes_nothing(make: Callable[[], Any], text: str, wanted: str) -> None:
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise TargetError(
            f"the target {text!r} cannot be called without arguments: {error}. A target names a function that takes nothing "
            f"and returns {wanted}. Write such a function, and name that one."
        ) from None
    except ValueError:
        pass  # not every callable has a signature


def _file(place: str, text: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise TargetError(
            f"the target {text!r}: there is no file {place!r} in {Path.cwd()}. A target is {_FORMS}. Correct the path."
        )
    _look_in(path.parent)
    _look_in(Path.cwd())
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise _not_imported(text, error, path.parent) from error
    return module


def _module(place: str, text: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise _not_imported(text, error, Path.cwd()) from error


def _not_imported(text: str, error: ImportError, folder: Path) -> TargetError:
    """``folder``: where modules are looked up, too."""
    lines = traceback.extract_tb(error.__traceback__)
    own = [
        f" ({line.filename}:{line.lineno})"
        for line in lines
        if line.filename not in (__file__, importlib.__file__) and not line.filename.startswith("<frozen importlib")
    ]
    return TargetError(
        f"the target {text!r}: {error}{own[-1] if own else ''}. A target is {_FORMS}; modules are looked up in the installed "
        f"packages and in {folder}. Correct the name, install what is missing, or run the command from the project's folder."
    )


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
