"""Channel slots: nested and flat concatenations share one buffer, and what conflicts is copied."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir

from bnfuse.runtime.kernels.kernel import MapType
from bnfuse.runtime.lowering.layout import MapRef, Slots, assign_slots


def slots_of(body: str, maps: str) -> tuple[Slots, dict[str, ir.Value]]:
    """Slots of a graph with the given nodes; `maps` declares the types of all intermediate maps."""
    text = f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[2,4,3,3] x, float[4,4,1,1] w) => (float[2,4,3,3] out) <{maps}> {{ {body} }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    values = {v.name: v for node in model.graph for v in node.outputs}
    values.update({v.name: v for v in model.graph.inputs})
    return assign_slots(list(model.graph)), values


def places(slots: Slots, values: dict[str, ir.Value]) -> dict[str, tuple[str, int]]:
    return {name: (s.root.name, s.start) for name, v in values.items() if (s := slots.of.get(v)) is not None}


def copies(slots: Slots) -> dict[str, list[tuple[str, int]]]:
    return {v.name: [(s.root.name, s.start) for s in found] for v, found in slots.copies.items()}


def test_nested_pairs_share_the_buffer_of_the_largest():
    slots, values = slots_of(
        """a = Conv(x, w)  b = Conv(a, w)  t1 = Concat<axis = 1>(a, b)
           c = Conv(b, w)  t2 = Concat<axis = 1>(t1, c)  out = Conv(c, w)""",
        "float[2,4,3,3] a, float[2,4,3,3] b, float[2,8,3,3] t1, float[2,4,3,3] c, float[2,12,3,3] t2",
    )
    assert places(slots, values) == {"a": ("t2", 0), "b": ("t2", 4), "t1": ("t2", 0), "c": ("t2", 8), "t2": ("t2", 0)}
    assert copies(slots) == {}


def test_flat_lists_come_to_the_same():
    slots, values = slots_of(
        """a = Conv(x, w)  b = Conv(a, w)  t1 = Concat<axis = 1>(a, b)
           c = Conv(b, w)  t2 = Concat<axis = 1>(a, b, c)  out = Conv(c, w)""",
        "float[2,4,3,3] a, float[2,4,3,3] b, float[2,8,3,3] t1, float[2,4,3,3] c, float[2,12,3,3] t2",
    )
    assert places(slots, values) == {"a": ("t2", 0), "b": ("t2", 4), "t1": ("t2", 0), "c": ("t2", 8), "t2": ("t2", 0)}
    assert copies(slots) == {}


def test_a_run_in_the_middle_is_a_view_too():
    slots, values = slots_of(
        """a = Conv(x, w)  b = Conv(a, w)  c = Conv(b, w)  t1 = Concat<axis = 1>(b, c)
           t2 = Concat<axis = 1>(a, b, c)  out = Conv(c, w)""",
        "float[2,4,3,3] a, float[2,4,3,3] b, float[2,4,3,3] c, float[2,8,3,3] t1, float[2,12,3,3] t2",
    )
    assert places(slots, values)["t1"] == ("t2", 4)
    assert copies(slots) == {}


def test_a_second_order_of_the_same_maps_is_copied():
    slots, values = slots_of(
        """a = Conv(x, w)  b = Conv(a, w)  t1 = Concat<axis = 1>(a, b)  t2 = Concat<axis = 1>(b, a)
           out = Conv(b, w)""",
        "float[2,4,3,3] a, float[2,4,3,3] b, float[2,8,3,3] t1, float[2,8,3,3] t2",
    )
    assert places(slots, values)["a"] == ("t1", 0)
    assert copies(slots) == {"b": [("t2", 0)], "a": [("t2", 4)]}


def test_a_map_twice_in_one_concatenation_is_copied_once():
    slots, values = slots_of(
        "a = Conv(x, w)  t = Concat<axis = 1>(a, a)  out = Conv(a, w)", "float[2,4,3,3] a, float[2,8,3,3] t"
    )
    assert places(slots, values) == {"a": ("t", 0), "t": ("t", 0)}
    assert copies(slots) == {"a": [("t", 4)]}


def test_a_graph_input_is_copied_because_no_kernel_writes_it():
    slots, values = slots_of(
        "a = Conv(x, w)  t = Concat<axis = 1>(x, a)  out = Conv(a, w)", "float[2,4,3,3] a, float[2,8,3,3] t"
    )
    assert places(slots, values) == {"a": ("t", 4), "t": ("t", 0)}
    assert copies(slots) == {"x": [("t", 0)]}


def test_ranges_of_one_buffer_overlap_by_channels():
    kind = MapType(2, 3, 3, 12, 12)
    whole = MapRef(0, 0, kind)
    assert whole.channels(0, 4).overlaps(whole.channels(3, 8))
    assert not whole.channels(0, 4).overlaps(whole.channels(4, 8))
    assert whole.channels(4, 12).channels(1, 3) == MapRef(0, 5, MapType(2, 3, 3, 2, 12))


def test_layouts_agree_where_there_is_one_pixel_or_one_channel():
    assert MapRef(0, 0, MapType(4, 1, 1, 8, 8)).is_file_layout
    assert MapRef(0, 0, MapType(4, 5, 5, 1, 1)).is_file_layout
    assert not MapRef(0, 0, MapType(4, 5, 5, 2, 2)).is_file_layout
    assert not MapRef(0, 0, MapType(4, 1, 1, 8, 16)).is_file_layout
