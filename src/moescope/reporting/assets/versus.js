// Two runs in one figure: lines of the second are dotted beside those of the first, maps show the difference.
// What cannot show both says whose it is.
M.versus = (() => {
  const DIVERGING = [[0, "#2166AC"], [0.25, "#92C5DE"], [0.5, "#F7F7F7"], [0.75, "#F4A582"], [1, "#B2182B"]];
  const MOST_LINES = 12;
  const name = (key) => M.data.roots[M.selected.root(key)];

  // the run that a section's run is compared with, or null
  function against(section) {
    if (section.run === null || section.run === undefined) return null;
    const run = M.selected.run(M.data.runs[section.run].verb, "vs");
    return run === section.run ? null : run;
  }
  const whose = (section) => (against(section) === null ? "" : name("run"));
  function alone(figure) {
    const slider = figure.slider && { ...figure.slider, captions: figure.slider.captions.map((words) => `${words} Shows ${name("run")} only.`), domain_captions: {} };
    return { ...figure, caption: `${figure.caption} Shows ${name("run")} only.`, slider };
  }
  // The figure of the run to compare with: same tab, section, layer and name.
  async function counterpart(entry, section) {
    const run = against(section);
    if (run === null) return null;
    const all = M.data.tabs.flatMap((tab) => tab.sections).flatMap(function inside(item) { return [item, ...(item.sections ?? []).flatMap(inside)]; });
    const same = all.filter((item) => item.run === run && item.id === section.id && item.layer === section.layer);
    const found = same.find((item) => item.view === section.view) ?? same.at(-1);
    if (!found) return null;
    if (!found.payload) {
      const figure = found.figures.find((item) => item.name === entry.name);
      return figure ? M.payload(figure.payload) : null;
    }
    const content = await M.payload(found.payload);
    return [content, ...content.sections].flatMap((item) => item.figures).find((item) => item.name === entry.name) ?? null;
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
    const [a, b] = [numbers(mine.z), numbers(other.z)];
    if (a.length !== b.length || a[0]?.length !== b[0]?.length) return null;
    const units = [mine.meta?.unit ?? 1, other.meta?.unit ?? 1];
    const z = a.map((row, i) => row.map((cell, j) => (cell === null || b[i][j] === null ? null : cell * units[0] - b[i][j] * units[1])));
    const label = mine.colorbar?.title?.text ?? "value";
    if (mine.meta?.doublings) return ratio(mine, z, label);
    const { end, words } = M.anchored(z.flat(), [Math.hypot(mine.meta?.noise ?? NaN, other.meta?.noise ?? NaN)]);
    return { ...mine, z, zmin: -end, zmax: end, words, colorscale: DIVERGING, customdata: undefined, text: undefined, texttemplate: undefined,
      colorbar: { ...mine.colorbar, tickvals: undefined, ticktext: undefined, title: { ...mine.colorbar?.title, text: `difference in ${label}` } },
      hovertemplate: "%{x}, %{y}: difference %{z:.3g}<extra></extra>" };
  }
  // Maps of ratios hold doublings: their difference is a ratio again, on the same ticks.
  const ratio = (mine, z, label) => ({ ...mine, z, text: undefined, texttemplate: undefined, words: "as a ratio, on the scale of one run",
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
    const maps = figure.data.some((trace) => trace.type === "heatmap");
    if (maps) {
      if (other.data.length !== figure.data.length) return alone(figure);
      const data = figure.data.map((trace, index) => (trace.type === "heatmap" && other.data[index].type === "heatmap" ? difference(trace, other.data[index]) : trace));
      if (data.some((trace) => trace === null)) return alone(figure);
      const words = data.find((trace) => trace.words)?.words;
      for (const trace of data) delete trace.words;
      const over = figure.data.some((trace) => trace.meta?.doublings) ? "divided by" : "minus";
      const caption = `${name("run")} ${over} ${name("vs")}; ${words}.`;
      return { ...figure, data, caption, slider: figure.slider && { ...figure.slider, captions: figure.slider.values.map(() => caption), domain_captions: {} } };
    }
    if (figure.slider) return alone(figure);
    const known = new Set(figure.data.map((trace) => trace.name));
    const reference = (trace) => trace.meta?.reference || [trace.line?.color, trace.marker?.color].includes("#8A9099");
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
  return { counterpart, together, whose };
})();
