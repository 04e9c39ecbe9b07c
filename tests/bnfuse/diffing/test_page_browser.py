"""The page of a difference in a browser: a click, a search, the keyboard, no script, small windows, hostile names."""

import pytest
from page_case import hostile_pair, small

import bnfuse
from bnfuse.build.named import build_model
from bnfuse.diffing.page import diff_page, rewrite_page

pytestmark = pytest.mark.browser

LAPTOP = {"width": 1280, "height": 800}

# where the focus is, by the nearest id, and whether that shows
FOCUS = """(() => {
  const it = document.activeElement === document.body ? null : document.activeElement;
  const shown = it && (it.querySelector(".selected") || it);
  if (!it) return { id: "", outline: "none" };
  return { id: it.closest("[id]")?.id || "skip", outline: getComputedStyle(shown).outlineStyle };
})()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Files by name."""
    folder = tmp_path_factory.mktemp("pages")
    before = small()
    rewritten = bnfuse.rewrite(before, level="icf")
    sampled = bnfuse.rewrite(before, level="bnff", sample="fs:1/4")
    dense = build_model("densenet121", zoo={"batch": 16}).model
    named = bnfuse.rewrite(before).model
    named.graph[0].metadata_props["bnfuse.pass"] = 300 * "x"
    made = {
        "named": diff_page(before, named),
        "small": diff_page(before, rewritten),
        "refused": rewrite_page(before, sampled, output="sampled.onnx"),
        "equal": diff_page(before, before),
        "hostile": diff_page(*hostile_pair()),
        "large": diff_page(dense, bnfuse.rewrite(dense, level="icf")),
    }
    for name, page in made.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return folder


@pytest.fixture
def visit(pages, browser):
    """Opens a page in a window of its own. Whatever it asks for, prints or breaks on is an error at the end."""
    contexts, wrong = [], []

    def opened(name, fragment="", **settings):
        context = browser.new_context(**{"viewport": LAPTOP, **settings})
        context.set_default_timeout(30_000)  # of a busy machine
        contexts.append(context)
        page = context.new_page()
        address = (pages / f"{name}.html").as_uri()
        page.on("request", lambda request: wrong.append(request.url) if request.url.split("#")[0] != address else None)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.goto(address + fragment)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def chosen(page):
    """Side and name of the selected node."""
    node = page.evaluate(
        "view.selected && [SIDES[view.selected.side], NODES[view.selected.side][view.selected.index].name]"
    )
    return tuple(node) if node else None


def is_visible_in_list(page, selector):
    inside = "(node) => { const a = node.getBoundingClientRect(), b = at('scroller').getBoundingClientRect();"
    return page.locator(selector).first.evaluate(f"{inside} return a.top >= b.top - 1 && a.bottom <= b.bottom + 1; }}")


def test_a_click_on_a_batch_norm_shows_what_became_of_its_halves(visit):
    page = visit("small")
    page.locator("#side-before .node", has_text="BatchNorm").nth(1).click()
    side, name = chosen(page)
    assert side == "before"
    details = page.locator("#details")
    assert details.locator("h3").inner_text() == name
    assert [term.inner_text() for term in details.locator("dt").all()][:4] == [
        "statistics",
        "normalize",
        "gradient reduce",
        "gradient input",
    ]
    assert "its operators alone, sweeps" in details.inner_text()
    assert page.locator("#side-after .node.related").count() >= 2
    assert page.evaluate("location.hash") == f"#node={name}&side=before"


def test_a_half_leads_to_the_node_that_does_it_and_back_leads_home(visit):
    page = visit("small", "#node=block2/layer1/norm1&side=before")
    start = chosen(page)
    link = page.locator("#details dd a").last
    there = link.inner_text()
    link.click()
    assert chosen(page) == ("after", there)
    assert is_visible_in_list(page, "#side-after .node.selected")
    assert "Does for BatchNorms" in page.locator("#details").inner_text()
    page.go_back()
    assert chosen(page) == start
    page.go_forward()
    assert chosen(page) == ("after", there)


def test_an_address_opens_its_node_and_one_without_a_side_the_graph_before(visit):
    first = visit("small")
    first.locator("#side-after .node").nth(3).click()
    second = visit("small", first.evaluate("location.hash"))
    assert chosen(second) == chosen(first)
    assert is_visible_in_list(second, "#side-after .node.selected")
    assert chosen(visit("small", "#node=stem/conv")) == ("before", "stem/conv")
    assert chosen(visit("small", "#node=no-such-node&side=before")) is None
    assert chosen(visit("small", "#node=stem/conv&side=beside")) is None


def test_a_search_counts_and_steps_through_its_hits(visit):
    page = visit("small")
    page.keyboard.press("/")
    page.keyboard.type("relu block1")
    names = page.evaluate("NODES.map((nodes) => nodes.map((node) => `${node.name} ${node.op}`.toLowerCase()))")
    counts = [sum("relu" in name and "block1" in name for name in side) for side in names]
    assert all(counts)
    assert page.locator("#hits").inner_text() == f"{sum(counts)} found: {counts[0]} before, {counts[1]} after"
    page.keyboard.press("Enter")
    first = chosen(page)
    page.keyboard.press("Enter")
    assert chosen(page) != first
    assert page.locator("#hits").inner_text().startswith(f"2 of {sum(counts)} found")
    page.keyboard.press("Shift+Enter")
    assert chosen(page) == first
    page.keyboard.press("Escape")
    assert (page.locator("#search").input_value(), page.locator(".node.hit").count()) == ("", 0)
    page.keyboard.press("Escape")
    assert chosen(page) is None
    page.locator("#search").fill("nothing is called so")
    assert page.locator("#hits").inner_text() == "nothing found"


def test_a_pass_of_the_legend_finds_its_nodes(visit):
    page = visit("small")
    button = page.locator("#legend button", has_text="icf")
    count = int(button.inner_text().split()[-1])
    button.click()
    assert f"{count} after" in page.locator("#hits").inner_text()


def test_the_keyboard_walks_along_the_graph_and_across(visit):
    page = visit("small")
    page.locator("#side-before").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    side, name = chosen(page)
    active = page.locator("#side-before").get_attribute("aria-activedescendant")
    assert (side, page.locator(f"#{active}").get_attribute("aria-selected")) == ("before", "true")
    page.keyboard.press("Shift+ArrowDown")  # to a reader
    reader = chosen(page)[1]
    reads = page.evaluate(
        "(n) => NODES[0].find((node) => node.name === n).inputs.map(([from]) => NODES[0][from]?.name)", reader
    )
    assert name in reads
    page.keyboard.press("ArrowRight")
    assert chosen(page)[0] == "after"
    assert page.evaluate("document.activeElement.id") == "side-after"
    page.keyboard.press("ArrowLeft")
    assert chosen(page)[0] == "before"
    page.keyboard.press("End")
    assert chosen(page)[1] == page.evaluate("NODES[0][ORDER[0].at(-1)].name")
    assert is_visible_in_list(page, "#side-before .node.selected")


@pytest.mark.parametrize("inside, key", [("a", "Escape"), ("button.close", "Enter")])
def test_closing_a_node_by_key_leaves_the_focus_in_its_list(visit, inside, key):
    page = visit("small", "#node=block1/layer1/norm1&side=before")
    page.locator(f"#details {inside}").first.focus()
    page.keyboard.press(key)
    assert chosen(page) is None
    assert page.evaluate("document.activeElement.id") == "side-before"


def test_the_tab_key_reaches_everything_and_its_place_is_visible(visit):
    page = visit("small")
    page.evaluate("choose({ side: 0, index: 5 }, null)")
    seen = set()
    for _ in range(200):
        page.keyboard.press("Tab")
        focus = page.evaluate(FOCUS)
        if focus["id"] in ("", "other"):
            break
        seen.add(focus["id"])
        assert focus["outline"] != "none"
    assert {"skip", "search", "legend", "side-before", "side-after", "details", "norms"} <= seen


def test_without_script_the_tables_and_the_batch_norms_are_there(visit):
    page = visit("refused", java_script_enabled=False)
    assert page.locator("#explorer").is_hidden()
    assert page.locator("#no-script").is_visible()
    assert page.locator("#summary table").first.is_visible()
    norm = page.locator("details.norm").first
    assert not norm.locator("dl").is_visible()
    norm.locator("summary").click()
    assert norm.locator("dl").is_visible()
    assert "normalize" in norm.inner_text()
    assert "Passes, in the order in which they ran" in page.locator("#rewrite").inner_text()


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_no_window_makes_the_page_scroll_sideways(visit, width):
    page = visit("small", "#node=block1/layer1/norm1&side=before", viewport={"width": width, "height": 800})
    page.evaluate("document.querySelectorAll('details').forEach((each) => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("before", "after"):
        node = page.locator(f"#side-{name} .node").first.bounding_box()
        assert node["width"] > 0.3 * min(width, 900) - 20
        head = page.locator(f"#head-{name}").bounding_box()
        assert abs(head["x"] - node["x"]) < 12  # of these up to 9 by the bar to scroll with


def test_hostile_names_are_shown_and_do_nothing(visit):
    page = visit("hostile")
    names = page.evaluate("NODES.flatMap((nodes, side) => nodes.map((node, index) => address({ side, index })))")
    for fragment in names[:16]:
        page.goto(page.url.split("#")[0] + fragment)
        _, name = chosen(page)
        assert (
            page.locator("#details h3").inner_text().split()
            == name.replace("\u2028", " ").replace("\u2029", " ").split()
        )
    page.locator("#search").fill("<script>")
    page.keyboard.press("Enter")
    assert "found" in page.locator("#hits").inner_text()
    page.locator("#legend button").first.click()
    assert page.evaluate("window.pwned") is None
    assert page.locator("img, #explorer script").count() == 0


def test_a_long_name_of_a_pass_stays_inside_the_window(visit):
    page = visit("named")
    assert max(len(button.inner_text()) for button in page.locator("#legend button").all()) > 300
    assert page.evaluate("document.documentElement.scrollWidth") <= LAPTOP["width"]


def test_equal_graphs_face_each_other(visit):
    page = visit("equal")
    tops = [
        page.locator(f"#side-{side} .node").evaluate_all("(all) => all.map((node) => node.style.top)")
        for side in ("before", "after")
    ]
    assert tops[0] == tops[1]
    assert page.locator("#legend button").count() == 1


def test_only_rows_near_the_visible_ones_are_in_the_document(visit):
    page = visit("large")
    assert page.evaluate("DATA.rows.length") > 900
    for share in (0, 0.5, 1):
        page.evaluate("(share) => { scroller.scrollTop = share * scroller.scrollHeight; }", share)
        page.wait_for_timeout(100)
        assert 10 < page.locator(".node").count() < 150
        edge = page.evaluate("visibleRows()")
        drawn = page.evaluate("[view.first, view.last]")
        assert drawn[0] <= edge[0] and drawn[1] >= edge[1]


def test_printing_takes_the_rows_that_are_visible(visit):
    page = visit("large", "#node=block2/layer5/norm1&side=before")
    rows = page.evaluate("(() => { const [a, b] = visibleRows(); return b - a; })()")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("at('canvas').offsetHeight") == rows * page.evaluate("ROW")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("at('canvas').offsetHeight === ROW * DATA.rows.length")
    assert len(page.pdf()) > 10_000


@pytest.mark.parametrize(
    "action",
    [
        pytest.param("() => {}", id="as it opens"),
        pytest.param("() => choose({ side: 1, index: 700 })", id="far away"),
        pytest.param("() => { scroller.scrollTop += 9000; }", id="scrolled"),
    ],
)
def test_of_a_large_graph_only_what_is_near_is_drawn(visit, action):
    """What keeps actions short; benchmarks/page_latency.py has their times."""
    page = visit("large", "#graphs")
    page.evaluate(action)
    page.wait_for_timeout(100)
    drawn = page.locator(".node").count()
    seen = 2 * page.evaluate("scroller.clientHeight / ROW")
    assert 0 < drawn < 4 * seen < page.evaluate("NODES[0].length + NODES[1].length") / 4
