"use strict";
// The page: unpacks payloads when they come into view, draws figures, fills tables. No network, no state but theme and selected views.
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
  function definition(columns, details) {
    const box = make("details", { class: "definition" }, make("summary", {}, "Definitions"), details ? make("p", {}, details) : "");
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
    const frame = plot.closest("figure");
    const title = `${frame.querySelector("h4").textContent}. ${frame.querySelector(".caption").textContent}`;
    const lines = title.match(/.{1,95}(\s|$)/g) || [title];
    const layout = assign(structuredClone(plot.layout), { ...light, title: { text: lines.map((line) => line.replaceAll("<", "&lt;")).join("<br>"), x: 0.02, font: { size: 14 } },
      margin: { ...plot.layout.margin, t: 70 + 20 * lines.length }, height: figure.height + 90, width: 900, autosize: false });
    return Plotly.downloadImage({ data: plot.data, layout }, { format: "svg", filename: "moescope-" + figure.name, width: 900, height: figure.height + 90 });
  }

  function draw(figure, div) {
    const narrow = div.clientWidth < 480;
    const data = figure.data;
    if (figure.slider) shown(figure, figure.slider.start).forEach((visible, index) => { data[index].visible = visible; });
    const layout = assign(figure.layout, {
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
    const title = make("h4", {}, figure.title);
    const caption = make("p", { class: "caption" }, figure.caption);
    const element = make("figure", { "data-name": figure.name }, title, caption);
    if (figure.slider) {
      const { label, values, start, orders, captions } = figure.slider;
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
        if (captions.length) caption.textContent = captions[position];
        Plotly.update(div, { visible: shown(figure, position) }, orders.length ? reorder() : {});
      });
      similar.addEventListener("change", () => Plotly.relayout(div, reorder()));
      const controls = make("div", { class: "controls" });
      if (values.length > 1) controls.append(make("label", {}, label, range, output));
      if (orders.length) controls.append(make("label", {}, similar, "order by similarity"));
      element.append(controls);
    }
    element.append(div, definition(figure.columns, figure.details));
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
  // A spreadsheet takes text that begins with one of these for a formula; a quote before it makes it text again.
  const csvText = (value) => (typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value ?? ""));
  const csvCell = (value) => { const text = csvText(value); return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
  const csv = (table) => [table.columns.map((c) => c.name), ...table.rows].map((row) => row.map(csvCell).join(",")).join("\n") + "\n";
  function display(value, kind) {
    if (value === null) return "–";
    if (kind === "bool") return value ? "yes" : "no";
    if (kind !== "float" || typeof value === "string") return String(value);  // a cell may say why it has no number
    const size = Math.abs(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(1).replace(/e(.*)$/, (_, power) => " × 10" + power.replace("+", "").replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]));
    return size >= 1000 ? value.toFixed(0) : value.toPrecision(3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  }
  function tableElement(table, folded, view) {
    const head = make("tr", {}, ...table.columns.map((column) => {
      const entry = column.entry ?? column.name;
      return make("th", { class: column.kind === "text" ? "text" : "" }, glossary[entry] ? make("a", { href: "#g-" + entry, title: glossary[entry].meaning }, column.title) : column.title);
    }));
    const rows = table.rows.map((row) => make("tr", {}, ...row.map((value, index) => {
      const kind = table.columns[index].kind;
      const cell = make("td", { class: (kind === "text" ? "text" : "") + (value === null ? " none" : "") });
      if (table.links && view && table.columns[index].name === "layer") cell.append(make("a", { href: `#${view}-${table.links}${value}` }, String(value)));
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
    const of = slot.closest("[data-view]");
    slot.append(tableElement(payload(slot.dataset.payload), slot.dataset.folded, of && `${of.dataset.group}-v${of.dataset.view}`));
  }

  // ---- widgets: drawn by a function that another script has registered
  const widgets = {};
  function fillWidget(slot) {
    if (slot.dataset.done || !slot.offsetParent) return;
    slot.dataset.done = "1";
    widgets[slot.dataset.widget](slot, payload(slot.dataset.payload));
  }

  // ---- drawn when scrolled to
  const fillers = { "figure-slot": fillFigure, "table-slot": fillTable, "widget-slot": fillWidget };
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { observer.unobserve(entry.target); fillers[entry.target.classList[0]](entry.target); }
  }, { rootMargin: "400px" });
  const watch = (node) => node.querySelectorAll(".figure-slot, .table-slot, .widget-slot").forEach((slot) => { if (!slot.dataset.done) observer.observe(slot); });

  // ---- folded sections, filled when opened
  function slotFor(figure) { const slot = make("div", { class: "figure-slot" + (figure.wide ? " wide" : "") }); slot.figure = figure; return slot; }
  function fillSection(body, content) {
    if (content.text) body.append(...content.text.split("\n").map((words) => make("p", { class: "prose" }, words)));
    if (content.findings.length) body.append(make("ul", { class: "findings" }, ...content.findings.map((line) => make("li", {}, line))));
    const facts = Object.entries(content.facts);
    if (facts.length) body.append(make("details", { class: "setup" }, make("summary", {}, "Setup"),
      make("table", { class: "plain" }, make("tbody", {}, ...facts.map(([name, value]) => make("tr", {}, make("th", {}, name), make("td", {}, value)))))));
    if (content.figures.length) body.append(make("div", { class: "grid" }, ...content.figures.map(slotFor)));
    body.append(...content.tables.map((table) => tableElement(table, true)));
    if (content.widget) { const slot = make("div", {}); body.append(slot); widgets[content.widget[0]](slot, content.widget[1]); }
    for (const inner of content.sections) { body.append(make("h3", {}, inner.title)); fillSection(body, inner); }
  }
  function openFolded(details) {
    if (!details.open || details.dataset.done) return;
    details.dataset.done = "1";
    const body = details.querySelector(".body");
    fillSection(body, payload(details.dataset.payload));
    watch(body);
  }
  document.querySelectorAll("details.folded").forEach((details) => details.addEventListener("toggle", () => openFolded(details)));

  // ---- links open what they point at
  function reveal() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const hidden = target.closest("[data-view][hidden]");
    const select = hidden && document.querySelector(`select[data-selects="${hidden.dataset.group}"]`);
    if (select) { select.value = hidden.dataset.view; showView(select); }
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    target.scrollIntoView();
  }
  window.addEventListener("hashchange", reveal);

  // ---- which view is shown
  function showView(select) {
    document.querySelectorAll(`[data-group="${select.dataset.selects}"]`).forEach((node) => { node.hidden = node.dataset.view !== select.value; });
  }
  document.querySelectorAll("select[data-selects]").forEach((select) => { select.addEventListener("change", () => showView(select)); showView(select); });
  document.querySelectorAll("#summary .table-slot").forEach(fillTable);
  document.addEventListener("DOMContentLoaded", () => { watch(document); reveal(); });  // when all payloads and plotly are there

  window.moescope = { make, tableElement, display, widgets };

  // ---- paper has no scrolling: draw what is open before it is printed
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll(".table-slot").forEach((slot) => { if (slot.offsetParent) fillTable(slot); });
    document.querySelectorAll(".figure-slot").forEach(fillFigure);
    document.querySelectorAll(".widget-slot").forEach(fillWidget);
  });
})();
