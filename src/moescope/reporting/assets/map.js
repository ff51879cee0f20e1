// The map: layers x experts, coloured by a measure. A click opens the expert, a click on a row its layer.
M.map = (() => {
  const { make } = M;
  const BOUND = 1.96; // standard deviations of a cell's own 95 % null interval
  const LABEL = 44, TOP = 4, AXIS = 22, BELOW = 90, SMALLEST = 9;
  let data = null, geometry = null, cursor = null;
  let canvas, tip, title, caption, legend, colour, sort, beyond, unknown, frame, cue;

  // ---- what is drawn
  function candidates() {
    return (data?.measures ?? []).filter((measure) => M.selected.matches(measure));
  }
  function chosen() {
    const all = candidates();
    const wanted = M.state.get().colour;
    const domain = M.selected.domain();
    const ofDomain = wanted ? null : all.find((measure) => domain !== null && measure.domain === domain);
    return ofDomain ?? all.find((measure) => measure.name === wanted && (!measure.domain || measure.domain === domain)) ?? all.find((measure) => measure.name === wanted) ?? all.find((measure) => !measure.domain && other(measure)) ?? all[0] ?? null;
  }
  // the same measure of the run to compare with
  function other(measure) {
    const run = M.selected.run(measure.verb, "vs");
    if (run === null || run === measure.run) return null;
    const same = data.measures.filter((item) => item.run === run && item.name === measure.name && item.domain === measure.domain);
    return same.find((item) => item.view === measure.view) ?? same.at(-1) ?? null;
  }
  function difference(measure, baseline) {
    const ratio = measure.logarithmic;
    const value = measure.layers.map((layer, i) => {
      const row = baseline.value[baseline.layers.indexOf(layer)] ?? [];
      return measure.value[i].map((cell, j) => (cell === null || row[j] === null || row[j] === undefined ? null : ratio ? cell / row[j] : cell - row[j]));
    });
    const deviation = (item, row, j) => item.noise?.[row]?.[j] ?? (item.high?.[row]?.[j] - item.low?.[row]?.[j]) / 3.92;
    const noises = measure.layers.flatMap((layer, i) => measure.value[i].map((_, j) => Math.hypot(deviation(measure, i, j), deviation(baseline, baseline.layers.indexOf(layer), j))));
    const { end, noise, words } = M.anchored(ratio ? [] : value.flat().filter((cell) => cell !== null), noises, ratio ? ", relative" : "");
    const fold = Math.max(2, Math.exp(3 * noise));
    return { ...measure, value, chance: undefined, beyond: undefined, mark: undefined, middle: ratio ? 1 : 0, limits: ratio ? [1 / fold, fold] : [-end, end],
      unit: ratio ? "× " + M.data.roots[M.selected.root("vs")] : measure.unit, title: `${measure.title}: change`,
      caption: `${M.data.roots[M.selected.root("run")]} ${ratio ? "divided by" : "minus"} ${M.data.roots[M.selected.root("vs")]}; ${ratio && !noise ? `the scale ends at a factor of ${fold}` : words}.` };
  }
  const sameShape = (a, b) => a.layers.join() === b.layers.join() && a.value.every((row, i) => row.filter((cell) => cell !== null).length === b.value[i].filter((cell) => cell !== null).length);
  // loads from the largest to the smallest: expert j of separately trained models is not the same expert
  function ranked(measure) {
    const value = measure.value.map((row) => row.toSorted((a, b) => (b ?? -Infinity) - (a ?? -Infinity)));
    return { ...measure, value, chance: undefined, beyond: undefined, low: undefined, high: undefined, noise: undefined, mark: undefined, cluster: undefined };
  }
  function shown() {
    const measure = chosen();
    const baseline = measure && other(measure);
    if (!baseline) return measure;
    if (sameShape(measure, baseline)) {
      if (M.versus.related(measure.run, baseline.run)) return difference(measure, baseline);
      if (measure.name === "load") {
        const change = difference(ranked(measure), ranked(baseline));
        return { ...change, ranks: true, title: "Load by rank: change", caption: `${M.data.roots[M.selected.root("run")]} divided by ${M.data.roots[M.selected.root("vs")]} at equal rank: experts of separate trainings do not correspond.` };
      }
    }
    const why = sameShape(measure, baseline) ? "experts of separate trainings do not correspond" : "models of different shape are not subtracted";
    return { ...measure, caption: `${measure.caption} Shows ${M.data.roots[M.selected.root("run")]} only: ${why}.` };
  }

  // ---- colours
  function scaleOf(measure) {
    const values = measure.value.flat().filter((cell) => cell !== null);
    const [low, high] = measure.limits ?? [Math.min(...values), Math.max(...values)];
    const f = measure.logarithmic ? (x) => Math.log2(Math.max(x, 1e-9)) : (x) => x;
    const stops = measure.middle === null ? M.sequential() : M.diverging();
    const scale = stops.map((color, i) => [i / (stops.length - 1), color]);
    return { low, high, stops, color: (row, expert) => `rgb(${M.blend(scale, (f(signal(measure, row, expert, low)) - f(low)) / (f(high) - f(low) || 1))})` };
  }
  // What a cell is coloured by: pale inside its own null interval, from its end on by how far it is away.
  function signal(measure, row, expert, low) {
    const value = measure.value[row][expert], chance = measure.chance?.[row][expert] ?? measure.middle;
    const half = BOUND * (measure.noise?.[row][expert] ?? NaN);
    if (!(half >= 0) || chance === null) return value;
    const pale = measure.middle ?? low;
    if (Math.abs(value - chance) <= half) return pale;
    if (measure.middle === null) return value > chance ? value : pale;
    const end = chance + Math.sign(value - chance) * half;
    return measure.logarithmic ? (pale * value) / Math.max(end, 1e-9) : pale + value - end;
  }
  // ---- the order of a layer's experts: by number, by a measure, or by an order that puts related experts side by side
  const SORTS = { number: "by number", value: "by value", load: "by load", cluster: "by cluster" };
  // the measure that an order comes from; a scan's clusters for a scan's measure
  function source(kind, measure) {
    if (kind === "value") return measure;
    const able = candidates().filter((item) => (kind === "load" ? item.name === "load" : item.cluster));
    return able.find((item) => item.verb === measure.verb) ?? able[0];
  }
  const sorted = () => (SORTS[M.state.get().sort] && [...sort.options].some(({ value }) => value === M.state.get().sort) ? M.state.get().sort : "number");
  function orderOf(measure, row) {
    const experts = [...measure.value[row].keys()].filter((expert) => measure.value[row][expert] !== null);
    const from = measure.ranks || sorted() === "number" ? null : source(sorted(), measure);
    const key = from && (from[sorted() === "cluster" ? "cluster" : "value"][from.layers.indexOf(measure.layers[row])]);
    const sign = sorted() === "cluster" ? 1 : -1;
    return key ? experts.sort((a, b) => sign * ((key[a] ?? 0) - (key[b] ?? 0)) || a - b) : experts;
  }

  // ---- drawing
  function draw() {
    const measure = shown();
    frame.hidden = !measure;
    if (!measure) return;
    title.textContent = measure.title;
    caption.textContent = measure.caption;
    const room = Math.floor(frame.getBoundingClientRect().width);
    // strips as long as they leave half of the room, and 6 px per expert, to the map; none where it scrolls
    const smallest = room < 700 ? SMALLEST : 2;
    const strips = M.strips.shown(data.strips, measure, Boolean(other(measure)) && sameShape(measure, other(measure)))
      .filter((_, i) => room - LABEL - M.strips.span(i + 1) >= Math.max(room / 2, Math.max(6, smallest) * measure.experts));
    const width = Math.max(room, LABEL + measure.experts * smallest);
    const rows = measure.layers.length;
    const above = frame.getBoundingClientRect().top + window.scrollY;
    const cellHeight = Math.max(7, Math.min(34, Math.floor(Math.max(window.innerHeight - above - BELOW, 300) / rows)));
    const right = M.strips.span(strips.length);
    const cellWidth = (width - LABEL - right) / measure.experts;
    const height = TOP + rows * cellHeight + AXIS;
    const dense = window.devicePixelRatio || 1;
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * dense);
    canvas.height = Math.round(height * dense);
    const pen = canvas.getContext("2d");
    cue.hidden = width <= room;
    pen.scale(dense, dense);
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const scale = scaleOf(measure);
    geometry = { measure, cellWidth, cellHeight, strips, width, orders: measure.layers.map((_, row) => orderOf(measure, row)) };
    const [ink, soft, accent] = ["--ink", "--soft", "--accent"].map(M.theme.color);
    const every = Math.ceil(13 / cellHeight);
    measure.layers.forEach((layer, row) => {
      const y = TOP + row * cellHeight;
      pen.fillStyle = layer === M.state.get().layer ? accent : soft;
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      if (row % every === 0 || layer === M.state.get().layer) pen.fillText(String(layer), LABEL - 8, y + cellHeight / 2);
      geometry.orders[row].forEach((expert, column) => drawCell(pen, measure, scale, row, expert, LABEL + column * cellWidth, y));
      M.strips.draw(pen, strips, layer, y, width, cellHeight);
    });
    drawAxis(pen, measure, height, soft);
    drawSelection(pen, ink, accent);
    drawLegend(measure, scale);
  }
  // whether any cell was compared with chance; without intervals none is
  const tested = (measure) => Boolean(measure.beyond?.some((row) => row.some((cell) => cell !== null)));
  function drawCell(pen, measure, scale, row, expert, x, y) {
    const { cellWidth: w, cellHeight: h } = geometry;
    const gap = Math.min(1, w / 6);
    const far = measure.beyond?.[row][expert];
    pen.globalAlpha = beyond.checked && tested(measure) && !far ? 0.22 : 1;
    pen.fillStyle = scale.color(row, expert);
    pen.fillRect(x, y, w - gap, h - gap);
    pen.globalAlpha = 1;
    if (beyond.checked && far && w > 5) {
      pen.strokeStyle = M.theme.color("--ink");
      pen.lineWidth = 1;
      pen.strokeRect(x + 0.5, y + 0.5, w - gap - 1, h - gap - 1);
    }
    if (measure.mark?.[row][expert]) {
      const [cx, cy, arm] = [x + (w - gap) / 2, y + (h - gap) / 2, Math.min(6, w / 2 - 1, h / 2 - 1)];
      pen.strokeStyle = M.theme.color("--ink");
      pen.lineWidth = 1.5;
      pen.beginPath();
      pen.moveTo(cx - arm, cy - arm); pen.lineTo(cx + arm, cy + arm);
      pen.moveTo(cx + arm, cy - arm); pen.lineTo(cx - arm, cy + arm);
      pen.stroke();
    }
  }
  function drawAxis(pen, measure, height, soft) {
    pen.fillStyle = soft;
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    const step = [1, 2, 4, 8, 16, 32, 64].find((size) => size * geometry.cellWidth > 26) ?? 128;
    if (measure.ranks) pen.fillText("rank of the expert in its layer, most load first", LABEL + (measure.experts * geometry.cellWidth) / 2, height - 7);
    else if (sorted() === "number") for (let expert = 0; expert < measure.experts; expert += step) pen.fillText(String(expert), LABEL + (expert + 0.5) * geometry.cellWidth, height - 7);
    else pen.fillText({ value: "experts of each layer, highest first", load: "experts of each layer, most load first", cluster: "experts of each layer, related ones side by side" }[sorted()], LABEL + (measure.experts * geometry.cellWidth) / 2, height - 7);
    pen.textAlign = "left";
    M.strips.drawTitles(pen, geometry.strips, geometry.width, height - 7);
  }
  function drawSelection(pen, ink, accent) {
    const { layer, expert } = M.state.get();
    const outline = (row, column, color, width) => {
      pen.strokeStyle = color;
      pen.lineWidth = width;
      const span = column === null ? geometry.measure.experts * geometry.cellWidth : geometry.cellWidth;
      pen.strokeRect(LABEL + (column ?? 0) * geometry.cellWidth, TOP + row * geometry.cellHeight, span - 0.5, geometry.cellHeight - 0.5);
    };
    const row = geometry.measure.layers.indexOf(layer);
    if (row >= 0) outline(row, null, accent, 1.5);
    if (row >= 0 && expert !== undefined && !geometry.measure.ranks) { const column = geometry.orders[row].indexOf(expert); if (column >= 0) outline(row, column, ink, 2.5); }
    if (cursor) outline(cursor.row, cursor.column, ink, 2);
  }
  function drawLegend(measure, scale) {
    const bar = make("span", { class: "gradient", style: `background:linear-gradient(90deg,${scale.stops.join(",")})` });
    const ends = [scale.low, scale.high].map((value) => M.number(value));
    const noisy = measure.noise?.some((row) => row.some((cell) => cell > 0));
    legend.replaceChildren(make("span", {}, `${measure.limits && measure.middle !== null ? "≤ " : ""}${ends[0]}`), bar, make("span", {}, `${measure.limits && measure.middle !== null ? "≥ " : ""}${ends[1]} ${measure.unit}`),
      noisy ? make("span", { class: "soft" }, "pale: within chance") : "",
      geometry.strips.length ? make("span", { class: "right" }, M.strips.legend(geometry.strips)) : "");
  }

  // ---- pointing
  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const row = Math.floor((y - TOP) / geometry.cellHeight);
    const column = Math.floor((x - LABEL) / geometry.cellWidth);
    if (row < 0 || row >= geometry.measure.layers.length) return null;
    return { row, column: column >= 0 && column < geometry.orders[row].length ? column : null };
  }
  function words({ row, column }) {
    const { measure, orders } = geometry;
    const layer = measure.layers[row];
    if (column === null) return [`Layer ${layer}`, ...M.strips.words(geometry.strips, layer)];
    const expert = orders[row][column];
    const at = (name) => measure[name]?.[row][expert];
    const lines = [`Layer ${layer}, ${measure.ranks ? `rank ${expert + 1}` : `expert ${expert}`}`, `${measure.title}: ${M.number(at("value"))} ${measure.unit}`];
    if (at("low") !== undefined && at("low") !== null) lines.push(`interval ${M.number(at("low"))} to ${M.number(at("high"))}`);
    if (at("chance") !== undefined && at("chance") !== null) lines.push(`chance ${M.number(at("chance"))}`);
    if (at("beyond") !== undefined) lines.push(at("beyond") === null ? "not judged" : measure.outline[at("beyond") ? 0 : 1]);
    if (at("mark")) lines.push("removed");
    return lines;
  }
  function point(cell, x, y) {
    tip.hidden = !cell;
    if (!cell) return;
    tip.replaceChildren(...words(cell).map((line, index) => make(index ? "div" : "strong", {}, line)));
    const box = frame.getBoundingClientRect();
    tip.style.left = Math.max(0, Math.min(x - box.left + 12, box.width - tip.offsetWidth - 4)) + "px";
    const below = y - box.top + 14;
    tip.style.top = (below + tip.offsetHeight > box.height ? Math.max(0, y - box.top - tip.offsetHeight - 8) : below) + "px";
  }
  function open({ row, column }) {
    const layer = geometry.measure.layers[row];
    M.state.set(column === null || geometry.measure.ranks ? { layer, expert: null } : { layer, expert: geometry.orders[row][column] });
  }
  function key(event) {
    const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!move && event.key !== "Enter") return;
    event.preventDefault();
    if (event.key === "Enter") { if (cursor) open(cursor); return; }
    const { layer, expert } = M.state.get();
    const row = Math.max(0, geometry.measure.layers.indexOf(layer));
    cursor ??= { row, column: Math.max(0, geometry.orders[row].indexOf(expert)) };
    cursor.row = Math.min(Math.max(cursor.row + move[0], 0), geometry.measure.layers.length - 1);
    cursor.column = Math.min(Math.max(cursor.column + move[1], 0), geometry.orders[cursor.row].length - 1);
    draw();
    const box = canvas.getBoundingClientRect();
    point(cursor, box.left + LABEL + cursor.column * geometry.cellWidth, box.top + TOP + (cursor.row + 1) * geometry.cellHeight);
  }

  function fillColours() {
    const all = candidates();
    const names = new Map(all.map((measure) => [measure.name, measure.domain ? "Domain affinity" : measure.title]));
    colour.replaceChildren(...[...names].map(([value, words]) => make("option", { value }, words)));
    const measure = chosen();
    if (!measure) return;
    colour.value = measure.name;
    const kinds = Object.keys(SORTS).filter((kind) => kind === "number" || source(kind, measure));
    sort.replaceChildren(...kinds.map((value) => make("option", { value }, SORTS[value])));
    sort.value = sorted();
    beyond.parentElement.hidden = !measure.beyond || Boolean(other(measure));
    beyond.nextSibling.textContent = `highlight: ${measure.outline[0]}`;
    beyond.checked = M.state.get().beyond === "1";
    unknown.hidden = beyond.parentElement.hidden || !beyond.checked || tested(measure);
  }
  // a domain's affinity needs a domain: the selected one, else the first
  function pick() {
    const needs = candidates().find((measure) => measure.name === colour.value)?.domain;
    M.state.set({ colour: colour.value, ...(needs ? { domain: M.selected.domain() ?? M.data.domains[0] } : {}) });
  }
  const ready = M.payload(M.data.map).then((value) => { data = value; });
  async function element() {
    await ready;
    canvas = make("canvas", { tabindex: 0, role: "application", "aria-label": "Map of layers and experts. Arrow keys move, Enter opens the expert." });
    tip = make("div", { class: "tip", role: "status", hidden: true });
    title = make("h2", {});
    caption = make("p", { class: "caption" });
    legend = make("div", { class: "legend" });
    colour = make("select", { "aria-label": "Colour of the map", onchange: pick });
    sort = make("select", { "aria-label": "Order of experts", onchange: () => M.state.replace({ sort: sort.value === "number" ? null : sort.value }) });
    beyond = make("input", { type: "checkbox", onchange: () => M.state.replace({ beyond: beyond.checked ? 1 : null }) });
    unknown = make("span", { class: "soft", role: "status", hidden: true }, "No expert has an interval: all are shown.");
    frame = make("div", { class: "map-frame" }, canvas, tip);
    canvas.addEventListener("pointermove", (event) => point(cellAt(event), event.clientX, event.clientY));
    canvas.addEventListener("pointerleave", () => point(null));
    canvas.addEventListener("click", (event) => { const cell = cellAt(event); point(null); if (cell) { cursor = null; open(cell); } });
    canvas.addEventListener("keydown", key);
    canvas.addEventListener("blur", () => { cursor = null; point(null); draw(); });
    cue = make("p", { class: "cue", hidden: true }, "Swipe the map for more experts →");
    const controls = make("div", { class: "controls" }, make("label", {}, "Colour", colour), make("label", {}, "Experts", sort), make("label", {}, beyond, make("span", {})), unknown);
    return make("section", { class: "map", hidden: data.measures.length === 0 }, title, caption, controls, cue, frame, legend);
  }
  // where the map scrolls in its frame, the selected cell is scrolled into view
  function reveal() {
    const { layer, expert } = M.state.get();
    const row = geometry && canvas.offsetParent ? geometry.measure.layers.indexOf(layer) : -1;
    const column = row < 0 ? -1 : geometry.orders[row].indexOf(expert);
    if (column < 0) return;
    const left = LABEL + column * geometry.cellWidth;
    if (left < frame.scrollLeft || left + geometry.cellWidth > frame.scrollLeft + frame.clientWidth) frame.scrollLeft = left - frame.clientWidth / 2;
  }
  function refresh() {
    if (!canvas || !canvas.isConnected || !canvas.offsetParent) return;
    fillColours();
    draw();
  }
  window.addEventListener("resize", refresh); M.theme.changed(refresh);
  M.state.onChange(refresh);
  const layout = () => ({ left: LABEL, top: TOP, cellWidth: geometry.cellWidth, cellHeight: geometry.cellHeight, rows: geometry.measure.layers.length, columns: geometry.measure.experts, orders: geometry.orders, strips: geometry.strips });
  // number of experts of a layer
  const experts = (layer) => Math.max(...candidates().map((measure) => (measure.value[measure.layers.indexOf(layer)] ?? []).findLastIndex((cell) => cell !== null) + 1), 0);
  return { element, refresh, reveal, ready, candidates, layout, shown, experts };
})();
