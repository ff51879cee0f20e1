// Figures: drawn by plotly in the page's colours; follow the selected layer; saved as CSV, PNG or SVG.
M.figures = (() => {
  const { make } = M;
  const drawn = new Set();
  const MIDPOINT = { light: "#F7F7F7", dark: "#2b3138" };
  const WIDTHS = [["single column, 85 mm", 85], ["double column, 175 mm", 175]];
  const PER_MM = 96 / 25.4; // CSS pixels per millimetre

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
  // A diverging scale has a pale midpoint on white and a dark one on black.
  function themedTraces(data) {
    const wanted = M.theme.dark() ? MIDPOINT.dark : MIDPOINT.light;
    for (const trace of data) {
      for (const holder of [trace, trace.marker]) {
        const stops = Array.isArray(holder?.colorscale) ? holder.colorscale : [];
        const middle = stops.find(([at, color]) => at === 0.5 && Object.values(MIDPOINT).includes(color));
        if (middle) middle[1] = wanted;
      }
    }
  }

  // ---- the selected layer: an axis called "layer" gets a mark, lines of other layers fade
  const axisTitle = (layout, axis) => (layout[axis]?.title?.text ?? "").toLowerCase();
  function layerMark(plot, layer) {
    const shapes = (plot.layout.shapes ?? []).filter((shape) => shape.name !== "selected layer");
    if (layer === undefined) return shapes;
    for (const axis of ["xaxis", "yaxis"]) {
      if (axisTitle(plot.layout, axis) !== "layer") continue;
      const categories = plot._fullLayout[axis]._categories;
      const at = categories?.length ? categories.indexOf(String(layer)) : layer;
      if (at < 0) continue;
      const along = axis === "xaxis" ? { x0: at - 0.5, x1: at + 0.5, y0: 0, y1: 1, yref: "paper" } : { y0: at - 0.5, y1: at + 0.5, x0: 0, x1: 1, xref: "paper" };
      shapes.push({ type: "rect", name: "selected layer", line: { color: M.theme.color("--accent"), width: 1.5 }, ...along });
    }
    return shapes;
  }
  function follow(plot) {
    const { layer, expert } = M.state.get();
    const Plotly = window.Plotly;
    const lines = plot.data.map((trace) => trace.meta?.layer);
    if (lines.some((value) => value !== undefined)) {
      const known = layer !== undefined && lines.includes(layer);
      Plotly.restyle(plot, { opacity: lines.map((value) => (!known || value === undefined || value === layer ? 1 : 0.18)) });
    }
    Plotly.relayout(plot, { shapes: layerMark(plot, layer) });
    plot.slide?.(layer, expert);
  }
  // A click on a point sets the layer and expert that its axes name.
  function clicked(plot, event) {
    const point = event.points[0];
    const changes = {};
    for (const [axis, value] of [["xaxis", point.x], ["yaxis", point.y]]) {
      const name = axisTitle(plot.layout, axis);
      if ((name === "layer" || name === "expert") && Number.isInteger(Number(value))) changes[name] = Number(value);
    }
    if (point.data.meta?.layer !== undefined) changes.layer = point.data.meta.layer;
    if (Object.keys(changes).length) M.state.set(changes);
  }

  // ---- drawing
  const visibleTraces = (figure, position) => figure.data.map((_, index) =>
    index >= figure.slider.per * figure.slider.values.length || Math.floor(index / figure.slider.per) === position);

  async function draw(figure, div) {
    const Plotly = await M.plotly();
    const narrow = div.clientWidth < 480;
    themedTraces(figure.data);
    const layout = assign(figure.layout, {
      ...themed(figure.layout), "font.family": getComputedStyle(document.body).fontFamily, "font.size": narrow ? 11 : 12.5,
      height: figure.height, autosize: true, margin: { l: 58, r: 14, t: 8, b: 48 }, hovermode: "closest",
      "xaxis.automargin": true, "yaxis.automargin": true,
    });
    layout.showlegend ??= true;
    layout.legend = { ...layout.legend, orientation: "h", yanchor: "bottom", y: 1.01, x: 0, xanchor: "left", font: { size: narrow ? 10 : 11.5 }, bgcolor: "rgba(0,0,0,0)" };
    await Plotly.newPlot(div, figure.data, layout, { displaylogo: false, displayModeBar: false, responsive: true, plotlyServerURL: "" });
    div.classList.add("drawn");
    drawn.add(div);
    div.on("plotly_click", (event) => clicked(div, event));
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
  // For paper: white, at a column's width, with or without the title.
  async function picture(figure, plot, format, width, titled) {
    const Plotly = await M.plotly();
    const wide = Math.round(width * PER_MM * 1.6); // text of 12 px becomes 7.5 points when set at this width
    const data = structuredClone(plot.data);
    for (const trace of data) for (const holder of [trace, trace.marker]) holder?.colorscale?.forEach?.((stop) => { if (stop[1] === MIDPOINT.dark) stop[1] = MIDPOINT.light; });
    const layout = structuredClone(plot.layout);
    const white = { "font.color": "#1a1d21", paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff" };
    for (const axis of axesOf(layout)) Object.assign(white, { [`${axis}.gridcolor`]: "#e9ecef", [`${axis}.linecolor`]: "#9aa1a9", [`${axis}.zerolinecolor`]: "#cfd4da" });
    layout.shapes = (layout.shapes ?? []).filter((shape) => shape.name !== "selected layer");
    const lines = titled ? figure.title.match(new RegExp(`.{1,${Math.floor(wide / 8)}}(\\s|$)`, "g")) : [];
    const text = lines.map((line) => line.replaceAll("<", "&lt;")).join("<br>");
    const height = figure.height + 40 + 20 * lines.length;
    assign(layout, { ...white, width: wide, height, autosize: false, "margin.t": 30 + 22 * lines.length, title: { text, x: 0.02, font: { size: 14 } } });
    const name = `moescope-${figure.name}-${width}mm`;
    return Plotly.downloadImage({ data, layout }, { format, filename: name, width: wide, height, scale: format === "png" ? 3 : 1 });
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
    if (figure.slider) frame.append(slider(figure, div, caption));
    frame.append(div);
    if (figure.slider) figure.data.forEach((trace, index) => { trace.visible = visibleTraces(figure, figure.slider.start)[index]; });
    requestAnimationFrame(() => draw(figure, div));
    return frame;
  }

  // A slider over layers is the page's selected layer; others are the figure's own.
  function slider(figure, div, caption) {
    const { label, values, start, orders, captions } = figure.slider;
    let position = start;
    const output = make("output", {}, values[start]);
    const range = make("input", { type: "range", min: 0, max: values.length - 1, value: start, step: 1, "aria-label": label });
    const similar = make("input", { type: "checkbox" });
    const order = () => {
      const wanted = similar.checked ? orders[position] : null;
      return Object.fromEntries(["xaxis", "yaxis"].flatMap((axis) => [[`${axis}.categoryorder`, wanted ? "array" : "trace"], [`${axis}.categoryarray`, wanted || []]]));
    };
    function move(to) {
      position = to;
      range.value = to;
      output.textContent = values[to];
      if (captions.length) caption.textContent = captions[to];
      if (div.classList.contains("drawn")) window.Plotly.update(div, { visible: visibleTraces(figure, to) }, orders.length ? order() : {});
    }
    if (label === "layer") {
      div.slide = (layer) => { const at = values.indexOf(String(layer)); if (at >= 0 && at !== position) move(at); };
      range.addEventListener("input", () => { move(Number(range.value)); M.state.replace({ layer: Number(values[position]) }); });
    } else range.addEventListener("input", () => move(Number(range.value)));
    similar.addEventListener("change", () => window.Plotly.relayout(div, order()));
    const controls = make("div", { class: "controls" });
    if (values.length > 1) controls.append(make("label", {}, label, range, output));
    if (orders.length) controls.append(make("label", {}, similar, "order by similarity"));
    return controls;
  }

  const closeMenus = (except) => document.querySelectorAll("details.menu[open]").forEach((open) => { if (open !== except) open.open = false; });
  document.addEventListener("click", (event) => closeMenus(event.target.closest("details.menu")));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") closeMenus(null); });
  const live = () => [...drawn].filter((div) => div.isConnected);
  M.state.onChange((state, before) => { if (state.layer !== before.layer || state.expert !== before.expert) live().forEach(follow); });
  M.theme.changed(() => live().forEach((div) => {
    themedTraces(div.data);
    window.Plotly.update(div, {}, themed(div.layout));
  }));
  return { element };
})();
