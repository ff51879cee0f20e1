// A slider of slots per layer: what a cache of that size holds and costs, with the level of random routing.
M.widgets.slots = (slot, { slots, n, rows }) => {
  const { make } = M;
  const BYTES = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["bytes", 1]];
  function words(value, unit) {
    if (unit !== "bytes") return `${M.number(value)} ${unit}`;
    const [name, size] = BYTES.find(([, size]) => value >= size) ?? BYTES.at(-1);
    return `${M.number(value / size)} ${name}`;
  }
  const start = slots.reduce((best, size, at) => (Math.abs(size - n / 2) < Math.abs(slots[best] - n / 2) ? at : best), 0);
  const range = make("input", { type: "range", min: 0, max: slots.length - 1, value: start, "aria-label": "slots per layer", oninput: () => fill() });
  const shown = make("b", {});
  const cards = make("div", { class: "cards" });
  function fill() {
    const at = Number(range.value);
    shown.textContent = `${slots[at]} of ${n} experts per layer`;
    cards.replaceChildren(...rows.map(({ name, unit, values, chance, chance_label }) => make("div", { class: "card" }, make("div", { class: "name" }, name), make("div", { class: "value" }, words(values[at], unit)),
      make("div", { class: "words" }, chance ? `${chance_label} ${words(chance[at], unit)}` : ""))));
  }
  fill();
  slot.append(make("div", { class: "slots" }, make("label", {}, "Slots ", range, " ", shown), make("span", { class: "soft" }, " LRU, all layers"), cards));
};
