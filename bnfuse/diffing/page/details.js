// What the selected node is, where it went or came from, and what it costs.

const HALVES = { statistics: "statistics", normalize: "normalize", gradient_reduce: "gradient reduce", gradient_input: "gradient input" };
const PLACES = { prologue: "on the way in of", epilogue: "on the way out of", own: "on its own in", sample: "on a sample, in" };
const STATUS = {
  fused: "No half sweeps a feature map of its own.",
  sampled: "A half touches a sample of the map in an operator of its own.",
  split: "A half is still an operator of its own.",
  whole: "It is still one operator.",
  gone: "It was taken out of the graph, or is not to be found in it.",
};
const MOST = 12; // entries of a list that are shown before the rest is folded

/** BatchNorms by the index of each of their nodes before. */
const NORMS = new Map();
DATA.norms.forEach((norm) => norm.nodes.forEach((index) => NORMS.set(index, norm)));

/** For each node after, the halves that it does: [norm, half, where]. */
const WORK = NODES[1].map(() => []);
DATA.norms.forEach((norm) => Object.keys(HALVES).forEach((half) =>
  norm.halves[half].forEach(([index, where]) => index >= 0 && WORK[index].push([norm, half, where]))));

function address(node) {
  return `#node=${encodeURIComponent(NODES[node.side][node.index].name).replaceAll("%2F", "/")}&side=${SIDES[node.side]}`;
}

/** The other nodes that are marked with a selected one. */
function relatedTo(node) {
  if (node.side) return numbers(NODES[1][node.index].sources).map((index) => ({ side: 0, index })).concat(partnerOf(node));
  const norm = NORMS.get(node.index);
  const found = new Set(DATA.into[node.index]);
  if (norm) Object.values(norm.halves).flat().forEach(([index]) => index >= 0 && found.add(index));
  const other = norm ? norm.nodes.filter((index) => index !== node.index).map((index) => ({ side: 0, index })) : [];
  return [...found].map((index) => ({ side: 1, index })).concat(other);
}

const numbers = (list) => (list || []).filter((entry) => typeof entry === "number");
const partnerOf = (node) => (DATA.partner[node.index] >= 0 ? [{ side: 0, index: DATA.partner[node.index] }] : []);

function showDetails(node) {
  const panel = at("details");
  panel.classList.toggle("empty", !node);
  if (!node) {
    panel.replaceChildren(element("p", { className: "note" },
      "Choose a node, or find one by its name, its operator or its pass. A BatchNorm shows what became of its halves."));
    return;
  }
  const found = NODES[node.side][node.index];
  const parts = [
    element("button", { type: "button", className: "close", "aria-label": "Close", onclick: () => choose(null) }, "×"),
    element("h3", {}, found.name),
    element("p", { className: "op" }, ...steps(found.op)),
    element("p", { className: "note" }, [SIDES[node.side], found.forward ? "forward" : "backward", found.domain, origin(node)].filter(Boolean).join(" · ")),
  ];
  if (!node.side && NORMS.has(node.index)) parts.push(normDetails(NORMS.get(node.index)));
  parts.push(...(node.side ? afterDetails(node.index) : beforeDetails(node.index)), ...values(node));
  panel.replaceChildren(...parts);
  panel.scrollTop = 0;
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

function normDetails(norm) {
  const list = element("dl", { className: "facts" });
  for (const [half, shown] of Object.entries(HALVES)) {
    list.append(element("dt", {}, shown), element("dd", {}, ...places(norm, half)));
  }
  for (const reason of norm.reasons) list.append(element("dt", {}, "not fused"), element("dd", {}, reason));
  const channels = norm.channels === null ? "" : ` ${norm.channels} channels.`;
  return element("section", {},
    element("h4", {}, "BatchNorm ", element("span", { className: `status ${norm.status}` }, norm.status)),
    element("p", {}, STATUS[norm.status] + channels), list,
    costTable("Feature maps", [["its operators alone", ...norm.own], ["with what is fused with it", ...norm.around]]));
}

/** Where a half is done, by the way in which it is done there. */
function places(norm, half) {
  if (!norm.halves[half].length) return [norm.status === "whole" ? "in the BatchNorm" : "nowhere"];
  return Object.entries(PLACES).flatMap(([where, shown]) => {
    const links = norm.halves[half].filter(([, how]) => how === where).map(([index]) => (index < 0 ? "?" : reference(1, index)));
    if (!links.length) return [];
    return links.length === 1 ? [element("div", {}, `${shown} `, links[0])] : [`${shown} ${links.length} nodes:`, ...folded(links)];
  });
}

function beforeDetails(index) {
  const into = DATA.into[index].map((other) => [reference(1, other), ` ${NODES[1][other].op}`]);
  return into.length ? [heading(DATA.partner[DATA.into[index][0]] === index ? "Is" : "Went into", into.length), ...folded(into)] : [];
}

function afterDetails(index) {
  const node = NODES[1][index];
  const parts = [];
  if (WORK[index].length) {
    const work = WORK[index].map(([norm, half, where]) => [`${HALVES[half]} of `, reference(0, norm.nodes[0]), where === "own" ? " (alone)" : ""]);
    parts.push(heading("Does for BatchNorms", work.length), ...folded(work));
  }
  const sources = (node.sources || []).map((source) => (typeof source === "number" ? [reference(0, source), ` ${NODES[0][source].op}`] : [source]));
  if (sources.length) parts.push(heading("Made of", sources.length), ...folded(sources));
  if (MEMBERS[index].length) {
    const sum = (key) => MEMBERS[index].reduce((total, i) => total + NODES[0][i][key], 0);
    const costs = [["here", [sum("sweeps"), sum("bytes")], [node.sweeps, node.bytes]]];
    parts.push(costTable("Feature maps, against what was fused here", costs));
  }
  const changes = Object.entries(DATA.changed[index] || {}).map(([name, [old, now]]) => [`${name}: ${JSON.stringify(old)} → ${JSON.stringify(now)}`]);
  if (changes.length) parts.push(heading("Changed attributes", changes.length), ...folded(changes));
  return parts;
}

/** What the node reads and writes, with the nodes at the other end of each edge. */
function values(node) {
  const { inputs, outputs, sweeps, bytes } = NODES[node.side][node.index];
  const reads = inputs.filter(([, name]) => name).map(([from, name, size]) =>
    [element("code", {}, name), size ? ` ${scaled(size)}` : "", ...(from >= 0 ? [" from ", reference(node.side, from)] : "")]);
  const readers = [...new Set(READERS[node.side][node.index].map(([reader]) => reader))];
  const writes = outputs.map(([name, type]) => [element("code", {}, name), ` ${type}`]);
  return [
    heading("Reads", reads.length), ...folded(reads),
    heading("Writes", writes.length), ...folded(writes),
    ...(readers.length ? [heading("Read by", readers.length), ...folded(readers.map((reader) => [reference(node.side, reader)]))] : []),
    element("p", { className: "note" }, `${sweeps} feature-map sweeps, ${scaled(bytes)}`),
  ];
}

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
  const line = (name, old, now, show) => element("tr", {},
    element("th", { scope: "row" }, name),
    ...[show(old), show(now), show(old - now)].map((text) => element("td", { className: "number" }, text)));
  const head = ["", "before", "after", "saved"].map((text, i) => element("th", { scope: "col", className: i ? "number" : "" }, text));
  const body = rows.flatMap(([name, old, now]) => [line(`${name}, sweeps`, old[0], now[0], String), line(`${name}, bytes`, old[1], now[1], scaled)]);
  return element("table", {}, element("caption", {}, caption), element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body));
}

/** 1234567 -> 1.23 MB */
function scaled(bytes) {
  let [value, unit] = [bytes, 0];
  while (Math.abs(value) >= 999.5 && unit < 4) [value, unit] = [value / 1000, unit + 1];
  return `${Number(value.toPrecision(3))} ${["", "k", "M", "G", "T"][unit]}B`;
}
