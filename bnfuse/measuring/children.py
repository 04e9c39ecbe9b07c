"""Measurements in a fresh process: a module is run with a request in JSON, and its last line is the answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from bnfuse.core.errors import BnfuseError
from bnfuse.core.interpreter import end_with_parent, import_root

REFUSED = 3  # exit status: the last line on stderr is for the user


def ask(
    module: str,
    request: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    *,
    timeout: float | None = None,
) -> Any:
    """Tell what `module` answers. A BnfuseError in there is one here. After `timeout` seconds it is ended."""
    command = [sys.executable, "-m", module, json.dumps(request), str(os.getpid())]
    settings = {**os.environ, **(environment or {})}
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, cwd=import_root(), env=settings, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        raise BnfuseError(f"{module} took longer than {timeout:.0f} s in a process of its own") from None
    if child.returncode:
        said = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise BnfuseError(said if child.returncode == REFUSED else f"{module} failed in a process of its own: {said}")
    return json.loads(child.stdout.splitlines()[-1])


def answer(function: Callable[[dict[str, Any]], Any]) -> None:
    """Answer in the child: the request from the command line, the answer on stdout."""
    end_with_parent(int(sys.argv[2]))
    try:
        found = function(json.loads(sys.argv[1]))
    except BnfuseError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)
    print(json.dumps(found))
