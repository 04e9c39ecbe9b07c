"""Networks that a text names by code that makes a torch module.

    model.py:make            what `make` of that file returns, or a module that the file has under that name
    package.module:make      the same of a module that Python can import

Both are the user's own code, and are run.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import re
import sys
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bnfuse.core.errors import BnfuseError, first_line, one_line

from .export import as_arguments, require_torch

_CODE = re.compile(r"(?P<place>.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_SHAPE = re.compile(r"(?:(?P<kind>float32|float64|int64|int32|bool):)?(?P<sizes>\d+(?:,\d+)*)")


def is_code(text: str) -> bool:
    """Tell whether a source names something in a Python file or module."""
    return _CODE.fullmatch(text) is not None and not Path(text).exists()


def module_of(text: str, arguments: Mapping[str, Any] | None = None, *, seed: int = 0) -> Any:
    """Run the code that a source names, and give the torch module that comes of it.

    `arguments` are keyword arguments of a function or class; parameters are drawn with `seed` as torch's. Raises
    BnfuseError, with the line of the user's code, where it raises or gives something else.
    """
    torch = require_torch()
    match = _CODE.fullmatch(text)
    if match is None:
        raise BnfuseError(f"{text}: write it as model.py:make, or as package.module:make")
    place, names = match["place"], match["name"].split(".")
    torch.manual_seed(seed)
    with told_of(text):
        found: Any = loaded(place)
        for name in names:
            if not hasattr(found, name):
                raise BnfuseError(f"{text}: {place} has no '{name}'{hint(found)}")
            found = getattr(found, name)
        if isinstance(found, torch.nn.Module):
            if arguments:
                raise BnfuseError(f"{text}: is a module already: it takes no --make-arg {', '.join(arguments)}")
            return found
        if not callable(found):
            raise BnfuseError(f"{text}: is a {type(found).__name__}: name a function, a class or a torch module")
        made = found(**(arguments or {}))
    if not isinstance(made, torch.nn.Module):
        raise BnfuseError(f"{text}: gives a {type(made).__name__}: it must give a torch.nn.Module")
    return made


def hint(module: Any) -> str:
    """List some names that a module has and that may be meant."""
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    own = [name for name in names if getattr(getattr(module, name), "__module__", "") == module.__name__]
    return f": it has {', '.join((own or names)[:8])}" if names else ""


def loaded(place: str) -> types.ModuleType:
    """Import a file, with its folder in front of the search path as Python does for a script, or a module by name, from
    the current folder too."""
    if not place.endswith(".py"):
        with searched(Path.cwd()):
            try:
                return importlib.import_module(place)
            except ModuleNotFoundError as error:
                if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
                    raise BnfuseError(f"{place}: there is no module of that name to import") from None
                raise
    path = Path(place)
    if not path.is_file():
        raise BnfuseError(f"{place}: there is no such file")
    name = f"bnfuse_source_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    with searched(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def searched(folder: Path) -> Iterator[None]:
    """Search a folder first for what is imported."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))


@contextlib.contextmanager
def told_of(text: str) -> Iterator[None]:
    """Make one line of what the user's code raises, with the place in it."""
    try:
        yield
    except BnfuseError:
        raise
    except (Exception, SystemExit) as error:
        here = Path(__file__)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) != here]
        own = [frame for frame in frames if not frame.filename.startswith("<")]
        where = f" (line {own[-1].lineno} of {Path(own[-1].filename).name})" if own else ""
        if isinstance(error, SyntaxError) and error.lineno:
            where = f" (line {error.lineno})"
        what = one_line(f"{type(error).__name__}: {first_line(error)}")
        raise BnfuseError(f"{text}: {what}{where}") from error


def make_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """Read --make-arg: ["width=2", "act=silu"] -> {"width": 2, "act": "silu"}; what is no literal of Python is text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise BnfuseError(f"--make-arg {pair}: write it as NAME=VALUE")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    return found


def examples(texts: Sequence[str], batch: int | None, image: Any, channels: int | None) -> tuple[Any, ...]:
    """Make the tensors that a module is called with: of each --example, or one of images [16, 3, 224, 224] by default.

    "16,3,224,224" is float32, "int64:16,20" of that type. `image` is (height, width). Raises BnfuseError for what does
    not read, and for sizes that are given twice.
    """
    if not texts:
        height, width = image or (224, 224)
        return as_arguments([(batch or 16, channels or 3, height, width)])
    given = {"--batch": batch, "--image": image, "--channels": channels}
    if twice := [option for option, value in given.items() if value is not None]:
        raise BnfuseError(f"{', '.join(twice)} and --example say the same: leave one of them out")
    shapes = []
    for text in texts:
        match = _SHAPE.fullmatch(text.replace(" ", "").replace("x", ","))
        if match is None or "0" in match["sizes"].split(","):
            raise BnfuseError(f"--example {text}: write it as 16,3,224,224, or as int64:16,20 for another type")
        sizes = [int(size) for size in match["sizes"].split(",")]
        shapes.append((match["kind"], *sizes) if match["kind"] else tuple(sizes))
    return as_arguments(shapes)
