// Methods: how to read the report, glossary with search, every table, provenance, the command of each run.
(() => {
  const { make } = M;
  let terms = null;
  M.glossary = async () => {
    terms ??= new Map((await M.payload(M.data.glossary)).flatMap((section) => section.entries.map((entry) => [entry.key, entry])));
    return terms;
  };
  M.definition = (entry, table) => {
    const marks = ["worst", "chance", "best"].filter((mark) => entry["at_" + mark]).map((mark) => `${mark} ${entry["at_" + mark]}`).join(" · ");
    return make("div", { class: "term", id: "term-" + entry.key }, make("strong", {}, entry.label || entry.name.replaceAll("_", " ")),
      make("code", {}, entry.name + (table ? `, table ${table}` : "")), make("p", {}, ...M.prose(entry.meaning)), entry.formula ? make("p", { class: "formula" }, entry.formula) : null,
      marks ? make("p", { class: "marks" }, marks) : null, entry.misleads ? make("p", { class: "misleads" }, ...M.prose("Caution: " + entry.misleads)) : null);
  };

  async function glossary() {
    const sections = await M.payload(M.data.glossary);
    const search = make("input", { type: "search", placeholder: "Search the glossary", "aria-label": "Search the glossary" });
    const all = sections.flatMap((section) => section.entries.map((entry) => ({ ...entry, table: section.table })));
    all.sort((a, b) => (a.label || a.name).localeCompare(b.label || b.name));
    const names = all.map((entry) => entry.name); // a name in several tables is told apart by its table
    const items = all.map((entry) => [entry, M.definition(entry, names.indexOf(entry.name) < names.lastIndexOf(entry.name) ? entry.table : null)]);
    search.addEventListener("input", () => {
      const wanted = search.value.trim().toLowerCase();
      for (const [entry, item] of items) item.hidden = wanted !== "" && !`${entry.name} ${entry.label} ${entry.meaning}`.toLowerCase().includes(wanted);
    });
    return make("section", { class: "section" }, make("h2", {}, "Glossary"), search, make("div", { class: "glossary" }, ...items.map(([, item]) => item)));
  }

  async function provenance(run) {
    const info = await M.payload(run.info);
    const rows = { status: `${info.status}, ${info.started}${info.finished ? " to " + info.finished : ""}`, device: info.device,
      time: Object.entries(info.timings ?? {}).map(([stage, seconds]) => `${stage} ${seconds} s`).join(", "),
      versions: Object.entries(info.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", "),
      machine: info.machine && [info.machine.cpu, `${info.machine.cores} cores`, info.machine.threads && `${info.machine.threads} threads per operation`, ...(info.machine.gpus ?? [])].filter(Boolean).join(", "),
      "git commit of moescope": info.package_commit,
      "git commit of the working folder": info.git_commit,
      checkpoints: (info.checkpoints ?? []).map((item) => `${item.path ?? ""}${item.header_hash ? " (headers " + item.header_hash.slice(0, 16) + ")" : ""}`).join("\n") };
    const body = Object.entries(rows).filter(([, value]) => value).map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, String(value))));
    return make("div", {}, M.data.runs.length > 1 ? make("h3", {}, run.name) : null, info.command ? make("pre", { class: "command" }, info.command) : null,
      make("table", { class: "plain" }, make("tbody", {}, ...body)),
      make("details", {}, make("summary", {}, "All settings (run.json)"), make("pre", {}, JSON.stringify(info, null, 1))));
  }

  M.fillMethods = async (container) => {
    const guide = make("section", { class: "section" }, make("h2", {}, "How to read this report"), ...M.data.guide.map((words) => make("p", { class: "prose" }, ...M.prose(words))));
    const runs = await Promise.all(M.data.runs.map(provenance));
    container.append(guide, await glossary(), make("section", { class: "section" }, make("h2", {}, "Reproduce this run"), ...runs));
    showTerm();
  };
  function showTerm() {
    const { term, tab } = M.state.get();
    if (tab === "methods" && term) document.getElementById("term-" + term)?.scrollIntoView({ block: "center" });
  }
  M.state.onChange(showTerm);
})();
