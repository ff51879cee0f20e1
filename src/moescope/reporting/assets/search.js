// Search: experts by number, layers, tokens of experts, domains, sections and figures by title, glossary terms.
(() => {
  const { make } = M;
  const MOST = 14;

  function places(wanted) {
    const found = [];
    const [, layer, expert] = wanted.match(/^l?\s*(\d+)\D+(\d+)$/) ?? [];
    const single = wanted.match(/^e(?:xpert)?\s*(\d+)$/)?.[1];
    const whole = wanted.match(/^l(?:ayer)?\s*(\d+)$/)?.[1];
    const add = (at, number) => { if (M.data.layers.includes(at) && number < M.map.experts(at)) found.push([`Layer ${at}, expert ${number}`, { layer: at, expert: number }]); };
    if (expert !== undefined) add(Number(layer), Number(expert));
    if (single !== undefined) add(M.selected.layer(M.data.layers), Number(single));
    if (M.data.layers.includes(Number(whole))) found.push([`Layer ${whole}`, { layer: Number(whole), expert: null }]);
    return found;
  }
  function titles(wanted) {
    const found = [];
    const has = (text) => text?.toLowerCase().includes(wanted);
    for (const domain of M.data.domains) if (has(domain)) found.push([`Domain: ${domain}`, { domain }]);
    const inside = (section) => [section, ...(section.sections ?? []).flatMap(inside)];
    for (const tab of M.data.tabs) for (const section of tab.sections.flatMap(inside)) {
      const shown = M.selected.matches(section) && (section.layer === null || section.layer === M.selected.layer(M.data.layers));
      if (!shown) continue;
      if (has(section.title)) found.push([`${tab.title}: ${section.title}`, { tab: tab.name, section: section.id, expert: null }]);
      for (const figure of section.figures) if (has(figure.title) || has(figure.name.replaceAll("_", " ")))
        found.push([`${tab.title}: ${figure.title}`, { tab: tab.name, figure: figure.name, expert: null }]);
    }
    return found;
  }
  async function terms(wanted) {
    const entries = [...(await M.glossary()).values()].map((entry) => [entry.label || entry.name.replaceAll("_", " "), entry.key]);
    return entries.filter(([name]) => name.toLowerCase().includes(wanted)).map(([name, term]) => [`Glossary: ${name}`, { tab: "methods", term, expert: null }]);
  }
  async function tokens(wanted, most) {
    const found = [];
    for (const entry of M.data.experts.filter((place) => M.selected.matches(place))) {
      if (found.length >= most) break;
      const cards = await M.payload(entry.payload);
      for (const [expert, blocks] of Object.entries(cards)) {
        const block = blocks.find(({ kind, rows }) => kind === "tokens" && rows.some(([word]) => word.toLowerCase().trim() === wanted));
        if (block) found.push([`“${wanted}”: layer ${entry.layer}, expert ${expert} (${block.title.toLowerCase()})`, { layer: entry.layer, expert: Number(expert) }]);
      }
    }
    return found;
  }

  M.search = () => {
    const input = make("input", { type: "search", placeholder: "Search: L2 E5", "aria-label": "Search" });
    const results = make("ul", { class: "results", hidden: true });
    let newest = 0;
    async function find() {
      const mine = ++newest;
      const wanted = input.value.trim().toLowerCase();
      await M.map.ready;
      const first = wanted ? [...places(wanted), ...titles(wanted)].slice(0, MOST) : [];
      const words = wanted ? await terms(wanted) : [];
      const some = wanted ? await tokens(wanted, MOST) : [];
      if (mine !== newest) return;
      // every kind has room: a common word in many titles does not hide tokens and terms
      const rest = [...some.slice(0, 5), ...words.slice(0, 4), ...some.slice(5), ...words.slice(4)];
      const found = [...first.slice(0, MOST - Math.min(rest.length, 7)), ...rest].slice(0, MOST);
      results.hidden = wanted === "";
      results.replaceChildren(...(found.length ? found.map(([text, place]) => make("li", {}, make("a", { href: M.state.link(place) }, text))) : [make("li", {}, "Nothing found")]));
    }
    input.addEventListener("input", find);
    input.addEventListener("keydown", async (event) => {
      if (event.key === "Enter") { await find(); results.querySelector("a")?.click(); }
      if (event.key === "ArrowDown") { event.preventDefault(); results.querySelector("a")?.focus(); }
      if (event.key === "Escape") { event.preventDefault(); results.hidden = true; }
    });
    results.addEventListener("keydown", (event) => {
      const item = event.target.closest("li");
      const next = { ArrowDown: item?.nextElementSibling, ArrowUp: item?.previousElementSibling }[event.key];
      if (next) { event.preventDefault(); next.querySelector("a").focus(); }
      if (event.key === "Escape") { event.preventDefault(); results.hidden = true; input.focus(); }
    });
    document.addEventListener("click", (event) => { if (!results.contains(event.target) && event.target !== input) results.hidden = true; });
    results.addEventListener("click", () => { results.hidden = true; });
    return make("span", { class: "search" }, input, results);
  };
})();
