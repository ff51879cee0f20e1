// Strips beside the map: one number per layer as a bar, its chance level as a tick; of two runs the change.
M.strips = (() => {
  const WIDTH = 96, GAP = 10, MOST = 3;
  const span = (count) => count * (WIDTH + GAP);

  // the strip of the run to compare with; null where that run has none
  function other(all, strip) {
    const run = M.selected.run(strip.verb, "vs");
    const same = all.filter((item) => item.run === run && item.name === strip.name);
    return same.find((item) => item.view === strip.view) ?? same.at(-1) ?? null;
  }
  function change(strip, baseline) {
    const value = strip.layer.map((layer, i) => {
      const at = baseline.layer.indexOf(layer);
      return at < 0 || strip.value[i] === null || baseline.value[at] === null ? null : strip.value[i] - baseline.value[at];
    });
    return { ...strip, title: `Δ ${strip.title}`, value, chance: undefined, word: undefined, change: true, most: null };
  }
  // Those about the map's measure first, then of its verb, then others; where the map shows a change, their change.
  function shown(all, measure, changed) {
    const place = (strip) => (strip.measure === measure.name ? 0 : strip.verb === measure.verb ? 1 : 2);
    const mine = all.filter((strip) => M.selected.matches(strip)).sort((a, b) => place(a) - place(b));
    const drawn = changed ? mine.map((strip) => [strip, other(all, strip)]).filter(([, baseline]) => baseline).map(([strip, baseline]) => change(strip, baseline)) : mine;
    return drawn.slice(0, MOST);
  }

  const left = (strips, index, width) => width - span(strips.length - index) + GAP + 8;
  function draw(pen, strips, layer, y, width, height) {
    strips.forEach((strip, index) => {
      const at = strip.layer.indexOf(layer);
      if (at < 0 || strip.value[at] === null) return;
      const chance = strip.chance?.[at];
      const known = [...strip.value, ...(strip.chance ?? [])].filter((value) => value !== null);
      const top = strip.most ?? Math.max(...known.map(Math.abs), 1e-12);
      const signed = strip.change || known.some((value) => value < 0); // negative values go to the left
      const room = signed ? (WIDTH - 10) / 2 : WIDTH - 10;
      const zero = left(strips, index, width) + (signed ? room : 0);
      const long = (value) => Math.max(-1, Math.min(1, value / top)) * room;
      pen.fillStyle = M.theme.color("--bar");
      pen.fillRect(zero + Math.min(0, long(strip.value[at])), y + height * 0.22, Math.abs(long(strip.value[at])), Math.max(2, height * 0.5));
      pen.fillStyle = M.theme.color("--ink");
      if (signed) pen.fillRect(zero - 0.5, y, 1, height);
      if (!strip.change && chance !== null && chance !== undefined) pen.fillRect(zero + long(chance), y + 1, 1.5, height - 3);
    });
  }
  const drawTitles = (pen, strips, width, y) => strips.forEach((strip, index) => pen.fillText(strip.title, left(strips, index, width), y));
  const listed = (names) => names.join(", ").replace(/, ([^,]*)$/, " and $1");
  const legend = (strips) => (strips[0]?.change ? `right: change per layer, to the right where ${M.data.roots[M.selected.root("run")]} has more` : `bar: ${listed(strips.map(({ title }) => title))} per layer; tick: chance`);
  // what a layer's strips say, one line each
  function words(strips, layer) {
    return strips.filter((strip) => strip.layer.includes(layer)).map((strip) => {
      const at = strip.layer.indexOf(layer);
      const chance = strip.chance?.[at];
      const word = strip.word?.[at];
      return `${strip.title} ${M.number(strip.value[at])}${chance === null || chance === undefined ? "" : ` (chance ${M.number(chance)})`}${word ? ", " + word : ""}`;
    });
  }
  return { shown, span, draw, drawTitles, legend, words };
})();
