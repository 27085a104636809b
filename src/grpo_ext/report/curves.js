"use strict";
// Curves: hovering shows the values of a step, dragging zooms all curves into a range of steps, a double click shows the
// whole run again. Without JavaScript the pictures stay as they are.
(() => {
  const place = document.getElementById("curves-data");
  if (!place) return;
  const NS = "http://www.w3.org/2000/svg";
  const all = JSON.parse(place.textContent);
  const figures = [...document.querySelectorAll("[data-curve]")].map((box) => ({ box, data: all[box.dataset.curve], whole: box.firstElementChild }));
  const [WIDTH, HEIGHT, LEFT, TOP, INNER, TALL] = [316.8, 165.6, 47.5, 6.6, 256.6, 140.8]; // as the pictures have them
  let range = null;
  figures.filter(({ data }) => data).forEach(prepare);

  function prepare(figure) {
    const { box, data } = figure;
    const line = made("i", "cursor"), chosen = made("i", "chosen"), value = made("p", "value");
    value.setAttribute("role", "status");
    box.append(line, chosen);
    box.after(value);
    let start = null;
    const share = (event) => {
      const edge = box.getBoundingClientRect();
      return Math.min(1, Math.max(0, ((event.clientX - edge.left) / edge.width * WIDTH - LEFT) / INNER));
    };
    const left = (part) => (LEFT + part * INNER) / WIDTH * 100 + "%";
    const step = (part) => { const [low, high] = range || data.x; return low + part * (high - low); };
    box.addEventListener("pointerdown", (event) => { start = share(event); });
    box.addEventListener("pointermove", (event) => {
      const at = share(event);
      const found = nearest(data.steps, step(at));
      line.style.visibility = "visible";
      line.style.left = left((data.steps[found] - step(0)) / (step(1) - step(0) || 1));
      value.textContent = "step " + number(data.steps[found]) + ": " + data.lines.map((one) => words(one, found, data.lines.length > 1)).join(", ");
      chosen.style.left = left(Math.min(at, start ?? at));
      chosen.style.width = Math.abs(at - (start ?? at)) * INNER / WIDTH * 100 + "%";
    });
    const over = () => { start = null; chosen.style.width = "0"; };
    box.addEventListener("pointerup", (event) => {
      const ends = start === null ? [] : [start, share(event)].sort((a, b) => a - b);
      if (ends.length && ends[1] - ends[0] > 0.02) zoom([step(ends[0]), step(ends[1])]);
      over();
    });
    box.addEventListener("pointerleave", () => { over(); value.textContent = ""; line.style.visibility = "hidden"; });
    box.addEventListener("dblclick", () => zoom(null));
  }

  function words(one, at, several) {
    const band = one.low && one.low[at] !== one.high[at] ? ` (${number(one.low[at])} to ${number(one.high[at])})` : "";
    return (several ? one.name + " " : "") + number(one.mean[at]) + band;
  }

  function nearest(steps, wanted) {
    let best = 0;
    steps.forEach((step, i) => { if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = i; });
    return best;
  }

  function zoom(wanted) {
    range = wanted;
    figures.forEach(({ box, data, whole }) => {
      if (data) box.replaceChild(range ? picture(data) : whole, box.firstElementChild);
    });
  }

  function picture(data) {
    const [low, high] = range;
    const inside = data.steps.map((step, i) => [step, i]).filter(([step]) => step >= low && step <= high).map(([, i]) => i);
    const shown = data.lines.flatMap((one) => inside.flatMap((i) => [one.low ? one.low[i] : one.mean[i], one.high ? one.high[i] : one.mean[i]])).filter((v) => v !== null);
    if (data.stack) shown.push(0);
    let [bottom, top] = shown.length ? [Math.min(...shown), Math.max(...shown)] : [0, 1];
    if (bottom === top) [bottom, top] = [bottom - 0.5, top + 0.5];
    const x = (step) => LEFT + (step - low) / (high - low) * INNER;
    const y = (value) => TOP + TALL - (value - bottom) / (top - bottom) * TALL;
    const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
    ticks(low, high).forEach((step) => svg.append(rule(x(step), TOP, x(step), TOP + TALL), label(x(step), HEIGHT - 4, "middle", step)));
    ticks(bottom, top).forEach((v) => svg.append(rule(LEFT, y(v), LEFT + INNER, y(v)), label(LEFT - 4, y(v) + 3, "end", v)));
    data.lines.forEach((one) => {
      const known = inside.filter((i) => one.mean[i] !== null);
      const points = (values, order) => order.map((i) => `${x(data.steps[i]).toFixed(1)},${y(values[i]).toFixed(1)}`).join(" ");
      if (one.low && known.length) svg.append(shape("polygon", { points: points(one.high, known) + " " + points(one.low, [...known].reverse()), fill: one.colour, opacity: 0.18 }));
      svg.append(shape("polyline", { points: points(one.mean, known), fill: "none", stroke: one.colour, "stroke-width": 1.6, "stroke-dasharray": { solid: "", dashed: "6 3", dotted: "2 3" }[one.dash] }));
    });
    return svg;
  }

  function ticks(low, high) {
    const rough = (high - low) / 4, size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((part) => part * size >= rough) * size;
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9 && found.length < 12; at += step) found.push(at);
    return found;
  }

  function rule(x1, y1, x2, y2) { return shape("line", { x1, y1, x2, y2, stroke: "var(--grid)", "stroke-width": 0.5 }); }

  function label(x, y, anchor, value) {
    const text = shape("text", { x, y, "text-anchor": anchor, fill: "currentColor", "font-size": 9 });
    text.textContent = number(value);
    return text;
  }

  function shape(name, attributes) {
    const one = document.createElementNS(NS, name);
    Object.entries(attributes).forEach(([key, value]) => one.setAttribute(key, value));
    return one;
  }

  function made(name, kind) {
    const one = document.createElement(name);
    one.className = kind;
    return one;
  }

  function number(value) { return value === null ? "none" : String(Number(value.toPrecision(4))); }
})();
