// Two runs in one figure: lines of the second are dotted beside those of the first, maps show the difference.
// What cannot show both says whose it is.
M.versus = (() => {
  const DIVERGING = [[0, "#2166ac"], [0.25, "#92c5de"], [0.5, "#f3f4f6"], [0.75, "#f4a582"], [1, "#b2182b"]];
  const MOST_LINES = 12;
  const name = (key) => M.data.roots[M.selected.root(key)];

  // the run that a section's run is compared with, or null
  function against(section) {
    if (section.run === null || section.run === undefined) return null;
    const run = M.selected.run(M.data.runs[section.run].verb, "vs");
    return run === section.run ? null : run;
  }
  const whose = (section) => (against(section) === null ? "" : name("run"));
  function alone(figure, why = "") {
    const words = (caption) => `${caption} Shows ${name("run")} only${why}.`;
    const slider = figure.slider && { ...figure.slider, captions: figure.slider.captions.map(words), domain_captions: {} };
    return { ...figure, caption: words(figure.caption), slider };
  }
  // whether expert j of both runs is the same expert
  const related = (a, b) => M.data.runs[a].base === M.data.runs[b].base;
  const UNRELATED = ": experts of separate trainings do not correspond";
  const byExpert = ({ layout }) => Object.keys(layout).some((key) => /^[xy]axis/.test(key) && /expert|router row/.test(layout[key].title?.text ?? ""));
  // The figure of the run to compare with: same tab, section, layer and name.
  async function counterpart(entry, section) {
    const run = against(section);
    if (run === null) return null;
    const all = M.data.tabs.flatMap((tab) => tab.sections).flatMap(function inside(item) { return [item, ...(item.sections ?? []).flatMap(inside)]; });
    const same = all.filter((item) => item.run === run && item.id === section.id && item.layer === section.layer);
    const found = same.find((item) => item.view === section.view) ?? same.at(-1);
    if (!found) return null;
    const like = (figures) => { // panels of a layer share a name
      const named = figures.filter((item) => item.name === entry.name);
      return named.find((item) => item.title === entry.title) ?? named[0];
    };
    if (!found.payload) {
      const figure = like(found.figures);
      return figure ? M.payload(figure.payload) : null;
    }
    const content = await M.payload(found.payload);
    return like([content, ...content.sections].flatMap((item) => item.figures)) ?? null;
  }

  const numbers = (values) => (values?.bdata === undefined ? Array.from(values ?? [], (row) => (Array.isArray(row) ? row : Number(row))) : decode(values));
  const KINDS = { f4: Float32Array, f8: Float64Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, u1: Uint8Array, u2: Uint16Array, u4: Uint32Array };
  function decode({ dtype, bdata, shape }) {
    const bytes = Uint8Array.from(atob(bdata), (letter) => letter.charCodeAt(0));
    const flat = Array.from(new KINDS[dtype](bytes.buffer));
    const [, width] = (shape ?? "").split(",").map(Number);
    return width ? Array.from({ length: flat.length / width }, (_, row) => flat.slice(row * width, (row + 1) * width)) : flat;
  }

  function difference(mine, other) {
    // values beside what a cell is coloured by
    const [a, b] = [mine, other].map((trace) => numbers(trace.customdata ?? trace.z));
    if (a.length !== b.length || a[0]?.length !== b[0]?.length) return null;
    if (mine.meta?.ratio) {
      const folds = a.map((row, i) => row.map((cell, j) => (cell > 0 && b[i][j] > 0 ? Math.log2(cell / b[i][j]) : null)));
      const end = Math.max(1, ...folds.flat().map((fold) => Math.abs(fold ?? 0)));
      const ticks = { ...mine.colorbar, tickvals: [-end, 0, end], ticktext: [M.number(2 ** -end), "1", M.number(2 ** end)] };
      return ratio({ ...mine, zmin: -end, zmax: end, colorscale: DIVERGING, colorbar: ticks }, folds, ticks.title?.text ?? "value");
    }
    const z = a.map((row, i) => row.map((cell, j) => (cell === null || b[i][j] === null ? null : cell - b[i][j])));
    const label = mine.colorbar?.title?.text ?? "value";
    const { end, words } = M.anchored(z.flat(), [Math.hypot(mine.meta?.noise ?? NaN, other.meta?.noise ?? NaN)]);
    return { ...mine, z, zmin: -end, zmax: end, words, colorscale: DIVERGING, customdata: undefined, text: undefined, texttemplate: undefined,
      colorbar: { ...mine.colorbar, tickvals: undefined, ticktext: undefined, title: { ...mine.colorbar?.title, text: `difference in ${label}` } },
      hovertemplate: "%{x}, %{y}: difference %{z:.3g}<extra></extra>" };
  }
  // The difference of two maps of ratios is a ratio again, coloured by doublings.
  const ratio = (mine, z, label) => ({ ...mine, z, text: undefined, texttemplate: undefined, words: "as a ratio",
    customdata: z.map((row) => row.map((cell) => (cell === null ? "–" : M.number(2 ** cell)))),
    colorbar: { ...mine.colorbar, title: { ...mine.colorbar?.title, text: `ratio of ${label}` } },
    hovertemplate: "%{x}, %{y}: ratio %{customdata}<extra></extra>" });

  // Ticks of a logarithmic axis over both runs: at 1, 2 and 5, over three decades at 1.
  function logTicks(axis, values) {
    const logs = values.filter((value) => value > 0).map(Math.log10);
    const [low, high] = [Math.min(...logs), Math.max(...logs)];
    const steps = high - low <= 3 ? [1, 2, 5] : [1];
    const powers = Array.from({ length: Math.ceil(high) - Math.floor(low) + 2 }, (_, i) => Math.floor(low) - 1 + i);
    const tickvals = powers.flatMap((power) => steps.map((step) => step * 10 ** power)).filter((tick) => Math.log10(tick) > low - 0.35 && Math.log10(tick) < high + 0.35);
    return tickvals.length > 1 ? { ...axis, tickvals, ticktext: tickvals.map((tick) => M.number(tick)) } : axis;
  }
  // The figure with the other run in it; alone where the two cannot share one.
  function together(figure, other, section) {
    if (!other) return against(section) === null ? figure : alone(figure);
    if (figure.data.some((trace) => trace.meta?.categories)) return alone(figure); // no number: nothing to subtract
    if (figure.data.some((trace) => trace.type === "heatmap")) {
      if (byExpert(figure) && !related(section.run, against(section))) return alone(figure, UNRELATED);
      const maps = (all) => (figure.slider ? all : all.filter((trace) => trace.type === "heatmap")); // rings are of one run
      const [own, its] = [maps(figure.data), maps(other.data)];
      if (its.length !== own.length) return alone(figure);
      const data = own.map((trace, index) => (trace.type === "heatmap" && its[index].type === "heatmap" ? difference(trace, its[index]) : trace));
      if (data.some((trace) => trace === null)) return alone(figure);
      const words = data.find((trace) => trace.words)?.words;
      for (const trace of data) delete trace.words;
      const over = figure.data.some((trace) => trace.meta?.ratio) ? "divided by" : "minus";
      const caption = `${name("run")} ${over} ${name("vs")}; ${words}.`;
      return { ...figure, data, caption, slider: figure.slider && { ...figure.slider, captions: figure.slider.values.map(() => caption), domain_captions: {} } };
    }
    if (figure.slider) return paged(figure, other, section);
    const known = new Set(figure.data.map((trace) => trace.name));
    const reference = (trace) => [trace.line?.color, trace.marker?.color].includes("#8A9099");
    const added = other.data.filter((trace) => ["scatter", "bar"].includes(trace.type) && !(reference(trace) && known.has(trace.name)))
      .map((trace) => ({ ...trace, name: `${trace.name ?? ""} · ${name("vs")}`, opacity: 0.85, ...(trace.type === "bar" ? { marker: { ...trace.marker, pattern: { shape: "/" } } } : { line: { ...trace.line, dash: "dot" }, marker: { ...trace.marker, symbol: "circle-open" } }) }));
    const lines = [...figure.data, ...added].filter((trace) => trace.type === "scatter" && trace.mode?.includes("lines") && !reference(trace));
    if (lines.length > MOST_LINES) return { ...figure, caption: `${figure.caption} Shows ${name("run")} only: with ${name("vs")} it would have ${lines.length} lines.` };
    const data = [...figure.data, ...added];
    const { yaxis } = figure.layout;
    const layout = yaxis?.type === "log" && yaxis.tickvals ? { ...figure.layout, yaxis: logTicks(yaxis, data.flatMap((trace) => numbers(trace.y))) } : figure.layout;
    const how = added.some((trace) => trace.type === "bar") ? "hatched" : "dotted";
    return { ...figure, data, layout, caption: `${name("run")}: ${figure.caption}\n${name("vs")} (${how}): ${other.caption}` };
  }
  // Page by page, where both have the same pages.
  function paged(figure, other, section) {
    const [mine, its] = [figure.slider, other.slider];
    if (!its || mine.layouts.length === 0 || mine.values.join() !== its.values.join()) return alone(figure);
    const page = (of, at) => ({ ...of, slider: null, caption: of.slider.captions[at], layout: of.slider.layouts[at], data: of.data.slice(at * of.slider.per_value, (at + 1) * of.slider.per_value) });
    const pages = mine.values.map((_, at) => together(page(figure, at), page(other, at), section));
    const per = Math.max(...pages.map(({ data }) => data.length));
    const blank = { type: "scatter", x: [null], y: [null], showlegend: false, hoverinfo: "skip" };
    const data = pages.flatMap((one) => [...one.data, ...Array(per - one.data.length).fill(blank)].map((trace) => ({ ...trace })));
    const slider = { ...mine, per_value: per, captions: pages.map(({ caption }) => caption), layouts: pages.map(({ layout }) => layout), domain_captions: {} };
    return { ...figure, data, slider, layout: structuredClone(pages[mine.start].layout), caption: pages[mine.start].caption };
  }
  return { counterpart, together, whose, related };
})();
