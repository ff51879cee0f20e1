// The overview: key numbers, map, charts, findings. Of several runs, the selected one beside the one it is compared with.
M.overview = (() => {
  const { make } = M;
  const { runs, tabs, notices, together } = M.data;
  // "a/scan" and "b/scan" are a and b where space is short
  const tails = new Set(M.data.roots.map((name) => name.split("/").slice(1).join("/")));
  const short = (name) => (tails.size === 1 ? name.split("/")[0] : name);
  const names = (numbers) => [...new Set(numbers.map((index) => short(M.data.roots[runs[index].root])))].join(", ");
  const tag = (numbers) => (M.selected.alike.length > 1 ? make("span", { class: "run-tag" }, names(numbers)) : null);

  // a run's summary, of the selected view and domain where it has one of its own
  function summaryOf(index) {
    const of = runs[index].views[M.selected.view(runs[index].verb)] ?? runs[index];
    return { ...runs[index], index, ...of, ...(of.domains[M.selected.domain()] ?? {}) };
  }
  // of every verb the selected run, then the one to compare with
  function shown() {
    return [...M.selected.verbs.keys()].map((verb) => {
      const pair = [M.selected.run(verb), M.selected.run(verb, "vs")];
      return [...new Set(pair.filter((index) => index !== null))].map(summaryOf);
    });
  }

  // ---- the verdict: one sentence per verb, of two runs that are compared the one on both, where there is one
  const compares = () => M.selected.root("vs") !== null;
  function verdicts() {
    const both = compares() ? together.slice(0, 1).map((entry) => ({ ...entry, place: { tab: entry.tab, ...entry.place } })) : [];
    const each = shown().flat().flatMap((run) => run.verdict.map(({ text, place }) => ({ text, of: [run.index], place: { tab: run.tab, ...place } })));
    return (both.length ? both : each).map(({ text, of, place }) => make("p", {}, of ? tag(of) : null, make("a", { href: M.state.link({ layer: null, expert: null, colour: null, figure: null, section: null, ...place }) }, text)));
  }

  // ---- key numbers: value, bar with the chance mark, one word
  function card([{ key }]) {
    const { name, unit, value, chance, word, reference } = key;
    // a bar has the fixed scale of its quantity, or there is none; negative values go to the left of the middle
    const zero = value < 0 || chance < 0 ? 50 : 0;
    const at = (size) => zero + (100 - zero) * Math.max(-1, Math.min(1, size / key.most));
    const bar = () => make("span", { class: "bar" }, make("i", { style: `left:${Math.min(zero, at(value))}%;width:${Math.abs(at(value) - zero)}%` }),
      chance === null ? null : make("u", { class: "chance", style: `left:${at(chance)}%` }));
    return make("div", { class: "card" }, make("div", { class: "name" }, name), make("div", { class: "value" }, M.number(value), make("small", {}, unit)),
      key.most > 0 ? bar() : null,
      make("div", { class: "words" }, word ? make("b", {}, word) : null, chance === null ? null : ` ${reference} ${M.number(chance)}`));
  }
  // At most five, each quantity once: the verbs take turns. Of two runs every number that both have, on one scale.
  function keyNumbers() {
    const groups = shown().map((pair) => pair[0].key_numbers.map((key) => pair.map((run) => ({ key: run.key_numbers.find((item) => item.name === key.name), run: run.index }))));
    const cards = new Map();
    for (let turn = 0; groups.some((group) => group.length > turn); turn++) for (const group of groups) if (group[turn] && !cards.has(group[turn][0].key.name)) cards.set(group[turn][0].key.name, group[turn]);
    const known = [...cards.values()].filter((keys) => keys.every(({ key }) => key));
    return compares() ? [dumbbells(known.filter((keys) => keys.length > 1).slice(0, MOST_ROWS))] : known.slice(0, 5).map(card);
  }
  const MOST_ROWS = 10;
  function dumbbells(rows) {
    const sides = names(rows[0]?.map(({ run }) => run) ?? []).split(", ").sort(); // as figures colour runs
    const dot = (run, more = {}) => make("i", { class: `dot side${sides.indexOf(names([run]))}`, ...more });
    const lines = rows.map((keys) => {
      const { name, unit, chance, reference, most } = keys[0].key;
      const values = keys.map(({ key }) => key.value);
      const [low, high] = [Math.min(0, ...values), Math.max(most ?? 0, chance ?? 0, ...values, 1e-12)];
      const at = (value) => `left:${(100 * (value - low)) / (high - low)}%`;
      const track = make("span", { class: "bar" }, chance === null ? null : make("u", { class: "chance", style: at(chance), title: `${reference} ${M.number(chance)}` }), ...keys.map(({ key, run }) => dot(run, { style: at(key.value) })));
      return make("tr", {}, make("th", { scope: "row" }, name, unit ? make("small", {}, ` ${unit}`) : null), make("td", { class: "track" }, track), ...values.map((value) => make("td", {}, M.number(value))), make("td", {}, M.number(values[1] - values[0])));
    });
    const heads = rows.length ? rows[0].map(({ run }) => make("th", { scope: "col" }, dot(run), names([run]))) : [];
    return make("table", { class: "dumbbells" }, make("thead", {}, make("tr", {}, make("td", {}), make("td", { class: "track" }), ...heads, make("th", { scope: "col", title: "second minus first" }, "Δ"))), make("tbody", {}, ...lines));
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
    const compared = compares() ? together.slice(1).map(({ text, place, tab }) => [{ head: headOf(text), text, place: { tab, ...place }, run: null }]) : [];
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
  const alone = () => !compares();
  const notice = ({ text, runs: of }) => make("details", { class: "notice", role: "note", open: alone() }, make("summary", {}, tag(of), "Contains your text"), text);
  function coverage() {
    const lines = shown().flat().flatMap((run) => run.coverage.map((words) => make("p", {}, tag([run.index]), words)));
    return make("details", { class: "coverage" }, make("summary", {}, "What was read"), ...lines);
  }

  // What a tab shows beyond the first findings.
  function findingsOf(tab) {
    const mine = ordered().rest.filter(([entry]) => entry.place.tab === tab);
    return mine.length ? [make("details", { class: "tab-findings", open: mine.length < 4 }, make("summary", {}, `${mine.length} more ${mine.length === 1 ? "finding" : "findings"}`), make("ul", {}, ...mine.map(line)))] : [];
  }

  // The expert to show first: that of the first finding about one that gets tokens, else the map's most extreme one.
  function remarkable() {
    const [measure] = M.map.candidates();
    const load = M.map.candidates().find(({ name }) => name === "load");
    const alive = (layer, expert) => !load || (load.value[load.layers.indexOf(layer)]?.[expert] ?? 1) > 0;
    const { some, rest } = ordered();
    for (const [{ text, place: { layer, expert } }] of [...some, ...rest]) if (expert !== undefined && alive(layer, expert)) return { layer, expert, why: text };
    const cells = (measure?.layers ?? []).flatMap((layer, row) => measure.value[row].map((value, expert) => ({ layer, expert, value })));
    const known = cells.filter(({ layer, expert, value }) => value !== null && alive(layer, expert)).sort((a, b) => a.value - b.value);
    const middle = measure?.middle ?? known[known.length >> 1]?.value;
    const [least, most] = [known[0], known.at(-1)];
    const end = most && middle - least.value > most.value - middle ? least : most;
    return end ? { ...end, why: `${measure.title} is ${end === most ? "highest" : "lowest"}: ${M.number(end.value)} ${measure.unit}` } : { layer: M.data.layers[0], expert: 0, why: "" };
  }

  async function fillOverview(panel) {
    const verdict = make("div", { class: "verdicts" });
    const cards = make("div", { class: "cards" });
    const list = make("div", { class: "findings-box" });
    const row = make("div", { class: "overview-row" });
    const fill = () => {
      row.classList.toggle("compared", compares());
      verdict.replaceChildren(...verdicts());
      cards.replaceChildren(...keyNumbers());
      list.replaceChildren(...findings(), ...warnings(), ...notices.map(notice), coverage());
    };
    const map = await M.map.element();
    const below = make("div", { class: "below-map" }, ...tabs[0].sections.map((entry) => M.sections.element(entry)));
    const charts = tabs[0].sections.some((entry) => entry.figures?.length);
    const lead = tabs[0].sections.find((entry) => entry.id === "lead" && !entry.run); // of the first run, or of all
    const place = make("div", { class: "map-place" + (charts && !map.hidden ? " with-charts" : "") }, ...(lead ? [below, map] : [map, below]));
    place.classList.toggle("beside", lead?.run === 0);
    row.append(cards, list, place);
    panel.append(verdict, row);
    panel.below = below;
    fill();
    M.state.onChange(fill);
  }
  return { panel: fillOverview, findingsOf, remarkable };
})();
