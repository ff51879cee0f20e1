"use strict";
// What every part of the page uses: elements, payloads, numbers, colours, tables. All text enters as text nodes.
const M = { widgets: {} };

M.data = JSON.parse(document.getElementById("data").textContent);

M.make = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") element.className = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
};

// text in which `words` between two backticks are code
M.prose = (text) => { const parts = text.split("`"); return parts.length % 2 ? parts.map((part, at) => (at % 2 ? M.make("code", {}, part) : part)) : [text]; };

M.svg = (tag, attributes = {}, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
};

// ---- payloads: base64 of gzip, unpacked once, when they are needed
(() => {
  const unpacked = new Map();
  const loaded = new Promise((resolve) => {
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", resolve);
    else resolve();
  });

  async function text(id) {
    // an element without a next one may still be read by the parser, its text incomplete
    if (!document.getElementById(id)?.nextElementSibling) await loaded;
    const element = document.getElementById(id);
    const letters = atob(element.textContent);
    const bytes = new Uint8Array(letters.length); // a loop: ten times as fast as Uint8Array.from
    for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
    const stream = new Response(bytes).body.pipeThrough(new DecompressionStream("gzip"));
    element.textContent = "";
    return new Response(stream).text();
  }

  M.payload = (name) => {
    if (!unpacked.has(name)) unpacked.set(name, text("p-" + name).then(JSON.parse));
    return unpacked.get(name);
  };

  let plotly = null;
  M.plotly = () => {
    plotly ??= text("plotly").then((source) => {
      const script = M.make("script");
      script.textContent = source;
      document.head.append(script);
      return window.Plotly;
    });
    return plotly;
  };
  // plotly is unpacked while the overview is read: the first tab with figures does not wait for it
  loaded.then(() => requestIdleCallback(() => M.plotly()));
})();

// ---- numbers
M.number = (value, digits = 3) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3) {
    const [mantissa, power] = value.toExponential(1).split("e");
    const raised = power.replace("+", "").replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
    return `${mantissa.replace("-", "−")}\u00a0×\u00a010${raised}`; // in one line
  }
  const words = size >= 1000 ? Math.round(value).toLocaleString("en-US")
    : value.toPrecision(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  return words.replace("-", "−");
};

// one of several values, as a select
M.choice = (values, chosen, choose) => {
  return M.make("select", { "aria-label": "quantity", onchange: (event) => choose(Number(event.target.value)) },
    ...values.map((value, at) => M.make("option", { value: at, selected: at === chosen }, value)));
};

// ---- theme
(() => {
  const root = document.documentElement;
  const preferred = window.matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];
  let chosen = preferred.matches ? "dark" : "light";
  const apply = (theme) => {
    if (root.dataset.theme === theme) return;
    root.dataset.theme = theme;
    listeners.forEach((listener) => listener());
  };
  const choose = (theme) => { chosen = theme; apply(theme); };
  choose(chosen);
  preferred.addEventListener("change", (event) => choose(event.matches ? "dark" : "light"));
  M.theme = {
    toggle: () => choose(chosen === "dark" ? "light" : "dark"),
    lend: (theme) => apply(theme ?? chosen), // for a while, as for print; null gives it back
    dark: () => root.dataset.theme === "dark",
    changed: (listener) => listeners.push(listener),
    color: (name) => getComputedStyle(root).getPropertyValue(name).trim(),
  };
})();

// ---- colours: a scale is a list of [place from 0 to 1, "#rrggbb" or "rgb(r, g, b)"]
(() => {
  const parse = (color) => (color[0] === "#" ? [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)) : color.match(/[\d.]+/g).slice(0, 3).map(Number));
  // the colours of scales by theme: what chance leaves is nearly the page's background, the ends stand out from it
  M.SCALE = { light: ["#2166ac", "#92c5de", "#f3f4f6", "#f4a582", "#b2182b", "#0b2f5b"], dark: ["#6aaee8", "#2d5f8f", "#20252b", "#96503a", "#f08c6c", "#9cc4f0"] };
  M.sequential = () => { const scale = M.SCALE[M.theme.dark() ? "dark" : "light"]; return [scale[2], scale[5]]; };
  M.diverging = () => M.SCALE[M.theme.dark() ? "dark" : "light"].slice(0, 5);
  // The end of a scale of differences: the largest, and at least 3 standard deviations of the noise, which then looks pale.
  M.anchored = (differences, noises, unit = "") => {
    const sizes = differences.filter(Number.isFinite).map(Math.abs);
    const known = noises.filter((value) => Number.isFinite(value) && value > 0).sort((a, b) => a - b);
    const noise = known[known.length >> 1] ?? 0;
    const words = noise ? `the scale reaches at least 3 standard deviations of the noise (${M.number(noise)}${unit})` : "no noise level is known, and the scale ends at the largest difference";
    return { end: Math.max(...sizes, 3 * noise, 1e-12), noise, words };
  };
  M.blend = (scale, at) => {
    const place = Math.min(Math.max(at, 0), 1);
    const next = Math.max(1, scale.findIndex(([end]) => end >= place));
    const [[low, a], [high, b]] = [scale[next - 1], scale[next]];
    const part = (place - low) / (high - low || 1);
    return parse(a).map((value, i) => Math.round(value + part * (parse(b)[i] - value)));
  };
  // black or white, whichever contrasts more (WCAG 2): at least 4.58 on any colour
  M.inkOn = (rgb) => {
    const [r, g, b] = rgb.map((value) => (value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
  };
})();

// ---- tables and CSV
(() => {
  const csvCell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value !== "string") return String(value);
    // a spreadsheet would run a text that begins like a formula
    const text = /^[=+\-@\t\r]/.test(String(value)) ? "'" + value : String(value);
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  M.csv = (heads, rows) => [heads, ...rows].map((row) => row.map(csvCell).join(",")).join("\n") + "\n";

  M.save = (name, content, type) => {
    const link = M.make("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  M.copy = async (text, button) => {
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "The browser does not allow copying";
    }
    setTimeout(() => { button.textContent = before; }, 1500);
  };

  function cellText(value, kind) {
    if (value === null) return "–";
    if (kind === "bool") return value ? "yes" : "no";
    return kind !== "float" || typeof value === "string" ? String(value) : M.number(value);
  }

  const SHORT_TABLE = 20; // rows up to which a table is shown whole
  const cellClass = (kind) => ({ text: "text", sentence: "text sentence" })[kind] ?? null;
  M.tableElement = (table, folded) => {
    const heads = table.columns.map((column) => {
      const entry = column.entry ?? column.name;
      const link = M.make("a", { href: M.state.link({ tab: "methods", term: entry }) }, column.title);
      return M.make("th", { class: cellClass(column.kind), scope: "col" }, link);
    });
    const rows = table.rows.map((row) => M.make("tr", {}, ...row.map((value, index) => {
      const { kind, name, terms } = table.columns[index];
      const content = name === "layer" && typeof value === "number" ? M.make("a", { href: M.state.link({ layer: value }) }, String(value))
        : terms?.[value] ? M.make("a", { href: M.state.link({ tab: "methods", term: value }) }, terms[value]) : cellText(value, kind);
      return M.make("td", { class: cellClass(kind) }, content);
    })));
    // of a selected domain its rows only, shown and saved, where the table has any
    const domains = table.columns.findIndex((column) => column.name === "domain");
    const kept = () => {
      const mine = domains < 0 || M.selected.domain() === null ? [] : table.rows.filter((row) => row[domains] === M.selected.domain());
      return mine.length ? mine : table.rows;
    };
    const filter = () => { const shown = new Set(kept()); rows.forEach((element, index) => { element.hidden = !shown.has(table.rows[index]); }); };
    if (domains >= 0) { M.state.onChange(filter); filter(); }
    const save = () => M.save(`moescope-${table.name}.csv`, M.csv(table.columns.map((c) => c.name), kept()), "text/csv");
    const scroll = M.make("div", { class: table.rows.length > SHORT_TABLE ? "scroll" : "scroll whole", tabindex: 0 },
      M.make("table", {}, M.make("thead", {}, M.make("tr", {}, ...heads)), M.make("tbody", {}, ...rows)));
    const button = M.make("button", { type: "button", class: "csv", onclick: save }, "CSV");
    if (!folded) return M.make("div", { class: "table-block" }, M.make("div", { class: "table-head" }, M.make("h3", {}, table.title), button), scroll);
    return M.make("details", { class: "table-block" }, M.make("summary", {}, table.title), button, scroll);
  };
})();
