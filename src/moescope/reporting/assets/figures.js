// Figures: drawn by plotly in the page's colours; follow the selected layer; saved as CSV, PNG or SVG.
M.figures = (() => {
  const { make } = M;
  const drawn = new Set();
  const pending = new Set(); // promises of figures that are being drawn
  const WIDTHS = [["single column, 85 mm", 85], ["double column, 175 mm", 175]];
  const PER_MM = 96 / 25.4; // CSS pixels per millimetre
  const ENLARGED = 1.3; // drawn so much larger than printed: text of 13 px is printed at 7.5 points, as by `report --figures`

  // ---- colours of the page
  function assign(target, flat) {
    for (const [path, value] of Object.entries(flat)) {
      const keys = path.split(".");
      let place = target;
      for (const key of keys.slice(0, -1)) place = place[key] ??= {};
      place[keys.at(-1)] = value;
    }
    return target;
  }
  const axesOf = (layout) => Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key));
  function themed(layout) {
    const color = M.theme.color;
    const flat = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": color("--ink"),
      "hoverlabel.bgcolor": color("--panel"), "hoverlabel.font.color": color("--ink"), "hoverlabel.bordercolor": color("--line") };
    for (const axis of new Set(["xaxis", "yaxis", ...axesOf(layout)])) {
      flat[`${axis}.gridcolor`] = color("--grid");
      flat[`${axis}.zerolinecolor`] = color("--line");
      flat[`${axis}.linecolor`] = color("--line");
    }
    return flat;
  }
  // Scales are pale at chance on white, dark on black; rings are in the colour of text.
  function themedTraces(data, to) {
    const [wanted, other] = to === "dark" ? [M.SCALE.dark, M.SCALE.light] : [M.SCALE.light, M.SCALE.dark];
    for (const { marker } of data) if (marker?.symbol === "circle-open" && marker.line) marker.color = to === "dark" ? "#f2f4f6" : "#111111";
    for (const trace of data) for (const holder of [trace, trace.marker]) {
      const stops = Array.isArray(holder?.colorscale) ? holder.colorscale : [];
      const places = stops.map(([, color]) => other.indexOf(color.toLowerCase()));
      if (places.includes(2)) stops.forEach((stop, i) => { if (places[i] >= 0) stop[1] = wanted[places[i]]; });
    }
  }
  // Digits on the cells of a heatmap are black or white, whichever is easier to read there.
  function readable(plot) {
    for (const text of plot.querySelectorAll(".heatmap-label text")) {
      const { trace } = text.closest(".hm").__data__[0];
      text.style.fill = M.inkOn(M.blend(trace.colorscale, (text.__data__.z - trace.zmin) / (trace.zmax - trace.zmin || 1)));
    }
  }

  // ---- the selected layer and domain: an axis of them gets a mark, lines of others fade, a slider of layers moves
  const axisTitle = (layout, axis) => (layout[axis]?.title?.text ?? "").toLowerCase();
  const layerOf = (trace) => (/^layer \d+$/.test(trace.name ?? "") ? Number(trace.name.slice(6)) : undefined);
  const domainOf = (trace) => M.data.domains.find((domain) => trace.name === domain || trace.name?.startsWith(domain + ", "));
  // where a value stands on an axis: its category, a place among the labels, or itself
  function placeOn(plot, axis, value) {
    const { _categories: categories } = plot._fullLayout[axis];
    if (categories?.length) return categories.indexOf(String(value));
    const { ticktext, tickvals } = plot.layout[axis];
    const labels = Array.from(ticktext ?? [], Number);
    if (labels.length < 2 || labels.some(Number.isNaN)) return Number(value);
    // labels may name every second layer only
    return tickvals[0] + ((value - labels[0]) * (tickvals.at(-1) - tickvals[0])) / (labels.at(-1) - labels[0]);
  }
  function marks(plot, selected) {
    const shapes = (plot.layout.shapes ?? []).filter((shape) => !shape.name?.startsWith("selected "));
    for (const axis of axesOf(plot.layout)) {
      const value = selected[axisTitle(plot.layout, axis)];
      if (value === undefined || value === null) continue;
      const at = placeOn(plot, axis, value);
      if (!(at >= 0)) continue;
      const [mine, other] = axis[0] === "x" ? ["x", "y"] : ["y", "x"];
      shapes.push({ type: "rect", name: `selected ${axisTitle(plot.layout, axis)}`, line: { color: M.theme.color("--accent"), width: 1.5 },
        [`${mine}0`]: at - 0.5, [`${mine}1`]: at + 0.5, [`${mine}ref`]: axis.replace("axis", ""), [`${other}0`]: 0, [`${other}1`]: 1, [`${other}ref`]: "paper" });
    }
    return shapes;
  }
  // how strongly each trace is drawn: one of another layer or domain than the selected is faint
  function strengths(plot, selected) {
    const faint = plot.data.map(() => false);
    for (const [value, of] of [[selected.layer, layerOf], [selected.domain, domainOf]]) {
      const values = plot.data.map(of);
      if (value !== null && value !== undefined && values.includes(value)) values.forEach((own, i) => { if (own !== undefined && own !== value) faint[i] = true; });
    }
    return faint.map((is) => (is ? 0.28 : 1));
  }
  function follow(plot) {
    const selected = { layer: M.state.get().layer, domain: M.selected.domain() };
    plot.full ??= plot.data.map((trace) => trace.opacity ?? 1);
    const opacity = strengths(plot, selected).map((value, i) => value * plot.full[i]);
    if (opacity.some((value, i) => value !== (plot.data[i].opacity ?? 1))) window.Plotly.restyle(plot, { opacity });
    const before = plot.layout.shapes ?? [];
    const shapes = marks(plot, selected);
    if (shapes.length || before.length) window.Plotly.relayout(plot, { shapes });
    plot.slide?.();
  }
  // A click on a point sets the layer and expert that its axes name.
  function clicked(plot, event) {
    const point = event.points[0];
    const changes = {};
    for (const [axis, value] of [["xaxis", point.x], ["yaxis", point.y]]) {
      const name = axisTitle(plot.layout, axis);
      if ((name === "layer" || name === "expert") && Number.isInteger(Number(value))) changes[name] = Number(value);
    }
    if (/expert %\{text\}/.test(point.data.hovertemplate) && point.text !== undefined) changes.expert = Number(point.text);
    if (layerOf(point.data) !== undefined) changes.layer = layerOf(point.data);
    if (Object.keys(changes).length) M.state.set(changes);
  }

  // ---- drawing
  const visibleTraces = (figure, position) => figure.data.map((_, index) =>
    index >= figure.slider.per_value * figure.slider.values.length || Math.floor(index / figure.slider.per_value) === position);

  // on a narrow screen labels of every second tick, so that they stay apart
  function fewerTicks(axis) {
    if (axis.nticks) axis.nticks = Math.ceil(axis.nticks / 2);
    if (Array.isArray(axis.tickvals) && axis.tickvals.length > 10) {
      for (const key of ["tickvals", "ticktext"]) if (axis[key]) axis[key] = axis[key].filter((_, at) => at % 2 === 0);
    }
  }

  // digits run together in cells under 36 pixels; the rings beside them return into the cells
  function fewerDigits(data, width) {
    if (!data.some((trace) => trace.texttemplate && trace.x?.length > (width - 140) / 36)) return;
    for (const trace of data) {
      delete trace.texttemplate;
      if (trace.marker?.standoff) trace.marker.standoff = 0;
    }
  }

  // there the legend has one entry per line: the figure grows by them
  const legendEntries = (data) => data.filter((trace) => trace.showlegend !== false && trace.visible !== false && trace.name && trace.type !== "heatmap").length;
  async function draw(figure, div) {
    const Plotly = await M.plotly();
    const narrow = div.clientWidth < 480;
    themedTraces(figure.data, M.theme.dark() ? "dark" : "light");
    if (narrow) for (const axis of axesOf(figure.layout)) if (axis[0] === "x") fewerTicks(figure.layout[axis]);
    fewerDigits(figure.data, div.clientWidth);
    const height = figure.height + (narrow ? 14 * Math.max(0, legendEntries(figure.data) - 3) : 0);
    div.style.height = `${height}px`;
    const layout = assign(figure.layout, {
      ...themed(figure.layout), "font.family": getComputedStyle(document.body).fontFamily, "font.size": narrow ? 11 : 12.5,
      height, autosize: true, margin: { l: 58, r: 14, t: 8, b: 48 }, hovermode: "closest",
      "xaxis.automargin": true, "yaxis.automargin": true,
    });
    if (narrow && layout.yaxis?.title?.text) layout.yaxis.title.standoff ??= 6; // wide ticks push it away
    layout.showlegend ??= true;
    layout.legend = { ...layout.legend, orientation: "h", yanchor: "bottom", y: 1.01, x: 0, xanchor: "left", font: { size: narrow ? 10 : 11.5 }, bgcolor: "rgba(0,0,0,0)" };
    await Plotly.newPlot(div, figure.data, layout, { displaylogo: false, displayModeBar: false, responsive: true, plotlyServerURL: "" });
    div.classList.add("drawn");
    drawn.add(div);
    div.on("plotly_click", (event) => clicked(div, event));
    div.on("plotly_afterplot", () => readable(div));
    readable(div);
    follow(div);
  }

  // ---- the menu
  function csvOf(figure) {
    const plain = (values) => (values?.bdata !== undefined ? [] : Array.from(values ?? []));
    const rows = [];
    const plot = figure.div;
    (plot?._fullData ?? plot?.data ?? figure.data).forEach((trace, index) => {
      const { x, y, z } = trace;
      const name = trace.name ?? String(index);
      if (trace.visible === false) return;
      if (z) Array.from(z).forEach((row, i) => Array.from(row).forEach((value, j) => rows.push([name, plain(x)[j] ?? j, plain(y)[i] ?? i, value])));
      else plain(y?.length ? y : x).forEach((_, i) => rows.push([name, x?.[i] ?? i, y?.[i] ?? null, trace.customdata?.[i] ?? null]));
    });
    return M.csv(["trace", "x", "y", "value"], rows);
  }
  // The same digits for a saved picture, which is drawn anew: notes in place of plotly's own texts.
  function digits(plot, data) {
    const notes = [];
    plot._fullData.forEach((full, index) => {
      if (full.type !== "heatmap" || !full.texttemplate || full.visible !== true) return;
      delete data[index].texttemplate;
      const place = (values, at) => values?.[at] ?? at;
      Array.from(full.z).forEach((row, i) => Array.from(row).forEach((z, j) => {
        if (!Number.isFinite(z)) return;
        const color = M.inkOn(M.blend(data[index].colorscale ?? full.colorscale, (z - full.zmin) / (full.zmax - full.zmin || 1)));
        notes.push({ x: place(full.x, j), y: place(full.y, i), text: full.text?.[i]?.[j] ?? "", showarrow: false, font: { size: full.textfont.size, color } });
      }));
    });
    return notes;
  }
  const folded = (text, letters) => (text.match(new RegExp(`\\S.{0,${letters - 1}}(?=\\s|$)`, "g")) ?? []).map((line) => line.replaceAll("<", "&lt;"));
  // For paper: white, at a column's width, with or without title and caption; sizes are those of `report --figures`.
  async function picture(figure, plot, format, width, titled) {
    const Plotly = await M.plotly();
    const wide = Math.round(width * PER_MM * ENLARGED);
    const data = structuredClone(plot.data);
    themedTraces(data, "light");
    const layout = structuredClone(plot.layout);
    const white = { font: { family: "Helvetica, Arial, sans-serif", size: 13, color: "#1a1d21" }, paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff" };
    for (const axis of axesOf(layout)) Object.assign(white, { [`${axis}.gridcolor`]: "#e4e7eb", [`${axis}.linecolor`]: "#9aa1a9", [`${axis}.zerolinecolor`]: "#cfd4da" });
    layout.shapes = (layout.shapes ?? []).filter((shape) => !shape.name?.startsWith("selected "));
    layout.annotations = [...(layout.annotations ?? []), ...digits(plot, data)];
    const letters = Math.floor(wide / 7);
    const caption = plot.closest("figure").querySelector(".caption").textContent;
    const lines = titled ? [...folded(figure.title, letters).map((line) => `<b>${line}</b>`), ...folded(caption, letters)] : [];
    const top = titled ? 18 * lines.length + 24 : 14;
    const height = figure.height + top + 40;
    const title = { text: lines.join("<br>"), x: 0.01, xanchor: "left", y: 1 - 10 / height, yanchor: "top", font: { size: 12 } };
    const legend = { ...figure.layout.legend, orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, xanchor: "left", font: {} };
    assign(layout, { ...white, width: wide, height, autosize: false, margin: { l: 60, r: 16, t: top, b: 50 }, title, legend });
    const name = `moescope-${figure.name}-${width}mm`;
    return Plotly.downloadImage({ data, layout }, { format, filename: name, width: wide, height, scale: format === "png" ? 3 : 1 / ENLARGED });
  }
  function menu(figure, div) {
    const titled = make("input", { type: "checkbox", checked: true });
    const link = () => location.href.split("#")[0] + M.state.link({ figure: figure.name });
    const item = (words, action) => make("button", { type: "button", onclick: (event) => action(event.currentTarget) }, words);
    const pictures = ["svg", "png"].flatMap((format) => WIDTHS.map(([words, width]) =>
      item(`${format.toUpperCase()}, ${words}`, () => picture(figure, div, format, width, titled.checked))));
    return make("details", { class: "menu" }, make("summary", { "aria-label": "Menu of this figure", title: "Link, data and pictures" }, "⋯"),
      make("div", {}, item("Copy link", (button) => M.copy(link(), button)),
        item("CSV", () => M.save(`moescope-${figure.name}.csv`, csvOf({ ...figure, div }), "text/csv")), ...pictures,
        make("label", {}, titled, "with title")));
  }
  async function definitions(box, figure) {
    if (box.dataset.done) return;
    box.dataset.done = "1";
    const entries = await M.glossary();
    if (figure.details) box.append(make("p", {}, figure.details));
    for (const name of figure.columns) if (entries.has(name)) box.append(M.definition(entries.get(name)));
  }

  function element(figure) {
    const div = make("div", { class: "plot", style: `height:${figure.height}px`, role: "img", "aria-label": `${figure.title}. ${figure.caption}` });
    const caption = make("p", { class: "caption" }, figure.caption);
    const box = make("div", { class: "definition", hidden: true });
    const ask = make("button", { type: "button", class: "ask", "aria-expanded": "false", title: "Definitions", "aria-label": "Definitions" }, "?");
    ask.addEventListener("click", () => {
      box.hidden = !box.hidden;
      ask.setAttribute("aria-expanded", String(!box.hidden));
      definitions(box, figure);
    });
    const frame = make("figure", { "data-name": figure.name }, make("div", { class: "figure-head" }, make("h4", {}, figure.title), ask, menu(figure, div)), caption, box);
    if (figure.slider) {
      if (figure.slider.label === "layer") figure.slider.start = layerPlace(figure.slider.values);
      frame.append(slider(figure, div, caption));
      figure.data.forEach((trace, index) => { trace.visible = visibleTraces(figure, figure.slider.start)[index]; });
    }
    frame.append(div);
    const drawing = new Promise(requestAnimationFrame).then(() => draw(figure, div)).finally(() => pending.delete(drawing));
    pending.add(drawing);
    return frame;
  }

  // A slider over layers is the page's selected layer, else the first value; others are the figure's own.
  const layerPlace = (values) => Math.max(0, values.indexOf(String(M.state.get().layer)));
  function slider(figure, div, caption) {
    const { label, values, start, orders, captions, layouts, domain_captions: ofDomain } = figure.slider;
    let position = start;
    const output = make("output", {});
    const range = make("input", { type: "range", min: 0, max: values.length - 1, value: start, step: 1, "aria-label": label });
    const similar = make("input", { type: "checkbox" });
    const order = () => {
      const wanted = similar.checked ? orders[position] : null;
      return Object.fromEntries(["xaxis", "yaxis"].flatMap((axis) => [[`${axis}.categoryorder`, wanted ? "array" : "trace"], [`${axis}.categoryarray`, wanted || []]]));
    };
    function say() {
      output.textContent = values[position];
      if (captions.length) caption.textContent = (ofDomain?.[M.selected.domain()] ?? captions)[position];
    }
    // the axes of a page: what it does not say is plotly's default again
    const AXIS = { type: "-", "title.text": "", tickvals: null, ticktext: null, tickmode: "auto", rangemode: "normal", categoryorder: "trace", categoryarray: null };
    function axes() {
      const own = layouts[position];
      if (!own) return {};
      return Object.fromEntries(["xaxis", "yaxis"].flatMap((axis) => {
        const value = (path) => path.split(".").reduce((at, key) => at?.[key], own[axis]);
        const { range, autorange } = own[axis] ?? {};
        return [...Object.entries(AXIS).map(([path, usual]) => [`${axis}.${path}`, path === "tickmode" && value("tickvals") ? "array" : (value(path) ?? usual)]),
          [`${axis}.range`, range ? [...range] : null], [`${axis}.autorange`, range ? false : (autorange ?? true)]];
      }));
    }
    say();
    function move(to) {
      position = to;
      range.value = to;
      say();
      if (div.classList.contains("drawn")) window.Plotly.update(div, { visible: visibleTraces(figure, to) }, { ...axes(), ...(orders.length ? order() : {}) });
    }
    if (label === "layer") {
      div.slide = () => { if (layerPlace(values) !== position) move(layerPlace(values)); else say(); };
      const chosen = () => (/^\d+$/.test(values[position]) ? values[position] : null); // "mean" is no layer
      range.addEventListener("input", () => { move(Number(range.value)); M.state.replace({ layer: chosen() }); });
    } else range.addEventListener("input", () => move(Number(range.value)));
    similar.addEventListener("change", () => window.Plotly.relayout(div, order()));
    const controls = make("div", { class: "controls" });
    if (label === "quantity") controls.append(M.choice(values, position, move));
    else if (values.length > 1) controls.append(make("label", {}, label, range, output));
    if (orders.length) controls.append(make("label", {}, similar, "order by similarity"));
    return controls;
  }

  const closeMenus = (except) => document.querySelectorAll("details.menu[open]").forEach((open) => { if (open !== except) open.open = false; });
  document.addEventListener("click", (event) => closeMenus(event.target.closest("details.menu")));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeMenus(null); });
  const live = () => [...drawn].filter((div) => div.isConnected);
  M.state.onChange((state, before) => { if (["layer", "domain"].some((key) => state[key] !== before[key])) live().forEach(follow); });
  M.theme.changed(() => live().forEach((div) => {
    themedTraces(div.data, M.theme.dark() ? "dark" : "light");
    window.Plotly.update(div, {}, themed(div.layout));
    follow(div);
  }));
  // give every figure the width of its place: in print that is the paper's
  const fit = () => live().filter((div) => div.offsetParent).forEach((div) => window.Plotly.relayout(div, { autosize: true }));
  return { element, fit, ready: () => Promise.all(pending) };
})();
