"""Options in a file: `--config recipe.toml`, .yaml or .json, with a line for each option of the command.

    data = "photos/"
    epochs = 90
    label-smoothing = 0.1
    no-decay = ["*.bias"]

Names are those of the options, without the dashes in front. What stands on the command line wins. `written` gives the
options of a run as such a file.
"""

from __future__ import annotations

import difflib
import enum
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from bnfuse.core.errors import BnfuseError

SUFFIXES = (".toml", ".yaml", ".yml", ".json")
LEFT_OUT = ("config", "json", "help")  # of the call, not of the run


def take(context: typer.Context, path: Path | None) -> Path | None:
    """Make what the file says the defaults of the command's options. Raises BnfuseError for what they do not take."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **defaults(context, path, read(path))}
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml|yaml|json",
        help="Options in a file: a line for each, such as label-smoothing = 0.1. The command line wins.",
        callback=take,
        is_eager=True,
        show_default=False,
    ),
]


def read(path: Path) -> Mapping[str, Any]:
    """Read the file as a table."""
    if path.suffix.lower() not in SUFFIXES:
        raise BnfuseError(f"{path}: a file of options ends in {', '.join(SUFFIXES)}")
    try:
        text = path.read_text(encoding="utf-8")
        found = parsed(text, path)
    except OSError as error:
        raise BnfuseError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BnfuseError(f"{path}: is no file of options: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise BnfuseError(f"{path}: is no file of options: it needs a line for each, such as epochs = 90")
    return found


def parsed(text: str, path: Path) -> Any:
    """Parse the text by the name's ending. Raises ValueError where it is something else."""
    kind = path.suffix.lower()
    if kind == ".json":
        return json.loads(text)
    if kind == ".toml":
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        return tomllib.loads(text)
    try:
        import yaml
    except ImportError:
        raise BnfuseError(f"{path}: YAML needs PyYAML: pip install pyyaml, or write it as TOML") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def defaults(context: typer.Context, path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Bring what the file gives to what the command's options are, each checked as if it were typed."""
    options = {param.name: param for param in context.command.params if param.name not in LEFT_OUT}
    spelt = {**{flag.lstrip("-"): name for name, p in options.items() for flag in p.opts}, **{n: n for n in options}}
    found = {}
    for key, value in given.items():
        name = spelt.get(str(key)) or spelt.get(str(key).replace("_", "-"))
        if name is None:
            near = difflib.get_close_matches(str(key).replace("_", "-"), [s for s in spelt if s], 1)
            hint = f": did you mean '{near[0]}'?" if near else f": {context.command.name} --help lists them"
            raise BnfuseError(f"{path}: '{key}' is no option of {context.command.name}{hint}")
        found[name] = as_typed(context, options[name], value, f"{path}: {key}")
    return found


def as_typed(context: typer.Context, param: Any, value: Any, place: str) -> Any:
    """Give a value as it would be typed. Raises BnfuseError where the option does not take it."""
    several = param.multiple
    items = value if several and isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) for item in items):
        raise BnfuseError(
            f"{place}: must be {'text, or a list of it' if several else 'a number, text, or true or false'}"
        )
    typed = [str(item) for item in items]
    try:
        param.process_value(context, typed if several else typed[0])
    except typer.BadParameter as error:
        raise BnfuseError(f"{place}: {error.message.replace('Value error, ', '').rstrip('.')}") from None
    return typed if several else typed[0]


def asked_for(context: typer.Context) -> str:
    """Tell in a line which options were given, on the command line or in a file."""
    given = {
        name: value
        for name, value in context.params.items()
        if getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"
    }
    return f"train with {', '.join(written(given).splitlines())}"


def written(params: Mapping[str, Any]) -> str:
    """Write the options of a run as TOML, those without a value left out."""
    lines = []
    for name, value in sorted(params.items()):
        if name in LEFT_OUT or value is None or value in ([], ()):
            continue
        lines.append(f"{name.rstrip('_').replace('_', '-')} = {literal(value)}")
    return "\n".join(lines)


def literal(value: Any) -> str:
    """Write a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, list | tuple):
        return f"[{', '.join(literal(item) for item in value)}]"
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf, -inf and nan: TOML's spellings, where JSON has none
    return json.dumps(value, ensure_ascii=False)
