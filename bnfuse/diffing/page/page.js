// Choosing nodes: by pointer, by keyboard, by search and by address. The address is the state: #node=NAME&side=after.

/** Select a node, or none, and show it. `how`: "push" makes a step of the browser's history, "replace" none. */
function choose(node, how = "push") {
  const left = !node && at("details").contains(document.activeElement) ? view.selected : null;
  view.selected = node;
  view.related = node ? relatedTo(node) : [];
  if (node) reveal(row(node));
  drawMap();
  showDetails(node); // what asks for the layout comes before what changes it
  draw();
  SIDES.forEach((name, side) => {
    const list = at(`side-${name}`);
    if (node && node.side === side) list.setAttribute("aria-activedescendant", `${name}-${node.index}`);
    else list.removeAttribute("aria-activedescendant");
  });
  if (left) focusOn(left); // where the focus was has gone
  const target = node ? address(node) : "#graphs";
  if (how && location.hash !== target) history[how === "push" ? "pushState" : "replaceState"](null, "", target);
}

const focusOn = (node) => at(`side-${SIDES[node.side]}`).focus({ preventScroll: true });

/** The node that an address names; without a side, the graph before is asked first. */
function nodeAt(hash) {
  const asked = new URLSearchParams(hash.slice(1));
  if (!asked.has("node")) return null;
  for (const side of asked.has("side") ? [SIDES.indexOf(asked.get("side"))] : [0, 1]) {
    const index = side < 0 ? -1 : NODES[side].findIndex((node) => node.name === asked.get("node"));
    if (index >= 0) return { side, index };
  }
  return null;
}

function followAddress() {
  const node = nodeAt(location.hash);
  if (node && !same(node, view.selected)) {
    at("graphs").scrollIntoView({ block: "start" });
    choose(node, null);
    focusOn(node);
  } else if (!node && view.selected) choose(null, null);
}

// Search: every word must be somewhere in the node's name, operator, pass ("pass:icf") or BatchNorm status.
const TEXTS = NODES.map((nodes, side) => nodes.map((node, index) => {
  const status = !side && NORMS.has(index) ? `status:${NORMS.get(index).status}` : "";
  return `${node.name} ${node.op} pass:${fateOf(side, index)} ${status}`.toLowerCase();
}));
let hits = [];
let hitAt = -1;

function find(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  hits = [];
  hitAt = -1;
  if (words.length) {
    for (const pair of DATA.rows) {
      pair.forEach((index, side) => {
        if (index >= 0 && words.every((word) => TEXTS[side][index].includes(word))) hits.push({ side, index });
      });
    }
  }
  view.hits = new Set(hits.map((hit) => `${hit.side}-${hit.index}`));
  const [first, last] = visibleRows();
  if (hits.length && !hits.some((hit) => row(hit) >= first && row(hit) < last)) reveal(row(hits[0]));
  drawMap();
  draw();
  sayHits(words.length > 0);
}

function sayHits(asked) {
  const before = hits.filter((hit) => !hit.side).length;
  const place = hitAt >= 0 ? `${hitAt + 1} of ` : "";
  at("hits").textContent = !asked ? "" : hits.length
    ? `${place}${hits.length} found: ${before} before, ${hits.length - before} after` : "nothing found";
  for (const id of ["previous-hit", "next-hit"]) at(id).disabled = !hits.length;
}

function stepHit(by) {
  if (!hits.length) return;
  hitAt = hitAt < 0 ? (by > 0 ? 0 : hits.length - 1) : (hitAt + by + hits.length) % hits.length;
  choose(hits[hitAt]);
  sayHits(true);
}

function clearSearch() {
  at("search").value = "";
  find("");
}

/** The node that a key leads to from another. */
function nextNode(node, key, alongEdge) {
  const { side, index } = node;
  const by = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[key];
  if (key === "ArrowLeft" || key === "ArrowRight") return acrossFrom(node, key === "ArrowRight" ? 1 : 0);
  if (alongEdge && Math.abs(by) === 1) {
    const from = NODES[side][index].inputs.map(([producer]) => producer).filter((i) => i >= 0);
    const ends = by < 0 ? from : READERS[side][index].map(([reader]) => reader);
    const nearest = ends.sort((a, b) => Math.abs(rowOf[side][a] - row(node)) - Math.abs(rowOf[side][b] - row(node)))[0];
    return nearest === undefined ? node : { side, index: nearest };
  }
  const place = Math.min(Math.max(PLACE[side][index] + by, 0), ORDER[side].length - 1);
  return { side, index: ORDER[side][place] };
}

/** On the other side: what the node became or was made of, else what is in the nearest row. */
function acrossFrom(node, side) {
  if (node.side === side) return node;
  const kin = node.side ? MEMBERS[node.index][0] : DATA.home[node.index];
  if (kin !== undefined && kin >= 0) return { side, index: kin };
  const away = (index) => Math.abs(rowOf[side][index] - row(node));
  const nearest = ORDER[side].reduce((best, index) => (away(index) < away(best) ? index : best));
  return { side, index: nearest };
}

const WALK = ["ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "PageUp", "PageDown", "Home", "End"];

function onListKey(event, side) {
  if (!WALK.includes(event.key) || event.ctrlKey || event.metaKey || event.altKey || !ORDER[side].length) return;
  event.preventDefault();
  const [first] = visibleRows();
  const start = ORDER[side].find((index) => rowOf[side][index] >= first) ?? ORDER[side][0];
  const here = view.selected && view.selected.side === side ? view.selected : null;
  const next = here ? nextNode(here, event.key, event.shiftKey) : { side, index: start };
  choose(next, "replace");
  focusOn(next);
}

function onKey(event) {
  const isTyping = /^(input|textarea|select)$/i.test(event.target.tagName);
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    at("search").focus();
    at("search").select();
  } else if (event.key === "Escape") {
    if (at("search").value) clearSearch();
    else if (view.selected) choose(null);
  }
}

/** A button for each pass that made nodes: it finds them. */
function drawLegend() {
  const counts = new Map();
  NODES[1].forEach((_, index) => counts.set(fateOf(1, index), (counts.get(fateOf(1, index)) || 0) + 1));
  const gone = NODES[0].filter((_, index) => fateOf(0, index) === "gone").length;
  if (gone) counts.set("gone", gone);
  for (const fate of [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a))) {
    const query = `pass:${fate}`;
    const look = () => { at("search").value = query; find(query); };
    const settings = { type: "button", className: `fate-${colourOf(fate)}`, title: `Find ${query}`, onclick: look };
    const swatch = element("span", { className: "swatch" });
    at("legend").append(element("button", settings, swatch, `${fate} ${counts.get(fate)}`));
  }
}

function listen() {
  SIDES.forEach((name, side) => {
    at(`side-${name}`).addEventListener("keydown", (event) => onListKey(event, side));
    at(`side-${name}`).addEventListener("click", (event) => {
      const box = event.target.closest(".node");
      if (!box) return;
      choose({ side, index: Number(box.id.slice(name.length + 1)) });
      focusOn(view.selected);
    });
  });
  let waiting = false;
  scroller.addEventListener("scroll", () => {
    if (!waiting) requestAnimationFrame(() => { waiting = false; drawWhereNeeded(); });
    waiting = true;
  }, { passive: true });
  at("search").addEventListener("input", () => find(at("search").value));
  at("search").addEventListener("keydown", (event) => event.key === "Enter" && stepHit(event.shiftKey ? -1 : 1));
  at("next-hit").addEventListener("click", () => stepHit(1));
  at("previous-hit").addEventListener("click", () => stepHit(-1));
  for (const id of ["above", "below"]) at(id).addEventListener("click", () => reveal(Number(at(id).dataset.row)));
  const jump = (event) => {
    const box = at("minimap").getBoundingClientRect();
    scroller.scrollTop = ((event.clientY - box.top) / box.height) * ROW * DATA.rows.length - scroller.clientHeight / 2;
  };
  at("minimap").addEventListener("pointerdown", (event) => {
    at("minimap").setPointerCapture(event.pointerId);
    jump(event);
  });
  at("minimap").addEventListener("pointermove", (event) => event.buttons && jump(event));
  document.addEventListener("keydown", onKey);
  window.addEventListener("beforeprint", printVisible);
  window.addEventListener("afterprint", showAll);
  window.addEventListener("popstate", followAddress);
  window.addEventListener("hashchange", followAddress);
  window.addEventListener("resize", () => { draw(); drawMap(); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
}

/** Print the rows that are visible, and not the whole length of what can be scrolled. */
function printVisible() {
  const [first, last] = visibleRows();
  draw(0);
  at("canvas").style.setProperty("--shift", `${-ROW * first}px`);
  at("canvas").style.height = `${ROW * (last - first)}px`;
}

function showAll() {
  at("canvas").style.setProperty("--shift", "0px");
  at("canvas").style.height = `${ROW * DATA.rows.length}px`;
  draw();
}

function start() {
  at("no-script").hidden = true;
  at("explorer").hidden = false;
  showAll();
  SIDES.forEach((name, side) => { at(`head-${name}`).textContent = `${name} · ${NODES[side].length} nodes`; });
  drawLegend();
  sayHits(false);
  listen();
  choose(null, null);
  followAddress();
}

start();
