// Continuations of a prompt without and with a change, side by side. Words enter the page as text nodes only.
M.widgets.continuations = (() => {
  const { make } = M;
  const side = (title, tokens, others) => make("div", { class: "continuation" }, make("h4", {}, title),
    make("p", { class: "tokens", dir: "auto" }, ...tokens.flatMap((token, at) =>
      token === null ? [] : [make(token === others[at] ? "bdi" : "mark", {}, token)])));
  return function fill(slot, pairs) {
    for (const { change, prompt, before, after } of pairs) {
      slot.append(make("p", { class: "caption" }, make("b", {}, change), " · prompt: ", make("bdi", {}, prompt)),
        make("div", { class: "continuations" }, side("Untouched", before, after), side("Changed", after, before)));
    }
  };
})();
