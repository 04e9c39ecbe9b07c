"""Commands whose options are the fields of a dataclass, which names, types and describes them (core/options.py)."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from bnfuse.commands.options import settings
from bnfuse.core.options import KEY, Told, flag_of


def taking(kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `kind`, behind its own arguments, as keywords: what `kind(**keywords)` takes."""
    fields = {field.name: field for field in dataclasses.fields(kind) if KEY in field.metadata}
    hints = typing.get_type_hints(kind)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        arguments = [each for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
        others = [each for each in own if each.kind is each.KEYWORD_ONLY]
        derived = [parameter(field, hints[name]) for name, field in fields.items()]

        @functools.wraps(function)
        def command(**given: Any) -> None:
            function(**{name: read(fields.get(name), hints.get(name), value) for name, value in given.items()})

        command.__signature__ = inspect.Signature([*arguments, *derived, *others])  # type: ignore[attr-defined]
        return command

    return decorate


def parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    """Make the field a keyword as typer reads it."""
    told: Told = field.metadata[KEY]
    kind = written(field.name, hint)
    default = field.default if is_simple(hint) else None
    flags = [flag_of(field)] if kind is bool or told.flag else []
    shown = default is not None and kind is not bool
    option = typer.Option(*flags, help=told.help, metavar=told.metavar, min=told.low, max=told.high, show_default=shown)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def written(name: str, hint: Any) -> Any:
    """Give the type of what is written: of several the first, a list for what repeats, of words an enumeration."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)[0] | None
    if typing.get_origin(hint) is typing.Literal:
        return enum.Enum(name, {word: word for word in typing.get_args(hint)}, type=str)
    return hint if is_simple(hint) else list[str] | None


def is_simple(hint: Any) -> bool:
    """Tell whether an option is given once: no list, and no KEY=VALUE."""
    return typing.get_origin(hint) not in (collections.abc.Sequence, collections.abc.Mapping)


def read(field: dataclasses.Field[Any] | None, hint: Any, value: Any) -> Any:
    """Give what the field holds, from what typer made of it."""
    if field is None:
        return value
    if typing.get_origin(hint) is collections.abc.Mapping:
        return settings(value, flag_of(field))
    if typing.get_origin(hint) is collections.abc.Sequence:
        return value or ()
    return value.value if isinstance(value, enum.Enum) else value
