// The overview: key numbers, map, charts, findings. Of several runs, the selected one beside the one it is compared with.
M.overview = (() => {
  const { make } = M;
  const { runs, tabs, notices, together } = M.data;
  // "a/scan" and "b/scan" are a and b where space is short
  const tails = new Set(M.data.roots.map((name) => name.split("/").slice(1).join("/")));
  const short = (name) => (tails.size === 1 ? name.split("/")[0] : name);
  const names = (numbers) => [...new Set(numbers.map((index) => short(M.data.roots[runs[index].root])))].join(", ");
  const tag = (numbers) => (M.selected.alike.length > 1 ? make("span", { class: "run-tag" }, names(numbers)) : null);

  // a run's summary, of the selected view where it has one of its own
  const summaryOf = (index) => ({ ...runs[index], index, ...(runs[index].views[M.selected.view(runs[index].verb)] ?? {}) });
  // of every verb the selected run, then the one to compare with
  function shown() {
    return [...M.selected.verbs.keys()].map((verb) => {
      const pair = [M.selected.run(verb), M.selected.run(verb, "vs")];
      return [...new Set(pair.filter((index) => index !== null))].map(summaryOf);
    });
  }

  // ---- key numbers: value, bar with the chance mark, one word; of two runs side by side
  function card(keys) {
    const known = keys.flatMap(({ key }) => key ?? []);
    const { name, unit } = known[0];
    const top = Math.max(...known.flatMap((key) => [key.most ?? 0, Math.abs(key.value), key.chance ?? 0]), 1e-12);
    const part = (value) => `${(100 * Math.min(Math.abs(value), top)) / top}%`;
    const column = ({ key, run }) => make("div", {}, keys.length > 1 ? tag([run]) : null,
      make("div", { class: "value" }, M.number(key?.value), keys.length > 1 ? null : make("small", {}, unit)),
      key && make("span", { class: "bar" }, make("i", { style: `width:${part(key.value)}` }), key.chance === null ? null : make("u", { class: "chance", style: `left:${part(key.chance)}` })),
      key && make("div", { class: "words" }, key.word ? make("b", {}, key.word) : null, key.chance === null ? null : ` ${key.reference} ${M.number(key.chance)}`));
    return make("div", { class: "card" }, make("div", { class: "name" }, keys.length > 1 && unit ? `${name}, ${unit}` : name), make("div", { class: "columns" }, ...keys.map(column)));
  }
  function keyNumbers() {
    const groups = shown().map((pair) => pair[0].key_numbers.map((key) => pair.map((run) => ({ key: run.key_numbers.find((item) => item.name === key.name), run: run.index })))).filter((group) => group.length);
    // several verbs share the first row, equally many cards each; what both runs have comes first
    const each = Math.max(2, Math.floor(6 / groups.length));
    const lacking = (keys) => keys.filter(({ key }) => !key).length;
    return groups.flatMap((group) => group.toSorted((a, b) => lacking(a) - lacking(b)).slice(0, each)).slice(0, 6).map(card);
  }

  // ---- findings
  const headOf = (text) => text.match(/^(?:[^:(;.]|\.(?=\d)){3,70}(?=:)/)?.[0] ?? text.match(/^(?:[^(,;.]|[,.](?=\d)){3,90}(?=[(,;. ])/)?.[0] ?? text;
  const link = (content, place) => make("a", { href: M.state.link({ layer: null, expert: null, colour: null, figure: null, section: null, ...place }) }, content);
  // One item per finding; what two runs say under one head is one item.
  function items(pair) {
    const found = new Map();
    for (const run of pair) for (const { text, place } of run.findings) {
      const head = headOf(text);
      const key = found.get(head)?.some((entry) => entry.run === run.index) ? text : head;
      const root = M.selected.alike.includes(run.root) ? { run: run.root } : {};
      found.set(key, [...(found.get(key) ?? []), { head, text, place: { tab: run.tab, ...root, ...place }, run: run.index }]);
    }
    return [...found.values()];
  }
  function line(entries) {
    if (entries.length === 1) {
      const [{ head, text, place, run }] = entries;
      return make("li", {}, run === null ? null : tag([run]), link(head, place), text.slice(head.length));
    }
    const lines = entries.map(({ head, text, place, run }) => make("div", {}, link(tag([run]), place), text.slice(head.length).replace(/^:/, "")));
    return make("li", {}, entries[0].head, ...lines);
  }
  // The findings of the selected runs: at most five that stand first, and the rest.
  function ordered() {
    const pairs = shown();
    const compared = M.selected.root("vs") !== null ? together.map(({ text, place, tab }) => [{ head: headOf(text), text, place: { tab, ...place }, run: null }]) : [];
    // what compares the runs stands for what each says under the same head
    const heads = new Set(compared.map(([entry]) => entry.head));
    const lists = pairs.map(items);
    const first = lists.map((list) => list.filter(([entry]) => !heads.has(entry.head)));
    const some = compared.slice(0, 5);
    for (let turn = 0; some.length < 5 && first.some((list) => list.length > turn); turn++) for (const list of first) if (list[turn] && some.length < 5) some.push(list[turn]);
    return { some, rest: [...compared, ...lists.flat()].filter((entry) => !some.includes(entry)) };
  }
  function findings() {
    const { some, rest } = ordered();
    const box = [make("h2", {}, "Findings"), make("ol", {}, ...some.map(line))];
    if (rest.length) box.push(make("details", {}, make("summary", {}, `${rest.length} more`), make("ol", { start: some.length + 1 }, ...rest.map(line))));
    return box;
  }

  // ---- what a reader must know: each text once, with the runs it is about
  function warnings() {
    const lines = new Map();
    for (const pair of shown()) for (const run of pair) for (const text of run.warnings) lines.set(text, [...(lines.get(text) ?? []), run.index]);
    if (!lines.size) return [];
    const list = [...lines].map(([text, of]) => make("li", {}, tag(of), text));
    return [make("details", { class: "warnings", open: lines.size < 3 && alone() }, make("summary", {}, `${lines.size} ${lines.size === 1 ? "warning" : "warnings"}`), make("ul", {}, ...list))];
  }
  // of two runs the boxes are folded: both runs' key numbers, map and findings come first
  const alone = () => M.selected.root("vs") === null;
  const notice = ({ text, runs: of }) => make("details", { class: "notice", role: "note", open: alone() }, make("summary", {}, tag(of), "Before you pass this page on"), text);
  function coverage() {
    const lines = shown().flat().flatMap((run) => run.coverage.map((words) => make("p", {}, tag([run.index]), words)));
    return make("details", { class: "coverage" }, make("summary", {}, "What was read"), ...lines);
  }

  // What a tab shows beyond the first findings.
  function findingsOf(tab) {
    const mine = ordered().rest.filter(([entry]) => entry.place.tab === tab);
    return mine.length ? [make("details", { class: "tab-findings", open: mine.length < 4 }, make("summary", {}, `${mine.length} more ${mine.length === 1 ? "finding" : "findings"}`), make("ul", {}, ...mine.map(line)))] : [];
  }

  async function fillOverview(panel) {
    const cards = make("div", { class: "cards" });
    const list = make("div", { class: "findings-box" });
    const fill = () => {
      cards.replaceChildren(...keyNumbers());
      list.replaceChildren(...findings(), ...warnings(), ...notices.map(notice), coverage());
    };
    const map = await M.map.element();
    const below = make("div", { class: "below-map" }, ...tabs[0].sections.map((entry) => M.sections.element(entry)));
    const charts = tabs[0].sections.some((entry) => entry.figures?.length);
    const place = make("div", { class: "map-place" + (charts && !map.hidden ? " with-charts" : "") }, map, below);
    panel.append(make("div", { class: "overview-row" }, make("div", {}, cards, place), list));
    panel.below = below;
    fill();
    M.state.onChange(fill);
  }
  return { panel: fillOverview, findingsOf };
})();
