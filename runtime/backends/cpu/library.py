"""Object code loaded, without a linker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tvm_ffi_orcjit

from bnfuse.core.errors import BnfuseError, first_line
from bnfuse.runtime.backends.launching import ENTRANCE


class Library:
    """Loaded kernels. Functions stay valid as long as the library lives."""

    def __init__(self, names: Iterable[str], codes: Iterable[bytes]) -> None:
        with ENTRANCE:
            self._load(names, codes)

    def _load(self, names: Iterable[str], codes: Iterable[bytes]) -> None:
        self._session = tvm_ffi_orcjit.ExecutionSession()
        self._modules = []
        self.functions: list[Callable[..., Any]] = []
        for name, code in zip(names, codes, strict=True):
            try:
                module = self._session.load_module(code)
                self.functions.append(module[name])
            except Exception as error:
                raise BnfuseError(
                    f"kernel '{name}' does not load ({first_line(error)}): compile the model again"
                ) from None
            self._modules.append(module)
