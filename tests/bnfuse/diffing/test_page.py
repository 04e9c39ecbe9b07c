"""The page of a difference as a file: that it is sound, and that its numbers are the difference's."""

import base64
import hashlib
import itertools
import json
import random
import re
from importlib import resources

import onnx_ir as ir
import pytest
from page_case import HOSTILE, SMALL, Document, hostile_pair, small

import bnfuse
from bnfuse.build.named import build_model
from bnfuse.cli import main
from bnfuse.core.errors import BnfuseError
from bnfuse.diffing import diff_graphs
from bnfuse.diffing.page import diff_page, document, estimates, rewrite_page
from bnfuse.diffing.page.align import align, longest_increasing, nearest_order, rows_of
from bnfuse.diffing.page.gather import gather
from bnfuse.diffing.page.lists import saved
from bnfuse.diffing.page.markup import Markup, script_json, table, tag, text
from bnfuse.diffing.page.nodes import nodes_of, unique_keys
from bnfuse.diffing.page.norms import Cost
from bnfuse.graph.training_graph import open_graph

LIMIT = 3_000_000  # bytes of densenet121's page


@pytest.fixture(scope="module")
def pair():
    before = small()
    return open_graph(before), open_graph(bnfuse.rewrite(before, level="icf").model)


@pytest.fixture(scope="module")
def gathered(pair):
    return gather(*pair, hardware=("h100",))


@pytest.fixture(scope="module")
def page(pair):
    return Document(diff_page(*pair))


def test_elements_match_and_every_id_is_there_once(page):
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = {a[key] for _, a, _ in page.elements for key in ("aria-labelledby", "aria-describedby", "for") if key in a}
    assert named <= set(ids)


def test_the_policy_allows_this_style_and_this_script_and_nothing_else(page):
    policy = next(a["content"] for a, _ in page.named("meta") if a.get("http-equiv") == "Content-Security-Policy")
    (style,) = [text for _, text in page.named("style")]
    (script,) = [text for attributes, text in page.named("script") if "type" not in attributes]

    def digest(source):
        return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"

    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert (rules["style-src"], rules["script-src"]) == (digest(style), digest(script))


def test_no_element_carries_script_style_or_a_foreign_address(page):
    for _, attributes, _ in page.elements:
        assert not any(name.startswith("on") or name in ("style", "src") for name in attributes)
        assert re.match(r"#|data:,$", attributes.get("href") or "#")


def test_the_script_sets_no_html():
    source = "".join(document.asset(name) for name in document.SCRIPTS)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|fetch\(|XMLHttpRequest", source
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_stays_a_text(name):
    read = Document(tag("p", tag("a", name, title=name)))
    assert [element for element, _, _ in read.elements] == ["p", "a"]
    assert read.named("a") == [({"title": name}, name)]
    written = script_json({name: [name]})
    assert not set("<>&\u2028\u2029") & set(written)
    assert json.loads(written) == {name: [name]}


def test_what_no_document_may_contain_shows_as_a_box():
    assert text("a\x00b\x1bc\ud800") == "a\ufffdb\ufffdc\ufffd"
    assert text(Markup("<b>")) == "<b>"


def test_a_graph_of_hostile_names_makes_a_page_of_the_same_elements():
    before, after = hostile_pair()
    attacked = Document(diff_page(before, after))
    kinds = {name for name, _, _ in attacked.elements}
    assert not kinds & {"img", "b", "iframe", "object", "embed"}
    assert len(attacked.named("script")) == 2
    assert {node["name"] for node in attacked.data["sides"][0]["nodes"]} == {node.name for node in before.graph}


def test_sweeps_bytes_and_views_are_those_of_the_difference(pair, page):
    found, tables = diff_graphs(*pair).to_json(), page.tables()
    for caption, moved, free in (
        ("Feature-map sweeps", "feature_map_sweeps", "aliased_sweeps"),
        ("Feature-map bytes read and written", "feature_map_bytes", "aliased_bytes"),
    ):
        for phase in ("forward", "backward"):
            assert tables[caption][phase] == [str(found[moved][side][phase]) for side in ("before", "after")]
        totals = [str(sum(found[key][side].values())) for key in (moved, free) for side in ("before", "after")]
        assert tables[caption]["step"] + tables[caption]["of these, views at run time"] == totals


def test_operators_and_batch_norms_are_those_of_the_difference(pair, page):
    found, tables = diff_graphs(*pair).to_json(), page.tables()
    before, after = found["ops"]["before"], found["ops"]["after"]
    shown = tables["Operators"]
    assert shown["all nodes"] == [str(sum(before.values())), str(sum(after.values()))]
    for name in {*before, *after}:
        if before.get(name) != after.get(name):
            assert shown[name] == [str(before.get(name, 0)), str(after.get(name, 0))]
    assert tables["BatchNorms"]["fused"] == [str(sum(norm["fused"] for norm in found["batch_norms"]))]
    assert tables["BatchNorms"]["all"] == [str(len(found["batch_norms"]))]


def test_every_batch_norm_is_listed_with_its_halves(pair, page):
    listed = [text for attributes, text in page.named("details") if attributes.get("class") == "norm"]
    for norm, shown in zip(diff_graphs(*pair).to_json()["batch_norms"], listed, strict=True):
        assert norm["name"] in shown
        assert all(
            place["node"] in shown for half in ("statistics", "normalize", "gradient_input") for place in norm[half]
        )


def test_the_estimate_is_the_estimators(pair, gathered, page):
    (estimated,) = gathered.estimates.found
    shown = page.tables()[f"Estimated time on {estimated.hardware.about}"]["step"]
    assert [float(value) for value in shown] == [estimated.before.time_s, estimated.after.time_s]
    assert estimated.after.time_s < estimated.before.time_s


def test_a_graph_that_cannot_be_estimated_says_why(pair, monkeypatch):
    def refuse(graph):
        raise BnfuseError("node 'a' (Odd) has no type <of layer>")

    monkeypatch.setattr(estimates, "training_workload", refuse)
    assert "No estimate of time: node &#x27;a&#x27; (Odd) has no type &lt;of layer&gt;" in diff_page(*pair)


def test_the_same_graphs_make_the_same_page(pair):
    assert diff_page(*pair) == diff_page(*pair)
    source = small()
    first, second = (rewrite_page(source, bnfuse.rewrite(source, level="bnff"), output="a.onnx") for _ in range(2))
    assert first == second


def test_equal_graphs_face_each_other_row_by_row(pair):
    page = Document(diff_page(pair[0], pair[0]))
    count = len(pair[0].model.graph)
    assert page.data["rows"] == [[i, i] for i in range(count)]
    assert any("The graphs are equal." in text for _, text in page.named("p"))


def test_rows_hold_every_node_once_and_follow_every_edge(gathered):
    for side, nodes in enumerate((gathered.before, gathered.after)):
        order = [row[side] for row in gathered.alignment.rows if row[side] is not None]
        assert sorted(order) == list(range(len(nodes)))
        place = {node: row for row, node in enumerate(order)}
        for i, node in enumerate(nodes):
            assert all(place[read.producer] < place[i] for read in node.inputs if read.producer is not None)


def test_most_nodes_that_keep_their_name_face_themselves(gathered):
    before, after = ({node.label: i for i, node in enumerate(nodes)} for nodes in (gathered.before, gathered.after))
    kept = {(before[name], after[name]) for name in before.keys() & after.keys()}
    assert len(kept & set(gathered.alignment.rows)) >= 0.8 * len(kept)


def test_savings_add_up_home_by_home(gathered):
    """What each node after saves against what was fused into it, and what has no home, is the whole difference."""
    homes = gathered.alignment.home
    at_homes = sum(gathered.before[i].sweeps for i in homes) - sum(node.sweeps for node in gathered.after)
    homeless = sum(node.sweeps for i, node in enumerate(gathered.before) if i not in homes)
    diff = gathered.diff
    assert at_homes + homeless == diff.traffic_before.total.sweeps - diff.traffic_after.total.sweeps


def test_a_batch_norm_saves_its_own_sweeps(gathered):
    norm = next(norm for norm in gathered.norms if norm.status == "fused")
    assert norm.own_before.sweeps == 5  # it reads and writes a map, its gradient reads two and writes one
    assert norm.own_after.sweeps == 0
    assert norm.around_before.sweeps > norm.around_after.sweeps


def test_what_a_rewrite_refused_is_told_with_its_reason():
    source = small()
    rewritten = bnfuse.rewrite(source, level="rcf")
    page = Document(rewrite_page(source, rewritten, output="after.onnx"))
    tables = page.tables()
    count, names = len(rewritten.report.unfused), {entry.node for entry in rewritten.report.unfused}
    assert names and tables["BatchNorms"]["whole"] == tables["BatchNorms"]["refused"] == [str(len(names))]
    assert names == set(tables[f"Halves that are not fused ({count})"])
    assert all(norm["reasons"] for norm in page.data["norms"])


def test_what_a_sampled_batch_norm_does_on_its_own_counts_against_it():
    source = small()
    found = gather(open_graph(source), open_graph(bnfuse.rewrite(source, sample="fs:1/4")), hardware=())
    for norm in found.norms:
        assert 0 < norm.own_after.bytes < norm.around_after.bytes
        assert norm.own_after.bytes < norm.own_before.bytes


@pytest.mark.parametrize(
    "before, after, shown",
    [
        (Cost(9, 2000), Cost(5, 1000), "4 sweeps, 1 kB less"),
        (Cost(5, 2000), Cost(6, 1000), "1 kB less; 1 sweep more"),
        (Cost(5, 1000), Cost(7, 3000), "2 sweeps, 2 kB more"),
        (Cost(5, 1000), Cost(5, 1000), "nothing saved"),
    ],
)
def test_savings_in_words(before, after, shown):
    assert saved(before, after) == shown


@pytest.mark.parametrize("how, status", [({"remove": "1,2"}, "gone"), ({"sample": "fs:1/4"}, "sampled")])
def test_removed_and_sampled_batch_norms_have_a_status(how, status):
    source = small()
    page = Document(rewrite_page(source, bnfuse.rewrite(source, **how)))
    assert {norm["status"] for norm in page.data["norms"]} >= {status}
    assert page.tables()["BatchNorms"][status]


def test_a_rewritten_graph_may_be_the_one_before():
    source = small()
    page = Document(diff_page(bnfuse.rewrite(source, level="bnff"), bnfuse.rewrite(source, level="icf")))
    assert page.data["norms"] == []
    assert any("no BatchNorm" in text for _, text in page.named("p"))
    assert sum(home >= 0 for home in page.data["home"]) > 0.8 * len(page.data["home"])


def test_nodes_without_names_and_with_equal_names_are_told_apart():
    assert unique_keys(["a", "b", "a", "a (2)", "a"]) == ["a", "b", "a (3)", "a (2)", "a (4)"]
    model = small()
    for node in model.graph:
        node.name = None if node.op_type == "Relu" else "twin"
    keys = [node.key for node in nodes_of(open_graph(model))]
    assert len(set(keys)) == len(keys)
    assert len(Document(diff_page(model, model)).data["rows"]) == len(keys)


def test_the_longest_increasing_subsequence_is_one():
    random.seed(0)
    for _ in range(50):
        values = [random.randrange(6) for _ in range(7)]
        found = longest_increasing(list(enumerate(values)))
        best = max(
            n
            for n in range(8)
            if any(all(a < b for a, b in itertools.pairwise(some)) for some in itertools.combinations(values, n))
        )
        assert len(found) == best
        assert all(i < j and a < b for (i, a), (j, b) in itertools.pairwise(found))


def test_the_nearest_order_of_what_is_in_order_is_the_same():
    nodes = nodes_of(open_graph(small()))
    assert nearest_order(nodes, range(len(nodes))) == list(range(len(nodes)))


def test_a_gap_is_where_nodes_part():
    """1 and 2 went into 10 above, 3 into 11 below; nothing faces the middle."""
    home = {0: 10, 1: 10, 2: 11, 3: 11}
    order = [10, 5, 6, 7, 11]
    rows = rows_of(4, order, {10: 0, 11: 3}, home)
    assert rows == ((0, 10), (1, 5), (None, 6), (2, 7), (3, 11))


def test_graphs_without_anything_in_common_stand_apart(gathered):
    found = align(gathered.before, [], {}, {})
    assert list(found.rows) == [(i, None) for i in range(len(gathered.before))]
    assert found.home == {}


def test_tables_name_their_columns_and_rows():
    read = Document(table("t", ("", "n"), [("a", 1)], numbers=(1,)))
    assert [attributes["scope"] for attributes, _ in read.named("th")] == ["col", "row"]  # the corner is no header
    assert read.named("caption")[0][1] == "t"


def test_text_stands_out_from_what_is_behind_it():
    """WCAG 2 AA, 4.5 to 1, in both schemes."""
    style = resources.files("bnfuse.diffing.page").joinpath("page.css").read_text()
    schemes = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]
    assert len(schemes) == 2
    for scheme in schemes:
        for front, back in itertools.product(("text", "quiet", "link"), ("back", "panel")):
            assert contrast(scheme[front], scheme[back]) >= 4.5, (front, back)
        for fate in ("rcf", "mvf", "bnff", "icf", "sample", "remove", "other"):  # what a node's text stands on
            tint = mixed(scheme[fate], scheme["back"], 0.11)
            assert contrast(scheme["quiet"], tint) >= 4.5, fate
            assert contrast(scheme["text"], mixed(scheme[fate], scheme["back"], 0.28)) >= 4.5, fate
            assert contrast(scheme[fate], scheme["back"]) >= 3, fate


def channels(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def mixed(colour, back, share):
    both = zip(channels(colour), channels(back), strict=True)
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in both)


def contrast(one, other):
    def luminance(colour):
        linear = [
            c / 12.92 if (c := value / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for value in channels(colour)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_command_writes_the_page_beside_text_and_json(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    network = [*itertools.chain(*(["--set", f"{key}={SMALL[key]}"] for key in ("growth", "depth")))]
    assert main(["build", "densenet40", "--batch", "2", "--image", "16", *network, "-o", "train.onnx"]) == 0
    assert main(["rewrite", "train.onnx", "-o", "fused.onnx", "--report", "r.html"]) == 0
    report = Document((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert "Rewrite report, level icf" in report.named("header")[0][1]
    assert main(["diff", "train.onnx", "fused.onnx", "--format", "html", "-o", "d.html"]) == 0
    written = (tmp_path / "d.html").read_text(encoding="utf-8")
    assert Document(written).data == report.data
    capsys.readouterr()
    assert main(["diff", "train.onnx", "fused.onnx", "--format", "html", "--exit-code"]) == 1
    assert capsys.readouterr().out == written
    for name in ("r.json", "r.txt"):
        assert main(["rewrite", "train.onnx", "-o", "fused.onnx", "--report", name]) == 0
        assert json.loads((tmp_path / name).read_text())["level"] == "icf"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_page_of_densenet121_is_small():
    before = build_model("densenet121", zoo={"batch": 16}).model
    page = diff_page(before, bnfuse.rewrite(before, level="icf"))
    assert len(page.encode()) < LIMIT
    assert len(Document(page).data["sides"][0]["nodes"]) == 924


def test_a_foreign_graph_without_provenance_is_compared_by_its_structure():
    """Two graphs that no pass of ours has seen: what is the same is told by structure, the rest is new or gone."""
    before, after = small(), small()
    for node in after.graph:
        node.name = f"other/{node.name}"
        for value in node.outputs:
            if value.name and not value.is_graph_output():
                value.name = f"other/{value.name}"
    last = next(node for node in after.graph if node.op_type == "Relu")
    last.op_type = "Softplus"
    read = Document(diff_page(before, after))
    kinds = [node["op"] for node in read.data["sides"][1]["nodes"]]
    partner = read.data["partner"]
    assert partner[kinds.index("Conv")] >= 0  # nothing above it differs
    assert partner[kinds.index("Softplus")] == -1
    assert read.data["into"][[n["op"] for n in read.data["sides"][0]["nodes"]].index("Relu")] == []


def test_another_operator_of_the_same_name_faces_the_one_before():
    before, after = small(), small()
    changed = next(node for node in after.graph if node.op_type == "Relu")
    changed.op_type = "Softplus"
    another = ir.Node("", "Sigmoid", changed.inputs, name="another")
    after.graph.insert_before(changed, another)  # moves all below by a row
    data = Document(diff_page(before, after)).data
    names = [[node["name"] for node in side["nodes"]] for side in data["sides"]]
    b, a = (side.index(changed.name) for side in names)
    assert b != a and [b, a] in data["rows"]
    assert (data["home"][b], data["partner"][a]) == (-1, -1)  # what one reads is not set against what the other does


def test_graphs_in_the_wrong_order_are_told_so(pair):
    before, after = pair
    hint = "looks like a rewrite of the graph after"
    swapped = Document(diff_page(after, before))
    assert any(hint in text for _, text in swapped.named("p"))
    names = [[node["name"] for node in side["nodes"]] for side in swapped.data["sides"]]
    facing = sum(b >= 0 and a >= 0 and names[0][b] == names[1][a] for b, a in swapped.data["rows"])
    assert facing >= 0.8 * len({*names[0]} & {*names[1]})
    for graphs in ((before, after), (before, before), (after, after)):
        assert hint not in diff_page(*graphs)


def test_the_figure_of_batch_norms_says_what_it_counts(pair):
    def shown(*graphs):
        return [text for _, text in Document(diff_page(*graphs)).named("div") if text.startswith("BatchNorms fused")]

    count = len(diff_graphs(*pair).batch_norms)
    assert shown(*pair) == [f"BatchNorms fused{count} of {count}no sweep of their own"]
    sampled = bnfuse.rewrite(small(), sample="fs:1/4")
    assert shown(small(), sampled) == [f"BatchNorms fused{count} of {count}{count} of them read samples on their own"]
    assert shown(pair[1], pair[1]) == []  # there was none to fuse


def test_the_style_has_no_rule_that_browsers_drop():
    """Braces match, and nothing stands between a rule and the next: a browser would skip the next."""
    style = re.sub(r"/\*.*?\*/", "", document.asset("page.css"), flags=re.DOTALL)
    assert style.count("{") == style.count("}")
    assert not re.search(r"}\s*;", style)
