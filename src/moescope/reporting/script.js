"use strict";
// The page: unpacks payloads when they come into view, draws figures, fills tables. No network, no state but theme and reading.
(() => {
  const glossary = JSON.parse(document.getElementById("glossary-data").textContent);
  const payload = (name) => JSON.parse(document.getElementById("p-" + name).textContent);
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "class") element.className = value;
      else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  };

  // ---- unpacking
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  function unpack(value) {
    if (Array.isArray(value)) return value.map(unpack);
    if (value === null || typeof value !== "object") return value;
    if ("u16" in value) {
      const levels = new Uint16Array(bytes(value.u16));
      const [rows, columns] = value.shape;
      const step = (value.high - value.low) / 65534;
      return Array.from({ length: rows }, (_, r) =>
        Array.from(levels.subarray(r * columns, (r + 1) * columns), (level) => (level === 65535 ? null : value.low + level * step)));
    }
    if ("f32" in value) return Array.from(new Float32Array(bytes(value.f32)), (x) => (Number.isNaN(x) ? null : x));
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, unpack(item)]));
  }

  // ---- theme
  const root = document.documentElement;
  const wanted = window.matchMedia("(prefers-color-scheme: dark)");
  const setTheme = (dark) => { root.dataset.theme = dark ? "dark" : "light"; };
  setTheme(wanted.matches);
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const themed = () => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": color("--ink"),
    "xaxis.gridcolor": color("--grid"), "yaxis.gridcolor": color("--grid"), "xaxis.zerolinecolor": color("--line"), "yaxis.zerolinecolor": color("--line"),
    "xaxis.linecolor": color("--line"), "yaxis.linecolor": color("--line"), "hoverlabel.bgcolor": color("--panel"), "hoverlabel.font.color": color("--ink"),
    "hoverlabel.bordercolor": color("--line"), "legend.bgcolor": "rgba(0,0,0,0)",
  });
  function assign(target, flat) {
    for (const [path, value] of Object.entries(flat)) {
      const keys = path.split(".");
      let place = target;
      for (const key of keys.slice(0, -1)) place = place[key] ??= {};
      place[keys.at(-1)] = value;
    }
    return target;
  }
  function repaint() { document.querySelectorAll(".plot.drawn").forEach((div) => Plotly.relayout(div, themed())); }
  document.getElementById("theme").addEventListener("click", () => { setTheme(root.dataset.theme !== "dark"); repaint(); });
  wanted.addEventListener("change", (event) => { setTheme(event.matches); repaint(); });

  // ---- figures
  function definition(columns) {
    const box = make("details", { class: "definition" }, make("summary", {}, "Definitions"));
    for (const name of columns) {
      const entry = glossary[name];
      if (!entry) continue;
      const marks = [["worst", entry.worst], ["chance", entry.chance], ["best", entry.best]].filter((m) => m[1]).map((m) => m.join(" ")).join(" · ");
      box.append(make("p", {}, make("a", { href: "#g-" + name }, make("strong", {}, entry.title || name.replaceAll("_", " "))), " " + entry.meaning,
        entry.formula ? make("span", { class: "formula" }, entry.formula) : "", marks ? make("span", { class: "marks" }, marks) : "",
        entry.misleads ? make("span", { class: "misleads" }, "Misleads: " + entry.misleads) : ""));
    }
    return box;
  }

  function shown(figure, position) {
    const { per, values } = figure.slider;
    return figure.data.map((_, index) => index >= per * values.length || Math.floor(index / per) === position);
  }

  // A picture is for paper: light whatever the page is, with its title in it.
  function picture(figure, plot) {
    const light = { "font.color": "#1a1d21", paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff", "xaxis.gridcolor": "#e9ecef", "yaxis.gridcolor": "#e9ecef" };
    const title = plot.closest("figure").querySelector("h4").textContent;
    const lines = title.match(/.{1,95}(\s|$)/g) || [title];
    const layout = assign(structuredClone(plot.layout), { ...light, title: { text: lines.map((line) => line.replaceAll("<", "&lt;")).join("<br>"), x: 0.02, font: { size: 14 } },
      margin: { ...plot.layout.margin, t: 70 + 20 * lines.length }, height: figure.height + 90, width: 900, autosize: false });
    return Plotly.downloadImage({ data: plot.data, layout }, { format: "svg", filename: "moescope-" + figure.name, width: 900, height: figure.height + 90 });
  }

  function draw(figure, div) {
    const narrow = div.clientWidth < 480;
    const data = unpack(figure.data);
    if (figure.slider) shown(figure, figure.slider.start).forEach((visible, index) => { data[index].visible = visible; });
    const layout = assign(unpack(figure.layout), {
      ...themed(), "font.family": getComputedStyle(document.body).fontFamily, "font.size": narrow ? 11 : 12.5, height: figure.height, autosize: true,
      margin: { l: 58, r: 14, t: 8, b: 48 }, hovermode: "closest", "xaxis.automargin": true, "yaxis.automargin": true,
    });
    layout.showlegend ??= true;
    layout.legend = { ...layout.legend, orientation: "h", yanchor: "bottom", y: 1.01, x: 0, xanchor: "left", font: { size: narrow ? 10 : 11.5 }, bgcolor: "rgba(0,0,0,0)" };
    const camera = { name: "picture", title: "Download as picture", icon: Plotly.Icons.camera, click: (plot) => picture(figure, plot) };
    const config = { displaylogo: false, responsive: true, plotlyServerURL: "", modeBarButtons: [[camera, "zoom2d", "pan2d", "resetScale2d"]],  // named: plotly's own choice offers an upload
    };
    div.classList.add("drawn");
    return Plotly.newPlot(div, data, layout, config);
  }

  function figureElement(figure) {
    const div = make("div", { class: "plot", style: `height:${figure.height}px` });
    const title = make("h4", {}, figure.title), caption = make("figcaption", {}, figure.caption);
    const element = make("figure", { "data-name": figure.name }, title, caption);
    if (figure.slider) {
      const { label, values, start, orders, titles, captions } = figure.slider;
      let position = start;
      const output = make("output", {}, values[start]);
      const range = make("input", { type: "range", min: 0, max: values.length - 1, value: start, step: 1, "aria-label": label });
      const similar = make("input", { type: "checkbox" });
      const reorder = () => {
        const order = similar.checked ? orders[position] : null;
        return { "xaxis.categoryorder": order ? "array" : "trace", "xaxis.categoryarray": order || [], "yaxis.categoryorder": order ? "array" : "trace", "yaxis.categoryarray": order || [] };
      };
      range.addEventListener("input", () => {
        position = Number(range.value);
        output.textContent = values[position];
        if (titles.length) title.textContent = titles[position];
        if (captions.length) caption.textContent = captions[position];
        Plotly.update(div, { visible: shown(figure, position) }, orders.length ? reorder() : {});
      });
      similar.addEventListener("change", () => Plotly.relayout(div, reorder()));
      const controls = make("div", { class: "controls" });
      if (values.length > 1) controls.append(make("label", {}, label, range, output));
      if (orders.length) controls.append(make("label", {}, similar, "order by similarity"));
      element.append(controls);
    }
    element.append(div, definition(figure.columns));
    return { element, start: () => draw(figure, div) };
  }

  function fillFigure(slot) {
    if (slot.dataset.done || !slot.offsetParent) return;
    slot.dataset.done = "1";
    const figure = slot.figure || payload(slot.dataset.payload);
    if (figure.wide) slot.classList.add("wide");
    const { element, start } = figureElement(figure);
    slot.append(element);
    start();
  }

  // ---- tables
  const csvCell = (value) => { const text = value === null ? "" : String(value); return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
  const csv = (table) => [table.columns.map((c) => c.name), ...table.rows].map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
  function display(value, kind) {
    if (value === null) return "–";
    if (kind === "bool") return value ? "yes" : "no";
    if (kind !== "float" || typeof value === "string") return String(value);  // a cell may say why it has no number
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(1).replace(/e(.*)$/, (_, power) => " × 10" + power.replace("+", "").replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]));
    return size >= 1000 ? value.toFixed(0) : value.toPrecision(3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  }
  function tableElement(table, folded, reading) {
    const head = make("tr", {}, ...table.columns.map((column) => {
      const entry = column.entry ?? column.name;
      return make("th", { class: column.kind === "text" ? "text" : "" }, glossary[entry] ? make("a", { href: "#g-" + entry, title: glossary[entry].meaning }, column.title) : column.title);
    }));
    const rows = table.rows.map((row) => make("tr", {}, ...row.map((value, index) => {
      const kind = table.columns[index].kind;
      const cell = make("td", { class: (kind === "text" ? "text" : "") + (value === null ? " none" : "") });
      if (table.links && table.columns[index].name === "layer") cell.append(make("a", { href: "#" + (typeof table.links === "string" ? table.links : `r${reading}-layer-`) + value }, String(value)));
      else cell.append(display(value, kind));
      return cell;
    })));
    const copy = make("button", { type: "button", onclick: async () => {
      try { await navigator.clipboard.writeText(csv(table)); copy.textContent = "Copied"; } catch { copy.textContent = "Copy refused by the browser"; }
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    } }, "Copy");
    const save = make("button", { type: "button", class: "csv", onclick: () => {
      const link = make("a", { href: URL.createObjectURL(new Blob([csv(table)], { type: "text/csv" })), download: `moescope-${table.name}.csv` });
      document.body.append(link); link.click(); link.remove();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    } }, "CSV");
    const block = make("div", { class: "table-block" }, make("div", { class: "table-head" }, make("h4", {}, folded ? "" : table.title), copy, save),
      make("div", { class: "scroll", tabindex: 0 }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
    return folded ? make("details", {}, make("summary", {}, table.title), block) : block;
  }
  function fillTable(slot) {
    if (slot.dataset.done) return;
    slot.dataset.done = "1";
    slot.append(tableElement(payload(slot.dataset.payload), slot.dataset.folded, slot.dataset.reading || 0));
  }

  // ---- drawn when scrolled to
  const fillers = { "figure-slot": fillFigure, "table-slot": fillTable };
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { observer.unobserve(entry.target); fillers[entry.target.classList[0]](entry.target); }
  }, { rootMargin: "400px" });
  const watch = (node) => node.querySelectorAll(".figure-slot, .table-slot, .text-slot").forEach((slot) => { if (!slot.dataset.done) observer.observe(slot); });

  // ---- layers, filled when opened
  function slotFor(figure) { const slot = make("div", { class: "figure-slot" + (figure.wide ? " wide" : "") }); slot.figure = figure; return slot; }
  function openLayer(details) {
    if (!details.open || details.dataset.done) return;
    details.dataset.done = "1";
    const content = payload(details.dataset.payload);
    const body = details.querySelector(".body");
    body.append(...content.verdict.map((words) => make("p", { class: "prose" }, words)));
    body.append(make("details", { class: "setup" }, make("summary", {}, "Setup"),
      make("table", { class: "plain" }, make("tbody", {}, ...content.setup.map(([name, value]) => make("tr", {}, make("th", {}, name), make("td", {}, value)))))));
    body.append(make("div", { class: "grid" }, ...content.figures.map(slotFor)));
    body.append(...content.tables.map((table) => tableElement(table, true)));
    if (content.complete.length) body.append(make("h3", {}, "Complete view"), make("div", { class: "grid panels" }, ...content.complete.map(slotFor)));
    watch(body);
  }
  document.querySelectorAll("details.layer:not(.routed)").forEach((details) => details.addEventListener("toggle", () => openLayer(details)));

  // ---- links open what they point at
  function reveal() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const hidden = target.closest("[data-reading][hidden]");
    if (hidden && select) { select.value = hidden.dataset.reading; showReading(); }
    const unseen = target.closest("[data-view][hidden]");
    if (unseen && viewSelect) { viewSelect.value = unseen.dataset.view; showView(); }
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    target.scrollIntoView();
  }
  window.addEventListener("hashchange", reveal);

  // ---- which reading is shown
  const select = document.getElementById("reading");
  function showReading() {
    const chosen = select ? select.value : "0";
    document.querySelectorAll("[data-reading]").forEach((node) => { node.hidden = node.dataset.reading !== chosen; });
  }
  if (select) select.addEventListener("change", showReading);
  showReading();
  const viewSelect = document.getElementById("view");
  function showView() {
    const chosen = viewSelect ? viewSelect.value : "0";
    document.querySelectorAll("[data-view]").forEach((node) => { node.hidden = node.dataset.view !== chosen; });
  }
  if (viewSelect) viewSelect.addEventListener("change", showView);
  showView();
  document.querySelectorAll("#summary .table-slot").forEach(fillTable);
  document.addEventListener("DOMContentLoaded", () => { watch(document); reveal(); });  // when all payloads and plotly are there

  window.moescope = { make, payload, unpack, tableElement, display, fillers };

  // ---- paper has no scrolling: draw what is open before it is printed
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll(".table-slot").forEach((slot) => { if (slot.offsetParent) fillTable(slot); });
    document.querySelectorAll(".figure-slot").forEach(fillFigure);
  });
})();
