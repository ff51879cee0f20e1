// Sections of a tab: built when the tab is first opened; those of the selected run, view and layer are shown.
M.sections = (() => {
  const { make } = M;

  const fillers = new WeakMap();
  const observer = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) fill(target);
  }, { rootMargin: "300px" });
  function fill(slot) {
    observer.unobserve(slot);
    const filler = fillers.get(slot);
    fillers.delete(slot);
    return filler ? filler() : null;
  }
  // An element whose content is made when it comes into view.
  function later(attributes, filler) {
    const slot = make("div", attributes);
    fillers.set(slot, () => filler(slot));
    observer.observe(slot);
    return slot;
  }

  function figureSlot(entry, section) {
    const slot = later({ class: "figure-slot" + (entry.wide ? " wide" : ""), "data-figure": entry.name }, async (slot) => {
      const figure = { ...(entry.payload ? await M.payload(entry.payload) : entry), height: entry.height };
      slot.replaceChildren(M.figures.element(M.versus.together(structuredClone(figure), await M.versus.counterpart(entry, section), section)));
    });
    if (entry.height) slot.style.setProperty("--height", entry.height + 74 + "px");  // drawn later: nothing below may jump
    return slot;
  }
  function factsTable(facts) {
    const rows = Object.entries(facts).map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value)));
    return make("table", { class: "plain" }, make("tbody", {}, ...rows));
  }
  const paragraphs = (text) => text.split("\n").filter(Boolean).map((words) => make("p", { class: "prose" }, ...M.prose(words)));

  // The content of a section, from the page's data or from a payload in one piece.
  function fillSection(body, content, section) {
    body.append(...paragraphs(content.text));
    if (content.findings.length) body.append(make("ul", { class: "findings" }, ...content.findings.map((line) => make("li", {}, line))));
    if (content.figures.length) body.append(make("div", { class: "grid" }, ...content.figures.map((figure) => figureSlot(figure, section))));
    if (content.widget) {
      const [name, payload] = Array.isArray(content.widget) ? [content.widget[0], content.widget[1]] : [content.widget.name, content.widget.payload];
      body.append(later({ class: "widget-slot", "data-widget": name }, async (slot) => M.widgets[name](slot, typeof payload === "string" ? await M.payload(payload) : payload)));
    }
    for (const table of content.tables) {
      const titled = { title: [table.title === content.title ? "" : table.title, M.versus.whose(section)].filter(Boolean).join(", ") };
      const fillTable = async (slot) => slot.append(M.tableElement({ ...(table.payload ? await M.payload(table.payload) : table), ...titled }, content.figures.length > 0));
      body.append(later({ class: "table-slot" }, fillTable));
    }
    for (const inner of content.sections) body.append(inner.payload || inner.folded !== undefined ? element(inner, 3) : inside(inner, section));
    if (Object.keys(content.facts).length) body.append(make("details", { class: "setup" }, make("summary", {}, "Setup"), factsTable(content.facts)));
  }
  function inside(content, section) {
    const body = make("details", { class: "inner" }, make("summary", {}, content.title));
    body.holds = (name) => content.figures.some((figure) => figure.name === name);
    body.fill = () => { if (!body.dataset.done) { body.dataset.done = "1"; fillSection(body, content, section); } };
    body.addEventListener("toggle", () => { if (body.open) body.fill(); });
    return body;
  }

  function element(entry, level = 2) {
    const title = entry.title && make(`h${level}`, {}, entry.title,
      entry.badge ? make("span", { class: `badge ${entry.badge[0]}` }, entry.badge[1]) : null,
      entry.line && !entry.folded ? make("span", { class: "line" }, entry.line) : null,
      typeof entry.layer === "number" ? make("span", { class: "line hint", hidden: true }, "first layer shown; select another at the top or on the map") : null);
    const body = make("div", { class: "body" });
    if (entry.folded) {
      const details = make("details", { class: "section folded" }, make("summary", {}, entry.title, make("span", { class: "line" }, entry.line)), body);
      details.unfold = () => {
        details.open = true;
        return details.filled ??= M.payload(entry.payload).then((content) => fillSection(body, content, entry));
      };
      details.addEventListener("toggle", () => { if (details.open) details.unfold(); });
      details.entry = entry;
      return details;
    }
    const section = make("section", { class: "section", "data-section": entry.id }, title, body);
    section.entry = entry;
    section.fill = () => section.filled ??= (async () => {
      fillSection(body, entry.payload ? await M.payload(entry.payload) : entry, entry);
      show(section);
    })();
    return section;
  }

  // Show the sections of the present state; fill those that were never shown. Without a selected layer the first is shown.
  function show(container) {
    const children = [...container.querySelectorAll(":scope > .section, :scope > .body > .section")].filter((child) => child.entry);
    const known = [...new Set(children.map((child) => child.entry.layer).filter((layer) => typeof layer === "number"))];
    const layer = M.selected.layer(known);
    for (const child of children) {
      const { entry } = child;
      const visible = M.selected.matches(entry) && (typeof entry.layer !== "number" || entry.layer === layer);
      child.hidden = !visible;
      if (!visible) continue;
      child.querySelector(":scope > * > .hint")?.toggleAttribute("hidden", M.state.get().layer === layer);
      if (child.fill) child.fill();
      show(child);
    }
  }
  // Scroll to a section, or to a figure, which may be in a folded section.
  async function reveal(panel, { figure, section }) {
    const visible = (selector) => [...panel.querySelectorAll(selector)].find((element) => element.offsetParent);
    if (!figure) { visible(`[data-section="${CSS.escape(section)}"]`)?.scrollIntoView(); return; }
    const place = `[data-figure="${CSS.escape(figure)}"]`;
    if (!visible(place)) {
      const holder = [...panel.querySelectorAll(".section")].find((child) => child.entry?.payload && child.offsetParent && child.entry.figures.some(({ name }) => name === figure));
      await (holder?.unfold ?? holder?.fill)?.();
      for (const inner of holder?.querySelectorAll("details.inner") ?? []) if (inner.holds(figure)) { inner.open = true; inner.fill(); }
    }
    visible(place)?.scrollIntoView({ block: "center" });
  }
  function fillVisible(container) {
    const slots = [...container.querySelectorAll(".figure-slot, .table-slot, .widget-slot")];
    return Promise.all(slots.filter((slot) => slot.offsetParent).map(fill));
  }
  return { element, show, reveal, fillVisible };
})();
