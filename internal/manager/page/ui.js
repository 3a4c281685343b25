// Elements and numbers. Everything that comes from the resource manager is put in as text, never as markup.

export const $ = id => document.getElementById(id);

// make creates an element with properties, CSS variables (names that begin with --) and children.
export function make(tag, properties = {}, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("--")) e.style.setProperty(name, value);
    else if (name.startsWith("data-") || name.startsWith("aria-") || name === "role") e.setAttribute(name, value);
    else e[name] = value;
  }
  e.append(...children.filter(c => c !== undefined && c !== null));
  return e;
}

export const card = (kind, title, note, ...children) =>
  make("section", { className: "card " + kind }, make("h2", {}, title, note ? make("small", {}, note) : null), ...children);

export function figure(value, unit, label, bad = false) {
  return make("section", { className: "card figure" + (bad ? " bad" : "") }, make("span", {}, label),
    make("b", {}, value, unit ? make("small", {}, " " + unit) : null));
}

const most = 500; // rows of a table

// table makes a table. A column is [title, function of a row, "number" or nothing]. The function returns text or an element.
export function table(columns, rows) {
  const body = make("tbody");
  for (const r of rows.slice(0, most))
    body.append(make("tr", {}, ...columns.map(([, of, kind]) => {
      const value = of(r);
      return make("td", { className: kind ?? "", title: typeof value === "object" ? "" : value }, value);
    })));
  if (rows.length > most) body.append(make("tr", {}, make("td", { colSpan: columns.length }, `and ${rows.length - most} more: /api/v1/state has all`)));
  if (rows.length === 0) body.append(make("tr", {}, make("td", { colSpan: columns.length, className: "none" }, "none")));
  return make("div", { className: "scroll" }, make("table", {},
    make("thead", {}, make("tr", {}, ...columns.map(([title, , kind]) => make("th", { className: kind ?? "" }, title)))), body));
}

// bar makes a bar of a size in percent, and a pale one of the size pale behind it.
export function bar(size, color, pale = 0) {
  const part = (n, kind) => make("i", { className: kind, "--size": Math.max(0, Math.min(100, n)).toFixed(2) + "%", "--c": color });
  return make("span", { className: "bar" }, pale ? part(pale, "pale") : null, part(size, ""));
}

export const key = color => make("i", { className: "key", "--c": color });

export function legend(...entries) {
  return make("p", { className: "legend" }, ...entries.map(([name, color, value]) =>
    make("span", {}, make("i", { "--c": color }), name, value === undefined ? null : make("b", {}, value))));
}

export const gib = n => (n / 2 ** 30).toFixed(1) + " GiB";

export function number(n) {
  const a = Math.abs(n);
  if (a >= 1e9) return (n / 1e9).toPrecision(3) + " G";
  if (a >= 1e6) return (n / 1e6).toPrecision(3) + " M";
  if (a >= 1e5) return (n / 1e3).toFixed(0) + " k";
  if (a >= 1e4) return (n / 1e3).toFixed(1) + " k";
  if (a >= 100 || Number.isInteger(n)) return n.toFixed(0);
  return a >= 10 ? n.toFixed(1) : a === 0 ? "0" : n.toPrecision(2);
}

export function seconds(s) {
  if (s === 0) return "0 s";
  if (s < 1e-3) return (s * 1e6).toFixed(0) + " µs";
  if (s < 1) return (s * 1e3).toPrecision(3) + " ms";
  if (s < 120) return (s < 10 ? s.toFixed(1) : s.toFixed(0)) + " s";
  if (s < 7200) return (s / 60).toFixed(0) + " min";
  return s < 48 * 3600 ? (s / 3600).toFixed(1) + " h" : (s / 86400).toFixed(1) + " days";
}

export const color = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
