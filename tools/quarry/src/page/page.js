"use strict";
// Asks the node for the cluster every two seconds while somebody looks, and draws what it says. Whatever a node says goes in as text.

const EVERY_MS = 2000;
const PATIENCE_MS = 8000;
const POINTS = 60;
// A member this far behind what is committed is worth a look.
const LAG_ENTRIES = 1000;
const SILENT_MS = 3000;
const STATES = [
  ["committed", "committed"], ["pinned", "kept for pins"], ["granted", "granted"],
  ["resting", "resting"], ["free", "free"],
  ["transit", "on its way to a shard or back"], ["unlent", "not lent"],
];
const MAP_COLUMNS = 128;
const RATES = [
  ["calls", "calls", "/s", count], ["commits", "commits", "/s", count], ["grants", "grants", "/s", count],
  ["refusals", "refusals", "/s", count], ["evicted_values", "evictions", "values/s", count], ["evicted_bytes", "evicted", "/s", bytes],
];

const byId = (id) => document.getElementById(id);
const trends = new Map(RATES.map(([key]) => [key, []]));
let before = null;
let lastAnswer = null;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined && text !== null) made.textContent = String(text);
  if (className) made.className = className;
  return made;
}

function count(value) {
  if (value >= 1e6) return (value / 1e6).toFixed(2) + " M";
  if (value >= 1e4) return (value / 1e3).toFixed(1) + " k";
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return (value >= 100 || Number.isInteger(value) ? Math.round(value) : value.toFixed(1)) + " " + units[unit];
}

function table(id, heads, rows) {
  const head = element("tr");
  for (const [name, className] of heads) head.append(element("th", name, className));
  const drawn = rows.map((cells) => {
    const row = element("tr");
    cells.forEach((cell, at) => {
      const box = element("td", null, heads[at][1]);
      box.append(cell instanceof Node ? cell : document.createTextNode(cell === null || cell === undefined ? "–" : String(cell)));
      row.append(box);
    });
    return row;
  });
  byId(id).replaceChildren(head, ...drawn);
}

function bar(space, total, small) {
  const drawn = element("div", null, small ? "bar small" : "bar");
  const words = [];
  for (const [state, name] of STATES) {
    const held = space[state] || 0;
    if (held === 0) continue;
    words.push(name + " " + bytes(held));
    if (state === "unlent") continue;
    const part = element("span", null, state);
    part.style.width = (100 * held / Math.max(total, 1)) + "%";
    drawn.append(part);
  }
  const said = words.join(", ") || "nothing is lent";
  drawn.title = said;
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", said);
  return drawn;
}

// What lies where in a region: cells in the order of addresses, line by line.
function map(found) {
  const drawn = element("canvas", null, "map");
  const cells = found.cells;
  drawn.width = Math.min(MAP_COLUMNS, cells.length);
  drawn.height = Math.ceil(cells.length / MAP_COLUMNS);
  const pen = drawn.getContext("2d");
  // A cell is the first letter of its state.
  const colour = new Map(STATES.map(([state]) => [state[0], getComputedStyle(document.querySelector("#legend ." + state)).backgroundColor]));
  for (let at = 0; at < cells.length; at += 1) {
    pen.fillStyle = colour.get(cells[at]);
    pen.fillRect(at % MAP_COLUMNS, Math.floor(at / MAP_COLUMNS), 1, 1);
  }
  drawn.title = "each cell shows what most of its " + bytes(found.cell_bytes) + " are, in the order of addresses";
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", "map of the region, " + cells.length + " cells of " + bytes(found.cell_bytes));
  return drawn;
}

// Sums over the meta nodes of what came since the last look; a node that restarted counts from 0 again.
function rates(cluster, at) {
  const now = new Map(cluster.metas.filter((meta) => meta.counters).map((meta) => [meta.node, flat(meta.counters)]));
  const found = {};
  for (const [key] of RATES) {
    found[key] = null;
    if (!before) continue;
    let sum = 0;
    for (const [node, counters] of now) {
      const earlier = before.counters.get(node);
      if (earlier && earlier.started_seconds === counters.started_seconds) sum += Math.max(0, counters[key] - earlier[key]);
    }
    found[key] = sum / ((at - before.at) / 1000);
  }
  before = { at, counters: now };
  return found;
}

function flat(counters) {
  const refusals = Object.values(counters.refusals).reduce((sum, value) => sum + value, 0);
  return { ...counters, refusals };
}

function line(points) {
  const svg = byId("line").content.firstElementChild.cloneNode(true);
  const top = Math.max(1, ...points);
  const shift = POINTS - points.length;
  const places = points.map((value, at) => (at + shift) + "," + (27 - 25 * value / top));
  svg.firstElementChild.setAttribute("points", places.join(" "));
  return svg;
}

function drawRates(found) {
  const cards = RATES.map(([key, name, unit, show]) => {
    const points = trends.get(key);
    if (found[key] !== null) points.push(found[key]);
    if (points.length > POINTS) points.shift();
    const card = element("div", null, "card");
    card.append(element("span", name, "name"));
    card.append(element("span", found[key] === null ? "…" : show(found[key]), "value"), " ", element("span", unit, "unit"));
    card.append(line(points));
    return card;
  });
  byId("rates").replaceChildren(...cards);
}

function drawMemory(cluster) {
  const nodes = cluster.data_nodes.map((node) => {
    const box = element("div", null, node.alive ? "node" : "node dead");
    const head = element("h3", "data node " + node.node);
    head.append(element("span", node.alive ? "alive" : "dead", node.alive ? "good" : "bad"));
    head.append(element("span", "silent for " + (node.silent_ms / 1000).toFixed(1) + " s", node.silent_ms > SILENT_MS ? "warn" : "dim"));
    if (node.standing && node.standing !== "serving") head.append(element("span", node.standing, "warn"));
    if (node.revoked) head.append(element("span", "revoked", "bad"));
    head.append(element("span", node.address, "dim"));
    for (const [name, value] of Object.entries(node.labels || {})) head.append(element("span", name + " " + value, "dim"));
    box.append(head);
    for (const region of node.regions) {
      const row = element("div", null, "region");
      const name = element("span", "r" + region.index + " · " + region.incarnation, "dim");
      name.title = "region " + region.index + ", incarnation " + region.incarnation;
      row.append(name, bar(region.space, region.bytes, false), element("span", bytes(region.bytes), "size"));
      box.append(row);
      if (region.map) {
        const below = element("div", null, "region");
        below.append(element("span"), map(region.map), element("span", bytes(region.map.cell_bytes) + " each", "size"));
        box.append(below);
      }
    }
    return box;
  });
  byId("memory").replaceChildren(...(nodes.length ? nodes : [element("p", "No data node has registered yet.", "dim")]));
}

function drawShards(cluster) {
  const heads = [["shard"], ["told by"], ["keys", "number"], ["grants", "number"], ["pins", "number"], ["committed", "number"], ["free", "number"], ["memory"]];
  table("shards", heads, cluster.shards.map((shard) => {
    const total = Object.values(shard.space).reduce((sum, value) => sum + value, 0);
    const teller = element("span", "meta " + shard.told_by + (shard.leads ? "" : ", no leader"), shard.leads ? "plain" : "warn");
    return [shard.shard, teller, count(shard.keys), count(shard.grants), count(shard.pins), bytes(shard.space.committed), bytes(shard.space.free), bar(shard.space, total, true)];
  }));
}

function ofMember(member) {
  if (!member) return "no member";
  if (member.role === null) return element("span", "silent", "bad");
  const said = element("span", null, "plain");
  said.append(element("span", member.role, member.role === "leader" ? "good" : member.role === "follower" ? "" : "warn"), " " + member.applied);
  if (member.lag > 0) said.append(element("span", " −" + member.lag, member.lag > LAG_ENTRIES ? "warn" : "dim"));
  said.title = ["term " + member.term, "last entry " + member.last_log, "committed " + member.committed, "applied " + member.applied, "snapshot " + member.snapshot].join(", ");
  return said;
}

function drawGroups(cluster) {
  const heads = [["group"], ["leader"], ["term", "number"], ["leaders seen", "number"], ["committed", "number"]];
  const metas = [...new Set(cluster.groups.flatMap((group) => group.members.map((member) => member.node)))].sort((one, other) => one - other);
  for (const node of metas) heads.push(["meta " + node + ": role, applied −lag", "plain"]);
  table("groups", heads, cluster.groups.map((group) => {
    const name = group.group === 0 ? "0 directory" : group.group;
    const leader = group.leader === null ? element("span", "none", "bad") : element("span", "meta " + group.leader, "plain");
    const seen = group.members.map((member) => member.elections).filter((it) => typeof it === "number");
    const members = metas.map((node) => ofMember(group.members.find((it) => it.node === node)));
    return [element("span", name, "plain"), leader, group.term, seen.length ? Math.max(...seen) : null, group.committed, ...members];
  }));
}

function drawMetas(cluster) {
  const heads = [["node"], ["address", "plain"], ["build", "plain"], ["leads", "number"], ["memory", "number"], ["up since", "plain"], [""]];
  table("metas", heads, cluster.metas.map((meta) => {
    const leads = cluster.groups.filter((group) => group.leader === meta.node).length;
    const counters = meta.counters;
    const since = counters ? new Date(counters.started_seconds * 1000).toISOString().slice(0, 19) + "Z" : null;
    const wrong = element("span", meta.error || (meta.counters_error ? "no counters: " + meta.counters_error : meta.draining ? "drains: leads nothing and wants nothing" : ""), meta.error ? "bad" : "warn");
    return [element("span", "meta " + meta.node, "plain"), meta.address, meta.build, leads, counters ? bytes(counters.resident_bytes) : null, since, wrong];
  }));
}

function problems(cluster) {
  if (!cluster.cluster) return { state: "bad", word: "no cluster yet", found: ["This node belongs to no cluster yet: bootstrap it."] };
  const found = [];
  const headless = cluster.groups.filter((group) => group.leader === null).map((group) => group.group);
  if (headless.length) found.push("No leader: group " + headless.join(", ") + ". Nothing can be written there.");
  for (const meta of cluster.metas) if (meta.error) found.push("Meta node " + meta.node + " does not answer: " + meta.error);
  for (const node of cluster.data_nodes) if (!node.alive) found.push("Data node " + node.node + " is dead: its copies are gone.");
  for (const node of cluster.data_nodes) if (node.revoked) found.push("Data node " + node.node + " signs with a key that was revoked.");
  const change = cluster.change;
  if (change) found.push("A change of the meta nodes is under way (" + change.what + "): " + change.done + " of " + change.groups + " groups done" + (change.next ? ", " + change.next : "") + ".");
  for (const group of cluster.groups) {
    for (const member of group.members) {
      if (member.role === "stopped") found.push("Meta node " + member.node + " has stopped taking part in group " + group.group + ".");
      if (member.lag > LAG_ENTRIES) found.push("Meta node " + member.node + " is " + member.lag + " entries behind in group " + group.group + ".");
    }
  }
  const state = headless.length ? "bad" : found.length ? "warn" : "good";
  return { state, word: state === "good" ? "healthy" : state === "warn" ? "degraded" : "unavailable", found };
}

function say(state, word, found) {
  byId("state").className = state;
  byId("state").textContent = word;
  byId("problems").replaceChildren(...found.map((problem) => element("li", problem)));
  byId("problems").hidden = found.length === 0;
}

function draw(cluster, at) {
  const generation = cluster.cluster ? ", generation " + cluster.generation : "";
  byId("identity").textContent = "as meta node " + cluster.node + " finds it · " + (cluster.cluster || "no cluster") + generation;
  document.title = "Quarry: meta " + cluster.node;
  drawRates(rates(cluster, at));
  drawMemory(cluster);
  drawShards(cluster);
  drawGroups(cluster);
  drawMetas(cluster);
  const { state, word, found } = problems(cluster);
  say(state, word, found);
}

async function look() {
  if (document.hidden) return;
  try {
    const answer = await fetch("cluster.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error((await answer.text()).trim() || "status " + answer.status);
    const cluster = await answer.json();
    lastAnswer = performance.now();
    draw(cluster, lastAnswer);
  } catch (wrong) {
    say("bad", "this node does not answer", [String(wrong.message || wrong)]);
  }
}

async function watch() {
  await look();
  byId("age").textContent = lastAnswer === null ? "" : "asked " + ((performance.now() - lastAnswer) / 1000).toFixed(0) + " s ago";
  setTimeout(watch, EVERY_MS);
}

const legend = STATES.map(([state, name]) => {
  const item = element("li", null);
  item.append(element("i", null, state), name);
  return item;
});
byId("legend").replaceChildren(...legend);
watch();
