"""The kinds of kernels: each has a generator on every target that it names, with the same parameters."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

import pytest

from bnfuse.core.interpreter import import_root
from bnfuse.runtime.backends.resolve import resolve
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.kernel import MapType, Problem
from bnfuse.runtime.kernels.registry import Kind
from bnfuse.runtime.kernels.request import Request

KINDS = [value for value in vars(registry).values() if isinstance(value, Kind)]


def required(kind: Kind, target: str) -> list[str]:
    """Names of the parameters that a kind's generator cannot do without. Others are for choices."""
    parameters = inspect.signature(kind.generator(target)).parameters.values()
    return [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]


def test_no_kind_is_declared_twice():
    assert len(set(KINDS)) == len(KINDS) > 20


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_kind_has_a_generator_of_the_same_parameters_on_each_of_its_targets(kind):
    found = [required(kind, target) for target in kind.on]
    assert "target" in found[0]
    assert all(names == found[0] for names in found)


def test_only_the_packing_of_weights_is_of_one_target_alone():
    assert [kind for kind in KINDS if kind.on != ("cpu", "cuda")] == [registry.PACK_WEIGHTS]


def test_a_request_that_was_sent_to_another_process_makes_the_same_kernel():
    kind = MapType(1, 2, 2, 4, 4)
    arguments = (Problem("ReluPointwise", (("x", kind), ("y", kind))), resolve("cpu", 2))
    request = Request(registry.POINTWISE_FORWARD, arguments)
    sent = pickle.loads(pickle.dumps(request))
    assert sent == request and hash(sent) == hash(request)
    assert sent.kernel().key == request.kernel().key


def test_the_kinds_are_known_without_tvm():
    code = "import sys; sys.modules['tvm'] = None\nfrom bnfuse.runtime.kernels import registry, request"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=import_root())
