// The drawer and the page of one expert: numbers of all measures, and what each run holds of it.
M.experts = (() => {
  const { make, svg } = M;
  const drawer = document.getElementById("drawer");
  const word = (text, attributes = {}) => make("bdi", attributes, text);
  const oneLine = (text) => text.replaceAll("\n", "⏎");

  // ---- blocks
  function bars({ title, rows, middle }) {
    const top = Math.max(...rows.map((row) => row[3] ?? row[1] ?? 0), middle ?? 0, 1e-12);
    const lines = rows.map(([name, value, low, high]) => make("div", { class: "bar-row" }, word(String(name)),
      make("span", { class: "bar" }, make("i", { style: `width:${(100 * value) / top}%` }),
        low !== undefined && low !== null ? make("u", { class: "interval", style: `left:${(100 * low) / top}%;width:${(100 * (high - low)) / top}%` }) : null,
        middle ? make("u", { class: "chance", style: `left:${(100 * middle) / top}%` }) : null),
      make("span", { class: "amount" }, M.number(value))));
    return make("div", { class: "block" }, make("h4", {}, title), ...lines);
  }
  function others({ title, rows, unit }, layer) {
    const links = rows.flatMap(([expert, value], index) => [index ? ", " : "", make("a", { href: M.state.link({ layer, expert }) }, `expert ${expert}`), ` ${M.number(value)} ${unit}`]);
    return make("div", { class: "block" }, make("h4", {}, title), make("p", {}, ...links));
  }
  function tokens({ title, rows }) {
    const chips = rows.flatMap(([token, count, lift]) => [word(oneLine(token).replaceAll(" ", "␣"), { class: "chip", title: `${count} times, ${M.number(lift)} × chance` }), " "]);
    return make("div", { class: "block" }, make("h4", {}, title), make("p", { class: "chips" }, ...chips));
  }
  function contexts({ title, rows }) {
    const lines = rows.map(([before, token, after, gate, document_, position, domain]) =>
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
    for (const measure of M.map.candidates()) {
      const row = measure.layers.indexOf(layer);
      const value = measure.value[row]?.[expert];
      if (value === undefined || value === null) continue;
      const values = measure.value[row].filter((cell) => cell !== null);
      const rank = values.filter((cell) => cell > value).length + 1;
      const chance = measure.chance?.[row][expert];
      const interval = measure.low?.[row][expert] !== undefined && measure.low?.[row][expert] !== null ? ` [${M.number(measure.low[row][expert])}, ${M.number(measure.high[row][expert])}]` : "";
      const notes = [chance === undefined || chance === null ? "" : `chance ${M.number(chance)}`, `rank ${rank} of ${values.length}`].filter(Boolean);
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
      part.append(make("h3", {}, M.data.tabs.find((tab) => tab.name === run?.tab)?.title ?? verb));
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

  // ---- the drawer
  let newest = 0;
  async function show() {
    const { layer, expert, tab } = M.state.get();
    const mine = ++newest;
    await M.map.ready;
    if (mine !== newest) return;
    const exists = M.data.layers.includes(layer) && expert < M.map.experts();
    const open = exists && tab !== "experts";
    if (!open) { drawer.hidden = true; drawer.replaceChildren(); document.body.classList.remove("with-drawer"); return; }
    const parts = await content(layer, expert);
    if (mine !== newest) return;
    const step = (change) => M.make("a", { class: "button", href: M.state.link({ expert: Math.max(0, expert + change) }), "aria-label": change < 0 ? "Previous expert" : "Next expert" }, change < 0 ? "‹" : "›");
    drawer.replaceChildren(make("div", { class: "drawer-head" }, make("h2", {}, `L${layer} · E${expert}`), step(-1), step(1),
      make("a", { class: "button", href: M.state.link({ tab: "experts" }) }, "Expert page"),
      make("a", { class: "button", href: M.state.link({ expert: null }), "aria-label": "Close" }, "×")), ...parts);
    drawer.hidden = false;
    document.body.classList.add("with-drawer");
  }
  M.state.onChange(show);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !drawer.hidden) M.state.set({ expert: null }); });

  // ---- the tab: one expert, or two side by side
  async function page(container) {
    const draw = async () => {
      const state = M.state.get();
      if (state.tab !== "experts") return;
      await M.map.ready;
      const measure = M.map.candidates()[0];
      const layer = measure?.layers.includes(state.layer) ? state.layer : measure?.layers[0];
      const expert = Math.min(state.expert ?? 0, (measure?.experts ?? 1) - 1);
      const column = async (index, key) => {
        const input = make("input", { type: "number", min: 0, max: (measure?.experts ?? 1) - 1, value: index, "aria-label": "Expert" });
        input.addEventListener("change", () => M.state.set({ layer, [key]: Number(input.value) }));
        return make("div", { class: "expert-column" }, make("div", { class: "drawer-head" }, make("h2", {}, `L${layer} · E${index}`), input,
          key === "expert" ? make("a", { class: "button", href: M.state.link({ pinned: index }) }, "Pin to compare") : make("a", { class: "button", href: M.state.link({ pinned: null }) }, "Unpin")), ...(await content(layer, index)));
      };
      const columns = [await column(expert, "expert")];
      if (state.pinned !== undefined) columns.push(await column(state.pinned, "pinned"));
      container.replaceChildren(make("div", { class: "expert-columns" }, ...columns));
    };
    M.state.onChange(draw);
    return draw();
  }
  return { show, page };
})();
