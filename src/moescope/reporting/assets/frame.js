// The frame: header with selections, tabs. Starts the page.
(() => {
  const { make } = M;
  const { roots, tabs, views, layers } = M.data;
  const main = document.getElementById("main");
  const filled = (tab) => ["overview", "methods"].includes(tab.name) || tab.sections.length > 0 || (tab.name === "experts" && layers.length > 0);

  // ---- header
  const select = (label, key, options, none) => {
    const element = make("select", { "aria-label": label, "data-state": key, onchange: () => M.state.set({ [key]: element.value === "" ? null : element.value }) });
    if (none !== undefined) element.append(make("option", { value: "" }, none));
    element.append(...options.map(([value, words]) => make("option", { value }, words)));
    return make("label", {}, label, element);
  };

  function header() {
    const top = document.getElementById("top");
    const controls = [];
    const alike = M.selected.alike.map((index) => [index, roots[index]]);
    if (alike.length > 1) controls.push(select("Run", "run", alike), select("vs", "vs", [["none", "none"], ...alike]));
    for (const selector of views) controls.push(select(selector.label, selector.verb, selector.views.map((name) => [name, name])));
    if (layers.length) controls.push(select("Layer", "layer", layers.map((layer) => [layer, layer]), "all"));
    const search = make("input", { type: "search", placeholder: "L2 E5, token, figure", "aria-label": "Search", list: "found" });
    const results = make("ul", { class: "results", hidden: true });
    search.addEventListener("input", () => M.search(search.value, results));
    search.addEventListener("keydown", (event) => { if (event.key === "Enter") results.querySelector("a")?.click(); if (event.key === "Escape") results.hidden = true; });
    document.addEventListener("click", (event) => { if (!results.contains(event.target) && event.target !== search) results.hidden = true; });
    results.addEventListener("click", () => { results.hidden = true; });
    const copy = make("button", { type: "button", onclick: () => M.copy(location.href, copy) }, "Copy link");
    const theme = make("button", { type: "button", id: "theme", title: "Light or dark", "aria-label": "Switch between light and dark", onclick: M.theme.toggle }, "◐");
    top.append(make("a", { class: "brand", href: "#/overview" }, "moescope"), make("strong", { class: "model" }, M.data.title), make("span", { class: "soft" }, M.data.shape),
      make("span", { class: "space" }), ...controls, make("span", { class: "search" }, search, results), copy, theme);
  }
  function showSelections(state) {
    for (const element of document.querySelectorAll("#top select[data-state]")) {
      const key = element.dataset.state;
      const value = key === "run" ? M.selected.root("run") : key === "vs" ? M.selected.root("vs") ?? "none" : views.some((entry) => entry.verb === key) ? M.selected.view(key) : state[key];
      element.value = value ?? "";
    }
  }

  // ---- tabs
  const panels = new Map();
  function tabBar() {
    const bar = document.getElementById("tabs");
    const menu = make("select", { "aria-label": "Tab", onchange: () => M.state.set({ tab: menu.value }) }, ...tabs.map((tab) => make("option", { value: tab.name }, tab.title)));
    bar.append(menu, ...tabs.map((tab) => make("a", { "data-tab": tab.name, class: filled(tab) ? null : "empty" }, tab.title)));
  }
  function empty(tab) {
    return make("div", { class: "empty-tab" }, make("h2", {}, `${tab.title}: no data in this report`), make("p", {}, "This command fills it:"), make("pre", { class: "command" }, tab.command));
  }
  async function build(tab, panel) {
    if (tab.name === "overview") return M.overview(panel);
    if (tab.name === "methods") return M.fillMethods(panel);
    if (tab.name === "experts" && filled(tab)) return M.experts.page(panel);
    if (!filled(tab)) return panel.append(empty(tab));
    panel.append(...tab.sections.map((entry) => M.sections.element(entry)));
  }
  async function show(state) {
    const tab = tabs.find((entry) => entry.name === state.tab);
    for (const link of document.querySelectorAll("#tabs a")) {
      link.href = M.state.link({ tab: link.dataset.tab, figure: null, term: null });
      if (link.dataset.tab === tab.name) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
    }
    document.querySelector("#tabs select").value = tab.name;
    let panel = panels.get(tab.name);
    const fresh = !panel;
    if (fresh) { panel = make("div", { class: "panel", id: `tab-${tab.name}` }); panels.set(tab.name, panel); main.append(panel); }
    for (const other of panels.values()) other.hidden = other !== panel;
    if (fresh) await build(tab, panel);
    M.sections.show(panel.below ?? panel);
    M.map.refresh();
    if (state.figure) panel.querySelector(`[data-figure="${CSS.escape(state.figure)}"]`)?.scrollIntoView({ block: "center" });
  }

  // ---- search: experts by number, tokens of experts, figures by title
  M.search = async (text, results) => {
    const wanted = text.trim().toLowerCase();
    const found = [];
    const numbers = wanted.match(/^l?\s*(\d+)\D+(\d+)$/) ?? wanted.match(/^e(?:xpert)?\s*(\d+)$/);
    const known = (place) => layers.includes(place.layer) && place.expert < M.map.experts();
    if (numbers) found.push([numbers.length > 2 ? `Layer ${numbers[1]}, expert ${numbers[2]}` : `Expert ${numbers[1]}`, numbers.length > 2 ? { layer: Number(numbers[1]), expert: Number(numbers[2]) } : { layer: M.state.get().layer ?? layers[0], expert: Number(numbers[1]) }]);
    if (found.length && !known(found[0][1])) found.pop();
    if (wanted.length > 0) {
      for (const tab of tabs) for (const section of tab.sections) {
        if (M.selected.matches(section) && section.title?.toLowerCase().includes(wanted)) found.push([`${tab.title}: ${section.title}`, { tab: tab.name }]);
        for (const figure of section.figures ?? []) if (M.selected.matches(section) && figure.name.replaceAll("_", " ").includes(wanted)) found.push([`${tab.title}: ${figure.name.replaceAll("_", " ")}`, { tab: tab.name, figure: figure.name }]);
      }
      for (const entry of M.data.experts.filter((place) => M.selected.matches(place))) {
        if (found.length > 12) break;
        const cards = await M.payload(entry.payload);
        for (const [expert, blocks] of Object.entries(cards)) {
          const token = blocks.find((block) => block.kind === "tokens" && block.rows.some(([word]) => word.toLowerCase().trim() === wanted));
          if (token) found.push([`“${wanted}”: layer ${entry.layer}, expert ${expert} (${token.title.toLowerCase()})`, { layer: entry.layer, expert: Number(expert) }]);
        }
      }
    }
    results.hidden = wanted === "";
    results.replaceChildren(...(found.length ? found.slice(0, 12).map(([words, place]) => make("li", {}, make("a", { href: M.state.link(place) }, words))) : [make("li", {}, "Nothing found")]));
  };

  header();
  tabBar();
  M.state.onChange((state, before) => {
    if (state.run !== before.run || state.vs !== before.vs) {
      for (const name of [...panels.keys()].filter((tab) => !["overview", "methods", "experts"].includes(tab))) { panels.get(name).remove(); panels.delete(name); }
    }
    showSelections(state);
    show(state);
  });
  showSelections(M.state.get());
  show(M.state.get()).then(() => M.experts.show());
  window.addEventListener("beforeprint", () => M.sections.fillVisible(main));
})();
