"use strict";
// The two graphs as rows. Only rows near the visible ones exist in the document; lines between them are drawn anew when
// that window moves. A node is {side, index}: side 0 is before, side 1 after. Texts are set as text, never as HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SIDES = ["before", "after"];
const NODES = DATA.sides.map((side) => side.nodes);
const ROW = 38; // pixels, as in page.css
const SPARE = 14; // rows kept above and below the visible ones
const FAR = 40; // rows: a longer edge is drawn as its two ends
const KNOWN = ["rcf", "mvf", "bnff", "icf", "sample", "remove"]; // passes with a colour of their own
const WIDE = 100; // user units across each drawing; CSS stretches them

const at = (id) => document.getElementById(id);
const scroller = at("scroller");
const same = (a, b) => a !== null && b !== null && a.side === b.side && a.index === b.index;

/** An element with properties, attributes (aria-*, role, data-*) and children; strings become text. */
function element(name, settings = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(settings)) {
    if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** For each side, the row of every node. */
function rowsByNode() {
  const rows = NODES.map((nodes) => new Array(nodes.length).fill(-1));
  DATA.rows.forEach((pair, row) => pair.forEach((index, side) => index >= 0 && (rows[side][index] = row)));
  return rows;
}
const rowOf = rowsByNode();
const row = (node) => rowOf[node.side][node.index];

/** For each side and node, who reads it: [reader, bytes]. */
const READERS = NODES.map((nodes) => {
  const readers = nodes.map(() => []);
  nodes.forEach((node, i) => node.inputs.forEach(([from, , bytes]) => from >= 0 && readers[from].push([i, bytes])));
  return readers;
});

/** For each node after, the nodes before that are counted with it. */
const MEMBERS = NODES[1].map(() => []);
DATA.home.forEach((home, i) => home >= 0 && MEMBERS[home].push(i));

/** Nodes of a side in the order of their rows, for the arrow keys. */
const ORDER = SIDES.map((_, side) => DATA.rows.map((pair) => pair[side]).filter((index) => index >= 0));
const PLACE = ORDER.map((order) => {
  const place = [];
  order.forEach((index, i) => (place[index] = i));
  return place;
});

/** What made a node, or became of it: a pass, "same", "new" (no pass says so) or "gone". */
function fateOf(side, index) {
  const after = side ? index : DATA.home[index];
  if (after < 0) return "gone";
  if (NODES[1][after].pass) return NODES[1][after].pass;
  return DATA.partner[after] >= 0 ? "same" : "new";
}
const colourOf = (fate) => (fate === "same" || fate === "gone" || KNOWN.includes(fate) ? fate : "other");

/** From a node after to the rows before that went into it: runs of neighbouring rows, each drawn as one band. */
const BANDS = [];
MEMBERS.forEach((members, after) => {
  const rows = members.map((i) => rowOf[0][i]).sort((a, b) => a - b);
  let start = 0;
  rows.forEach((at, i) => {
    if (i + 1 < rows.length && rows[i + 1] === at + 1) return;
    const [top, bottom, to] = [rows[start], at, rowOf[1][after]];
    BANDS.push({ top, bottom, to, after, from: Math.min(top, to), until: Math.max(bottom, to) });
    start = i + 1;
  });
});

const view = { first: 0, last: 0, selected: null, related: [], hits: new Set() };

function visibleRows() {
  const first = Math.max(0, Math.floor(scroller.scrollTop / ROW));
  return [first, Math.min(DATA.rows.length, Math.ceil((scroller.scrollTop + scroller.clientHeight) / ROW))];
}

/** Draw the window round the visible rows, if it has left what is drawn. */
function drawWhereNeeded() {
  const [first, last] = visibleRows();
  const missing = (first < view.first && view.first > 0) || (last > view.last && view.last < DATA.rows.length);
  if (missing) draw();
  moveFrame(first, last);
}

function draw(spare = SPARE) {
  const [first, last] = visibleRows();
  view.first = Math.max(0, first - spare);
  view.last = Math.min(DATA.rows.length, last + spare);
  const rows = DATA.rows.slice(view.first, view.last);
  SIDES.forEach((name, side) => {
    const nodes = rows.map((pair) => pair[side]).filter((index) => index >= 0);
    const shown = view.selected;
    if (shown && shown.side === side && !nodes.includes(shown.index)) nodes.push(shown.index); // it has the focus
    at(`side-${name}`).replaceChildren(...nodes.map((index) => nodeBox(side, index)));
    drawing(`edges-${name}`, edgesOf(side));
  });
  drawing("links", [...bandsInView(), ...linksOfSelected()]);
  moveFrame(first, last);
}

function nodeBox(side, index) {
  const node = NODES[side][index];
  const fate = fateOf(side, index);
  const classes = ["node", `fate-${colourOf(fate)}`, node.forward ? "forward" : "backward"];
  const isSelected = same(view.selected, { side, index });
  if (isSelected) classes.push("selected");
  else if (view.related.some((other) => same(other, { side, index }))) classes.push("related");
  if (view.hits.has(`${side}-${index}`)) classes.push("hit");
  const box = element(
    "div",
    { id: `${SIDES[side]}-${index}`, className: classes.join(" "), role: "option", title: `${node.name}\n${node.op}`,
      "aria-selected": String(isSelected), "aria-setsize": String(NODES[side].length),
      "aria-posinset": String(PLACE[side][index] + 1) },
    element("span", { className: "op" }, node.op),
    element("span", { className: "tag" }, side ? fate : fate === "same" || fate === "gone" ? fate : `→ ${fate}`),
    element("span", { className: "name" }, node.name),
    element("span", { className: "phase", title: node.forward ? "forward" : "backward" }, node.forward ? "F" : "B"),
  );
  box.style.top = `${ROW * rowOf[side][index]}px`;
  return box;
}

/** Put shapes into a drawing that covers the window. */
function drawing(id, shapes) {
  const height = ROW * (view.last - view.first);
  const svg = shape("svg", { viewBox: `0 0 ${WIDE} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.style.top = `${ROW * view.first}px`;
  svg.style.height = `${height}px`;
  svg.append(...shapes);
  at(id).replaceChildren(svg);
}

const middle = (row) => ROW * (row - view.first) + ROW / 2;

/** Edges at the outer border of a side, from producers to readers. */
function edgesOf(side) {
  const shapes = new Map(); // by what they look like: many edges into one node have the same end
  const near = side ? 0 : WIDE; // where the nodes are
  const inView = (row) => row >= view.first && row < view.last;
  const chosen = view.selected && view.selected.side === side ? view.selected.index : -1;
  const add = (from, to, bytes) => {
    for (const [kind, d] of edge(side, near, from, to, bytes, chosen)) shapes.set(kind + d, [kind, d]);
  };
  for (let r = view.first; r < view.last; r++) {
    const index = DATA.rows[r][side];
    if (index < 0) continue;
    for (const [from, , bytes] of NODES[side][index].inputs) {
      if (from >= 0) add(from, index, bytes);
    }
    for (const [reader, bytes] of READERS[side][index]) {
      if (!inView(rowOf[side][reader])) add(index, reader, bytes);
    }
  }
  return [...shapes.values()].map(([kind, d]) => shape("path", { class: kind, d }));
}

/** The lines of one edge, as [class, path]. */
function edge(side, near, from, to, bytes, chosen) {
  const [a, b] = [rowOf[side][from], rowOf[side][to]];
  const distance = Math.abs(b - a);
  const isChosen = from === chosen || to === chosen;
  if (!isChosen && !bytes && distance > 6) return []; // coefficients travel far: only those of the chosen node
  const kind = `edge ${bytes ? "map" : "vector"}${isChosen ? " chosen" : ""}`;
  const reach = Math.min(0.92, 0.16 + 0.13 * Math.log2(1 + distance)) * WIDE;
  const far = side ? near + reach : near - reach;
  const [y, z] = [middle(a), middle(b)];
  if (distance <= FAR || isChosen) {
    return [[kind, `M${near} ${y}C${far} ${y} ${far} ${z} ${near} ${z}`]];
  }
  const edgeEnd = side ? 0.9 * WIDE : 0.1 * WIDE;
  const stub = (at, way) => [`${kind} stub`, `M${near} ${at}Q${edgeEnd} ${at} ${edgeEnd} ${at + way}`];
  return [stub(y, Math.sign(b - a) * 14), stub(z, Math.sign(a - b) * 14)];
}

function bandsInView() {
  return BANDS.filter((band) => band.until >= view.first && band.from < view.last).map((band) => {
    const inset = 5;
    const [top, bottom] = [middle(band.top) - ROW / 2 + inset, middle(band.bottom) + ROW / 2 - inset];
    const [toTop, toBottom] = [middle(band.to) - ROW / 2 + inset, middle(band.to) + ROW / 2 - inset];
    const isChosen = view.selected && touches(band, view.selected);
    const d = `M0 ${top}C50 ${top} 50 ${toTop} ${WIDE} ${toTop}V${toBottom}C50 ${toBottom} 50 ${bottom} 0 ${bottom}Z`;
    return shape("path", { class: `band fate-${colourOf(fateOf(1, band.after))}${isChosen ? " chosen" : ""}`, d });
  });
}

function touches(band, node) {
  if (node.side) return band.after === node.index;
  return DATA.home[node.index] === band.after && row(node) >= band.top && row(node) <= band.bottom;
}

/** Lines from the selected node to everything on the other side that it became, or was made of. */
function linksOfSelected() {
  if (!view.selected) return [];
  const [x, z] = view.selected.side ? [WIDE, 0] : [0, WIDE];
  const y = middle(row(view.selected));
  const across = view.related.filter((other) => other.side !== view.selected.side).map((other) => middle(row(other)));
  return across.map((to) => shape("path", { class: "link", d: `M${x} ${y}C50 ${y} 50 ${to} ${z} ${to}` }));
}

/** Scroll so that a row is well inside the view; `middle`: into its middle, where it was not visible. */
function reveal(target) {
  const [top, height] = [ROW * target, scroller.clientHeight];
  const margin = Math.min(3 * ROW, height / 4);
  if (top < scroller.scrollTop + margin / 2 || top + ROW > scroller.scrollTop + height - margin / 2) {
    const isNear = top > scroller.scrollTop - 2 * ROW && top < scroller.scrollTop + height + ROW;
    const above = top < scroller.scrollTop + height / 2;
    scroller.scrollTop = isNear ? (above ? top - margin : top + ROW - height + margin) : top - height / 2.5;
  }
}

// The map of all rows at the side: what is where, hits, the selected node, and a frame round what is visible.
const PAINTS = [...KNOWN, "other", "same", "gone", "backward", "hit", "selected"];
const map = element("canvas", {});
const frame = element("div", { className: "frame" });
at("minimap").append(map, frame);

const marked = () => (view.selected ? [view.selected, ...view.related] : []);

function drawMap() {
  const [width, height] = [at("minimap").clientWidth, at("minimap").clientHeight];
  const [scale, style] = [window.devicePixelRatio || 1, getComputedStyle(document.documentElement)];
  if (!width || !height) return;
  [map.width, map.height] = [width * scale, height * scale];
  const paint = map.getContext("2d");
  paint.scale(scale, scale);
  const colours = Object.fromEntries(PAINTS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  const step = height / DATA.rows.length;
  const half = width / 2;
  const edge = Math.min(4, half / 5);
  const mark = (side, r, name, x, w) => {
    paint.fillStyle = colours[name];
    paint.fillRect(side * half + x, r * step, w, Math.max(step, name === "selected" || name === "hit" ? 2.5 : 0.8));
  };
  rowOf.forEach((rows, side) => rows.forEach((r, index) => {
    mark(side, r, colourOf(fateOf(side, index)), edge, half - 2 * edge - 1);
    if (!NODES[side][index].forward) mark(side, r, "backward", half - edge, edge / 2);
  }));
  for (const hit of view.hits) {
    const [side, index] = hit.split("-").map(Number);
    mark(side, rowOf[side][index], "hit", 0, edge);
  }
  for (const node of marked()) mark(node.side, row(node), "selected", 0, half - edge);
}

/** The frame on the map, and how many related nodes are out of sight. */
function moveFrame(first, last) {
  const all = DATA.rows.length || 1;
  frame.style.top = `${(100 * first) / all}%`;
  frame.style.height = `${(100 * (last - first)) / all}%`;
  const rows = marked().map(row);
  const above = rows.filter((r) => r < first);
  const below = rows.filter((r) => r >= last);
  for (const [id, list, sign, word, next] of [
    ["above", above, "▲", "above", Math.max(...above)],
    ["below", below, "▼", "below", Math.min(...below)],
  ]) {
    at(id).hidden = !list.length;
    at(id).textContent = `${sign} ${list.length}`;
    at(id).title = `${list.length} of the marked nodes are ${word}`;
    at(id).dataset.row = list.length ? next : "";
  }
}
