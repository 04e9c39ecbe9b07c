"""The grammar of `ai.bnfuse` operators: a core, the steps on its way in, the steps on its way out.

A feature map is read, something elementwise happens to it, a core (a convolution, a pooling, or nothing at
all) works on the result, and something elementwise or a reduction happens to what comes out:

    Normalize Relu  Conv  Statistics        y = Conv(relu(a*x + b), weight);  mean, variance of y

The name of an operator is the concatenation of its steps, `NormalizeReluConvStatistics`, and everything else
about it follows from the steps: operands, results and attributes here; the function body in `functions.py`,
the numpy reference in `reference.py`, the kernel in `bnfuse.runtime`.

    forward    [Normalize] [[Where] Activation] [Gate]
               [[SkipActivation] [SkipGate] Add|AddNormalized [Plus|PlusNormalized]*] [Activation]
               Conv|ConvTranspose|MaxPool|AveragePool|GlobalAveragePool|Resample|Pointwise
               [Bias] [Relu] [StoreInput] [Statistics|ImageStatistics]
    backward   [Slice] [GateGrad] [[AddGrad] [ActivationGrad] BatchNormGrad [ActivationGrad]]
               [Normalize] [[Where] Activation] [Gate [Activation]]
               [[SkipActivation] [SkipGate] Add|AddNormalized]
               ConvGrad|ConvGradInput|ConvGradWeight|ConvTransposeGradInput|ConvTransposeGradWeight
               |MaxPoolGrad|AveragePoolGrad|GlobalAveragePoolGrad|ResampleGrad|PointwiseGrad
               [BiasGrad] [AddGradient|AddGatedGradient] [AddBatchNormGrad]
               [[Where] ActivationGrad [AddSkipGradient]]
               [Reduce] [[Part] ReduceOther|ReduceGated|ReduceActivationGrad|ReduceAddedActivationGrad]*
               [Scale|Accumulate|ImageReduce|ImageReduceOther|ImageGate|ImageGateActivation]

Forward steps (all maps are NCHW in files; a, b, ... have one value per channel):

    Normalize       x <- a*x + b                               a, b are [C], or [N, C]: of each sample its own
    Activation      x <- f(x): Relu, Clip, QuickGelu, ...      activations.py has them and their attributes
    Where           the activation after it is of the channels where active > 0; others stay as they are
    Gate            x <- gate*x                                gate is [N, C, 1, 1], [1, C, 1, 1], or a map like x
    Add             x <- x + skip
    AddNormalized   x <- x + (skip_a*skip + skip_b)            skip_a, skip_b are like a, b
    SkipActivation  what is added is f of that, f(skip) or f(skip_a*skip + skip_b): SkipRelu, SkipHardSwish, ...
    SkipGate        what is added is skip_gate times that
    Plus            x <- x + plus_i                            i = 1, 2, ...; of a Pointwise alone
    PlusNormalized  x <- x + (plus_a_i*plus_i + plus_b_i)
    Bias            y <- y + bias
    Relu            y <- relu(y): the activation whose gradient its result tells
    StoreInput      the x that the core read is also a result, `stored`
    Statistics      mean and biased variance of y over N, H, W are also results
    ImageStatistics the same over H, W: of each image and channel, [N, C]

Backward steps. `x` is the map that the forward operator read, before its prologue:

    Slice           dy <- dy[:, grad_start : grad_stop]        attributes grad_start, grad_stop
    GateGrad        dy <- grad_gate*dy                         grad_gate is like gate
    AddGrad         dy <- dy + grad_other                      the gradient of another reader; [N, C, 1, 1] of a pooling
    BatchNormGrad   dy <- grad_p*dy + grad_q*grad_x + grad_w   the input gradient of the BN that follows the core;
                    grad_p, grad_q, grad_w, grad_a, grad_b are [C], or [N, C] as of a GroupNorm
    ActivationGrad  before it, of the activation behind that BN: dy <- dy * f'(grad_a*grad_x + grad_b)
    ActivationGrad  behind it, of the activation before that BN, which is then over f(grad_x), as BatchNormGrad is:
                    dy <- dy * f'(grad_x)
    Normalize ...   the forward prologue, recomputed from x; the weight gradient reads its result
    BiasGrad        sum of dy over N, H, W (after the steps before it) is also a result, `dbias`
    AddGradient     dx <- dx + other
    AddGatedGradient  dx <- dx + other_gate*other              that of another reader, behind a gate
    AddBatchNormGrad  dx <- dx + (other_p*other_dy + other_q*other_x + other_w)     that of another reader, a BN
    ActivationGrad  dx <- dx * f'(z)                           z is x after Normalize and before the activation
    Where           the activation's gradient after it is of the channels where masked > 0; others stay as they are
    AddSkipGradient dx <- dx + skip_grad                       the gradient of a skip that goes past the activation
    Reduce          dbeta = sum dx, dgamma = sum dx*(x - mean)*inv_std     over N, H, W
    ReduceOther     the same for another BN that shares dx: operands x_i, mean_i, inv_std_i (i = 1, 2, ...)
    ReduceGated     the same for one that shares dx behind a gate: of gate_i*dx
    ReduceActivationGrad  the same for one that shares dx behind an activation: of dx * f'(a_i*x_i + b_i)
    ReduceAddedActivationGrad  and beside another gradient: of (dx + other_i) * f'(a_i*x_i + b_i)
    Part            the reduction after it, number i, is of the channels where part_i > 0, and 0 in the others; x_i has
                    channels from start_i on alone (attribute)
    Scale           dx <- acc_p*dx                             the first term of an accumulated gradient
    Accumulate      dx <- acc[:, acc_start : acc_stop] + acc_p*dx          attributes acc_start, acc_stop
    ImageReduce     image_sum = sum dx, image_dot = sum dx*x               over H, W: of each image and channel, [N, C]
    ImageReduceOther  the same with another map, reduced_x, in the place of x
    ImageGate       dx is the gradient of gate*f(z), z = gated_a*gated_x + gated_b, and of each image and channel are
                    summed over H, W: image_gate of dx*f(z), image_beta of dx*f'(z), image_slope of f'(z), and
                    image_gamma, image_tilt of the last two times (gated_x - gated_mean)*gated_inv_std. ImageGateRelu,
                    ImageGateHardSwish, ... say which f; ImageGate alone is f(z) = z

A gradient behind a Gate is that of the gated map, whose activation may follow (z is gate*(a*x + b) then): its epilogue
neither masks nor reduces the map in front of it.

A ConvTranspose is the input gradient of the convolution that goes the other way: its own gradient at x is that
convolution of dy, its weight gradient that convolution's with x and dy in each other's place.

`Resample` is a linear map along each of H and W, y = rows x columns^T: Resize in all modes, Pad that repeats what is
there. Its operands `rows` [OH, H] and `columns` [OW, W] are constants.

`Pointwise` and `PointwiseGrad` are the cores that do nothing: `NormalizeReluPointwise` stores a normalised map,
`BatchNormGradPointwiseGrad` stores the input gradient of a BN. With z = x a ReluGrad serves as well where x is the
*output* of the Relu, because both have the same sign.

Source: [Jung19], sections 3.2 to 3.4; the exact backward forms are in docs/maths.md.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator

from bnfuse.opset.activations import ACTIVATIONS, GRADIENTS
from bnfuse.opset.plain import PLAIN_OPS, WHOLE_OPS, PlainOp

DOMAIN = "ai.bnfuse"
VERSION = 1

ACTIVATION_GRADS = tuple(GRADIENTS)

CONV_ATTRIBUTES = ("dilations", "group", "kernel_shape", "pads", "strides")
CONV_TRANSPOSE_ATTRIBUTES = (*CONV_ATTRIBUTES, "output_padding")
MAX_POOL_ATTRIBUTES = ("ceil_mode", "dilations", "kernel_shape", "pads", "strides")
AVERAGE_POOL_ATTRIBUTES = ("ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")

FORWARD_CORES: dict[str, tuple[str, ...]] = {
    "Conv": CONV_ATTRIBUTES,
    "ConvTranspose": CONV_TRANSPOSE_ATTRIBUTES,
    "MaxPool": MAX_POOL_ATTRIBUTES,
    "AveragePool": AVERAGE_POOL_ATTRIBUTES,
    "GlobalAveragePool": (),
    "Resample": (),
    "Pointwise": (),
}
BACKWARD_CORES: dict[str, tuple[str, ...]] = {
    "ConvGrad": CONV_ATTRIBUTES,
    "ConvGradInput": CONV_ATTRIBUTES,
    "ConvGradWeight": CONV_ATTRIBUTES,
    "ConvTransposeGradInput": CONV_ATTRIBUTES,
    "ConvTransposeGradWeight": CONV_ATTRIBUTES,
    "MaxPoolGrad": MAX_POOL_ATTRIBUTES,
    "AveragePoolGrad": AVERAGE_POOL_ATTRIBUTES,
    "GlobalAveragePoolGrad": (),
    "ResampleGrad": (),
    "PointwiseGrad": (),
}
CONVS = ("Conv", "ConvTranspose")
CONV_GRADS = ("ConvGrad", "ConvGradInput", "ConvGradWeight", "ConvTransposeGradInput", "ConvTransposeGradWeight")
WEIGHT_GRADS = ("ConvGradWeight", "ConvTransposeGradWeight")  # they have no dx
RESAMPLES = ("Resample", "ResampleGrad")
TRANSPOSED = ("ConvTranspose", "ConvTransposeGradInput", "ConvTransposeGradWeight")

PLUS = ("Plus", "PlusNormalized")  # further terms of a sum, numbered from 1 on
ADDED_REDUCTIONS = tuple(f"ReduceAdded{step}" for step in ACTIVATION_GRADS)
MASKED_REDUCTIONS = {  # and what they do with dx first
    **{f"Reduce{step}": step for step in ACTIVATION_GRADS},
    **dict(zip(ADDED_REDUCTIONS, ACTIVATION_GRADS, strict=True)),
}
SHARED = ("ReduceOther", "ReduceGated", *MASKED_REDUCTIONS)  # reductions of further BNs, numbered from 1 on

# sums of each image and channel: on the way out of a gradient, behind a gate for each activation in front of it
IMAGE_GATES: dict[str, str | None] = {"ImageGate": None, **{f"ImageGate{kind}": kind for kind in ACTIVATIONS}}
IMAGE_REDUCTIONS = ("ImageReduce", "ImageReduceOther", *IMAGE_GATES)
IMAGE_STEPS = ("ImageStatistics", *IMAGE_REDUCTIONS)
READ_X = (*ACTIVATION_GRADS, "Reduce", "ImageReduce")  # steps of a gradient's epilogue that read x itself

_ACTIVATION = "|".join(sorted(ACTIVATIONS, key=len, reverse=True))
_FORWARD = re.compile(
    rf"(?P<way_in>(Normalize)?(?:(Where)?(?P<first>{_ACTIVATION}))?(Gate)?"
    rf"(?:(?P<skip>Skip(?:{_ACTIVATION}))?(SkipGate)?(?P<add>AddNormalized|Add)(?P<more>(?:PlusNormalized|Plus)*))?"
    rf"(?P<last>{_ACTIVATION})?)"
    rf"(?P<core>{'|'.join(FORWARD_CORES)})"
    r"(?P<way_out>(Bias)?(Relu)?(StoreInput)?(Statistics|ImageStatistics)?)"
)
_BACKWARD = re.compile(
    rf"(?P<way_in>(Slice)?(GateGrad)?"
    rf"(?:(AddGrad)?(?P<before>(?:{_ACTIVATION})Grad)?(BatchNormGrad)(?P<behind>(?:{_ACTIVATION})Grad)?)?"
    rf"(Normalize)?(?:(Where)?(?P<first>{_ACTIVATION}))?(?:(?P<gate>Gate)(?P<last>{_ACTIVATION})?)?"
    rf"(?:(?P<skip>Skip(?:{_ACTIVATION}))?(SkipGate)?(?P<add>AddNormalized|Add))?)"
    rf"(?P<core>{'|'.join(BACKWARD_CORES)})"
    rf"(?P<way_out>(BiasGrad)?(AddGradient|AddGatedGradient)?(AddBatchNormGrad)?"
    rf"(?:(Where)?(?P<mask>(?:{_ACTIVATION})Grad)(AddSkipGradient)?)?"
    rf"(?P<own>Reduce(?!Other|Gated|(?:Added)?(?:{_ACTIVATION})Grad))?"
    rf"(?P<others>(?:(?:Part)?(?:{'|'.join(SHARED)}))*)"
    rf"(?P<last_step>Scale|Accumulate|ImageReduceOther|ImageReduce|ImageGate(?:{_ACTIVATION})?)?)"
)
_REPEATED = {"others": re.compile("|".join(("Part", *SHARED))), "more": re.compile("PlusNormalized|Plus")}
# steps of the prologue that work on dy; all others work on x
OF_GRADIENT = ("Slice", "GateGrad", "AddGrad", "BatchNormGrad", *ACTIVATION_GRADS)


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """An operator as its steps. `name`, `operands`, `results` and `attributes` follow from them, in this order."""

    prologue: tuple[str, ...]
    core: str
    epilogue: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if parse_steps(self.name) != (self.prologue, self.core, self.epilogue):
            raise ValueError(f"not an {DOMAIN} operator: {' '.join((*self.prologue, self.core, *self.epilogue))}")

    @property
    def name(self) -> str:
        """Give the name: the steps in their order."""
        return "".join((*self.prologue, self.core, *self.epilogue))

    @property
    def is_gradient(self) -> bool:
        """Tell whether the core is a backward one."""
        return self.core in BACKWARD_CORES

    @property
    def is_transposed(self) -> bool:
        """Tell whether the core is a ConvTranspose or a gradient of one."""
        return self.core in TRANSPOSED

    @property
    def weighs(self) -> bool:
        """Tell whether `dweight` is a result."""
        return self.core == "ConvGrad" or self.core in WEIGHT_GRADS

    @property
    def activations(self) -> tuple[str, ...]:
        """The activations of the prologue, in order (at most two, and two only around an Add)."""
        return tuple(step for step in self.prologue if step in ACTIVATIONS)

    @property
    def reads_x(self) -> bool:
        """Whether `x` is an operand: always, but for a PointwiseGrad that neither masks nor reduces."""
        return self.core != "PointwiseGrad" or bool({*READ_X} & {*self.epilogue})

    @property
    def operands(self) -> tuple[str, ...]:
        """Operand names in the order of the node's inputs."""
        return tuple(self._operands())

    @property
    def results(self) -> tuple[str, ...]:
        """Result names in the order of the node's outputs."""
        return tuple(self._results())

    @property
    def attributes(self) -> tuple[str, ...]:
        """Attribute names; every one is required on the node."""
        names = list((BACKWARD_CORES if self.is_gradient else FORWARD_CORES)[self.core])
        for kind in ACTIVATIONS:
            written = {kind, f"Skip{kind}", f"{kind}Grad", f"Reduce{kind}Grad", f"ReduceAdded{kind}Grad"}
            written.add(f"ImageGate{kind}")
            if written & {*self.prologue, *self.epilogue}:
                names += ACTIVATIONS[kind].attributes
        if "Slice" in self.prologue:
            names += ["grad_start", "grad_stop"]
        if "Accumulate" in self.epilogue:
            names += ["acc_start", "acc_stop"]
        names += [f"start_{number}" for number in parts_of(self.epilogue)]
        return tuple(names)

    @property
    def others(self) -> int:
        """How many other BNs reduce over the same gradient."""
        return sum(self.epilogue.count(step) for step in SHARED)

    def _operands(self) -> Iterator[str]:
        if self.is_gradient:
            yield "dy"
            if self.core == "MaxPoolGrad":
                yield "indices"
        if self.reads_x:
            yield "x"
        if self.core in CONVS or self.core in CONV_GRADS:
            yield "weight"
        if self.core in RESAMPLES:
            yield from ("rows", "columns")
        yield from prologue_operands(self.prologue)
        other = 0
        for step in self.epilogue:
            if step in SHARED:
                other += 1
                yield from (f"x_{other}", f"mean_{other}", f"inv_std_{other}")
                yield from (f"gate_{other}",) if step == "ReduceGated" else ()
                yield from (f"a_{other}", f"b_{other}") if step in MASKED_REDUCTIONS else ()
                yield from (f"other_{other}",) if step in ADDED_REDUCTIONS else ()
                yield from (f"part_{other}",) if other in parts_of(self.epilogue) else ()
            else:
                yield from EPILOGUE_OPERANDS.get(step, ())

    def _results(self) -> Iterator[str]:
        if self.is_gradient:
            if self.core not in WEIGHT_GRADS:
                yield "dx"
            if self.weighs:
                yield "dweight"
        else:
            yield "y"
            if self.core == "MaxPool":
                yield "indices"
        other = 0
        for step in self.epilogue:
            if step in SHARED:
                other += 1
                yield from (f"dbeta_{other}", f"dgamma_{other}")
            else:
                yield from EPILOGUE_RESULTS.get(step, ())


PROLOGUE_OPERANDS: dict[str, tuple[str, ...]] = {
    "Normalize": ("a", "b"),
    "Where": ("active",),
    "Gate": ("gate",),
    "SkipGate": ("skip_gate",),
    "Add": ("skip",),
    "AddNormalized": ("skip", "skip_a", "skip_b"),
    "GateGrad": ("grad_gate",),
    "AddGrad": ("grad_other",),
    "BatchNormGrad": ("grad_x", "grad_p", "grad_q", "grad_w"),
}
EPILOGUE_OPERANDS: dict[str, tuple[str, ...]] = {
    "Bias": ("bias",),
    "AddGradient": ("other",),
    "AddGatedGradient": ("other", "other_gate"),
    "Where": ("masked",),
    "AddBatchNormGrad": ("other_dy", "other_x", "other_p", "other_q", "other_w"),
    "AddSkipGradient": ("skip_grad",),
    "Reduce": ("mean", "inv_std"),
    "Scale": ("acc_p",),
    "Accumulate": ("acc", "acc_p"),
    "ImageReduceOther": ("reduced_x",),
    **dict.fromkeys(IMAGE_GATES, ("gated_x", "gated_mean", "gated_inv_std", "gated_a", "gated_b")),
}
# operands that are maps: those of an operator of steps whose size is that of its x, those like its dy
MAPS_LIKE_X = ("x", "skip", "other", "other_dy", "other_x", "skip_grad", "gated_x", "reduced_x")
MAPS_LIKE_DY = ("dy", "grad_x", "grad_other")
_NUMBERED = re.compile(r"(x|other|plus)_\d+")
_NUMBERED_COEFFICIENT = re.compile(r"(plus_)?[ab]_\d+")

# coefficients that are [C], or [N, C] where each sample has its own
SAMPLEWISE = (
    *("a", "b", "skip_a", "skip_b", "grad_a", "grad_b", "grad_p", "grad_q", "grad_w"),
    *("other_p", "other_q", "other_w"),
)

EPILOGUE_RESULTS: dict[str, tuple[str, ...]] = {
    "StoreInput": ("stored",),
    "Statistics": ("mean", "variance"),
    "BiasGrad": ("dbias",),
    "Reduce": ("dbeta", "dgamma"),
    "ImageStatistics": ("image_mean", "image_variance"),
    **dict.fromkeys(("ImageReduce", "ImageReduceOther"), ("image_sum", "image_dot")),
    **dict.fromkeys(IMAGE_GATES, ("image_gate", "image_beta", "image_gamma", "image_slope", "image_tilt")),
}


def is_of_images(name: str) -> bool:
    """Tell whether a result is of each image and channel, [N, C]."""
    return name.startswith("image_")


def image_step(epilogue: tuple[str, ...]) -> str | None:
    """Name the step of an epilogue that sums over each image, None where it has none."""
    return next((step for step in epilogue if step in IMAGE_STEPS), None)


def is_numbered_map(name: str) -> bool:
    """Tell whether an operand is a map like x, numbered: of a further term or of a reduction of a further BN."""
    return _NUMBERED.fullmatch(name) is not None


def is_like_x(name: str) -> bool:
    """Tell whether an operand is a map of x's size that is read where x is, element by element."""
    return name in MAPS_LIKE_X or is_numbered_map(name)


def may_be_of_samples(name: str) -> bool:
    """Tell whether an operand is a coefficient that each sample may have of its own: a, grad_p, a_1, ..."""
    return name in SAMPLEWISE or _NUMBERED_COEFFICIENT.fullmatch(name) is not None


def prologue_operands(steps: tuple[str, ...]) -> Iterator[str]:
    """List what the steps of a prologue read, in their order."""
    number = 0
    for place, step in enumerate(steps):
        if step in ACTIVATION_GRADS:
            yield from ("grad_a", "grad_b") if "BatchNormGrad" in steps[place:] else ()
        elif step in PLUS:
            number += 1
            yield f"plus_{number}"
            yield from (f"plus_a_{number}", f"plus_b_{number}") if step == "PlusNormalized" else ()
        else:
            yield from PROLOGUE_OPERANDS.get(step, ())


def parts_of(epilogue: tuple[str, ...]) -> tuple[int, ...]:
    """Give the numbers of the reductions of further BNs that are over a part of the channels."""
    places = [place for place, step in enumerate(epilogue) if step in SHARED]
    return tuple(number for number, place in enumerate(places, 1) if epilogue[place - 1 : place] == ("Part",))


def around_batch_norm_grad(prologue: tuple[str, ...]) -> tuple[str | None, str | None]:
    """Name the gradients of activations before and behind a prologue's BatchNormGrad, each None where there is none."""
    if "BatchNormGrad" not in prologue:
        return None, None
    place = prologue.index("BatchNormGrad")
    sides = (prologue[:place], prologue[place:])
    before, behind = (next((step for step in side if step in ACTIVATION_GRADS), None) for side in sides)
    return before, behind


def masks_gated(prologue: tuple[str, ...]) -> bool:
    """Tell whether a Gate stands before a prologue's activation, so that a mask's z is the gated map."""
    return "Gate" in prologue and not {*ACTIVATIONS} & {*prologue[: prologue.index("Gate")]}


def further_terms(operands: Iterable[str]) -> list[tuple[str, str, str]]:
    """List the further terms of a sum by what its operands are called: the map, and its a and b, which it may lack."""
    names = [name for name in operands if re.fullmatch(r"plus_\d+", name)]
    return [(name, f"plus_a_{name[5:]}", f"plus_b_{name[5:]}") for name in names]


def applied(steps: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """Give the steps without Where, and of each whether it is of some channels alone: Where stands before it."""
    for before, step in zip(("", *steps), steps, strict=False):
        if step != "Where":
            yield step, before == "Where"


def parse_steps(name: str) -> tuple[tuple[str, ...], str, tuple[str, ...]] | None:
    """Prologue, core and epilogue of an operator's name, or None where it is not one."""
    if match := _FORWARD.fullmatch(name):
        first, skip, last = match["first"], of_skip(match["skip"]), match["last"]
        if (first and last and not match["add"]) or (match["more"] and match["core"] != "Pointwise"):
            return None
        if share_attributes(first, last) or any(
            kind != skip and share_attributes(skip, kind) for kind in (first, last)
        ):
            return None
        return _steps(match, "way_in"), match["core"], _steps(match, "way_out")
    if match := _BACKWARD.fullmatch(name):
        epilogue = _steps(match, "way_out")
        masked = (match["mask"] or "").removesuffix("Grad")
        if match["core"] in WEIGHT_GRADS and {*epilogue} - {"BiasGrad"}:
            return None  # there is no dx to work on
        if match["core"] == "ConvTransposeGradInput" and "BiasGrad" in epilogue:
            return None  # a forward convolution of dy, which sums what it makes
        if match["add"] and (masked or match["core"] not in ("ConvGrad", *WEIGHT_GRADS)):
            return None  # it is of the weight's gradient alone
        of_gated = match["own"] or match["last_step"] == "ImageReduce"
        if match["gate"] and (of_gated or (match["core"] not in CONV_GRADS and not masked)):
            return None  # dx is the gradient of the gated map
        if match["gate"] and match["first"] and (masked or match["last"]):
            return None
        grads = [step.removesuffix("Grad") for step in (match["before"], match["behind"]) if step]
        grads += [MASKED_REDUCTIONS[step].removesuffix("Grad") for step in epilogue if step in MASKED_REDUCTIONS]
        behind_gate = IMAGE_GATES.get(match["last_step"] or "")
        found = (match["first"], match["last"], of_skip(match["skip"]), masked, behind_gate, *grads)
        kinds = dict.fromkeys(kind for kind in found if kind)
        if any(share_attributes(kind, other) for kind, other in itertools.combinations(kinds, 2)):
            return None
        return _steps(match, "way_in"), match["core"], epilogue
    return None


def _steps(match: re.Match[str], side: str) -> tuple[str, ...]:
    """Give the steps within a group of a name: its own groups, those that repeat one by one."""
    start, stop = match.span(side)
    names = {index: name for name, index in match.re.groupindex.items()}
    found: list[str] = []
    for index in range(match.re.groupindex[side] + 1, match.re.groups + 1):
        first, last = match.span(index)
        if start <= first < last <= stop:
            repeated = _REPEATED.get(names.get(index, ""))
            found += repeated.findall(match[index]) if repeated else [match[index]]
    return tuple(found)


def of_skip(step: str | None) -> str | None:
    """Name the activation that a step such as SkipRelu applies to the skip; None for any other step."""
    kind = step.removeprefix("Skip") if step else ""
    return kind if kind != step and kind in ACTIVATIONS else None


def skip_activation(prologue: tuple[str, ...]) -> str | None:
    """Name the activation of a prologue's skip, None where it has none."""
    return next((kind for step in prologue if (kind := of_skip(step))), None)


def share_attributes(first: str | None, second: str | None) -> bool:
    """Tell whether two activations have an attribute of one name, which an operator could not give them apart."""
    return bool(first and second and {*ACTIVATIONS[first].attributes} & {*ACTIVATIONS[second].attributes})


@functools.cache  # names are few, and asked for at every turn
def parse(name: str) -> OpSpec | None:
    """Give the operator of this name, or None where the name is not composed of steps."""
    steps = parse_steps(name)
    return OpSpec(*steps) if steps else None


INTEGERS = ("indices", "offset", "points")  # operands and results that are int64
LABELS = ("labels",)  # operands that are int64 or int32


def is_unfused(op: OpSpec | PlainOp) -> bool:
    """Tell whether an operator is one that training graphs have before any pass: the affine map of a frozen BatchNorm
    and its gradient are among them."""
    if isinstance(op, PlainOp):
        return op in WHOLE_OPS or op.name == "BatchNormGradReduce"
    if op.core == "Pointwise":
        return not op.epilogue and len(op.prologue) == 1 and op.prologue[0] in (*ACTIVATIONS, "Normalize")
    if op.core == "PointwiseGrad":
        return not op.prologue and len(op.epilogue) == 1 and op.epilogue[0] in (*GRADIENTS, "Scale")
    return op.is_gradient and not op.prologue and op.epilogue in ((), ("BiasGrad",))


def find(name: str) -> OpSpec | PlainOp | None:
    """Give the operator of this name, composed of steps or plain."""
    return PLAIN_OPS.get(name) or parse(name)


_LISTS = ("dilations", "extent", "kernel_shape", "output_padding", "pads", "strides")
_FLOATS = ("elements", "epsilon", "momentum", "own_share", "weight")


def attribute_type(name: str) -> str:
    """Give the ONNX type of an attribute: INTS, FLOAT or INT."""
    is_float = name in _FLOATS or any(name in each.attributes for each in ACTIVATIONS.values())
    return "INTS" if name in _LISTS else "FLOAT" if is_float else "INT"
