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
    const fields = ["run", "step", "prompt", "search", "of", "least", "most", "sort", "order", ...(data.kinds.length ? ["colour"] : [])];
    const choice = (name) => form.elements[name].value;
    let page = 0, scale = 0;

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
    if (data.kinds.length) fill("colour", data.kinds.map((name) => [name, name]), "none");
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
      legend();
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
      const kind = data.kinds.length ? choice("colour") : "";
      const completion = kind && row.tokens ? coloured(row.tokens, kind) : [written(row.completion, "completion")];
      whole.append(facts, written(data.prompts[row.prompt], "prompt"), ...completion, same);
      return whole;
    }

    // Tokens, each coloured by how far its value is from where it says nothing: an advantage or an entropy of 0, a ratio
    // of 1. Above it the line below a token is drawn through, below it broken, so that colour is not all there is.
    function value(tokens, kind, place) {
      const known = Array.isArray(tokens[kind]) ? tokens[kind][place] : tokens[kind];
      return known === undefined ? null : known;
    }

    function distance(kind, known) {
      return kind === "ratio" ? Math.log(Math.max(known, 1e-9)) : known;
    }

    function farthest(kind) {
      let most = 0;
      data.rows.forEach(({ tokens }) => tokens && tokens.text.forEach((_, place) => {
        const known = value(tokens, kind, place);
        if (known !== null) most = Math.max(most, Math.abs(distance(kind, known)));
      }));
      return most;
    }

    function legend() {
      const place = document.getElementById("legend"), kind = data.kinds.length ? choice("colour") : "";
      place.hidden = !kind;
      if (!kind) return;
      const most = farthest(kind), end = kind === "ratio" ? Math.exp(most) : most;
      const shown = (name, words) => {
        const example = element("span", " token ");
        example.className = "token " + name;
        example.style.setProperty("--w", "1");
        return [example, element("span", " " + words + "  ")];
      };
      const middle = kind === "ratio" ? "1" : "0";
      const parts = shown("up", `${kind} above ${middle}, deepest at ${number(end)}, with a line below.`);
      const below = kind === "ratio" ? 1 / end : -end;
      if (kind !== "entropy") parts.push(...shown("down", `below ${middle}, deepest at ${number(below)}, with a broken line.`));
      const coloured = data.rows.filter((row) => row.tokens).length;
      parts.push(element("span", `No colour: ${middle}, or not known. ${coloured} of ${data.rows.length} completions have values.`
        + " Hover, or use the arrow keys in a completion, to read a token's."));
      place.replaceChildren(...parts);
      scale = most;
    }

    function coloured(tokens, kind) {
      const whole = written("", "completion, tokens coloured by " + kind + "; arrow keys go from token to token");
      const said = element("p");
      said.setAttribute("role", "status");
      said.className = "dim";
      const spans = tokens.text.map((text, place) => {
        const span = element("span", text), known = value(tokens, kind, place);
        span.className = "token";
        if (known !== null && scale > 0) {
          span.classList.add(distance(kind, known) < 0 ? "down" : "up");
          span.style.setProperty("--w", Math.min(1, Math.abs(distance(kind, known)) / scale).toFixed(3));
        }
        span.title = data.kinds.map((name) => `${name} ${number(value(tokens, name, place))}`).join(", ");
        return span;
      });
      let current = -1;
      const go = (to) => {
        if (current >= 0) spans[current].classList.remove("current");
        current = Math.min(Math.max(to, 0), spans.length - 1);
        spans[current].classList.add("current");
        said.textContent = `token ${current + 1} of ${spans.length + tokens.left}, "${tokens.text[current]}": ${spans[current].title}`;
      };
      whole.addEventListener("keydown", (event) => {
        const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!move || !spans.length) return;
        go(current + move);
        spans[current].scrollIntoView({ block: "nearest" });
        event.preventDefault();
      });
      whole.addEventListener("click", (event) => { if (spans.includes(event.target)) go(spans.indexOf(event.target)); });
      whole.append(...spans);
      if (tokens.left) whole.append(element("span", ` \u2026 [${tokens.left} tokens more]`));
      return [whole, said];
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
