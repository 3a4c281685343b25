"use strict";
// Shows /api/v1/state, again and again. Everything from there is put in as text, never as markup.

const most = 500; // rows of a table
const $ = id => document.getElementById(id);

function table(id, head, rows) {
  const t = document.createDocumentFragment();
  const line = (cells, tag) => {
    const tr = document.createElement("tr");
    for (const c of cells) {
      const e = document.createElement(tag);
      e.textContent = e.title = c; // the title: what does not fit
      tr.append(e);
    }
    t.append(tr);
  };
  line(head, "th");
  rows.slice(0, most).forEach(r => line(r, "td"));
  if (rows.length > most) line([`and ${rows.length - most} more: /api/v1/state has all`], "td");
  if (rows.length === 0) line(["none"], "td");
  $(id).replaceChildren(t);
}

const gib = n => (n / 2 ** 30).toFixed(1) + " GiB";
const seconds = s => s < 120 ? s.toFixed(0) + " s" : s < 7200 ? (s / 60).toFixed(0) + " min" : (s / 3600).toFixed(1) + " h";

// The picture: a square for each core, a gap after each executor; where each executor begins, for the pointer.
let spans = [];
function picture(executors) {
  const canvas = $("cores"), width = canvas.clientWidth || 800, scale = window.devicePixelRatio || 1;
  const total = executors.reduce((n, e) => n + e.cores, 0);
  const side = total > 20000 ? 3 : total > 2000 ? 6 : 12, step = side + 1;
  const perRow = Math.max(1, Math.floor(width / step));
  let at = 0;
  spans = executors.map(e => {
    const span = { first: at, end: at + e.cores, e };
    at += e.cores + 1;
    return span;
  });
  spans.perRow = perRow;
  spans.step = step;
  const height = Math.max(1, Math.ceil(at / perRow)) * step;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = height + "px";
  const g = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  const color = {};
  for (const c of ["used", "free", "draining", "dead"]) color[c] = style.getPropertyValue("--" + c);
  g.scale(scale, scale);
  for (const s of spans)
    for (let i = s.first; i < s.end; i++) {
      const used = i - s.first < s.e.cores - s.e.free_cores;
      g.fillStyle = s.e.state === "silent" ? color.dead : used ? color.used : s.e.state === "draining" ? color.draining : color.free;
      g.fillRect(i % perRow * step, Math.floor(i / perRow) * step, side, side);
    }
}

$("cores").addEventListener("mousemove", ev => {
  const i = Math.floor(ev.offsetY / spans.step) * spans.perRow + Math.floor(ev.offsetX / spans.step);
  const s = spans.find(s => s.first <= i && i < s.end);
  $("hint").textContent = s ? `${s.e.node} ${s.e.address}: ${s.e.cores - s.e.free_cores} of ${s.e.cores} cores used, ${s.e.leases} leases, ${s.e.state}` : "";
});

// s.leases is absent for who may see no tenant.
function show(s) {
  const all = s.leases !== undefined;
  $("ask").hidden = all;
  for (const e of document.querySelectorAll(".named")) e.hidden = !all;
  const alive = s.executors.filter(e => e.state !== "silent");
  const cores = alive.reduce((n, e) => n + e.cores, 0), free = alive.reduce((n, e) => n + e.free_cores, 0);
  $("summary").textContent = `${alive.length} of ${s.executors.length} executors, ${cores - free} of ${cores} cores used` +
    (all ? `, ${s.leases.length} leases, ${s.subscribers} subscribers` : "");
  $("trouble").textContent = all ? s.trouble : "";
  picture(s.executors);
  table("executors", ["node", "address", "state", "free / cores", "free / memory", "leases", "by", "last heard"],
    s.executors.map(e => [e.node, e.address, e.state, `${e.free_cores} / ${e.cores}`,
      `${gib(e.free_memory_bytes)} / ${gib(e.memory_bytes)}`, e.leases, e.providers.join(" "), seconds(e.age_ms / 1000)]));
  if (!all) return;
  table("leases", ["lease", "tenant", "node", "age", "core seconds", "GiB seconds", "calls"],
    s.leases.map(l => [l.lease, l.tenant, l.node, seconds((s.now_ms - l.began_ms) / 1000), l.core_seconds.toFixed(1),
      l.gib_seconds.toFixed(1), l.calls]));
  table("tenants", ["tenant", "leases", "cores reserved", "limit"],
    s.tenants.map(t => [t.tenant, t.leases, t.limited ? t.reserved_cores : "-", t.limited ? t.limit_cores : "none"]));
  table("bills", ["tenant", "item", "quantity", "price", "amount"],
    s.bills.flatMap(b => b.lines.filter(l => l.units !== "0").map(l => [b.tenant, l.item, l.quantity, l.price, l.amount])
      .concat([[b.tenant, "total", "", "", b.amount + " " + s.currency]])));
}

// The token is kept for as long as the tab is.
$("token").addEventListener("change", ev => sessionStorage.setItem("token", ev.target.value.trim()));

function get(part) {
  const token = sessionStorage.getItem("token");
  return fetch("/api/v1/" + part, { cache: "no-store", signal: AbortSignal.timeout(10000),
    headers: token ? { Authorization: "Bearer " + token } : {} });
}

// The token with which the manager has refused to show all: it is asked for that again when there is another one.
let refusedWith;

async function look() {
  const began = performance.now(), token = sessionStorage.getItem("token");
  try {
    let refused = refusedWith !== undefined && refusedWith === token;
    let r = refused ? undefined : await get("state");
    if (r?.status === 401) {
      refused = true;
      refusedWith = token;
    }
    if (refused) r = await get("executors");
    if (!r.ok) throw new Error(r.statusText);
    const said = await r.json();
    show(refused ? { executors: said } : said);
  } catch (err) {
    $("trouble").textContent = "The resource manager does not answer: " + err.message;
  }
  setTimeout(look, Math.max(1000, 4 * (performance.now() - began))); // a large cluster is looked at less often
}
look();
