"""States by other names and shapes than a graph's, without torch."""

from __future__ import annotations

import numpy as np
import pytest

from bnfuse.core.errors import BnfuseError
from bnfuse.graph.module_state import MODULE_KEY, ModuleState, digest_of
from bnfuse.graph.state_matching import fitted, matched, require_all

OWN = ("conv.weight", "bn.running_mean", "fc.weight")
MODULE = ModuleState(
    names={**{name: name for name in OWN}, "tied.weight": "conv.weight"},
    tracked={"bn.num_batches_tracked": 3},
    constants={"index": digest_of(np.arange(4))},
    unread=("spare",),
)
STATE = {name: np.full(2, place, np.float32) for place, name in enumerate(OWN)}


def array(value, what):
    return np.asarray(value)


def names(state, module=MODULE):
    found = matched(state, OWN, module, array)
    return set(found.values), found.tracked, found.missing, found.unexpected


def test_all_that_a_module_has_is_understood():
    count = np.array(5)
    state = {**STATE, "bn.num_batches_tracked": count, "index": np.arange(4), "spare": 1, "tied.weight": np.zeros(2)}
    assert names(state) == (set(OWN), {"bn.num_batches_tracked": 5}, (), ())
    assert names({**STATE, "optimizer.momentum.conv.weight": 0}) == (set(OWN), {}, (), ())
    assert names(STATE, ModuleState()) == (set(OWN), {}, (), ())
    assert names({**STATE, "bn.num_batches_tracked": count}, ModuleState())[1] == {"bn.num_batches_tracked": 5}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.", "net.0."])
def test_prefixes_of_wrappers_are_taken_off(prefix):
    state = {f"{prefix}{name}": value for name, value in {**STATE, "bn.num_batches_tracked": 4}.items()}
    found = names(state)
    assert found == (
        (set(OWN), {"bn.num_batches_tracked": 4}, (), ()) if prefix != "net.0." else (set(), {}, OWN, tuple(state))
    )


def test_parts_that_were_compiled_are_understood():
    state = {name.replace(".", "._orig_mod.", 1): value for name, value in STATE.items()}
    assert names(state)[0] == set(OWN)


def test_what_is_missing_and_unexpected_is_listed():
    state = {"conv.weight": STATE["conv.weight"], "other": 1, "cls.num_batches_tracked": 1}
    assert names(state) == ({"conv.weight"}, {}, ("bn.running_mean", "fc.weight"), ("other", "cls.num_batches_tracked"))
    with pytest.raises(
        BnfuseError,
        match=r"^the state lacks 'a', 'b', 'c' and 1 more \(4 of the graph's 9 names\) and has 'x' \(1 names\), which "
        r"the graph has not: is it of this network\? Do this$",
    ):
        require_all("abcd", "x", 9, "Do this")
    require_all((), (), 9, "")


def test_values_that_contradict_the_graph_are_refused():
    with pytest.raises(BnfuseError, match=r"'tied.weight' is one tensor with 'conv.weight' in the graph"):
        names({**STATE, "tied.weight": np.ones(2)})
    with pytest.raises(BnfuseError, match="'index' is a constant of the graph, with other values there"):
        names({**STATE, "index": np.arange(1, 5)})
    with pytest.raises(BnfuseError, match=r"'bn.num_batches_tracked' is float64 \[\]: it must be a count"):
        names({**STATE, "bn.num_batches_tracked": 1.5})


def test_a_head_for_other_classes_is_told_and_left_out_when_asked():
    floats = np.dtype(np.float32)
    own = {"conv": ((4, 2), floats), "fc.weight": ((10, 4), floats), "fc.bias": ((10,), floats)}
    arrays = {name: np.zeros(shape, np.float32) for name, (shape, _) in own.items()}
    assert fitted(arrays, own, 10).arrays.keys() == own.keys()
    other = {**arrays, "fc.weight": np.zeros((7, 4)), "fc.bias": np.zeros(7)}
    with pytest.raises(
        BnfuseError,
        match=r"'fc.weight' has the shape \[7, 4\], not \[10, 4\] \(and 'fc.bias' alike\): it is for "
        "another number of classes than 10. --skip-head leaves",
    ):
        fitted(other, own, 10, remedy="--skip-head")
    found = fitted(other, own, 10, skip_head=True)
    assert (set(found.arrays), found.head) == ({"conv"}, ("fc.weight", "fc.bias"))
    with pytest.raises(BnfuseError, match="no tensor of the state is for another number of classes than 10"):
        fitted(arrays, own, 10, skip_head=True)
    with pytest.raises(BnfuseError, match=r"'conv' has the shape \[4, 3\], not \[4, 2\]$"):
        fitted({**other, "conv": np.zeros((4, 3))}, own, 10, skip_head=True)
    with pytest.raises(BnfuseError, match="'conv' is complex128, not float32"):
        fitted({"conv": np.zeros((4, 2), complex)}, own, 10)


def test_the_description_survives_metadata():
    assert ModuleState.from_metadata({MODULE_KEY: MODULE.to_json()}) == MODULE
    assert not ModuleState.from_metadata({}).is_known
    for text in (
        "{",
        "[]",
        '{"names": [1], "aliases": {}, "tracked": {}, "constants": {}, "unread": [], "frozen": []}',
    ):
        with pytest.raises(BnfuseError, match="metadata is damaged"):
            ModuleState.from_metadata({MODULE_KEY: text})
