"use strict";
// The browser of completions. Text goes in by textContent alone. What is chosen stands in the address after #, so that a
// view survives a reload and can be passed on.
(() => {
  const place = document.getElementById("completions-data");
  if (place) browse(JSON.parse(place.textContent));

  function browse(data) {
    const PAGE = 20;
    const form = document.getElementById("choose");
    const list = document.getElementById("cards");
    const said = document.getElementById("shown");
    const fields = ["run", "step", "prompt", "search", "of", "least", "most", "sort", "order"];
    const choice = (name) => form.elements[name].value;
    let page = 0;

    const measures = {
      step: (row) => row.step,
      reward: (row) => row.reward,
      advantage: (row) => row.advantage,
      length: (row) => row.length,
    };
    data.parts.forEach((name) => { measures["part: " + name] = (row) => row.parts[name]; });
    const unique = (values) => [...new Set(values)].sort((a, b) => a - b);
    fill("run", data.runs.map((name, place) => [place, name]), "all");
    fill("step", unique(data.rows.map((row) => row.step)).map((step) => [step, step]), "all");
    fill("prompt", data.prompts.map((text, place) => [place, place + 1 + ": " + text.slice(-60)]), "all");
    fill("sort", Object.keys(measures).map((name) => [name, name]));
    fill("of", Object.keys(measures).slice(1).map((name) => [name, name]));
    form.elements.run.parentElement.hidden = data.runs.length < 2;
    recall();
    form.addEventListener("input", () => { page = 0; show(); });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => { page = 0; show(); }));
    window.addEventListener("hashchange", () => { recall(); show(); });
    document.getElementById("back").addEventListener("click", () => { page -= 1; show(); });
    document.getElementById("on").addEventListener("click", () => { page += 1; show(); });
    show();

    function fill(name, options, first) {
      const select = form.elements[name];
      if (first) select.append(new Option(first, ""));
      options.forEach(([value, text]) => select.append(new Option(text, value)));
    }

    function recall() {
      const wanted = new URLSearchParams(location.hash.slice(1));
      fields.forEach((name) => { if (wanted.has(name)) form.elements[name].value = wanted.get(name); });
      ["sort", "of", "order"].forEach((name) => { if (!choice(name)) form.elements[name].selectedIndex = 0; });
    }

    function keep() {
      const wanted = new URLSearchParams();
      fields.forEach((name) => {
        const field = form.elements[name];
        const usual = field.options && field.options.length ? field.options[0].value : "";
        if (field.value !== usual) wanted.set(name, field.value);
      });
      const hash = wanted.toString();
      if (hash || location.hash.includes("=")) history.replaceState(null, "", "#" + (hash || "completions"));
    }

    function chosen() {
      const words = choice("search").toLowerCase();
      const of = measures[choice("of")];
      const bound = (name, none) => (choice(name) === "" ? none : Number(choice(name)));
      const least = bound("least", -Infinity), most = bound("most", Infinity);
      const bounded = least !== -Infinity || most !== Infinity;
      const is = (name, value) => choice(name) === "" || choice(name) === String(value);
      const by = measures[choice("sort")], sign = choice("order") === "down" ? -1 : 1;
      const text = (row) => data.prompts[row.prompt] + "\n" + row.completion + "\n" + Object.values(row.extras).join("\n");
      const known = (value) => value !== null && value !== undefined;
      return data.rows
        .filter((row) => is("run", row.run) && is("step", row.step) && is("prompt", row.prompt))
        .filter((row) => !bounded || (known(of(row)) && of(row) >= least && of(row) <= most))
        .filter((row) => !words || text(row).toLowerCase().includes(words))
        .sort((a, b) => known(by(b)) - known(by(a)) || (known(by(a)) ? sign * (by(a) - by(b)) : 0));
    }

    function show() {
      const rows = chosen(), pages = Math.max(1, Math.ceil(rows.length / PAGE));
      page = Math.min(Math.max(page, 0), pages - 1);
      list.replaceChildren(...rows.slice(page * PAGE, (page + 1) * PAGE).map(card));
      said.textContent = `${rows.length} of ${data.rows.length} match; page ${page + 1} of ${pages}`;
      document.getElementById("back").disabled = page === 0;
      document.getElementById("on").disabled = page === pages - 1;
      keep();
    }

    function card(row) {
      const facts = element("dl");
      const fact = (name, value) => {
        const pair = element("div");
        pair.append(element("dt", name), element("dd", number(value)));
        facts.append(pair);
      };
      if (data.runs.length > 1) fact("run", data.runs[row.run]);
      fact("step", row.step);
      fact("reward", row.reward);
      Object.entries(row.parts).forEach(([name, value]) => fact(name, value));
      if (row.advantage !== null) fact("advantage", row.advantage);
      fact("characters", row.length);
      Object.entries(row.extras).forEach(([name, value]) => fact(name, value));
      const same = element("button", "only this prompt");
      same.type = "button";
      same.addEventListener("click", () => { form.elements.prompt.value = row.prompt; page = 0; show(); form.elements.prompt.focus(); });
      const whole = element("article");
      whole.className = "card";
      whole.append(facts, written(data.prompts[row.prompt], "prompt"), written(row.completion, "completion"), same);
      return whole;
    }

    function written(text, name) {
      const pre = element("pre", text);
      pre.dir = "auto";
      pre.tabIndex = 0;
      pre.setAttribute("aria-label", name);
      return pre;
    }

    function number(value) {
      if (value === null || value === undefined) return "none";
      return typeof value === "number" ? String(Number(value.toPrecision(4))) : value;
    }

    function element(name, text) {
      const made = document.createElement(name);
      if (text !== undefined) made.textContent = text;
      return made;
    }
  }
})();
