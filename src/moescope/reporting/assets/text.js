// A document coloured by expert. Words of the text enter the page as text nodes only.
(() => {
  const { make } = M;
  const display = (value) => M.number(value);
  const HUES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C62C7", "#A3A500"];
  const times = (value) => (value === null ? "–" : display(value, "float"));
  const word = (text, attributes = {}) => make("bdi", attributes, text);

  // ---- the text
  const layerChoices = (text, position) => text.layers[position];

  function fillText(slot, text) {
    slot.classList.add("text-slot");
    const documents = make("select", { "aria-label": "document" }, ...text.documents.map((d, i) => make("option", { value: i }, `document ${d.number}${d.domain === "text" ? "" : ", " + d.domain}`)));
    const range = make("input", { type: "range", min: 0, max: text.layers.length - 1, value: 0, step: 1, "aria-label": "layer" });
    const shownLayer = make("output", {});
    const focus = make("select", { "aria-label": "expert" });
    const legend = make("div", { class: "legend" });
    const title = make("h4", {});
    const tip = make("div", { class: "tip", role: "status", hidden: "" });
    const body = make("div", { class: "tokens", tabindex: 0, dir: "auto", "aria-label": "the text; arrow keys go from token to token" });
    let spans = [], first = 0, at = -1;

    function describe(index) {
      const layer = layerChoices(text, Number(range.value));
      const rows = layer.experts[index].map((expert, place) => [expert, layer.gates[index][place]]).filter(([expert]) => expert >= 0);
      return [make("strong", {}, word(text.words[index])), ` at ${index - first}`,
        ...rows.map(([expert, gate]) => make("div", {}, `expert ${expert}`, make("span", {}, gate === null ? "" : ` gate ${times(gate)}`))), strip(index)];
    }
    // the token's first choice in every layer; shade: its share of the gates
    function strip(index) {
      const cells = text.layers.map((entry) => {
        const [expert] = entry.experts[index];
        const gates = entry.gates[index].filter((gate) => gate !== null);
        const total = gates.reduce((sum, gate) => sum + gate, 0);
        const share = total > 0 ? gates[0] / total : 0.5;
        const here = entry.layer === text.layers[Number(range.value)].layer;
        return make("i", { class: here ? "here" : null, style: `opacity:${(0.15 + 0.85 * share).toFixed(2)}` }, expert < 0 ? "" : text.layers.length <= 16 ? String(expert) : "");
      });
      return make("div", { class: "strip" }, make("span", {}, `layers ${text.layers[0].layer} to ${text.layers.at(-1).layer}, first choice`), make("div", {}, ...cells));
    }
    function showTip(index) {
      if (spans[at]) spans[at].classList.remove("current");
      at = index;
      if (!spans[index]) { tip.hidden = true; return; }
      spans[index].classList.add("current");
      tip.replaceChildren(...describe(first + index));
      tip.hidden = false;
      const box = spans[index].getBoundingClientRect(), frame = slot.getBoundingClientRect();
      tip.style.left = Math.max(0, Math.min(box.left - frame.left, frame.width - tip.offsetWidth)) + "px";
      tip.style.top = box.bottom - frame.top + 6 + "px";
    }
    function paint() {
      const layer = layerChoices(text, Number(range.value));
      const wanted = focus.value === "" ? null : Number(focus.value);
      const counts = new Map();
      spans.forEach((_, i) => { const e = layer.experts[first + i][0]; if (e >= 0) counts.set(e, (counts.get(e) || 0) + 1); });
      const ranked = [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0]);
      const hue = new Map(ranked.slice(0, HUES.length).map(([expert], i) => [expert, HUES[i]]));
      spans.forEach((span, i) => {
        const row = layer.experts[first + i], gates = layer.gates[first + i];
        const place = wanted === null ? 0 : row.indexOf(wanted);
        const color = wanted === null ? hue.get(row[0]) : place >= 0 ? HUES[0] : undefined;
        // strength says how much of the gate the expert has; without gates all are alike
        const total = gates.reduce((sum, gate) => sum + (gate || 0), 0);
        const strength = color && total > 0 && place >= 0 ? gates[place] / total : 0.5;
        span.style.setProperty("--hue", color || "transparent");
        span.style.setProperty("--strength", (color ? 18 + 52 * strength : 0).toFixed(0) + "%");
        span.dataset.expert = row[0];
      });
      shownLayer.textContent = String(layer.layer);
      const tokens = spans.length;
      legend.replaceChildren(...(wanted === null ? ranked.slice(0, HUES.length).map(([expert, count]) =>
        make("span", { class: "key", style: `--hue:${hue.get(expert)}` }, `expert ${expert} (${((100 * count) / tokens).toFixed(0)} %)`)) : [make("span", { class: "key", style: `--hue:${HUES[0]}` }, `expert ${wanted} among the chosen`)]),
        ...(wanted === null && ranked.length > HUES.length ? [make("span", { class: "key plain" }, `${ranked.length - HUES.length} more, uncoloured`)] : []));
      const top = ranked[0];
      const chosen = spans.filter((_, i) => layer.experts[first + i].includes(wanted)).length;
      title.textContent = wanted === null
        ? (top ? `Layer ${layer.layer}: ${ranked.length} of ${layer.n} experts come first for a token here, expert ${top[0]} most often (${((100 * top[1]) / tokens).toFixed(0)} %; an even share is ${display(100 / layer.n, "float")} %)` : `Layer ${layer.layer}: no token was routed`) +
          (layer.same === null ? "" : `; over all documents shown, ${(100 * layer.same).toFixed(0)} % of tokens share their first expert with the token before`)
        : `Layer ${layer.layer}: expert ${wanted} is chosen at ${chosen} of ${tokens} tokens here; an even share is ${display((tokens * layer.experts[first].length) / layer.n, "float")}`;
      if (at >= 0) showTip(at);
    }
    function fillExperts() {
      const kept = focus.value;
      const { n } = text.layers[Number(range.value)];
      focus.replaceChildren(make("option", { value: "" }, "the first choice of each"), ...Array.from({ length: n }, (_, e) => make("option", { value: e }, `expert ${e}`)));
      focus.value = Number(kept) < n ? kept : "";
    }
    function showDocument() {
      const document_ = text.documents[Number(documents.value)];
      first = document_.from;
      at = -1; tip.hidden = true;
      spans = text.words.slice(document_.from, document_.to).map((content) => word(content, { class: "token" }));
      body.replaceChildren(...spans);
      paint();
    }
    body.addEventListener("pointerover", (event) => { const index = spans.indexOf(event.target.closest(".token")); if (index >= 0) showTip(index); });
    body.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") showTip(-1); });
    body.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (move) { event.preventDefault(); showTip(Math.max(0, Math.min(spans.length - 1, at + move))); }
      else if (event.key === "Escape") showTip(-1);
    });
    documents.addEventListener("change", showDocument);
    range.addEventListener("input", () => M.state.replace({ layer: text.layers[Number(range.value)].layer }));
    focus.addEventListener("change", () => M.state.replace({ expert: focus.value === "" ? null : focus.value }));
    function follow() {
      const { layer, expert } = M.state.get();
      const place = text.layers.findIndex((entry) => entry.layer === layer);
      if (place >= 0) range.value = place;
      fillExperts();
      focus.value = expert !== undefined && expert < text.layers[Number(range.value)].n ? expert : "";
      paint();
    }
    M.state.onChange(() => { if (slot.offsetParent) follow(); });
    slot.append(title, make("div", { class: "controls" }, make("label", {}, "layer", range, shownLayer), make("label", {}, "text", documents), make("label", {}, "colour", focus)), legend, body, tip,
      make("details", { class: "definition" }, make("summary", {}, "What is drawn, and what the words mean"),
        make("p", {}, "The first tokens of some documents of every domain. A token has the colour of its first choice, the expert with the largest gate, stronger where that gate is a larger share of the token's gates; the eight experts that come first most often here are coloured. Point at a token, or go along with the arrow keys, to see all its experts and gates. Colours are given anew in every layer and document."),
        make("p", {}, "Characters that cannot be seen are spelled out, as [U+200B]." + (text.unnamed ? ` ${text.unnamed} of ${text.words.length} tokens are shown by number: the run does not hold their words.` : ""))));
    showDocument();
    follow();
  }
  M.widgets.text = fillText;

})();
