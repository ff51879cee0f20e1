// The frame: header with selections, tabs. Starts the page.
(() => {
  const { make } = M;
  const { roots, tabs, views, layers } = M.data;
  const main = document.getElementById("main");

  // ---- header: every select shows a value of the state and changes it
  const shown = [];
  function select(label, key, options, { none, read = (state) => state[key], write = (value) => ({ [key]: value }) } = {}) {
    const element = make("select", { "aria-label": label, "data-state": key, onchange: () => M.state.set(write(element.value === "" ? null : element.value)) });
    if (none !== undefined) element.append(make("option", { value: "" }, none));
    element.append(...options.map(([value, words]) => make("option", { value }, words)));
    const box = make("label", {}, label, element);
    shown.push((state) => {
      element.value = read(state) ?? "";
      box.classList.toggle("on", none !== undefined && element.value !== "");
    });
    return box;
  }
  // A view such as "step 100, decode" is two choices: step and phase.
  function viewSelects({ verb, label, views: names }) {
    const parts = names.map((name) => name.split(", "));
    const kind = (word) => (/^step \d+$/.test(word) ? "Step" : /^(prefill|decode)$/.test(word) ? "Phase" : null);
    const kinds = parts[0].map(kind);
    if (kinds.includes(null) || parts.some((words) => words.length !== kinds.length || words.some((word, place) => kind(word) !== kinds[place])))
      return [select(label, verb, names.map((name) => [name, name]), { read: () => M.selected.view(verb) })];
    const now = () => M.selected.view(verb).split(", ");
    return kinds.map((words, place) => {
      const values = [...new Set(parts.map((part) => part[place]))];
      const write = (value) => {
        const wanted = now().map((part, index) => (index === place ? value : part)).join(", ");
        return { [verb]: names.includes(wanted) ? wanted : names.find((name) => name.split(", ")[place] === value) };
      };
      return select(words, words.toLowerCase(), values.map((value) => [value, value.replace(/^step /, "")]), { read: () => now()[place], write });
    });
  }
  function header() {
    const controls = [];
    const alike = M.selected.alike.map((index) => [index, roots[index]]);
    if (alike.length > 1) controls.push(select("Run", "run", alike, { read: () => M.selected.root("run") }), select("vs", "vs", [["none", "none"], ...alike], { read: () => M.selected.root("vs") ?? "none" }));
    for (const selector of views) controls.push(...viewSelects(selector));
    if (M.data.domains.length > 1) controls.push(select("Domain", "domain", M.data.domains.map((domain) => [domain, domain]), { none: "all", read: M.selected.domain }));
    if (layers.length) controls.push(select("Layer", "layer", layers.map((layer) => [layer, layer]), { none: "all" }));
    document.getElementById("top").append(make("a", { class: "brand", href: "#/overview" }, "moescope"), make("strong", { class: "model" }, M.data.title),
      make("span", { class: "space" }), ...controls, M.search());
  }
  const showSelections = (state) => shown.forEach((show) => show(state));

  // ---- tabs
  const panels = new Map();
  function tabBar() {
    const bar = document.getElementById("tabs");
    const menu = make("select", { "aria-label": "Tab", onchange: () => M.state.set({ tab: menu.value }) }, ...tabs.map((tab) => make("option", { value: tab.name }, tab.title)));
    const copy = make("button", { type: "button", onclick: () => M.copy(location.href, copy) }, "Copy link");
    const print = make("button", { type: "button", id: "print", title: "Print the overview and this tab", onclick: M.print }, "Print");
    const theme = make("button", { type: "button", id: "theme", title: "Light or dark", "aria-label": "Switch between light and dark", onclick: M.theme.toggle }, "◐");
    bar.append(menu, ...tabs.map((tab) => make("a", { "data-tab": tab.name }, tab.title)), adding(), make("span", { class: "tools" }, copy, print, theme));
  }
  // what this report lacks, with the commands that make it from this run's model and text
  function adding() {
    if (!M.data.add.length) return "";
    const item = ({ title, command }) => {
      const copy = make("button", { type: "button", onclick: () => M.copy(command, copy) }, "Copy");
      return make("div", {}, make("h4", {}, title, " ", copy), make("pre", { class: "command" }, command));
    };
    const box = make("div", { class: "adding" }, ...M.data.add.map(item), make("p", { class: "soft" }, `Then show both: ${M.data.report}`));
    return make("details", { class: "add" }, make("summary", {}, "Add to this report ▾"), box);
  }
  async function build(tab, panel) {
    if (tab.name === "overview") return M.overview.panel(panel);
    if (tab.name === "methods") return M.fillMethods(panel);
    if (tab.name === "experts") return M.experts.page(panel);
    const more = make("div", { class: "findings-box" });
    panel.findings = () => more.replaceChildren(...M.overview.findingsOf(tab.name));
    panel.append(more, ...tab.sections.map((entry) => M.sections.element(entry)));
  }
  // The panel of a tab, built when it is first needed; the overview stands first, for print.
  function panelOf(tab) {
    let panel = panels.get(tab.name);
    if (panel) return panel;
    panel = make("div", { class: "panel", id: `tab-${tab.name}`, hidden: true });
    panels.set(tab.name, panel);
    if (tab.name === "overview") main.prepend(panel); else main.append(panel);
    panel.ready = build(tab, panel);
    return panel;
  }
  async function show(state, before) {
    const tab = tabs.find((entry) => entry.name === state.tab);
    for (const link of document.querySelectorAll("#tabs a")) {
      link.href = M.state.link({ tab: link.dataset.tab, figure: null, section: null, term: null });
      if (link.dataset.tab === tab.name) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
    }
    document.querySelector("#tabs select").value = tab.name;
    const panel = panelOf(tab);
    for (const other of panels.values()) other.hidden = other !== panel;
    await panel.ready;
    panel.findings?.();
    M.sections.show(panel.below ?? panel);
    M.map.refresh();
    const moved = ["tab", "figure", "section"].some((key) => state[key] !== before?.[key]);
    if (moved && (state.figure || state.section)) await M.sections.reveal(panel, state);
  }

  // ---- print: the overview and the open tab, on white, everything drawn at the width of the paper
  function beforePrint() {
    const overview_ = panels.get("overview");
    if (!overview_ || document.body.classList.contains("printing")) return;
    document.body.classList.add("printing");
    overview_.hidden = false;
    M.theme.lend("light");
    M.map.refresh();
    M.figures.fit();
    M.sections.fillVisible(main); // what was never scrolled to; the button waits for it, the browser's own menu may not
  }
  function afterPrint() {
    if (!document.body.classList.contains("printing")) return;
    document.body.classList.remove("printing");
    for (const [name, panel] of panels) panel.hidden = name !== M.state.get().tab;
    M.theme.lend(null);
    M.map.refresh();
    M.figures.fit();
  }
  M.print = async () => {
    await panelOf(tabs[0]).ready;
    beforePrint();
    M.sections.show(panels.get("overview").below);
    await M.sections.fillVisible(main);
    await M.figures.ready();
    M.figures.fit();
    window.print();
  };
  // the browser's own key prints the same pages as the button, which waits until all are drawn
  document.addEventListener("keydown", (event) => { if ((event.ctrlKey || event.metaKey) && event.key === "p") { event.preventDefault(); M.print(); } });
  window.addEventListener("beforeprint", beforePrint);
  window.addEventListener("afterprint", afterPrint);

  header();
  tabBar();
  M.state.onChange((state, before) => {
    if (state.run !== before.run || state.vs !== before.vs) {
      for (const name of [...panels.keys()].filter((tab) => !["overview", "methods", "experts"].includes(tab))) { panels.get(name).remove(); panels.delete(name); }
    }
    showSelections(state);
    show(state, before);
  });
  showSelections(M.state.get());
  show(M.state.get()).then(() => M.experts.show()).then(() => panelOf(tabs[0]));
  const head = document.getElementById("head");
  new ResizeObserver(() => document.documentElement.style.setProperty("--head", head.offsetHeight + "px")).observe(head);
})();
