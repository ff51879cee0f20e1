// A document coloured by expert. Words of the text enter the page as text nodes only.
M.widgets.text = (() => {
  const { make } = M;
  const KEYS = 14; // experts in the legend
  const word = (text, attributes = {}) => make("bdi", attributes, text);
  const percent = (part, whole) => `${((100 * part) / whole).toFixed(0)} %`;
  // An expert has the same colour in every layer and document, and in figures.
  const hueOf = (expert) => M.data.palette[expert % M.data.palette.length];
  // the gate's share of the token's gates; one half where the run holds no gates
  function share(gates, place) {
    const total = gates.reduce((sum, gate) => sum + (gate ?? 0), 0);
    return total > 0 && gates[place] !== null ? gates[place] / total : 0.5;
  }

  const strength = (part) => (12 + 40 * part).toFixed(0) + "%"; // text on it stays readable

  function fill(slot, text) {
    slot.classList.add("text-slot");
    const known = text.layers.map((entry) => entry.layer);
    const documents = make("select", { "aria-label": "document", onchange: () => M.state.set({ document: documents.value }) });
    const range = make("input", { type: "range", min: 0, max: known.length - 1, value: 0, step: 1, "aria-label": "layer" });
    const shownLayer = make("output", {});
    const focus = make("select", { "aria-label": "expert" });
    const legend = make("div", { class: "legend" });
    const caption = make("p", { class: "caption" });
    const note = make("p", { class: "note" });
    const tip = make("div", { class: "tip", role: "status", hidden: true });
    const body = make("div", { class: "tokens", tabindex: 0, dir: "auto", "aria-label": "the text; left and right go from token to token, up and down from layer to layer, Enter opens the expert" });
    let shown = null, spans = [], at = -1;
    const layer = () => text.layers[Number(range.value)];

    // ---- one token: its experts here, and its first choice in every layer
    function describe(index) {
      const { experts, gates } = layer();
      const rows = experts[index].map((expert, place) => [expert, gates[index][place]]).filter(([expert]) => expert >= 0);
      const cells = text.layers.map((entry) => {
        const [expert] = entry.experts[index];
        const style = expert < 0 ? null : `--hue:${hueOf(expert)};--strength:${strength(share(entry.gates[index], 0))}`;
        return make("i", { class: "token" + (entry === layer() ? " here" : ""), style, title: `layer ${entry.layer}: expert ${expert}` }, expert < 0 || known.length > 16 ? "" : String(expert));
      });
      return [make("strong", {}, word(text.words[index])), ` token ${index - shown.from}`,
        ...rows.map(([expert, gate]) => make("div", {}, `expert ${expert}`, make("span", {}, gate === null ? "" : ` gate ${M.number(gate)}`))),
        make("div", { class: "strip" }, make("span", {}, `first choice, layers ${known[0]} to ${known.at(-1)}`), make("div", {}, ...cells))];
    }
    function point(index) {
      spans[at]?.classList.remove("current");
      at = spans[index] ? index : -1;
      tip.hidden = at < 0;
      if (at < 0) return;
      spans[at].classList.add("current");
      tip.replaceChildren(...describe(shown.from + at));
      const box = spans[at].getBoundingClientRect(), frame = slot.getBoundingClientRect();
      tip.style.left = Math.max(0, Math.min(box.left - frame.left, frame.width - tip.offsetWidth)) + "px";
      tip.style.top = box.bottom - frame.top + 6 + "px";
    }
    function open(index) {
      const [expert] = layer().experts[shown.from + index];
      if (expert >= 0) M.state.set({ layer: layer().layer, expert });
    }

    // ---- the whole text
    function paint() {
      const { experts, gates, n, same, layer: number } = layer();
      const wanted = focus.value === "" ? null : Number(focus.value);
      const counts = new Map();
      spans.forEach((span, i) => {
        const row = experts[shown.from + i];
        const place = wanted === null ? 0 : row.indexOf(wanted);
        const coloured = place >= 0 && row[place] >= 0;
        span.style.setProperty("--hue", coloured ? hueOf(row[place]) : "transparent");
        span.style.setProperty("--strength", coloured ? strength(share(gates[shown.from + i], place)) : "0%");
        span.dataset.expert = row[0];
        if (coloured) counts.set(row[place], (counts.get(row[place]) ?? 0) + 1);
      });
      shownLayer.textContent = String(number);
      const ranked = [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0]);
      const key = ([expert, count]) => make("span", { class: "key", "data-expert": expert, style: `--hue:${hueOf(expert)}` }, `expert ${expert} (${percent(count, spans.length)})`);
      legend.replaceChildren(...ranked.slice(0, KEYS).map(key), ...(ranked.length > KEYS ? [`and ${ranked.length - KEYS} more experts, each with its own colour`] : []));
      const chosen = counts.get(wanted) ?? 0;
      const even = M.number((spans.length * experts[shown.from].length) / n);
      caption.textContent = wanted !== null ? `Layer ${number}: expert ${wanted} is chosen at ${chosen} of ${spans.length} tokens here; an even share is ${even}.`
        : !ranked.length ? `Layer ${number}: no token was routed.`
          : `Layer ${number}: ${ranked.length} of ${n} experts are a token's first choice here, expert ${ranked[0][0]} most often (${percent(ranked[0][1], spans.length)}; an even share is ${M.number(100 / n)} %).` +
            (same === null ? "" : ` Over all documents shown, ${percent(same, 1)} of tokens have the first choice of the token before.`);
      if (at >= 0) point(at);
    }
    function showDocument(document_) {
      if (document_ === shown) return;
      shown = document_;
      point(-1);
      spans = text.words.slice(shown.from, shown.to).map((content) => word(content, { class: "token" }));
      const cut = shown.tokens > spans.length;
      body.replaceChildren(...spans, ...(cut ? [" …"] : []));
      note.textContent = cut ? `First ${spans.length} of ${shown.tokens.toLocaleString("en-US")} tokens.` : `All ${spans.length} tokens.`;
    }
    // ---- the selected domain, document, layer and expert
    function follow() {
      const { document: number, expert } = M.state.get();
      const domain = M.selected.domain();
      const some = text.documents.filter((entry) => domain === null || entry.domain === domain);
      const all = some.length ? some : text.documents;
      documents.replaceChildren(...all.map((entry) => make("option", { value: entry.number }, `document ${entry.number}${entry.domain === "text" ? "" : ", " + entry.domain}`)));
      showDocument(all.find((entry) => String(entry.number) === number) ?? all[0]);
      documents.value = shown.number;
      range.value = known.indexOf(M.selected.layer(known));
      const { n } = layer();
      focus.replaceChildren(make("option", { value: "" }, "first choice of each token"), ...Array.from({ length: n }, (_, e) => make("option", { value: e }, `expert ${e}`)));
      focus.value = expert !== undefined && expert < n ? expert : "";
      paint();
    }
    const indexOf = (event) => spans.indexOf(event.target.closest(".tokens > .token"));
    body.addEventListener("pointerover", (event) => { if (indexOf(event) >= 0) point(indexOf(event)); });
    body.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") point(-1); });
    body.addEventListener("click", (event) => { if (indexOf(event) >= 0) open(indexOf(event)); });
    body.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
      const up = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      const next = text.layers[Number(range.value) + up];
      if (to !== undefined) point(Math.max(0, Math.min(spans.length - 1, to)));
      else if (up && at >= 0) { if (next) M.state.replace({ layer: next.layer }); }
      else if (event.key === "Enter" && at >= 0) open(at);
      else if (event.key === "Escape" && at >= 0) point(-1);
      else return;
      event.preventDefault();
      spans[at]?.scrollIntoView({ block: "nearest" });
    });
    range.addEventListener("input", () => M.state.replace({ layer: known[Number(range.value)] }));
    focus.addEventListener("change", () => M.state.replace({ layer: layer().layer, expert: focus.value === "" ? null : focus.value }));
    M.state.onChange(() => { if (slot.isConnected) follow(); });
    const unnamed = text.unnamed ? ` ${text.unnamed} of ${text.words.length} tokens are shown by number: the run does not hold their words.` : "";
    slot.append(caption, make("div", { class: "controls" }, make("label", {}, "layer", range, shownLayer), make("label", {}, "text", documents), make("label", {}, "colour", focus)), legend, body, note, tip,
      make("details", { class: "definition" }, make("summary", {}, "What is drawn"),
        make("p", {}, "The first tokens of some documents of every domain. A token has the colour of its first choice, the expert with the largest gate; the colour is stronger where that gate is a larger share of the token's gates. An expert has one colour in all layers and documents. Point at a token, or move with the arrow keys, to see all its experts and gates, and its first choice in every layer."),
        make("p", {}, "Characters that cannot be seen are spelled out, as [U+200B]." + unnamed)));
    follow();
  }
  return fill;
})();
