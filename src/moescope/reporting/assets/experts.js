// The drawer and the page of one expert: numbers of all measures, and what each run holds of it.
M.experts = (() => {
  const { make, svg } = M;
  const drawer = document.getElementById("drawer");
  const word = (text, attributes = {}) => make("bdi", attributes, text);
  const oneLine = (text) => text.replaceAll("\n", "⏎");

  // ---- blocks
  function bars({ title, rows, middle, note }) {
    const top = Math.max(...rows.map((row) => row[3] ?? row[1] ?? 0), middle ?? 0, 1e-12);
    const domain = M.selected.domain();
    const lines = rows.map(([name, value, low, high]) => make("div", { class: "bar-row" + (name === domain ? " here" : ""), "data-name": name }, word(String(name)),
      make("span", { class: "bar" }, make("i", { style: `width:${Math.max((100 * value) / top, 0)}%` }),
        low !== undefined && low !== null ? make("u", { class: "interval", style: `left:${Math.max((100 * low) / top, 0)}%;width:${(100 * Math.max(high - Math.max(low, 0), 0)) / top}%` }) : null,
        middle ? make("u", { class: "chance", style: `left:${(100 * middle) / top}%` }) : null),
      make("span", { class: "amount" }, M.number(value))));
    return make("div", { class: "block" }, make("h4", {}, title), make("div", { class: "bar-rows" }, ...lines), note ? make("p", { class: "note" }, note) : null);
  }
  function others({ title, rows, unit }, layer) {
    const links = rows.flatMap(([expert, value], index) => [index ? ", " : "", make("a", { href: M.state.link({ layer, expert }) }, `expert ${expert}`), ` ${M.number(value)} ${unit}`]);
    return make("div", { class: "block" }, make("h4", {}, title), make("p", {}, ...links));
  }
  function tokens({ title, rows }) {
    const chips = rows.flatMap(([token, count, lift]) => [word(oneLine(token).replaceAll(" ", "␣"), { class: "chip", title: `${count} times, ${M.number(lift)} × chance` }), " "]);
    return make("div", { class: "block" }, make("h4", {}, title), make("p", { class: "chips" }, ...chips));
  }
  // contexts of the selected domain, where the expert has any
  function contexts({ title, rows }) {
    const domain = M.selected.domain();
    const mine = domain === null ? rows : rows.filter((row) => row[6] === domain);
    if (!mine.length) return make("div", { class: "block" }, make("h4", {}, title), make("p", { class: "soft" }, `None of the ${rows.length} recorded is of ${domain}.`));
    const lines = mine.map(([before, token, after, gate, document_, position, domain]) =>
      make("p", { class: "context", title: `document ${document_}${domain === "text" ? "" : ", " + domain}, token ${position}` }, "… ", word(oneLine(before)), make("mark", {}, word(oneLine(token))), word(oneLine(after)), " …", make("span", { class: "gate" }, ` gate ${M.number(gate)}`)));
    return make("div", { class: "block" }, make("h4", {}, title), ...lines);
  }
  function curve({ title, x, y, low, high, logarithmic, labels, band }) {
    const [width, height, left, bottom] = [300, 110, 34, 18];
    const f = logarithmic ? (value) => Math.log2(value) : (value) => value;
    const [x0, x1] = [f(x[0]), f(x.at(-1))];
    const top = Math.max(...y, ...(high ?? []), 1e-12);
    const px = (value) => left + ((f(value) - x0) / (x1 - x0 || 1)) * (width - left - 6);
    const py = (value) => height - bottom - (value / top) * (height - bottom - 6);
    const path = (values) => values.map((value, i) => `${i ? "L" : "M"}${px(x[i]).toFixed(1)},${py(value).toFixed(1)}`).join("");
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "curve", role: "img", "aria-label": `${title}: ${labels[1]} from ${M.number(y[0])} to ${M.number(y.at(-1))}` });
    if (low) drawing.append(svg("path", { class: "band", d: path(high) + [...low.keys()].reverse().map((i) => `L${px(x[i]).toFixed(1)},${py(low[i]).toFixed(1)}`).join("") + "Z" }));
    drawing.append(svg("path", { class: "line", d: path(y) }));
    const label = (words, at, anchor, down) => { const text = svg("text", { x: at, y: down, "text-anchor": anchor }); text.textContent = words; drawing.append(text); };
    label(M.number(x[0]), left, "start", height - 5);
    label(M.number(x.at(-1)), width - 6, "end", height - 5);
    label(labels[0], (left + width) / 2, "middle", height - 5);
    label(M.number(top), left - 4, "end", 12);
    label("0", left - 4, "end", height - bottom);
    return make("div", { class: "block" }, make("h4", {}, title), drawing, band ? make("p", { class: "note" }, `grey: ${band}`) : null);
  }
  const BLOCKS = { bars, experts: others, tokens, contexts, curve };

  // ---- numbers: this expert's value of every measure, with chance and rank
  function numbers(layer, expert) {
    const groups = new Map();
    const domain = M.selected.domain();
    for (const measure of M.map.candidates()) {
      if (measure.domain && measure.domain !== domain) continue; // the bars show all domains
      const row = measure.layers.indexOf(layer);
      const value = measure.value[row]?.[expert];
      if (value === undefined || value === null) continue;
      const values = measure.value[row].filter((cell) => cell !== null);
      const rank = values.filter((cell) => cell > value).length + 1;
      const chance = measure.chance?.[row][expert];
      const interval = measure.low?.[row][expert] !== undefined && measure.low?.[row][expert] !== null ? ` [${M.number(measure.low[row][expert])}, ${M.number(measure.high[row][expert])}]` : "";
      const level = chance ?? null;
      const reference = level === null && (measure.middle ?? null) !== null ? `reference ${M.number(measure.middle)}` : "";
      const notes = [level === null ? reference : `chance ${M.number(level)}`, measure.name === "rank" ? `of ${values.length}` : `rank ${rank} of ${values.length}`, measure.low?.[row][expert] === null ? "no interval" : "", measure.mark?.[row][expert] ? "dropped" : ""].filter(Boolean);
      const line = make("tr", { "data-measure": measure.name }, make("th", { scope: "row" }, measure.title),
        make("td", {}, make("b", {}, M.number(value)), `${interval} ${measure.unit}`, make("div", { class: "soft" }, notes.join(" · "))));
      groups.set(measure.verb, [...(groups.get(measure.verb) ?? []), line]);
    }
    return groups;
  }
  async function content(layer, expert) {
    await M.map.ready;
    const parts = [];
    const groups = numbers(layer, expert);
    const places = M.data.experts.filter((entry) => entry.layer === layer && M.selected.matches(entry));
    const verbs = new Set([...groups.keys(), ...places.map((entry) => entry.verb)]);
    for (const verb of verbs) {
      const part = make("div", { class: "expert-part", "data-verb": verb });
      const run = M.data.runs.find((entry) => entry.verb === verb);
      const title = M.data.tabs.find((tab) => tab.name === run?.tab)?.title ?? verb;
      const taken = parts.some((other) => other.querySelector("h3").textContent === title);
      part.append(make("h3", {}, taken ? `${title}: ${verb}` : title));
      if (groups.has(verb)) part.append(make("table", { class: "numbers" }, make("tbody", {}, ...groups.get(verb))));
      for (const entry of places.filter((place) => place.verb === verb)) {
        const cards = await M.payload(entry.payload);
        const blocks = cards[String(expert)] ?? [];
        part.append(make("div", { class: "blocks" }, ...blocks.map((block) => BLOCKS[block.kind](block, layer))));
      }
      parts.push(part);
    }
    return parts;
  }

  // ---- one expert, next to the pinned one
  const exists = (layer, expert) => M.data.layers.includes(layer) && expert < M.map.experts(layer);
  function pinned() {
    const [, layer, expert] = /^(\d+)\.(\d+)$/.exec(M.state.get().pinned ?? "") ?? [];
    return layer !== undefined && exists(Number(layer), Number(expert)) ? { layer: Number(layer), expert: Number(expert) } : null;
  }
  const button = (words, changes, label) => make("a", { class: "button", href: M.state.link(changes), "aria-label": label }, words);
  function step(layer, expert, change, words, label) {
    const inside = expert + change >= 0 && expert + change < M.map.experts(layer);
    return inside ? button(words, { layer, expert: expert + change }, label) : make("span", { class: "button off", "aria-hidden": "true" }, words);
  }
  async function column(layer, expert, ...more) {
    return make("div", { class: "expert-column" }, make("div", { class: "drawer-head" }, make("h2", {}, `L${layer} · E${expert}`), ...more), ...(await content(layer, expert)));
  }
  // The expert's column and, after it, that of the pinned one; never the same expert twice.
  async function columns(layer, expert, ...more) {
    const beside = pinned();
    const same = beside && beside.layer === layer && beside.expert === expert;
    const own = await column(layer, expert, step(layer, expert, -1, "‹", "Previous expert"), step(layer, expert, 1, "›", "Next expert"),
      same ? button("Unpin", { pinned: null }) : button("Pin", { pinned: `${layer}.${expert}` }), ...more);
    own.querySelector(".drawer-head").title = same ? "Pinned: open another expert to see both" : "";
    return beside && !same ? [own, await column(beside.layer, beside.expert, make("span", { class: "soft" }, "pinned"), button("Unpin", { pinned: null }))] : [own];
  }

  // ---- the drawer lies over the findings; on narrow screens the page makes room, and map and figures follow
  let padding = ""; // of the page, when map and figures were drawn last
  function fit() {
    const now = getComputedStyle(document.querySelector("main")).paddingRight;
    const changed = padding ? now !== padding : !drawer.hidden;
    padding = now;
    if (changed) { M.map.refresh(); M.figures.fit(); }
    M.map.reveal();
  }
  let newest = 0;
  let earlier; // the layer that was selected before the drawer selected one
  const closed = () => ({ expert: null, layer: earlier ?? null });
  async function show() {
    const { layer, expert, tab } = M.state.get();
    const mine = ++newest;
    await M.map.ready;
    if (mine !== newest) return;
    if (tab === "experts" || !exists(layer, expert)) { drawer.hidden = true; drawer.replaceChildren(); fit(); return; }
    const parts = await columns(layer, expert, button("Page", { tab: "experts" }, "Expert page"), button("×", closed(), "Close"));
    if (mine !== newest) return;
    drawer.classList.toggle("two", parts.length > 1);
    drawer.replaceChildren(...parts);
    drawer.hidden = false;
    fit();
  }
  M.state.onChange((state, before) => {
    if (state.expert === undefined) earlier = undefined;
    else if (before.expert === undefined) earlier = before.layer;
    else if (state.expert === before.expert && state.layer !== before.layer) earlier = state.layer;
    show();
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !drawer.hidden && !event.defaultPrevented) M.state.set(closed()); });

  // ---- the tab: one expert, or two side by side
  async function page(container) {
    let latest = 0;
    const draw = async () => {
      const state = M.state.get();
      if (state.tab !== "experts") return;
      const mine = ++latest;
      await M.map.ready;
      const first = state.expert === undefined && state.layer === undefined ? M.overview.remarkable() : null;
      const layer = first?.layer ?? M.selected.layer(M.map.candidates()[0]?.layers ?? M.data.layers);
      const last = M.map.experts(layer) - 1;
      const expert = first?.expert ?? Math.min(state.expert ?? 0, last);
      const input = make("input", { type: "number", min: 0, max: last, value: expert, "aria-label": "Expert" });
      input.addEventListener("change", () => M.state.set({ layer, expert: Math.min(Math.max(Math.round(Number(input.value)) || 0, 0), last) }));
      const parts = await columns(layer, expert, input);
      if (mine === latest) container.replaceChildren(first?.why ? make("p", { class: "why" }, `Shown first: ${first.why}`) : "", make("div", { class: "expert-columns" }, ...parts));
    };
    M.state.onChange(draw);
    return draw();
  }
  return { show, page };
})();
