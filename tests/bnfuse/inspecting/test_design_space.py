"""Every row of the tables of [Iandola16] that the zoo has networks for, against what bnfuse computes.

The printed figures are the expectation (benchmarks/design_space_printed.py). A figure that does not round to the
printed one is in NOTES with its reason, and tested here against the reason.
"""

import pathlib

import pytest
from source_files import load

import bnfuse

BENCHMARKS = pathlib.Path(__file__).parents[3] / "benchmarks"
SCRIPT = load(BENCHMARKS / "design_space.py")
DOCUMENTS = load(BENCHMARKS / "documents.py")
paper = SCRIPT.paper
TABLES = {table.key: table for table in SCRIPT.tables()}


def line(key, name):
    return next(x for x in TABLES[key].lines if x.name == name)


def computed(key, name):
    return [figure.computed for figure in line(key, name).figures]


@pytest.mark.parametrize("key", TABLES)
def test_every_figure_rounds_to_the_printed_one_but_for_those_with_a_reason(key):
    assert set(TABLES[key].off) == {note for note in SCRIPT.NOTES if note[0] == key}


def test_all_rows_of_the_paper_are_there():
    layers = [x.name for x in TABLES["4.2"].lines]
    convolutions = [f"conv{n}" for n in range(1, 13)]
    assert [x for x in layers if x.startswith("conv")] == convolutions
    assert [x for x in layers if x.startswith("pool")] == ["pool3", "pool6", "pool9", "pool12"]
    assert len(layers) == 1 + 12 + 4 + 2
    for key in paper.VARIANTS:
        removed = {"pool3"} if key == "4.7" else set()
        assert [x.name for x in TABLES[key].lines if x.name != "amount"] == [x for x in layers if x not in removed]
    assert len(TABLES["5.1"].lines) == 15 and len(TABLES["3.1"].lines) == 4 and len(TABLES["4.1"].lines) == 6


@pytest.mark.parametrize(
    ("printed", "figure", "rounds"),
    [
        ("1190MB", 1189.5e6, True),
        ("1190MB", 1184e6, False),
        ("0.0372MB", 37_248, True),
        ("0.0372MB", 37_300, False),
        ("4.1x", 4.149, True),
        ("4.2x", 4.149, False),
        ("120TF", 120.6e12, True),
        ("5.90GB", 5.9e9, True),
        ("5.90GB", 5.91e9, False),
        ("1248424", 1_248_424, True),
        ("1248424", 1_248_425, False),
    ],
)
def test_what_rounds(printed, figure, rounds):
    assert SCRIPT.Figure(printed, figure).rounds == rounds


def test_maps_of_table_4_2_and_its_variants():
    cases = {"4.2": (paper.SIZES_4_2, {}), **{key: (v[2], v[1]) for key, v in paper.VARIANTS.items()}}
    names = [x.name for x in TABLES["4.2"].lines][:17]
    for key, (sizes, settings) in cases.items():
        found = SCRIPT.maps_of(SCRIPT.nin(**settings))
        assert [found.get(name, "-") for name in names] == sizes.split(), key


# the layers that a change reaches: those that are not exactly 1x in output, parameters or computation
REACHED = {
    "4.3": ({"data"}, {"conv1"}, {"conv1"}),
    "4.4": ({"conv8"}, {"conv8", "conv9"}, {"conv8", "conv9"}),
    "4.5": ({"conv7", "conv8", "conv9"}, {"conv7"}, {"conv7", "conv8", "conv9"}),
    "4.6": ({"conv12", "pool12"}, {"conv12"}, {"conv12", "pool12"}),
}


@pytest.mark.parametrize("key", REACHED)
def test_local_changes_reach_their_layers_alone(key):
    rows = [x for x in TABLES[key].lines if x.name not in ("total", "amount", "rows")]
    for index, expected in enumerate(REACHED[key]):
        assert {x.name for x in rows if x.figures[index].computed not in (0, 1)} == expected


@pytest.mark.parametrize("key", ["4.7", "4.8"])
def test_global_changes_reach_every_layer_below_and_no_parameters(key):
    rows = [x for x in TABLES[key].lines if x.name.startswith("conv")]
    start = 3 if key == "4.7" else 0
    assert all(x.figures[1].computed == 1 for x in rows)
    assert [x.figures[2].computed == 1 for x in rows] == [True] * start + [False] * (12 - start)


def test_the_printed_totals_of_output_are_inputs_of_convolutions_and_not_sums_of_the_rows():
    rows = SCRIPT.quantities(SCRIPT.nin())
    assert SCRIPT.sum_of_rows(rows) == pytest.approx(8.27e9, rel=1e-3)
    read = [rows[x][0] for x in ("data", "conv1", "conv2", "pool3", "conv4", "conv5", "pool6", "conv7", "conv8")]
    read += [rows[x][0] for x in ("pool9", "conv10", "conv11")]
    assert rows["total"][0] == sum(read) == pytest.approx(5.90e9, rel=1e-3)
    assert "sum of the rows above: 8.27 GB" in str(TABLES["4.2"].section())


def test_reasons_in_table_4():
    conv11, conv12, pool12 = (computed("4.2", name) for name in ("conv11", "conv12", "pool12"))
    assert conv12[0] == conv11[0] * 1000 / 1024  # printed is conv11's
    assert 2 * pool12[2] == pytest.approx(0.0737e9, rel=1e-3)  # printed is twice that of the other poolings
    assert computed("4.3", "amount")[1] - computed("4.2", "total")[1] == 9 * 121 * 96 * 4
    assert computed("4.3", "amount")[0] - computed("4.2", "total")[0] == pytest.approx(3 * 633.2e6, rel=1e-3)
    assert computed("4.5", "conv8")[0] == pytest.approx(12**2 / 13**2)
    assert computed("4.8", "conv4")[0] == computed("4.8", "conv4")[2] == pytest.approx(55**2 / 27**2)


def test_data_of_table_3_1_is_what_convolutions_and_linear_layers_read():
    assert [computed("3.1", name)[0] for name in ("GoogLeNet", "VGG-19")] == pytest.approx([19.10e9, 42.68e9], rel=1e-3)
    # AlexNet with images of 224 and poolings that round up, by hand: data, conv2, conv3 to conv5, linear
    floats = 3 * 224**2 + 96 * 27**2 + 256 * 13**2 + 2 * 384 * 13**2 + 256 * 6**2 + 2 * 4096
    assert floats * 4 * 1024 == pytest.approx(1680e6, rel=2e-3)
    read = floats + 3 * (227**2 - 224**2)
    assert computed("3.1", "AlexNet")[0] == read * 4 * 1024


def test_the_auxiliary_heads_make_googlenet_54_megabytes():
    with_biases = 6_998_552 + sum(c * 128 + 128 + 2048 * 1024 + 1024 + 1024 * 1000 + 1000 for c in (512, 528))
    assert with_biases * 4 == pytest.approx(53.51e6, rel=1e-4)
    without = computed("3.1", "GoogLeNet")[1]
    assert 0 < with_biases * 4 - without < 0.06e6


def test_the_printed_ratios_of_table_3_1_are_no_quotients_of_its_columns():
    for name, (_, _, text) in paper.TABLE_3_1.items():
        data, weights, ratio, _ = (SCRIPT.Figure(x, 0).value for x in text.split())
        assert abs(data / weights - ratio) > 0.5 if name != "AlexNet" else data / weights < ratio * 0.7


def test_squeezenet_has_the_maps_of_table_5_1_but_for_a_slip():
    shapes = {x.name: x.words[1:] for x in TABLES["5.1"].lines if x.name != "total"}
    assert {name: pair for name, pair in shapes.items() if pair[0] != pair[1]} == {
        "maxpool8": ("13x12x512", "13x13x512")
    }
    assert computed("5.1", "total") == [1_248_424]


def test_complex_bypass_has_four_convolutions():
    (size,) = computed("5.3", "table 5.3: complex bypass")
    assert size == 4 * (1_248_424 + 341_248)
    assert size + 4 * 341_248 == pytest.approx(7.7e6, rel=5e-3)


def speedups(bandwidth):
    found = {}
    for name, workers, batch, epochs, _, printed in paper.TABLES_3_2_AND_3_3:
        point = SCRIPT.on_k20s(name, batch, [workers], bandwidth)
        found[name, workers, batch, epochs] = (SCRIPT.train(point, epochs, name)[1], float(printed.rstrip("x")))
    return found


def test_one_bandwidth_fitted_to_one_row_predicts_the_others():
    bandwidth = SCRIPT.fitted_bandwidth()
    assert bandwidth == pytest.approx(3.12e9, rel=1e-2)
    found = speedups(bandwidth)
    model, printed = found["NiN", 32, 256, 47]
    assert model == pytest.approx(printed)
    errors = {key: model / printed - 1 for key, (model, printed) in found.items()}
    assert {key: round(error, 2) for key, error in errors.items() if key[0] == "NiN"} == {
        ("NiN", 32, 256, 47): 0.0,
        ("NiN", 32, 1024, 47): 0.02,
        ("NiN", 128, 1024, 47): 0.08,
    }
    assert all(-0.15 < error < 0.15 for key, error in errors.items() if key[0] == "GoogLeNet")
    assert errors["AlexNet", 8, 1024, 100] < -0.4  # there the linear layers' gradients are not exchanged


def test_exchanging_the_gradients_of_convolutions_alone_gives_krizhevskys_speedup():
    found = SCRIPT.on_k20s("AlexNet", 1024, [8], SCRIPT.fitted_bandwidth(), size=SCRIPT.convolutions_alone())
    assert found.points[0].speedup == pytest.approx(7.7, rel=0.02)


def test_the_document_has_the_scripts_tables():
    document = (pathlib.Path(__file__).parents[3] / "docs" / "design-space.md").read_text(encoding="utf-8")
    begin, end = DOCUMENTS.marks("design_space.py")
    body = document.partition(begin)[2].partition(end)[0]
    parts = SCRIPT.sections(SCRIPT.NOMINAL)
    assert body.strip() == "\n\n".join(map(DOCUMENTS.markdown, parts))


def test_writing_replaces_what_is_between_the_marks_alone(tmp_path):
    path = tmp_path / "d.md"
    begin, end = DOCUMENTS.marks("a.py")
    path.write_text(f"before\n{begin}\nold\n{end}\nafter\n", encoding="utf-8")
    DOCUMENTS.write_into(path, "a.py", [bnfuse.core.text.Section.table("T", ("a", "b"), [("1|2", "3 *")])])
    table = "**T**\n\n| a | b |\n| ---: | ---: |\n| 1\\|2 | 3 \\* |"
    assert path.read_text(encoding="utf-8") == f"before\n{begin}\n\n{table}\n\n{end}\nafter\n"
    with pytest.raises(SystemExit, match="lacks the marks"):
        DOCUMENTS.write_into(path, "b.py", [])
