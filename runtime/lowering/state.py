"""The state of one lowering, and what all operators do with it: ask for operands, define results, launch kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from bnfuse.core.errors import BnfuseError, at_node
from bnfuse.graph.sampling import Box, Points
from bnfuse.graph.signature import GraphSignature
from bnfuse.graph.values import static_shape
from bnfuse.parallel.ranks import ONE, Ranks
from bnfuse.runtime.kernels import registry
from bnfuse.runtime.kernels.kernel import Kernel, MapType, Param
from bnfuse.runtime.kernels.registry import Kind
from bnfuse.runtime.kernels.request import Request
from bnfuse.runtime.lowering.layout import LINE, Guards, MapRef, Slot, Slots, map_type, stored_dtype
from bnfuse.runtime.lowering.values import Form, check_elements, dtype_name, infer_outputs
from bnfuse.runtime.program import program as p
from bnfuse.runtime.targets.target import Target

Ref = MapRef | int  # a map, or the storage of a dense tensor


@dataclasses.dataclass(eq=False)
class Lowering:
    """State of one lowering. Operators' functions read `node`, ask for operands, define results, launch."""

    graph: ir.Graph
    signature: GraphSignature
    target: Target
    opset: int
    ranks: Ranks = ONE  # who run the step together

    # where the lowering is
    phase: p.Phase = "forward"
    node: str = "entry"
    order: dict[ir.Node, int] = field(default_factory=dict)

    # values
    forms: dict[ir.Value, Form] = field(default_factory=dict)
    residents: dict[int, list[tuple[ir.Value, MapRef]]] = field(default_factory=dict)  # maps by storage
    destinations: dict[ir.Value, int] = field(default_factory=dict)  # where outputs, and what becomes them, have to lie
    slots: Slots = field(default_factory=Slots)
    roots: dict[ir.Value, MapRef] = field(default_factory=dict)
    guards: dict[ir.Value, Guards] = field(default_factory=dict)
    vector_slots: Slots = field(default_factory=Slots)
    vector_roots: dict[ir.Value, int] = field(default_factory=dict)

    # memory
    regions: dict[str, int] = field(default_factory=dict)
    storages: list[p.Storage] = field(default_factory=list)
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)  # storage -> what it is a part of, byte offset
    initial: dict[int, np.ndarray] = field(default_factory=dict)
    map_storages: set[int] = field(default_factory=set)

    # kernels and launches
    made: dict[Request, Kernel] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)  # one for each kernel of the program
    kernels: dict[str, int] = field(default_factory=dict)  # by key: index in the program
    launches: list[p.Launch] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)

    # what the lowering of one operator leaves for that of another, or for the program
    packed: dict[tuple[int, tuple[int, ...], int, str], int] = field(default_factory=dict)  # weights, by source, form
    exchanged: dict[ir.Value, ir.Value] = field(default_factory=dict)  # left out Transposes of matrices: their source
    products: dict[ir.Node, ir.Node] = field(default_factory=dict)  # MatMuls by the Add of a vector that is the bias
    normalizing: dict[ir.Value, int] = field(default_factory=dict)  # scale*inv_std by inv_std: its storage
    rows: dict[tuple[int, int], int] = field(default_factory=dict)  # of coefficients, by matrix and group: storage
    origin: int | None = None  # the offset of a sample that begins where its map does
    places: dict[str, list[Box | Points]] = field(default_factory=dict)  # of samples, by input: as far as maps allow
    seed: int | None = None  # storage: what all gradients begin with, where it is not 1 (fp16)
    finite: int | None = None  # storage: whether all gradients were, and so the update was made
    norm: int | None = None  # storage: the norm of all gradients
    mean_loss: int | None = None  # storage: the loss as the mean over the ranks
    counts: int | None = None  # storage: 1 on ranks whose samples statistics are of, the first `counted_ranks`, else 0
    counted_ranks: int = 0
    header: int | None = None  # storage: of the memory in which GPUs of other ranks write

    # -- memory ------------------------------------------------------------------------------------------------

    def storage(self, elements: int, dtype: str = "float32", region: str = p.ARENA, offset: int | None = None) -> int:
        """Make a new storage. In a region other than the arena it lies behind the former one, or at `offset`."""
        if region == p.ARENA:
            place = 0
        else:
            place = self.regions.get(region, 0) if offset is None else offset
            end = place + p.aligned(elements * np.dtype(dtype).itemsize)
            self.regions[region] = max(self.regions.get(region, 0), end)
        self.storages.append(p.Storage(region, place, elements, dtype))
        return len(self.storages) - 1

    def part(self, base: int, start: int, elements: int) -> int:
        """Make a storage that is the elements from `start` on of another one, in the arena."""
        held = self.storages[base]
        assert held.region == p.ARENA and start % LINE == 0 and start + elements <= held.elements, (held, start)
        index = self.storage(elements, held.dtype)
        self.parts[index] = (base, start * np.dtype(held.dtype).itemsize)
        return index

    def constant_storage(self, array: np.ndarray) -> int:
        """Make a storage that holds an array's elements from the start."""
        index = self.storage(array.size, array.dtype.name, p.CONSTANTS)
        self.initial[index] = np.ascontiguousarray(array).reshape(-1)
        return index

    # -- operands ----------------------------------------------------------------------------------------------

    def operand(self, node: ir.Node, index: int) -> ir.Value:
        """Give an input that the operator cannot do without. Raises BnfuseError where it is left out."""
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None:
            raise self.error(node, f"lacks its operand {index + 1}: build the graph anew")
        return value

    def form(self, value: ir.Value) -> Form:
        """Say where a value lies. Raises BnfuseError for one that nothing has written yet."""
        if value not in self.forms:
            what = f"reads '{value.name}', which nothing before it writes: build the graph anew"
            raise BnfuseError(f"node '{self.node}' {what}")
        return self.forms[value]

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """Give the shape of a value, in the order of the file."""
        return self.form(value).shape

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """Give the value, if it is known now, or None."""
        return None if value is None or value not in self.forms else self.forms[value].constant

    def map(self, value: ir.Value) -> MapRef:
        """Give the value as a feature map; a rank other than 4 as pixels of one row, its last axis the channels."""
        form = self.form(value)
        if form.map is None:
            if len(form.shape) != 4:
                return MapRef(self.dense(value), 0, self.rows_type(form.shape, form.dtype))
            self.place(value, self._to_map(value, form))
        assert form.map is not None
        return form.map

    def lies_dense(self, value: ir.Value) -> bool:
        """Whether what an operator made, of rank 4 and of the type of maps, is no map as it lies."""
        form = self.form(value)
        made = value.producer() is not None and len(form.shape) == 4 and form.dtype == "float32"
        return made and form.map is None and form.dense is not None and value not in self.slots.of

    def dense(self, value: ir.Value) -> int:
        """Give the storage of the value in the layout of the file."""
        form = self.form(value)
        if form.dense is None:
            form.dense = self._to_dense(value, form)
        return form.dense

    def _to_map(self, value: ir.Value, form: Form) -> MapRef:
        kind = self.map_type(form.shape, form.dtype)
        if form.constant is not None:
            array = form.constant.transpose(0, 2, 3, 1).astype(self.stored(form.shape, form.dtype))
            return MapRef(self.constant_storage(array), 0, kind)
        assert form.dense is not None, value.name
        dense = MapRef(form.dense, 0, kind)
        if dense.is_file_layout:
            return dense
        target = self._slot_or_new(value, kind, self.stored(form.shape, form.dtype))
        self.convert(form.dense, target, form.dtype, to_map=True)
        return target

    def _to_dense(self, value: ir.Value, form: Form) -> int:
        if form.constant is not None:
            return self.constant_storage(form.constant)
        assert form.map is not None, value.name
        wanted = self.destinations.get(value)
        if form.map.is_file_layout and wanted in (None, form.map.storage):
            return form.map.storage
        target = self.storage(form.map.type.pixels * form.map.type.c, form.dtype) if wanted is None else wanted
        self.convert(target, form.map, form.dtype, to_map=False)
        return target

    # -- results -----------------------------------------------------------------------------------------------

    def new_map(self, value: ir.Value | None, shape: tuple[int, ...], dtype: str = "float32") -> MapRef:
        """Make a map for the value, in its slot if it has one; for None, memory that nobody will read.

        A rank other than 4 gets a dense tensor, seen as rows.
        """
        if len(shape) != 4:
            return MapRef(self.new_dense(value, shape, dtype), 0, self.rows_type(shape, dtype))
        ref = self._slot_or_new(value, self.map_type(shape, dtype), self.stored(shape, dtype))
        if value is not None:
            self.forms[value] = Form(shape, dtype)
            self.place(value, ref)
        return ref

    def new_dense(self, value: ir.Value | None, shape: tuple[int, ...], dtype: str = "float32") -> int:
        """Make a dense tensor for the value: where the output lies if it becomes one, else in the arena."""
        elements = check_elements(value.name or "" if value is not None else self.node, shape)
        index = None if value is None or dtype != "float32" else self.vector_slot(value, elements)
        if index is None and value is not None:
            index = self.destinations.get(value)
        if index is None:
            index = self.storage(elements, dtype)
        if value is not None:
            self.forms[value] = Form(shape, dtype, dense=index)
        return index

    def define(self, value: ir.Value, shape: tuple[int, ...], dtype: str = "float32") -> None:
        """Give the value its type; where it lies is said next."""
        self.forms[value] = Form(shape, dtype)

    def place(self, value: ir.Value, ref: MapRef) -> None:
        """Record that the map lies there."""
        self.forms[value].map = ref
        self.map_storages.add(ref.storage)
        self.residents.setdefault(ref.storage, []).append((value, ref))

    def alias(self, value: ir.Value, source: ir.Value, shape: tuple[int, ...] | None = None) -> None:
        """Let the value be its source, perhaps in another shape."""
        form = self.form(source)
        shape = form.shape if shape is None else shape
        if form.constant is not None:
            self.forms[value] = Form(shape, form.dtype, constant=form.constant.reshape(shape))
        elif shape == form.shape:
            self.forms[value] = Form(shape, form.dtype, dense=form.dense)
            if form.map is not None:
                self.place(value, form.map)
        else:
            self.forms[value] = Form(shape, form.dtype, dense=self.dense(source))
            if form.map is not None and form.map.storage == form.dense:
                self.residents[form.map.storage].append((value, form.map))

    def set_constant(self, value: ir.Value, array: np.ndarray) -> None:
        """Note the value of what is known now."""
        self.forms[value] = Form(array.shape, array.dtype.name, constant=array)

    def _slot_or_new(self, value: ir.Value | None, kind: MapType, dtype: str) -> MapRef:
        slot = self.slots.of.get(value) if value is not None else None
        if slot is not None:
            return self.root(slot.root).channels(slot.start, slot.start + kind.c)
        shape = kind_shape(kind)
        if value is not None and value in self.guards and value not in self.destinations:
            return self.guarded(kind, self.guards[value], dtype)
        wanted = self.destinations.get(value) if value is not None else None
        if wanted is not None and MapRef(wanted, 0, kind).is_file_layout and self.storages[wanted].dtype == dtype:
            return MapRef(wanted, 0, kind)
        return MapRef(self.storage(check_elements(self.node, shape), dtype), 0, kind)

    def guarded(self, kind: MapType, guards: Guards, dtype: str) -> MapRef:
        """Make a map with room around it."""
        check_elements(self.node, kind_shape(kind))
        offset, kind = guards.around(kind)
        return MapRef(self.storage(kind.elements, dtype), offset, kind)

    def root(self, value: ir.Value) -> MapRef:
        """Give the buffer of a concatenation that has one."""
        if value not in self.roots:
            shape, _ = self.type_of(value)
            kind, stored = self.map_type(shape), self.stored(shape)
            if value in self.guards:
                self.roots[value] = self.guarded(kind, self.guards[value], stored)
            else:
                self.roots[value] = MapRef(self.storage(check_elements(value.name or "", shape), stored), 0, kind)
            self.map_storages.add(self.roots[value].storage)
        return self.roots[value]

    def vector_slot(self, value: ir.Value, elements: int) -> int | None:
        """Give the part of a concatenated vector that this one is, if it has a slot."""
        slot = self.vector_slots.of.get(value)
        return None if slot is None else self.vector_part(slot, elements)

    def vector_part(self, slot: Slot, elements: int) -> int:
        """Give the storage of a slot in its concatenated vector; makes the vector for the first one."""
        if slot.root not in self.vector_roots:
            self.vector_roots[slot.root] = self.storage(self.type_of(slot.root)[0][0])
        return self.part(self.vector_roots[slot.root], slot.start, elements)

    # -- launches ----------------------------------------------------------------------------------------------

    def kernel(self, request: Request) -> Kernel:
        """Make the kernel of a request. Where two kernels have the same code, the program has it once."""
        if request not in self.made:
            kernel = request.kernel()
            self.made[request] = kernel
            if kernel.key not in self.kernels:
                self.kernels[kernel.key] = len(self.requests)
                self.requests.append(request)
        return self.made[request]

    def launch(
        self, kind: Kind, arguments: tuple[Any, ...], refs: Mapping[str, Ref], scalars: Iterable[p.Argument] = ()
    ) -> None:
        """Call the kernel of a kind that is made of these arguments.

        A result that has no ref goes where nobody reads it.
        """
        kernel = self.kernel(Request(kind, arguments))
        buffers, offsets = [], []
        for param in kernel.params:
            ref = refs.get(param.name)
            if ref is None:
                assert param.access == "out", f"node '{self.node}': {kernel.name} needs {param.name}"
                ref = self.storage(param.elements, param.dtype)
            index, offset = (ref.storage, ref.offset) if isinstance(ref, MapRef) else (ref, 0)
            held = self.storages[index]
            if (held.elements, held.dtype) != (param.elements, param.dtype):
                raise BnfuseError(f"node '{self.node}' {unfit(param, held)}")
            buffers.append(p.Buffer(index, param.access))
            if param.is_map:
                offsets.append(offset)
        call = (*buffers, *offsets, *scalars)
        self.launches.append(p.Launch(self.phase, self.kernels[kernel.key], self.node, call))

    def exchange(self, kernel: int, storages: Iterable[int]) -> None:
        """Exchange storages between the ranks: p.SUM each of them, p.GATHER pairs of own and all."""
        assert self.ranks.size > 1 and kernel in p.EXCHANGES, (self.node, kernel)
        second: Literal["in", "out", "inout"] = "inout" if kernel == p.SUM else "out"
        first: Literal["in", "out", "inout"] = "inout" if kernel == p.SUM else "in"
        buffers = tuple(p.Buffer(storage, (first, second)[place % 2]) for place, storage in enumerate(storages))
        self.launches.append(p.Launch(self.phase, kernel, self.node, buffers))

    def request_of(self, launch: p.Launch) -> Request | None:
        """Give the request of a launch's kernel; None for an exchange."""
        return None if launch.exchanges else self.requests[launch.kernel]

    def convert(self, dense: int, ref: MapRef, dtype: str, *, to_map: bool) -> None:
        """Copy between the layout of the file and a map."""
        if to_map:
            self.launch(registry.NCHW_TO_NHWC, (ref.type, self.target, dtype), {"x": dense, "y": ref})
        else:
            self.launch(registry.NHWC_TO_NCHW, (ref.type, self.target, dtype), {"x": ref, "y": dense})
        self.copies.append(f"{self.node}: {'NCHW to NHWC' if to_map else 'NHWC to NCHW'}")

    def copy_map(self, source: MapRef, target: MapRef) -> None:
        """Copy channels to another place."""
        arguments = (source.type, target.type, self.target, self.storages[source.storage].dtype)
        self.launch(registry.COPY_MAP, arguments, {"x": source, "y": target})
        self.copies.append(f"{self.node}: {source.type.c} channels")

    def copy_dense(self, source: int, target: int) -> None:
        """Copy a dense tensor."""
        held = self.storages[source]
        self.launch(registry.COPY, (held.elements, self.target, held.dtype), {"x": source, "y": target})
        self.copies.append(f"{self.node}: {held.elements} elements")

    # -- types -------------------------------------------------------------------------------------------------

    def stored(self, shape: tuple[int, ...], dtype: str = "float32") -> str:
        """Name the type in which a tensor of the file lies in memory as a map."""
        return stored_dtype(shape, dtype, self.target)

    def map_type(self, shape: tuple[int, ...], dtype: str = "float32") -> MapType:
        """Describe a tensor of rank 4 as a map that fills its storage."""
        return map_type(shape, dtype, self.target)

    def rows_type(self, shape: tuple[int, ...], dtype: str = "float32") -> MapType:
        """Describe a tensor of any rank as rows of its last axis."""
        last = shape[-1] if shape else 1
        count = int(np.prod(shape[:-1], dtype=np.int64)) if shape else 1
        return self.map_type((count, last, 1, 1), dtype)

    def type_of(self, value: ir.Value) -> tuple[tuple[int, ...], str]:
        """Shape and dtype: as lowered, else as the file has them."""
        if value in self.forms:
            return self.forms[value].shape, self.forms[value].dtype
        shape, dtype = static_shape(value), dtype_name(value)
        if shape is None or dtype is None:
            raise BnfuseError(f"'{value.name}' {unknown_type(value)}")
        return shape, dtype

    def output_types(self, node: ir.Node) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of a node's outputs: as the file has them, else by its operator's schema."""
        named = [value for value in node.outputs if value.name]
        known = [(static_shape(value), dtype_name(value)) for value in named]
        if all(shape is not None and dtype is not None for shape, dtype in known):
            return [(shape, dtype) for shape, dtype in known if shape is not None and dtype is not None]
        return infer_outputs(node, [None if v is None else self.form(v) for v in node.inputs], self.opset)

    def error(self, node: ir.Node, what: str) -> BnfuseError:
        """Make an error that names the node."""
        return at_node(node.name or "?", node.op_type, what)


def unknown_type(value: ir.Value) -> str:
    """Say what a value lacks whose shape or element type the graph does not say, and the remedy."""
    if value.shape is not None and static_shape(value) is None:
        dims = [dim if isinstance(dim, int) else str(dim.value) for dim in value.shape]
        return f"has the shape {dims}, which is not fixed: build the graph with --batch"
    lacking = "shape" if value.shape is None else "element type"
    return f"has no {lacking} in the file: build the graph anew, or infer its shapes (onnx.shape_inference)"


def unfit(param: Param, held: p.Storage) -> str:
    """Why a kernel cannot take a buffer as one of its parameters, and the remedy."""
    if held.dtype != param.dtype:
        what = f"takes {param.dtype} as its {param.name}, and was given {held.dtype}"
        return f"{what}: convert the model to float32, with labels of int64"
    what = f"takes {param.elements} elements as its {param.name}, and was given {held.elements}"
    return f"{what}: the graph is damaged. Build it anew"


def kind_shape(kind: MapType) -> tuple[int, int, int, int]:
    """Give the sizes (N, H, W, C) of a map."""
    return kind.n, kind.h, kind.w, kind.c
