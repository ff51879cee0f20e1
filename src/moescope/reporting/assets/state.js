// The state of the page lives in the URL fragment: #/routing?layer=9&expert=24. Every view is a link; back works.
M.state = (() => {
  const listeners = [];
  const NUMBERS = new Set(["run", "vs", "layer", "expert"]);
  let current = parse();

  function parse() {
    const [path, query = ""] = decodeURI(location.hash.replace(/^#\/?/, "")).split("?");
    const state = { tab: path || "overview" };
    for (const [key, value] of new URLSearchParams(query)) {
      const number = Number(value);
      if (!NUMBERS.has(key) || value === "none") state[key] = value;
      else if (Number.isInteger(number) && number >= 0) state[key] = number;
    }
    if (!M.data.tabs.some((tab) => tab.name === state.tab)) state.tab = "overview";
    return state;
  }

  // The link of the present state with some values changed; null removes one.
  function link(changes = {}) {
    const { tab, ...rest } = { ...current, ...changes };
    const query = new URLSearchParams();
    for (const [key, value] of Object.entries(rest)) if (value !== null && value !== undefined && value !== "") query.set(key, value);
    const words = query.toString();
    return `#/${tab}${words ? "?" + words : ""}`;
  }

  function changed() {
    const before = current;
    current = parse();
    listeners.forEach((listener) => listener(current, before));
  }
  window.addEventListener("hashchange", changed);

  return {
    get: () => current,
    link,
    set: (changes) => { location.hash = link(changes); },
    // a change that is no step of its own: back leaves it out
    replace: (changes) => {
      history.replaceState(null, "", link(changes));
      changed();
    },
    onChange: (listener) => listeners.push(listener),
  };
})();

// Which runs and views are selected. Of a verb with several runs the selected one is shown, with its parts.
M.selected = (() => {
  const { runs, roots, views } = M.data;
  const verbs = new Map();
  runs.forEach((run, index) => verbs.set(run.verb, [...(verbs.get(run.verb) ?? []), index]));

  // roots that can stand in for each other: they have runs of one verb
  const alike = roots.map((_, index) => index).filter((index) => runs.some((run) => run.root === index && verbs.get(run.verb).length > 1));
  // two runs are compared from the start, of more the first is shown, unless a reader chooses otherwise
  const root = (key) => {
    const value = M.state.get()[key];
    if (value < roots.length) return value;
    if (key === "run") return 0;
    return value === "none" || alike.length > 2 ? null : alike.find((index) => index !== root("run")) ?? null;
  };
  // the run of a verb under the selected root; a verb with one run has only that
  function run(verb, key = "run") {
    const mine = verbs.get(verb) ?? [];
    const wanted = root(key);
    if (wanted === null) return null;
    const found = mine.find((index) => runs[index].root === wanted);
    return found ?? (key === "run" ? mine[0] ?? null : null);
  }
  function view(verb) {
    const selector = views.find((entry) => entry.verb === verb);
    if (!selector) return null;
    const chosen = M.state.get()[verb];
    return selector.views.includes(chosen) ? chosen : selector.views[selector.first];
  }
  const matchesRun = (entry) => entry.run === null || entry.run === undefined || run(runs[entry.run].verb) === entry.run;
  // a run without the selected view shows the one it opens with
  function matchesView(entry) {
    const wanted = view(entry.verb);
    if (!entry.view || wanted === null) return true;
    const own = M.data.run_views[entry.run] ?? [];
    return entry.view === (own.includes(wanted) ? wanted : own.at(-1));
  }
  // the layer to show of those that a view has: the selected one, else the first
  const layer = (known) => (known.includes(M.state.get().layer) ? M.state.get().layer : known[0]);
  const domain = () => (M.data.domains.includes(M.state.get().domain) ? M.state.get().domain : null);
  return { run, view, root, verbs, alike, layer, domain, matches: (entry) => matchesRun(entry) && matchesView(entry) };
})();
