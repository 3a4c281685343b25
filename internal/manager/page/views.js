// The pages. Each view has an element, and update(data), which is called with {state, history, known, node}.

import { make, card, figure, table, bar, key, gib, number, seconds } from "./ui.js";
import { charts, complete } from "./charts.js";
import { NodeMap, nodesOf } from "./map.js";

const paths = ["cold", "seeded", "pooled", "cached"];
const spanNames = { hour: "last hour", day: "last 24 hours", week: "last 7 days", year: "last year" };
const hours = (cores, s) => number(cores * s / 3600);
const others = "(others)";

// A range of start times on a logarithmic scale from 10 µs to 10 s.
const place = s => 100 * Math.max(0, Math.min(1, (Math.log10(Math.max(s, 1e-6)) + 5) / 6));

const nodeLink = name => make("a", { href: "#/node/" + encodeURIComponent(name) }, name);
const leaseLink = l => make("a", { href: `#/lease/${encodeURIComponent(l.node)}/${l.lease}` }, l.lease);
const state = s => make("span", { className: "state" }, key(`var(--${{ open: "harvested", draining: "draining", cordoned: "cordoned", silent: "silent", absent: "batch" }[s] ?? "idle"})`), s);

export class Overview {
  constructor() {
    this.figures = make("div");
    this.cores = charts.cores();
    this.calls = charts.calls();
    this.starts = charts.starts();
    this.ends = charts.ends();
    this.map = new NodeMap();
    this.latency = make("div");
    this.share = make("div");
    this.tenants = card("third", "Tenants", "share of core-hours", this.share);
    this.element = [this.figures, card("wide", "Cores", "harvested by leases, idle, and used by batch jobs or down", this.cores.element), this.tenants,
      card("", "Nodes", "", this.map.element), card("half", "Calls", "", this.calls.element), card("half", "Worker starts", "by class", this.starts.element),
      card("half", "Start times", "median, and pale 95th percentile; logarithmic, 10 µs to 10 s", this.latency), card("half", "Evictions and failures", "leases that were taken away, workers that died", this.ends.element)];
    this.figures.style.display = "contents";
  }

  update({ history: h, executors, known, span }) {
    const t = h.total, alive = executors.filter(e => e.state !== "silent");
    const lent = alive.reduce((n, e) => n + e.cores, 0), used = alive.reduce((n, e) => n + e.cores - e.free_cores, 0);
    const last = complete(h).at(-1);
    const starts = paths.reduce((n, p) => n + t.starts[p], 0);
    const slow = starts ? Math.max(...paths.map(p => h.starts[p].count ? h.starts[p].p95 : 0)) : 0;
    const lost = t.ended.revoked + t.ended.drained;
    this.figures.replaceChildren(
      figure(number(used), `of ${number(lent)}`, "Harvested cores now"),
      figure(hours(t.harvested, t.seconds), "core-h", "Harvested, " + spanNames[span]),
      figure(last ? number(last.calls / last.seconds) : "–", "/s", "Calls"),
      figure(number(t.failures), t.calls ? `of ${number(t.calls)}` : "", "Failed calls", t.failures > 0),
      figure(number(starts), starts ? "p95 " + seconds(slow) : "", "Worker starts"),
      figure(number(lost), "leases", "Evictions", false));
    for (const c of [this.cores, this.calls, this.starts, this.ends]) c.draw(h);
    this.map.draw(nodesOf(executors, known));
    this.latency.replaceChildren(table([["class", p => make("span", {}, key(`var(--${p})`), p)], ["starts", p => number(h.starts[p].count), "number"],
      ["", p => h.starts[p].count ? bar(place(h.starts[p].median), `var(--${p})`, place(h.starts[p].p95)) : ""],
      ["median", p => h.starts[p].count ? seconds(h.starts[p].median) : "–", "number"], ["p95", p => h.starts[p].count ? seconds(h.starts[p].p95) : "–", "number"]], paths));
    this.tenants.hidden = h.tenants === undefined;
    if (h.tenants) {
      const all = h.tenants.reduce((n, x) => n + x.core_seconds, 0) || 1;
      this.share.replaceChildren(table([["tenant", x => x.tenant || others], ["", x => bar(100 * x.core_seconds / all, "var(--harvested)")],
        ["share", x => (100 * x.core_seconds / all).toFixed(0) + " %", "number"], ["core-h", x => number(x.core_seconds / 3600), "number"]], h.tenants.slice(0, 8)));
    }
  }

  destroy() { for (const c of [this.cores, this.calls, this.starts, this.ends]) c.destroy(); }
}

const executorColumns = [["address", e => e.address], ["state", e => state(e.state)], ["cores used", e => `${e.cores - e.free_cores} of ${e.cores}`, "number"],
  ["free memory", e => `${gib(e.free_memory_bytes)} of ${gib(e.memory_bytes)}`, "number"], ["leases", e => e.leases, "number"],
  ["slowdown of other programs", e => e.neighbour_slowdown ? (100 * (e.neighbour_slowdown - 1)).toFixed(1) + " %" : "–", "number"], ["reached by", e => e.providers.join(" ")],
  ["last report", e => seconds(e.age_ms / 1000) + " ago", "number"]];

const leaseColumns = now => [["lease", leaseLink], ["tenant", l => l.tenant], ["node", l => nodeLink(l.node)], ["age", l => seconds((now - l.began_ms) / 1000), "number"],
  ["core-hours", l => number(l.core_seconds / 3600), "number"], ["GiB-hours", l => number(l.gib_seconds / 3600), "number"], ["calls", l => number(+l.calls), "number"],
  ["failures", l => number(+l.failures), "number"]];

export class Nodes {
  constructor() {
    this.map = new NodeMap();
    this.list = make("div");
    this.element = [card("", "Nodes", "", this.map.element), card("", "Executors", "", this.list)];
  }

  update({ executors, known }) {
    const nodes = nodesOf(executors, known);
    this.map.draw(nodes);
    const rows = nodes.flatMap(n => n.executors.length ? n.executors : [{ node: n.name, absent: n }]);
    this.list.replaceChildren(table([["node", e => nodeLink(e.node)], ...executorColumns.map(([title, of, kind]) =>
      [title, e => !e.absent ? of(e) : title === "state" ? state("absent") : title === "cores used" ? `${e.absent.cores} not lent` : "", kind])], rows));
  }

  destroy() {}
}

export class Node {
  constructor(name) {
    this.name = name;
    this.cores = charts.node();
    this.calls = charts.nodeCalls();
    this.starts = charts.nodeStarts();
    this.executors = make("div");
    this.leases = make("div");
    this.held = card("", "Leases", "", this.leases);
    this.figures = make("div");
    this.figures.style.display = "contents";
    this.history = [card("third", "Cores", "last hour", this.cores.element), card("third", "Calls", "last hour", this.calls.element),
      card("third", "Worker starts", "last hour", this.starts.element)];
    this.element = [card("", "Node " + name, "", this.executors), this.figures, ...this.history, this.held];
  }

  update({ executors, known, state: s, node, now }) {
    const n = nodesOf(executors, known).find(x => x.name === this.name);
    this.executors.replaceChildren(n ? n.executors.length ? table(executorColumns, n.executors) :
      make("p", { className: "none" }, `No executor. The last one was here ${seconds((now - n.seen) / 1000)} ago. A batch job has the node's ${n.cores} cores, or it is down.`) :
      make("p", { className: "none" }, "The resource manager does not know this node."));
    for (const c of this.history) c.hidden = !s; // without the token there is none
    if (node) {
      const steps = node.minutes, sum = f => steps.reduce((k, m) => k + f(m), 0);
      this.figures.replaceChildren(figure(n ? number(n.used) : "–", n ? `of ${n.lent}` : "", "Harvested cores now"),
        figure(hours(1, sum(m => m.harvested * m.seconds)), "core-h", "Harvested, last hour"), figure(number(sum(m => m.calls)), "", "Calls, last hour"),
        figure(number(sum(m => m.failures)), "", "Failed calls", sum(m => m.failures) > 0), figure(number(sum(m => m.starts)), "", "Worker starts"), figure(number(sum(m => m.ended)), "", "Ended leases"));
      for (const c of [this.cores, this.calls, this.starts]) c.draw({ steps, step_ms: 60000, from_ms: now - 3600000, now_ms: now });
    }
    this.held.hidden = !s;
    if (s) this.leases.replaceChildren(table(leaseColumns(now).filter(([title]) => title !== "node"), s.leases.filter(l => l.node === this.name)));
  }

  destroy() { for (const c of [this.cores, this.calls, this.starts]) c.destroy(); }
}

export class Leases {
  constructor() {
    this.list = make("div");
    this.element = [card("", "Running leases", "", this.list)];
  }

  update({ state: s, now }) {
    if (s) this.list.replaceChildren(table(leaseColumns(now), s.leases));
  }

  destroy() {}
}

// Lease shows one lease. The resource manager keeps no series of a lease, so its chart begins when the page is opened.
export class Lease {
  constructor(node, id) {
    this.node = node;
    this.id = id;
    this.steps = [];
    this.facts = make("div");
    this.calls = charts.leaseCalls();
    this.element = [card("half", "Lease " + id, "", this.facts), card("half", "Calls", "since this page was opened", this.calls.element)];
  }

  update({ state: s, now }) {
    if (!s) return;
    const l = s.leases.find(x => x.lease === this.id && x.node === this.node);
    if (!l) {
      this.facts.replaceChildren(make("p", { className: "none" }, "This lease has ended, or never existed. Its use is on the tenant's bill."));
      return;
    }
    const age = (now - l.began_ms) / 1000, facts = { tenant: l.tenant, node: nodeLink(l.node), began: new Date(l.began_ms).toLocaleString("en-GB"), age: seconds(age),
      "cores, mean": number(l.core_seconds / Math.max(age, 1e-3)), "core-hours": number(l.core_seconds / 3600), "GiB-hours": number(l.gib_seconds / 3600), calls: number(+l.calls),
      "calls a second, mean": number(l.calls / Math.max(age, 1e-3)), failures: number(+l.failures), "bytes in": number(+l.bytes_in), "bytes out": number(+l.bytes_out) };
    this.facts.replaceChildren(make("dl", { className: "facts" }, ...Object.entries(facts).flatMap(([k, v]) => [make("dt", {}, k), make("dd", {}, v)])));
    if (this.last && now > this.last.now) {
      const d = (now - this.last.now) / 1000;
      this.steps.push({ start_ms: now, calls: Math.max(0, l.calls - this.last.calls) / d, failures: Math.max(0, l.failures - this.last.failures) / d });
      if (this.steps.length > 600) this.steps.shift();
    }
    this.last = { now, calls: +l.calls, failures: +l.failures };
    this.calls.draw({ steps: this.steps, step_ms: 3600000, from_ms: Math.min(now - 60000, this.steps[0]?.start_ms ?? now), now_ms: now });
  }

  destroy() { this.calls.destroy(); }
}

export class Tenants {
  constructor() {
    this.use = make("div");
    this.now = make("div");
    this.bills = make("div");
    this.element = [card("half", "Use", "in the time span", this.use), card("half", "Now", "", this.now), card("", "Bills", "from the beginning", this.bills)];
  }

  update({ state: s, history: h }) {
    if (!s) return;
    const tenants = h.tenants ?? [], all = tenants.reduce((n, x) => n + x.core_seconds, 0) || 1;
    this.use.replaceChildren(table([["tenant", x => x.tenant || others], ["", x => bar(100 * x.core_seconds / all, "var(--harvested)")], ["core-hours", x => number(x.core_seconds / 3600), "number"],
      ["calls", x => number(x.calls), "number"], ["failures", x => number(x.failures), "number"]], tenants));
    this.now.replaceChildren(table([["tenant", t => t.tenant], ["leases", t => t.leases, "number"], ["cores reserved", t => t.limited ? t.reserved_cores : "–", "number"],
      ["limit", t => t.limited ? t.limit_cores : "none", "number"]], s.tenants));
    const rows = s.bills.flatMap(b => b.lines.filter(l => l.units !== "0").map(l => ({ tenant: b.tenant, ...l })).concat([{ tenant: b.tenant, item: "total", quantity: "", price: "", amount: `${b.amount} ${s.currency}` }]));
    this.bills.replaceChildren(table([["tenant", l => l.tenant], ["item", l => l.item], ["quantity", l => l.quantity, "number"], ["price", l => l.price, "number"], ["amount", l => l.amount, "number"]], rows));
  }

  destroy() {}
}
