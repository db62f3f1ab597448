// What the reader does, and what the page says to it.

const $ = (id) => document.getElementById(id);
const steps = DATA.steps.map((step) => new Step(step, DATA));
const chart = new Chart($("chart"), steps, DATA.kinds);
const [UNIT, SIZE] = chart.least >= 2 ** 30 ? ["GiB", 2 ** 30] : ["MiB", 2 ** 20];
const SHORT = 12; // rows of a list that is not asked for in full
let pinned = 0; // the instant whose list is shown
let isLong = false; // is the list shown in full?

// ---- policies

const cost = (step) => (DATA.axis === "seconds" ? step.seconds : step.flops);
const none = steps.find((step) => step.name === "none") || steps[0];

function costWords(step) {
  const more = 100 * (cost(step) / cost(none) - 1);
  const words = `${more < 0 ? "−" : "+"}${Math.abs(more).toFixed(1)}%`;
  return DATA.axis === "seconds" ? `${(1000 * step.seconds).toFixed(1)} ms, ${words}`
    : `${words} FLOPs`;
}

function makePolicies() {
  steps.forEach((step, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.setAttribute("role", "radio");
    button.innerHTML = "<b></b><span></span><span></span><i></i>";
    const [name, peak, more] = button.children;
    name.textContent = step.name;
    peak.textContent = format(step.total[step.peakAt]);
    more.textContent = costWords(step);
    button.addEventListener("click", () => choose(i));
    button.addEventListener("keydown", (event) => {
      const way = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
      if (!way) return;
      event.preventDefault();
      choose((i + way + steps.length) % steps.length);
      $("policies").children[(i + way + steps.length) % steps.length].focus();
    });
    $("policies").append(button);
  });
}

function choose(i) {
  const step = steps[i], before = chart.step;
  for (const [k, button] of [...$("policies").children].entries()) {
    button.setAttribute("aria-checked", String(k === i));
    button.tabIndex = k === i ? 0 : -1;
  }
  const largest = step.largest(step.peakAt);
  chart.cursor = {at: step.peakAt, storage: largest};
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  chart.show(step, step !== before && !still);
  pin(step.peakAt);
  showStorage(largest);
  showLegend(step.peakAt);
  $("words").textContent = `${step.name}: ${step.words}`;
  const peak = `${format(step.total[step.peakAt])} in ${step.where}`;
  $("chart").setAttribute("aria-label",
    `Memory over one step with ${step.name}: its peak is ${peak}`);
  say(`${step.name}: peak ${peak}, ${costWords(step)}`);
}

// ---- budget

function setBudget(bytes, from) {
  chart.budget = Math.max(0, bytes);
  if (from !== $("budget")) $("budget").value = (chart.budget / SIZE).toFixed(UNIT === "GiB" ? 2 : 1);
  const fitting = steps.filter((step) => step.total[step.peakAt] <= chart.budget);
  for (const [k, button] of [...$("policies").children].entries()) {
    const fits = fitting.includes(steps[k]);
    button.lastElementChild.textContent = fits ? "fits" : "does not fit";
    button.classList.toggle("fits", fits);
  }
  // The cheapest; among equals the one that comes first, but nobody needs `plain`.
  const order = (step) => (step.name === "plain" ? steps.length : steps.indexOf(step));
  const [first] = fitting.sort((a, b) => cost(a) - cost(b) || order(a) - order(b));
  $("verdict").textContent = !first ? "nothing fits"
    : `first that fits: ${first.name} (${costWords(first)})`;
  $("flags").textContent = first ? first.flags : "";
  if (chart.heights) chart.show(chart.step, false);
}

// ---- what is under the pointer, and what is alive

const ROWS = [
  ["what", (d) => `${d.shape}, ${d.dtype}`],
  ["bytes", (d) => `${format(d.bytes)} (${exactly(d.bytes)})`],
  ["kind", (d) => d.kind],
  ["block", (d) => (d.block < 0 ? "none" : String(d.block))],
  ["line", (d) => d.where],
  ["why", (d) => d.why],
  ["comes", (d) => d.comes],
  ["goes", (d) => d.goes],
];

function showStorage(i) {
  const list = $("storage");
  list.replaceChildren();
  if (i < 0) {
    $("storage-title").textContent = "Point at the picture";
    const hint = document.createElement("dd");
    hint.textContent = "Each layer is a tensor's storage: point at one, or tap it.";
    list.append(hint);
    return;
  }
  const about = chart.step.describe(i);
  $("storage-title").textContent = about.name;
  for (const [name, words] of ROWS) {
    if (!words(about)) continue;
    const term = document.createElement("dt"), description = document.createElement("dd");
    term.textContent = name;
    description.textContent = words(about);
    if (name === "line") {
      const code = document.createElement("code");
      code.textContent = about.code;
      description.append(code);
    }
    list.append(term, description);
  }
}

function pin(at) {
  pinned = at;
  isLong = false;
  showAlive();
}

function showAlive() {
  const step = chart.step, at = pinned, groups = step.groups(at), total = step.total[at];
  const where = at === step.peakAt ? "Alive at the peak" : "Alive here";
  $("alive-title").textContent = `${where}: ${format(total)}`;
  const count = groups.reduce((sum, group) => sum + group.storages.length, 0);
  $("alive-about").textContent = `${step.name}, ${step.placeOf(at)}, after operator ` +
    `${at.toLocaleString("en")} of ${(step.length - 1).toLocaleString("en")}: ${exactly(total)} ` +
    `in ${count.toLocaleString("en")} storages`;
  const i = step.largest(at), about = i < 0 ? null : step.describe(i);
  $("largest").textContent = about ? `The largest that the step made: ${about.name}, ` +
    `${format(about.bytes)}, ${about.where}  ${about.code}` : "";
  const body = $("alive");
  body.replaceChildren();
  for (const group of isLong ? groups : groups.slice(0, SHORT)) {
    const row = groupRow(group, total, false);
    body.append(row);
    if (group.storages.length === 1) continue;
    row.cells[2].firstElementChild.addEventListener("click", (event) => {
      const button = event.currentTarget, open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      if (open) while (row.nextSibling && row.nextSibling.className === "one") row.nextSibling.remove();
      else row.after(...group.storages.map((i) => groupRow({
        name: step.text(i, 0), kind: group.kind, bytes: step.bytes[i], storages: [i],
      }, total, true)));
    });
  }
  const rest = groups.slice(SHORT);
  $("more").hidden = !rest.length;
  const left = rest.reduce((sum, group) => sum + group.bytes, 0);
  $("more").textContent = isLong ? "show less" : `and ${rest.length} more: ${format(left)}`;
}

function groupRow({name, kind, bytes, storages}, total, isOne) {
  const row = document.createElement("tr"), what = document.createElement("td");
  const size = document.createElement("td"), share = document.createElement("td");
  if (isOne) row.className = "one";
  row.dataset.bytes = bytes;
  row.dataset.count = storages.length;
  size.textContent = format(bytes);
  size.title = exactly(bytes);
  share.textContent = `${(100 * bytes / total).toFixed(1)}%`;
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = storages.length > 1 ? `${storages.length} × ${name}`
    : chart.step.text(storages[0], 0);
  button.style.setProperty("--kind", DATA.kinds[kind][1]);
  if (storages.length > 1) button.setAttribute("aria-expanded", "false");
  else button.addEventListener("click", () => point({at: pinned, storage: storages[0]}));
  what.append(button);
  const lines = new Set(storages.map((i) => DATA.labels[chart.step.label[i]][6]));
  const [where, text] = DATA.lines[[...lines][0]];
  if (lines.size === 1 && where) {
    const code = document.createElement("code");
    code.textContent = `${where}  ${text}`;
    what.append(code);
  }
  row.append(size, share, what);
  return row;
}

function showLegend(at) {
  const step = chart.step;
  [...$("legend").children].forEach((item, k) => {
    item.lastElementChild.textContent = format(step.ofKind[k][at]);
  });
}

function makeLegend() {
  for (const [name, color, meaning] of DATA.kinds) {
    const item = document.createElement("li");
    item.innerHTML = "<i></i><span></span> <b></b>";
    item.children[0].style.background = color;
    item.children[1].textContent = name;
    item.title = meaning;
    $("legend").append(item);
  }
}

// ---- the cursor

// Move the cursor to {at, storage}, and tell what is there.
function point(cursor, mouse = null) {
  chart.cursor = cursor;
  chart.draw();
  showStorage(cursor.storage);
  showLegend(cursor.at);
  const tip = $("tip");
  tip.hidden = !mouse || cursor.storage < 0;
  if (tip.hidden) return;
  const about = chart.step.describe(cursor.storage);
  tip.textContent = `${about.name}\n${format(about.bytes)}, ${chart.step.placeOf(cursor.at)}`;
  const width = $("chart").clientWidth;
  tip.style.left = `${Math.min(mouse.x + 14, width - tip.offsetWidth - 4)}px`;
  tip.style.top = `${mouse.y > 70 ? mouse.y - tip.offsetHeight - 10 : mouse.y + 18}px`;
}

function say(words) {
  $("spoken").textContent = words;
}

const pointers = new Map(); // fingers, or the mouse, that are down: id -> {x, y}
let drag = null; // {what: "budget" or "view", ...}

function listenToPointers(canvas) {
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return {x: event.clientX - box.left, y: event.clientY - box.top};
  };
  const onBudget = (p) => { // its line, or what a finger takes of it
    const away = Math.abs(p.y - chart.budgetY());
    return away < 4 || away < 14 && p.x > chart.frame.left + chart.frame.width - 30;
  };

  canvas.addEventListener("pointerdown", (event) => {
    const p = place(event);
    pointers.set(event.pointerId, p);
    if (pointers.size === 2) drag = {what: "pinch", ...spread()};
    else if (onBudget(p)) drag = {what: "budget"};
    else drag = {what: "view", x: p.x, view: [...chart.view], moved: false};
    if (drag.what !== "view" || event.pointerType === "mouse")
      canvas.setPointerCapture(event.pointerId);
  });

  canvas.addEventListener("pointermove", (event) => {
    const p = place(event);
    if (pointers.has(event.pointerId)) pointers.set(event.pointerId, p);
    if (drag && drag.what === "budget") return setBudget(chart.fromY(p.y));
    if (drag && drag.what === "pinch") return pinch();
    if (drag && pointers.size) {
      const moved = (p.x - drag.x) / chart.frame.width * (drag.view[1] - drag.view[0]);
      drag.moved = drag.moved || Math.abs(p.x - drag.x) > 4;
      if (drag.moved) return chart.zoom(drag.view[0] - moved, drag.view[1] - moved);
    }
    canvas.style.cursor = onBudget(p) ? "ns-resize" : chart.ribbonAt(p.x, p.y) ? "zoom-in" : "";
    const found = chart.under(p.x, p.y);
    if (found) point(found, p);
    else $("tip").hidden = true;
  });

  const up = (event) => {
    const p = place(event), wasClick = drag && drag.what === "view" && !drag.moved;
    pointers.delete(event.pointerId);
    if (!pointers.size) drag = null;
    if (!wasClick || event.type === "pointercancel") return;
    const part = chart.ribbonAt(p.x, p.y), found = chart.under(p.x, p.y);
    if (part) zoomTo(part);
    else if (found) {
      point(found, event.pointerType === "mouse" ? p : null);
      pin(found.at);
    }
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => ($("tip").hidden = true));

  canvas.addEventListener("wheel", (event) => {
    const p = place(event), width = chart.view[1] - chart.view[0];
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) chart.zoomBy(1.002 ** event.deltaY, chart.fromX(p.x));
    else if (Math.abs(sideways) > 1) {
      const by = sideways / chart.frame.width * width;
      chart.zoom(chart.view[0] + by, chart.view[1] + by);
    } else return; // the page scrolls
    event.preventDefault();
  }, {passive: false});
}

// How far two fingers are apart, and where they are.
function spread() {
  const [a, b] = [...pointers.values()];
  return {apart: Math.max(20, Math.abs(a.x - b.x)), middle: (a.x + b.x) / 2, view: [...chart.view]};
}

function pinch() {
  if (pointers.size < 2) return;
  const now = spread(), factor = drag.apart / now.apart;
  const [from, to] = drag.view;
  const x = from + (drag.middle - chart.frame.left) / chart.frame.width * (to - from);
  const start = x - (now.middle - chart.frame.left) / chart.frame.width * (to - from) * factor;
  chart.zoom(start, start + (to - from) * factor);
}

function zoomTo(part) {
  const step = chart.step, from = step.x[part.from], to = step.x[part.to + 1];
  chart.zoom(from - 0.03 * (to - from), to + 0.03 * (to - from));
}

function makeZoom() {
  const names = {"whole step": null, forward: "forward", head: "head", backward: "backward"};
  for (const [name, phase] of Object.entries(names)) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () =>
      (phase ? zoomTo(chart.phase(phase)) : chart.zoom(0, chart.longest)));
    $("zoom").append(button);
  }
  const enlarge = document.createElement("button");
  enlarge.type = "button";
  enlarge.textContent = "hide weights and moments";
  enlarge.setAttribute("aria-pressed", "false");
  enlarge.addEventListener("click", () => {
    chart.isEnlarged = !chart.isEnlarged;
    enlarge.setAttribute("aria-pressed", String(chart.isEnlarged));
    chart.show(chart.step, false);
  });
  $("zoom").append(enlarge);
}

// ---- keys

// The cursor on another instant, and on the same storage if it is there.
function move(to) {
  const step = chart.step, at = Math.max(0, Math.min(step.length - 1, to));
  const {storage} = chart.cursor;
  const isThere = storage >= 0 && step.born[storage] <= at && at <= step.died[storage];
  const x = step.x[at], width = chart.view[1] - chart.view[0];
  if (x < chart.view[0] || x > chart.view[1]) chart.zoom(x - width / 2, x + width / 2);
  point({at, storage: isThere ? storage : -1});
  say(`${step.placeOf(at)}, operator ${at}: ${format(step.total[at])}`);
}

function climb(way) {
  const {at, storage} = chart.cursor, alive = chart.step.alive(at);
  const i = alive.indexOf(storage) + way;
  const next = storage < 0 ? alive.length - 1 : Math.max(0, Math.min(alive.length - 1, i));
  point({at, storage: alive[next]});
  const about = chart.step.describe(alive[next]);
  say(`${about.name}, ${format(about.bytes)}, ${about.why}`);
}

function listenToKeys(canvas) {
  canvas.addEventListener("keydown", (event) => {
    const {at} = chart.cursor, step = chart.step, i = step.parts.indexOf(step.part(at));
    const parts = step.parts, beside = (way) => parts[Math.max(0, Math.min(parts.length - 1, i + way))];
    const keys = {
      ArrowLeft: () => move(event.shiftKey ? beside(-1).from : at - 1),
      ArrowRight: () => move(event.shiftKey ? beside(1).from : at + 1),
      ArrowUp: () => climb(1),
      ArrowDown: () => climb(-1),
      Home: () => move(0),
      End: () => move(step.length - 1),
      p: () => (move(step.peakAt), pin(step.peakAt)),
      "+": () => chart.zoomBy(0.5, step.x[at]),
      "-": () => chart.zoomBy(2, step.x[at]),
      0: () => chart.zoom(0, chart.longest),
      Enter: () => pin(at),
    };
    const number = Number(event.key);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (keys[event.key]) keys[event.key]();
    else if (number >= 1 && number <= steps.length) choose(number - 1);
    else return;
    event.preventDefault();
  });
}

// ---- begin

function begin() {
  $("about").textContent = DATA.about;
  $("command").textContent = DATA.command;
  $("unit").textContent = UNIT;
  $("axis").textContent = DATA.axis === "seconds"
    ? "Along the step: seconds, as they are predicted, operator by operator."
    : "Along the step: FLOPs. A block is as wide as its matrix products, and its operators share " +
      "that evenly; what has none is a sliver.";
  makePolicies();
  makeLegend();
  makeZoom();
  listenToPointers($("chart"));
  listenToKeys($("chart"));
  $("budget").addEventListener("input", () => setBudget($("budget").value * SIZE, $("budget")));
  $("more").addEventListener("click", () => {
    isLong = !isLong;
    showAlive();
  });
  new ResizeObserver(() => {
    chart.resize();
    chart.show(chart.step, false);
  }).observe($("chart"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart.draw());
  chart.resize();
  choose(DATA.first);
  setBudget(DATA.budget ?? Math.round(7.5 * none.total[none.peakAt] / SIZE) / 10 * SIZE);
}

begin();
