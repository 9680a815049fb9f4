"use strict";
// Without a prototype: a metric or a setting may be called toString.
const bare = (key, value) => value && value.constructor === Object ? Object.assign(Object.create(null), value) : value;
const data = JSON.parse(document.getElementById("data").textContent, bare), runs = data.runs;
const dark = matchMedia("(prefers-color-scheme: dark)");
const GREY = "var(--muted)", RED = "var(--bad)", INK = "var(--ink)";
const PANELS = [
  { title: "Loss", unit: "nats per token", keys: ["loss", "loss_mean"], names: ["train", "train, mean"],
    validation: true, log: true, first: true, marks: true },
  { title: "Gradient norm", keys: ["grad_norm"], log: true, first: true, marks: true },
  { title: "Learning rate", keys: ["lr"], first: true },
  { title: "Throughput", unit: "tokens/s", keys: ["tokens_per_sec"], zero: true, first: true },
  { title: "MFU", unit: "% of the peak", keys: ["mfu"], scale: 100, zero: true },
  { title: "Memory", unit: "GiB", keys: ["memory_gib"], zero: true },
  { title: "Step time", unit: "s", keys: ["step_sec"], zero: true },
  { title: "Shares of a step's time", unit: "%", prefix: "share ", zero: true },
  { title: "Communication in forward and backward", unit: "% of all time", keys: ["communication_share"], scale: 100,
    zero: true },
  { title: "Slowest rank", unit: "% of a step that it costs the others", keys: ["slowest_share"], scale: 100, zero: true,
    rank: "slowest_rank" },
  { title: "Wait of the host for its device", unit: "s, the least of all ranks", keys: ["host_ahead_sec"], zero: true },
  { title: "Router loss", keys: ["router_loss"] },
  { title: "Load of the most used expert", unit: "1 is even", keys: ["expert_load"] },
];
// Fields with a panel, and those that say the same in other words; any other number has a panel of its own.
const KNOWN = ["step", "time", "tokens", "consumed", "samples_per_sec", "tokens_per_sec_per_device",
  "tflops_per_device", "data_wait_sec", "slowest_rank", "slowest_sec", ...PANELS.flatMap(panel => panel.keys || [])];
const QUIET = ["start", "resume", "recovery", "stop", "finish", "save", "evaluate", "profile"];
const SVG = ["svg", "path", "line", "text", "rect", "circle"];
const UNITS = [["days", 86400], ["hours", 3600], ["minutes", 60], ["seconds", 1]];
const LEFT = 46, TOP = 12;
const hidden = new Set();
let zoom = null;

function el(name, attributes = {}, ...children) {
  const node = SVG.includes(name) ? document.createElementNS("http://www.w3.org/2000/svg", name)
    : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const picture = (width, height, label) =>
  el("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
const $ = id => document.getElementById(id);
const several = runs.length > 1;
const colors = () => data.palette[dark.matches ? "dark" : "light"];
const color = (run, series = 0) => colors()[(several ? run : series) % colors().length];
const unitOf = seconds => UNITS.find(([, size]) => seconds >= 2 * size) || UNITS.at(-1);
const longest = Math.max(1, ...runs.flatMap(run => run.attempts.map(each => each.ended - run.attempts[0].began)));
const [unit, second] = unitOf(longest);
const text = value => value == null ? "–" : typeof value === "object" ? JSON.stringify(value) : `${value}`;
const rounded = value => typeof value === "number" && !Number.isInteger(value) ? short(value) : text(value);
const clock = seconds => new Date(seconds * 1000).toISOString().slice(0, 19).replace("T", " ");
const union = find => [...new Set(runs.flatMap(find))];
const shown = find => runs.flatMap((run, r) => hidden.has(r) ? [] : find(run, r));
const room = box => Math.max(260, box.clientWidth - 24);

function short(value, digits = 3) {
  value = +(+value).toPrecision(digits);
  const size = Math.abs(value);
  if (size && size < 1e-3) return value.toExponential().replace("e-", "e−");
  for (const [letter, least, one] of [["T", 1e12, 1e12], ["B", 1e9, 1e9], ["M", 1e6, 1e6], ["k", 1e4, 1e3]])
    if (size >= least) return `${+(value / one).toPrecision(digits)}${letter}`;
  return `${value}`;
}

// At least four round numbers between two, and as many digits as tell them apart.
function ticks(low, high, log) {
  const found = [];
  if (log)
    for (const digits of [[1], [1, 2, 5]]) {
      found.length = 0;
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
        found.push(...digits.map(digit => digit * 10 ** power).filter(tick => tick >= low && tick <= high));
      if (found.length >= 4) return found.map(at => [at, short(at)]);
    }
  let power = 10 ** Math.ceil(Math.log10(high - low)), step;
  do {
    step = [5, 2, 1].map(each => each * power).find(each => Math.floor(high / each) - Math.ceil(low / each) >= 3);
    power /= 10;
  } while (!step);
  const digits = Math.max(3, Math.ceil(Math.log10(Math.max(Math.abs(low), Math.abs(high)) / step) + 1));
  found.length = 0;
  for (let at = Math.ceil(low / step); at * step <= high; at++) found.push([at * step, short(at * step, digits)]);
  return found;
}

// The x of a row, and of an event, on the chosen axis; tokens of an event are those of the step it follows.
function rowX(run, i) {
  const axis = $("axis").value, columns = run.columns;
  if (axis === "time") return (columns.time[i] - run.began) / second;
  return (axis === "tokens" && columns.tokens || columns.step)[i];
}
function eventX(run, event) {
  const steps = run.columns.step;
  if ($("axis").value === "time") return (event.time - run.began) / second;
  if ($("axis").value === "step" || !steps.length) return event.step;
  const after = steps.findIndex(step => step >= event.step);
  return rowX(run, after < 0 ? steps.length - 1 : after);
}

// The curves of a panel: {name, run, points, color, width, opacity, dash, dots, area}; a point is [x, y, note], of an area
// [x, y, "", top].
function curves(panel) {
  return shown((run, r) => {
    const found = [], base = { run: r, width: 1.4, opacity: 1, dash: "none" };
    if (panel.prefix) return r === panel.run ? areas(run, r, panel.prefix) : [];
    panel.keys.forEach((key, s) => {
      const column = run.columns[key] || [], scale = panel.scale || 1, ranks = run.columns[panel.rank];
      if (column.every(y => y === null)) return;
      const points = column.map(
        (y, i) => [rowX(run, i), y === null ? null : y * scale, ranks ? `, rank ${ranks[i]}` : ""]);
      const curve = { ...base, name: panel.names ? panel.names[s] : panel.title, points, color: color(r, s) };
      if (panel.validation) Object.assign(curve, { color: color(r), opacity: s ? 1 : 0.3, width: s ? 2 : 1 });
      found.push(curve);
    });
    const points = run.events.filter(each => each.event === "evaluate" && each.loss != null);
    if (panel.validation && points.length) found.push({ ...base, name: "validation", color: color(r, 1), dots: true,
      dash: several ? 4 : "none", points: points.map(each => [eventX(run, each), each.loss]) });
    return found;
  });
}

// The parts of a whole, each above the one before.
function areas(run, r, prefix) {
  const keys = Object.keys(run.columns).filter(key => key.startsWith(prefix));
  const tops = run.columns.step.map(() => 0), none = tops.map((_, i) => keys.every(key => run.columns[key][i] === null));
  return keys.map((key, s) => ({
    run: r, name: key.slice(prefix.length), area: true, opacity: 1, color: colors()[s % colors().length],
    points: run.columns[key].map((y, i) => [rowX(run, i), none[i] ? null : y || 0, "", tops[i] += y || 0]),
  }));
}

function legend(panel, all) {
  if (!panel.prefix && !panel.validation) return [];
  const each = new Map(all.map(curve => [curve.name, curve]));
  return [...each].map(([name, curve]) => {
    const style = `background:${several && !panel.prefix ? GREY : curve.color};opacity:${curve.opacity}`;
    return el("small", {}, el("i", { style }), name);
  });
}

function draw(figure, panel) {
  const all = curves(panel), width = room(figure), right = width - 14;
  const height = panel.validation ? 300 : 190, foot = height - 24, svg = picture(width, height, panel.title);
  figure.replaceChildren(
    el("figcaption", {}, panel.title, el("small", {}, panel.unit || ""), ...legend(panel, all)), svg);
  svg.ondblclick = () => { zoom = null; redraw(); };
  const xs = all.flatMap(curve => curve.points.map(point => point[0])).filter(Number.isFinite);
  let [x0, x1] = zoom || [Math.min(...xs), Math.max(...xs)];
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  const inside = x => x >= x0 && x <= x1;
  const ys = all.flatMap(
    curve => curve.points.filter(([x, y]) => y !== null && inside(x)).map(([, y, , top]) => top ?? y));
  if (!ys.length) return;
  let y0 = Math.min(...ys), y1 = Math.max(...ys);
  const log = panel.log && $("log").checked && y0 > 0;
  if (panel.zero) y0 = Math.min(0, y0);
  if (y0 === y1) [y0, y1] = y0 ? [y0 * 0.9, y1 * 1.1].sort((a, b) => a - b) : [0, 1];
  else if (!log) [y0, y1] = [panel.zero && y0 === 0 ? 0 : y0 - (y1 - y0) * 0.04, y1 + (y1 - y0) * 0.06];
  const scale = log ? Math.log : y => y;
  const X = x => LEFT + (x - x0) / (x1 - x0) * (right - LEFT);
  const Y = y => foot - (scale(y) - scale(y0)) / (scale(y1) - scale(y0)) * (foot - TOP);
  for (const [tick, label] of ticks(y0, y1, log)) svg.append(
    el("line", { x1: LEFT, x2: right, y1: Y(tick), y2: Y(tick), stroke: "var(--grid)" }),
    el("text", { x: LEFT - 6, y: Y(tick) + 4, "text-anchor": "end" }, label));
  for (const [tick, label] of ticks(x0, x1)) {
    const anchor = X(tick) > right - 8 ? "end" : "middle";
    svg.append(el("text", { x: X(tick), y: height - 8, "text-anchor": anchor }, label));
  }
  for (const curve of all) svg.append(...drawnCurve(curve, X, Y, (x, y) => inside(x) && !(log && y <= 0)));
  const marked = shown((run, r) => panel.marks ? run.events.map((event, i) => ({ event, x: eventX(run, event), i, r })) : []);
  for (const mark of marked.filter(each => inside(each.x))) svg.append(...drawnMark(mark, X(mark.x), foot));
  follow(svg, all, marked, { X, inside, foot, value: px => x0 + (px * width - LEFT) / (right - LEFT) * (x1 - x0) });
}

function drawnMark({ event, i, r }, x, foot) {
  const odd = !QUIET.includes(event.event);
  if (event.event === "save") return [el("path", { class: "save", d: `M${x - 3} ${foot + 5}l3 -5l3 5z`, fill: several ? color(r) : GREY })];
  if (odd) return [el("path", { class: "spike", d: `M${x - 4} ${TOP - 8}l4 7l4 -7z`, fill: several ? color(r) : RED })];
  if (!["resume", "recovery"].includes(event.event) && !(event.event === "start" && i)) return [];
  const stroke = event.event === "recovery" ? RED : GREY;
  return [el("line", { x1: x, x2: x, y1: TOP, y2: foot, stroke, "stroke-dasharray": "1 4" })];
}

// The visible points that belong together.
function pieces(curve, visible) {
  const found = [], attempts = $("axis").value === "time" ? runs[curve.run].attempts : [];
  let piece = null, before = -Infinity;
  for (const point of curve.points) {
    const [x, y] = point;
    if (attempts.some(each => before < each.from && each.from <= x)) piece = null;  // nothing ran in between
    before = x;
    if (y === null || !visible(x, y)) piece = null;
    else if (piece) piece.push(point);
    else found.push(piece = [point]);
  }
  return found;
}

function drawnCurve(curve, X, Y, visible) {
  const found = pieces(curve, visible), style = { class: "line", opacity: curve.opacity };
  const along = (points, y = point => point[1]) =>
    points.map(point => `${X(point[0]).toFixed(1)} ${Y(y(point)).toFixed(1)}`).join("L");
  if (curve.area) {
    const d = found.map(piece => `M${along(piece, point => point[3])}L${
      along([...piece].reverse(), point => point[3] - point[1])}Z`).join("");
    return d ? [el("path", { ...style, d, fill: curve.color, stroke: curve.color, "stroke-width": 0.5 })] : [];
  }
  const dots = found.flatMap(piece => curve.dots || piece.length === 1 ? piece : []);
  const circles = dots.map(([x, y]) => el("circle", { cx: X(x), cy: Y(y), r: curve.dots ? 3 : 1.5, fill: curve.color }));
  const d = found.map(piece => `M${along(piece)}`).join("");
  return d ? [...circles, el("path", { ...style, d, fill: "none", stroke: curve.color, "stroke-width": curve.width,
    "stroke-dasharray": curve.dash })] : circles;
}

// Show the numbers below the pointer; a drag enlarges all charts, a double click shows all again.
function follow(svg, all, marked, { X, inside, foot, value }) {
  const rule = el("line", { y1: TOP, y2: foot, stroke: INK, visibility: "hidden" });
  const band = el("rect", { y: TOP, height: foot - TOP, fill: GREY, opacity: 0.2 });
  const tip = $("tip");
  let from = null;
  svg.append(rule, band);
  const at = event => {
    const box = svg.getBoundingClientRect();
    return value((event.clientX - box.left) / box.width);
  };
  const nearest = (points, x) => points.reduce((best, point) =>
    point[1] !== null && (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x)) ? point : best, null);
  const leave = () => { tip.style.display = "none"; rule.setAttribute("visibility", "hidden"); };
  const stretch = (one, other) => {
    band.setAttribute("x", Math.min(one, other));
    band.setAttribute("width", Math.abs(one - other));
  };
  svg.onpointerleave = leave;
  svg.onpointermove = event => {
    const x = at(event), rows = all.map(curve => [curve, nearest(curve.points, x)]).filter(row => row[1]);
    if (from !== null) stretch(X(from), X(x));
    if (!inside(x) || !rows.length) return leave();
    const where = rows[0][1][0];
    for (const key of ["x1", "x2"]) rule.setAttribute(key, X(where));
    rule.setAttribute("visibility", inside(where) ? "visible" : "hidden");
    const near = marked.filter(each => Math.abs(X(each.x) - X(x)) < 5);
    const lines = new Set(near.map(({ event, r }) => `${several ? runs[r].name + ", " : ""}${event.event} at step ${event.step}${event.reason ? ": " + event.reason : ""}`));
    tip.replaceChildren(el("b", {}, `${$("axis").selectedOptions[0].text} ${short(where)}`), ...rows.map(row => {
      const [curve, [, y, note]] = row, name = `${several ? runs[curve.run].name + ", " : ""}${curve.name}`;
      return el("div", {}, el("i", { style: `background:${curve.color}` }), `${name} ${short(y)}${note || ""}`);
    }), ...[...lines].slice(0, 5).map(line => el("div", {}, line)));
    tip.style.display = "block";
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 12, innerHeight - tip.offsetHeight - 8))}px`;
  };
  svg.onpointerdown = event => { from = at(event); };
  svg.onpointerup = event => {
    const to = at(event), far = from !== null && Math.abs(X(to) - X(from)) > 8;
    if (far) zoom = [from, to].sort((a, b) => a - b);
    from = null;
    if (far) redraw(); else stretch(0, 0);
  };
}

// On a narrow screen each row is a block, and each cell names its column.
function table(head, rows, mark = false) {
  return el("table", {}, el("tr", { class: "head" }, ...head.map(each => el("th", {}, each))), ...rows.map(([name, ...cells]) => {
    const look = mark && new Set(cells).size > 1 ? { class: "other" } : {};
    return el("tr", {}, el("th", {}, name), ...cells.map((cell, i) =>
      el("td", { ...look, ...head[i + 1] && { "data-head": head[i + 1] } }, cell)));
  }));
}

function timeline() {
  const bars = runs.flatMap((run, r) => run.attempts.length ? [
    el("div", {}, several ? run.name : "", drawnAttempts(run, r))] : []);
  const rows = runs.flatMap(run => run.attempts.map((each, i) => {
    const start = run.starts.length === run.attempts.length ? run.starts[i] : {};  // else one ended before it trained
    const changed = Object.entries(start.changes || {}).map(([key, [a, b]]) => `${key} ${text(a)} → ${text(b)}`);
    const name = `${several ? run.name + " " : ""}${i + 1}`, lasted = each.ended - each.began, [of, size] = unitOf(lasted);
    return [name, clock(each.began), `${short(lasted / size)} ${of}`, `${each.first} – ${each.last}`, each.how, start.host || "", changed.join("; ")];
  }));
  const head = ["attempt", "began (UTC)", "time", "steps", "ended", "host", "changed settings"];
  $("timeline").replaceChildren(...bars, table(head, rows));
}

function drawnAttempts(run, r) {
  const width = room($("timeline")), foot = 16 * run.attempts.length;
  const X = time => 4 + (time - run.began) / longest * (width - 8);
  const svg = picture(width, foot + 22, "attempts");
  run.attempts.forEach((each, i) => {
    const opacity = { finished: 1, running: 1, stopped: 0.7 }[each.how] || 0.4;
    svg.append(el("rect", { class: "attempt", x: X(each.began), width: Math.max(2, X(each.ended) - X(each.began)),
      y: 16 * i + 3, height: 10, fill: color(r), opacity }));
    for (const [name, time] of each.events.filter(([name]) => ["save", "recovery"].includes(name) || !QUIET.includes(name)))
      svg.append(el("line", { x1: X(time), x2: X(time), y1: 16 * i + 1, y2: 16 * i + 15,
        stroke: name === "save" ? INK : RED }));
  });
  for (const [tick, label] of ticks(0, longest / second)) {
    const x = X(run.began + tick * second), anchor = tick ? x > width - 30 ? "end" : "middle" : "start";
    svg.append(el("text", { x, y: foot + 18, "text-anchor": anchor }, tick ? label : `0 ${unit}`));
  }
  return svg;
}

const fact = ([name, value]) => el("span", {}, el("small", {}, name), el("b", {}, value));

function headline(run) {
  const { state, ...others } = run.headline, [done, , total] = (others.step || "").replaceAll(",", "").split(" ");
  const bad = ["died", "hung"].includes(state), share = Math.min(100, 100 * done / total);
  const { model, parameters, data: source, ranks, host } = run.facts;
  const about = [model && `${model}${parameters ? ` with ${parameters} parameters` : ""}`, source && `trained on ${source}`,
    ranks && `${ranks} rank${ranks > 1 ? "s" : ""}${host ? ` on ${host}` : ""}`];
  return el("div", {}, el("h2", { class: bad ? "bad" : "good" }, `${several ? `${run.name}: ` : ""}${state}${share < 100 ? `, ${Math.floor(share)} %` : ""}`),
    el("p", {}, el("small", {}, about.filter(Boolean).join(", "))), el("p", { class: run.health.well ? "said" : "said bad" }, run.health.sentences), ...share >= 0 ? [el("div", { class: "bar" }, el("div", { style: `width:${share}%` }))] : [],
    el("div", { class: "facts" }, ...Object.entries(others).map(fact)));
}

function tables() {
  const head = ["", ...runs.map(run => run.name)];
  $("headline").append(...runs.map(headline));
  $("facts").append(...several ? [table(head, union(run => Object.keys(run.facts)).map(
    key => [key, ...runs.map(run => text(run.facts[key]))]))] : Object.entries(runs[0].facts).map(fact));
  const events = runs.flatMap(run => run.events.map(({ event, step, time, ...rest }) => [
    clock(time), several ? run.name : "", text(step), event,
    Object.entries(rest).map(([key, value]) => `${key} ${rounded(value)}`).join(", ")]));
  events.sort((a, b) => a[0] < b[0] ? 1 : -1);
  $("events").lastElementChild.append(table(["time (UTC)", "", "step", "event", ""], events.slice(0, 500)));
  const profiles = runs.flatMap(run => run.events.filter(each => each.event === "profile").slice(-1).map(
    each => el("div", {}, el("b", {}, several ? run.name : ""), el("p", {}, each.verdict),
      el("pre", {}, (each.operators || []).join("\n")))));
  if (profiles.length) $("profile").lastElementChild.append(...profiles); else $("profile").remove();
  const given = union(run => run.given), rows = keys => keys.map(key => [key, ...runs.map(run => text(run.config[key]))]);
  const differ = rows(union(run => Object.keys(run.config))).filter(([, ...values]) => new Set(values).size > 1);
  if (several) $("differences").lastElementChild.append(differ.length ? table(head, differ, true) : "none");
  else $("differences").remove();
  $("config").lastElementChild.append(table(["", ...several ? head.slice(1) : [""]], rows(given), true));
}

function redraw() {
  const more = union(run => Object.keys(run.columns)).filter(key => !KNOWN.includes(key) && !key.startsWith("share "));
  const each = panel => !panel.prefix ? [panel] : runs.map(
    (run, r) => ({ ...panel, run: r, title: panel.title + (several ? `, ${run.name}` : "") }));
  const others = more.map(key => ({ title: key.replaceAll("_", " "), keys: [key] }));
  const panels = [...PANELS.flatMap(each), ...others].filter(panel => curves(panel).length);
  const figures = panels.map(panel => el("figure", panel.validation ? { class: "wide" } : {}));
  $("charts").replaceChildren(...figures.filter((_, i) => panels[i].first));
  $("more").lastElementChild.replaceChildren(...figures.filter((_, i) => !panels[i].first));
  panels.forEach((panel, i) => draw(figures[i], panel));
  timeline();
  // Kept when the page loads itself again.
  location.replace(`#${[$("axis").value, $("log").checked ? "log" : "", ...zoom || []].join()}`);
}

function main() {
  for (const run of runs) {
    run.began = Math.min(...run.attempts.map(each => each.began));
    for (const each of run.attempts) each.from = (each.began - run.began) / second;
  }
  $("axis").options[1].text = unit;
  document.title = document.querySelector("h1").textContent = `${several ? "Runs" : "Run"} ${runs.map(run => run.name).join(", ")}`;
  const again = data.live ? `, and again every ${data.live} s while the run goes on` : "";
  $("about").textContent = `Written ${clock(data.written)} UTC by smp-train ${data.version}${again}. All settings: run.json.`;
  tables();
  if (several) runs.forEach((run, r) => {
    const box = el("input", { type: "checkbox", checked: "" });
    box.onchange = () => { hidden[box.checked ? "delete" : "add"](r); redraw(); };
    $("runs").append(el("label", {}, box, el("i", { style: `background:${color(r)}` }), `${run.name} `));
  });
  const [axis, log, ...ends] = location.hash.slice(1).split(",");
  if (["step", "time", "tokens"].includes(axis)) $("axis").value = axis;
  if (ends.length === 2 && ends.every(end => Number.isFinite(+end))) zoom = ends.map(Number);
  $("log").checked = log === "log";
  $("axis").onchange = () => { zoom = null; redraw(); };
  $("log").onchange = dark.onchange = redraw;
  for (const part of [$("more"), $("attempts")]) part.ontoggle = redraw;  // what is closed has no width
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  redraw();
  if (data.live) setTimeout(() => location.reload(), 1000 * data.live);
  document.body.dataset.drawn = document.querySelectorAll("path.line").length;
}
main();
