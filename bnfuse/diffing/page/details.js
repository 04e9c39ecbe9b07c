// What the selected node is, where it went or came from, and what it costs.

const { halves: HALVES, places: PLACES, statuses: STATUSES } = DATA.words;
const MOST = 12; // entries of a list that are shown before the rest is folded

/** BatchNorms by the index of each of their nodes before. */
const NORMS = new Map();
DATA.norms.forEach((norm) => norm.nodes.forEach((index) => NORMS.set(index, norm)));

/** For each node after, the halves that it does: [norm, half, where]. */
const WORK = NODES[1].map(() => []);
DATA.norms.forEach((norm) => Object.keys(HALVES).forEach((half) =>
  norm.halves[half].forEach(([index, where]) => index >= 0 && WORK[index].push([norm, half, where]))));

function address(node) {
  const name = encodeURIComponent(NODES[node.side][node.index].name).replaceAll("%2F", "/");
  return `#node=${name}&side=${SIDES[node.side]}`;
}

/** The other nodes that are marked with a selected one. */
function relatedTo(node) {
  const before = (index) => ({ side: 0, index });
  if (node.side) return [...numbers(NODES[1][node.index].sources), ...partnerOf(node)].map(before);
  const norm = NORMS.get(node.index);
  const found = new Set(DATA.into[node.index]);
  if (norm) Object.values(norm.halves).flat().forEach(([index]) => index >= 0 && found.add(index));
  const other = norm ? norm.nodes.filter((index) => index !== node.index) : [];
  return [...[...found].map((index) => ({ side: 1, index })), ...other.map(before)];
}

const numbers = (list) => (list || []).filter((entry) => typeof entry === "number");
const partnerOf = (node) => (DATA.partner[node.index] >= 0 ? [DATA.partner[node.index]] : []);

function showDetails(node) {
  const panel = at("details");
  panel.scrollTop = 0;
  panel.classList.toggle("empty", !node);
  if (!node) {
    const hint = "Choose a node, or find one by its name, its operator or its pass. ";
    panel.replaceChildren(note(`${hint}A BatchNorm shows what became of its halves.`));
    return;
  }
  const found = NODES[node.side][node.index];
  const parts = [
    element("button", { type: "button", className: "close", "aria-label": "Close", onclick: () => choose(null) }, "×"),
    element("h3", {}, found.name),
    element("p", { className: "op" }, ...steps(found.op)),
    note(summaryOf(node)),
  ];
  if (!node.side && NORMS.has(node.index)) parts.push(normDetails(NORMS.get(node.index)));
  parts.push(...(node.side ? afterDetails(node.index) : beforeDetails(node.index)), ...values(node));
  panel.replaceChildren(...parts);
}

function summaryOf(node) {
  const { forward, domain } = NODES[node.side][node.index];
  return [SIDES[node.side], forward ? "forward" : "backward", domain, origin(node)].filter(Boolean).join(" · ");
}

/** An operator's name with places to break the line at. */
function steps(op) {
  return op.split(/(?<=[a-z0-9])(?=[A-Z])/).flatMap((word, i) => (i ? [element("wbr"), word] : [word]));
}

function origin(node) {
  const fate = fateOf(node.side, node.index);
  if (fate === "same") return "unchanged";
  if (fate === "gone") return "nothing after is made of it";
  return node.side ? (fate === "new" ? "only in this graph" : `made by ${fate}`) : `fused by ${fate}`;
}

const sentence = (words) => `${words[0].toUpperCase()}${words.slice(1)}.`;

function normDetails(norm) {
  const list = element("dl", { className: "facts" });
  for (const [half, shown] of Object.entries(HALVES)) {
    list.append(element("dt", {}, shown), element("dd", {}, ...places(norm, half)));
  }
  for (const reason of norm.reasons) list.append(element("dt", {}, "not fused"), element("dd", {}, reason));
  const channels = norm.channels === null ? "" : ` ${norm.channels} channels.`;
  return element("section", {},
    element("h4", {}, "BatchNorm ", element("span", { className: `status ${norm.status}` }, norm.status)),
    element("p", {}, `${sentence(STATUSES[norm.status])}${channels}`),
    element("p", {}, "Saved: ", element("strong", {}, saved(norm.around)),
      ` with what is fused with it; ${saved(norm.own)} in its operators alone.`),
    list,
    costTable("Feature maps", [["its operators alone", ...norm.own], ["with what is fused with it", ...norm.around]]));
}

/** "18 sweeps, 77 MB"; what grew has a minus. */
const saved = ([old, now]) => `${sweepsOf(old[0] - now[0])}, ${scaled(old[1] - now[1])}`;
const sweepsOf = (count, kind = "") => `${count} ${kind}${Math.abs(count) === 1 ? "sweep" : "sweeps"}`;

/** Where a half is done, by the way in which it is done there. */
function places(norm, half) {
  if (!norm.halves[half].length) return [norm.status === "whole" ? "in the BatchNorm" : "nowhere"];
  return Object.entries(PLACES).flatMap(([where, shown]) => {
    const here = norm.halves[half].filter(([, how]) => how === where);
    const links = here.map(([index]) => (index < 0 ? "?" : reference(1, index)));
    if (links.length < 2) return links.map((link) => element("div", {}, `${shown} `, link));
    return [`${shown} ${links.length} nodes:`, ...folded(links)];
  });
}

function beforeDetails(index) {
  const into = DATA.into[index].map((other) => [reference(1, other), ` ${NODES[1][other].op}`]);
  const title = DATA.partner[DATA.into[index][0]] === index ? "Is" : "Went into";
  return listed(title, into);
}

function afterDetails(index) {
  const node = NODES[1][index];
  const work = WORK[index].map(([norm, half, where]) =>
    [`${HALVES[half]} of `, reference(0, norm.nodes[0]), where === "own" ? " (alone)" : ""]);
  const sources = (node.sources || []).map((source) =>
    (typeof source === "number" ? [reference(0, source), ` ${NODES[0][source].op}`] : [source]));
  const changes = Object.entries(DATA.changed[index] || {}).map(([name, [old, now]]) => [`${name}: ${old} → ${now}`]);
  const sum = (key) => MEMBERS[index].reduce((total, i) => total + NODES[0][i][key], 0);
  const costs = [["here", [sum("sweeps"), sum("bytes")], [node.sweeps, node.bytes]]];
  return [
    ...listed("Does for BatchNorms", work),
    ...listed("Made of", sources),
    ...(MEMBERS[index].length ? [costTable("Feature maps, against what was fused here", costs)] : []),
    ...listed("Changed attributes", changes),
  ];
}

/** What the node reads and writes, with the nodes at the other end of each edge. */
function values(node) {
  const { inputs, outputs, sweeps, bytes } = NODES[node.side][node.index];
  const producer = (from) => (from < 0 ? [] : [" from ", reference(node.side, from)]);
  const reads = inputs.filter(([, name]) => name).map(([from, name, size]) =>
    [element("code", {}, name), size ? ` ${scaled(size)}` : "", ...producer(from)]);
  const writes = outputs.map(([name, type]) => [element("code", {}, name), ` ${type}`]);
  const readers = [...new Set(READERS[node.side][node.index].map(([reader]) => reader))];
  return [
    ...listed("Reads", reads),
    ...listed("Writes", writes),
    ...listed("Read by", readers.map((reader) => [reference(node.side, reader)])),
    note(`${sweepsOf(sweeps, "feature-map ")}, ${scaled(bytes)}`),
  ];
}

const note = (text) => element("p", { className: "note" }, text);
const listed = (title, entries) => (entries.length ? [heading(title, entries.length), ...folded(entries)] : []);
const heading = (title, count) => element("h4", {}, `${title} `, element("span", { className: "note" }, `${count}`));
const reference = (side, index) => element("a", { href: address({ side, index }) }, NODES[side][index].name);

/** A list, of which what goes beyond the first entries is folded. */
function folded(entries) {
  const list = (some) => element("ul", {}, ...some.map((entry) => element("li", {}, ...[].concat(entry))));
  if (entries.length <= MOST + 2) return [list(entries)];
  const rest = element("details", {}, element("summary", {}, `${entries.length - MOST} more`));
  rest.addEventListener("toggle", () => rest.append(list(entries.slice(MOST))), { once: true });
  return [list(entries.slice(0, MOST)), rest];
}

/** Rows of [name, [sweeps, bytes] before, [sweeps, bytes] after]. */
function costTable(caption, rows) {
  const cell = (text) => element("td", { className: "number" }, text);
  const line = (name, old, now, show) => element("tr", {},
    element("th", { scope: "row" }, name), ...[show(old), show(now), show(old - now)].map(cell));
  const columns = ["before", "after", "saved"].map((text) => element("th", { scope: "col", className: "number" }, text));
  const lines = rows.flatMap(([name, old, now]) => [
    line(`${name}, sweeps`, old[0], now[0], String),
    line(`${name}, bytes`, old[1], now[1], scaled),
  ]);
  const head = element("thead", {}, element("tr", {}, element("td"), ...columns));
  return element("table", {}, element("caption", {}, caption), head, element("tbody", {}, ...lines));
}

/** 1234567 -> 1.23 MB */
function scaled(bytes) {
  let [value, unit] = [bytes, 0];
  while (Math.abs(value) >= 999.5 && unit < 4) [value, unit] = [value / 1000, unit + 1];
  return `${Number(value.toPrecision(3))} ${["", "k", "M", "G", "T"][unit]}B`;
}
