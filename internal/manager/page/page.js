// Fetches the state and the history again and again, and shows the view that the address names.

import { $, number } from "./ui.js";
import { Overview, Nodes, Node, Leases, Lease, Tenants } from "./views.js";

// The token is kept for as long as the tab is.
$("token").addEventListener("change", ev => {
  sessionStorage.setItem("token", ev.target.value.trim());
  look();
});

async function get(part) {
  const token = sessionStorage.getItem("token");
  const r = await fetch("/api/v1/" + part, { cache: "no-store", signal: AbortSignal.timeout(10000), headers: token ? { Authorization: "Bearer " + token } : {} });
  if (r.status !== 401 && !r.ok) throw new Error((await r.text()).trim() || r.statusText);
  return r.status === 401 ? undefined : r.json();
}

// ------------------------------------------------------------------------------------------------ settings of this browser

const root = document.documentElement, prefersDark = matchMedia("(prefers-color-scheme: dark)");
function theme() {
  root.classList.toggle("dark", (localStorage.getItem("theme") ?? (prefersDark.matches ? "dark" : "light")) === "dark");
  open(); // charts have the colours
}
$("theme").addEventListener("click", () => {
  localStorage.setItem("theme", root.classList.contains("dark") ? "light" : "dark");
  theme();
});
prefersDark.addEventListener("change", theme);

let span = localStorage.getItem("span");
if (!["hour", "day", "week", "year"].includes(span)) span = "hour";
function showSpan() {
  for (const b of $("spans").children) b.setAttribute("aria-pressed", b.dataset.span === span);
}
$("spans").addEventListener("click", ev => {
  if (!ev.target.dataset.span) return;
  span = ev.target.dataset.span;
  localStorage.setItem("span", span);
  showSpan();
  data.history = undefined;
  look();
});

// ------------------------------------------------------------------------------------------------ views

let view;
const data = {};

function open() {
  view?.destroy();
  let parts = [];
  try {
    parts = location.hash.split("/").map(decodeURIComponent);
  } catch { /* not an address of this page: show the overview */ }
  const [, name = "", ...rest] = parts;
  view = name === "nodes" ? new Nodes() : name === "node" ? new Node(rest[0]) : name === "leases" ? new Leases() : name === "lease" ? new Lease(...rest) :
    name === "tenants" ? new Tenants() : new Overview();
  data.node = undefined;
  $("main").replaceChildren(...view.element);
  for (const a of $("views").children)
    if (a.getAttribute("href") === "#/" + ({ node: "nodes", lease: "leases" }[name] ?? name)) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  show();
}

function show() {
  if (!data.executors || !data.history || !view) return;
  const s = data.state, alive = data.executors.filter(e => e.state !== "silent");
  $("ask").hidden = s !== undefined;
  for (const e of document.querySelectorAll(".named")) e.hidden = s === undefined && e.id !== "map";
  const cores = alive.reduce((n, e) => n + e.cores, 0);
  $("summary").textContent = `${alive.length} of ${data.executors.length} executors, ${number(cores)} cores` + (s ? `, ${s.leases.length} leases, ${s.subscribers} subscribers` : "");
  view.update({ ...data, span });
}

// ------------------------------------------------------------------------------------------------ updates

let refusedWith; // token with which the resource manager refused to name tenants. It is asked for them again when there is another one
let timer, round = 0, historyAt = -Infinity;

async function look() {
  clearTimeout(timer);
  const mine = ++round, began = performance.now(), token = sessionStorage.getItem("token");
  try {
    let state = refusedWith !== undefined && refusedWith === token ? undefined : await get("state");
    if (state === undefined) refusedWith = token;
    const executors = state?.executors ?? await get("executors");
    // The history changes slowly.
    const fresh = data.history === undefined || performance.now() - historyAt > 5000 || data.asked !== token;
    const [history, known] = fresh ? await Promise.all([get("history?span=" + span), get("nodes")]) : [data.history, data.known];
    const node = view instanceof Node && state !== undefined ? await get("nodes/" + encodeURIComponent(view.name)) : undefined;
    if (mine !== round) return;
    if (fresh) historyAt = performance.now();
    Object.assign(data, { state, executors, history, known, node, asked: token, now: state?.now_ms ?? Math.max(history.now_ms, data.now ?? 0) });
    const trouble = state?.trouble ?? "";
    $("trouble").textContent = trouble;
    $("trouble").hidden = trouble === "";
    document.body.classList.remove("stale");
    show();
    root.dataset.ready = "yes";
  } catch (err) {
    if (mine !== round) return;
    $("trouble").textContent = "The resource manager does not answer: " + err.message + (data.now ? `. What is shown is from ${new Date(data.now).toLocaleTimeString("en-GB")}.` : "");
    $("trouble").hidden = false;
    document.body.classList.add("stale");
    root.dataset.ready = "error";
  }
  timer = setTimeout(look, Math.max(1000, 4 * (performance.now() - began))); // a large cluster is looked at less often
}

addEventListener("hashchange", () => {
  open();
  look();
});
showSpan();
theme();
look();
