"""The commands: each parses, calls one function of the API, and prints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bnfuse.commands import estimate, explore, graphs, networks, search, steps, training

HELP = """Rewrite, compare, compile and train ONNX training graphs with BatchNorm split and fused.

\b
  bnfuse demo                                        the whole job on a small network, in two minutes
  bnfuse build densenet121 --batch 16 -o train.onnx  a training graph
  bnfuse rewrite train.onnx -o fused.onnx            the same with BatchNorms fused
  bnfuse diff train.onnx fused.onnx                  what changed
  bnfuse verify train.onnx fused.onnx                whether both compute the same
  bnfuse train fused.onnx --data digits              train it with generated kernels

Exit status: 0 done; 1 the check says no; 2 bad use or bad input, with one line on stderr.
"""


def make_command() -> Any:
    """Make the command line as one click command."""
    app = typer.Typer(
        name="bnfuse",
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback(help=HELP)(of_all)
    for module in (networks, graphs, steps, training, search, estimate, explore):
        for function in module.COMMANDS:
            summary = (function.__doc__ or "").splitlines()[0]
            app.command(short_help=summary, context_settings={"max_content_width": 110})(function)
    return typer.main.get_command(app)


def print_version(wanted: bool) -> None:
    """Print the version, and end."""
    if wanted:
        import bnfuse

        typer.echo(f"bnfuse {bnfuse.__version__}")
        raise typer.Exit


def of_all(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def usage_line(error: Exception) -> str | None:
    """Give what a usage error has to say, in one line; None for any other exception."""
    if not hasattr(error, "format_message"):
        return None
    message = error.format_message().rstrip(".").replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    return f"{message}. See {context.command_path} --help" if context is not None else message
