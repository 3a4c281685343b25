// The map of nodes: a tile for each node. Tiles are kept over updates.

import { make, legend } from "./ui.js";

// nodesOf merges executors by node with the nodes that had an executor within the last week.
export function nodesOf(executors, known) {
  const all = new Map();
  const at = name => {
    if (!all.has(name)) all.set(name, { name, cores: 0, lent: 0, used: 0, free: 0, leases: 0, executors: [], state: "absent" });
    return all.get(name);
  };
  for (const e of executors) {
    const n = at(e.node);
    n.executors.push(e);
    if (e.state === "silent") continue;
    n.lent += e.cores;
    n.free += e.free_cores;
    n.used += e.cores - e.free_cores;
    n.leases += e.leases;
  }
  for (const k of known) {
    const n = at(k.node);
    n.cores = k.cores;
    n.seen = k.seen_ms;
  }
  for (const n of all.values()) {
    n.cores = Math.max(n.cores, n.lent);
    if (n.executors.some(e => e.state === "silent")) n.state = "silent";
    else if (n.executors.some(e => e.state === "draining")) n.state = "draining";
    else if (n.executors.some(e => e.state === "cordoned")) n.state = "cordoned";
    else if (n.executors.length > 0) n.state = n.used > 0 ? "harvested" : "idle";
  }
  return [...all.values()].sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
}

export const words = n => n.state === "absent" ? `${n.name}: ${n.cores} cores, no executor: a batch job has it, or it is down` :
  `${n.name}: ${n.used} of ${n.lent} lent cores harvested, ${n.leases} leases, ${n.state}; the node has ${n.cores} cores`;

export class NodeMap {
  constructor() {
    this.tiles = new Map();
    this.grid = make("div", { id: "map", role: "list" });
    this.hint = make("p", { id: "hint" });
    this.element = make("div", {}, this.grid, legend(["harvested", "var(--harvested)"], ["idle", "var(--idle)"], ["batch or not lent", "var(--batch)"],
      ["draining", "var(--draining)"], ["cordoned", "var(--cordoned)"], ["silent", "var(--silent)"]), this.hint);
    const show = ev => { this.hint.textContent = ev.target.closest("a")?.title ?? ""; };
    this.grid.addEventListener("pointerover", show);
    this.grid.addEventListener("focusin", show);
  }

  draw(nodes) {
    const n = nodes.length, named = n <= 120;
    this.grid.classList.toggle("named", named);
    this.grid.style.setProperty("--tile", named ? "4.6rem" : n <= 600 ? "2rem" : n <= 2500 ? "1.1rem" : ".55rem");
    this.grid.style.setProperty("--gap", named ? "6px" : n <= 2500 ? "3px" : "1px");
    const left = new Set(this.tiles.keys());
    for (const node of nodes) {
      left.delete(node.name);
      let tile = this.tiles.get(node.name);
      if (!tile) {
        tile = { a: make("a", { href: "#/node/" + encodeURIComponent(node.name), role: "listitem", "data-name": node.name }) };
        this.tiles.set(node.name, tile);
        this.grid.append(tile.a);
      }
      const text = words(node);
      if (tile.text === text) continue;
      tile.text = tile.a.title = text;
      tile.a.className = node.state;
      const share = c => (node.cores ? 100 * c / node.cores : 0).toFixed(1) + "%";
      tile.a.style.setProperty("--used", share(node.used));
      tile.a.style.setProperty("--lent", share(node.lent));
    }
    for (const name of left) {
      this.tiles.get(name).a.remove();
      this.tiles.delete(name);
    }
  }
}
