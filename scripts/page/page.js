// Fills the page: policies, budget, the storage under the pointer, and the list of what is alive.

const $ = (id) => document.getElementById(id);
const steps = DATA.steps.map((step) => new Step(step, DATA));
const chart = new Chart($("chart"), steps, DATA.kinds);
const [UNIT, SIZE] = unitOf(chart.least); // unit of the budget field, and its bytes
const SHORT = 12; // rows of the list before "more" is clicked
let pinned = {at: 0, storage: -1}; // the cursor whose list is shown
let isLong = false; // is the list shown in full?

// ---- policies

const costOf = (step) => (DATA.axis === "seconds" ? step.seconds : step.flops);
const none = steps.find((step) => step.name === "none") || steps[0];

function costWords(cost) {
  const more = 100 * (cost / costOf(none) - 1);
  const words = `${more < 0 ? "−" : "+"}${Math.abs(more).toFixed(1)}%`;
  if (DATA.axis !== "seconds") return `${words} FLOPs`;
  return `${Number((1000 * cost).toPrecision(3)).toLocaleString("en")} ms, ${words}`;
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
    more.textContent = costWords(costOf(step));
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
  const x = step.x[step.peakAt];
  if (x < chart.view[0] || x > chart.view[1]) chart.view = [0, chart.longest];
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  chart.show(step, step !== before && !still);
  pin();
  $("tip").hidden = true;
  showStorage(largest);
  showLegend(step.peakAt);
  $("words").textContent = `${step.name}: ${step.words}`;
  const peak = `${format(step.total[step.peakAt])} in ${step.where}`;
  $("chart").setAttribute("aria-label",
    `Memory over one step with ${step.name}: its peak is ${peak}`);
  say(`${step.name}: peak ${peak}, ${costWords(costOf(step))}`);
}

// ---- budget

function setBudget(bytes, isTyped = false) {
  chart.budget = Math.max(0, bytes);
  chart.isExample = false;
  if (!isTyped) $("budget").value = (chart.budget / SIZE).toFixed(UNIT === "GiB" ? 2 : 1);
  for (const [k, button] of [...$("policies").children].entries()) {
    const fits = steps[k].total[steps[k].peakAt] <= chart.budget;
    button.lastElementChild.textContent = fits ? "fits" : "does not fit";
    button.classList.toggle("fits", fits);
  }
  // `ways` has policies and mixes of two, the cheapest first. Take the first one that fits.
  const [, cost, name, flags] = DATA.ways.find(([peak]) => peak <= chart.budget) ?? [];
  $("verdict").textContent = name ? `cheapest that fits: ${name} (${costWords(cost)})`
    : "nothing fits; scripts.plan_memory or plan_model with the same flags names a change that does";
  const words = flags?.split(" ") ?? []; // (spans, so that no line breaks at a hyphen)
  $("flags").replaceChildren(...words.flatMap((text) => [Object.assign(
    document.createElement("span"), {textContent: text}), " "]));
  if (chart.heights) chart.show(chart.step, false);
}

// ---- what is under the pointer, and what is alive

const ROWS = [
  ["shape", (d) => `${d.shape}, ${d.dtype}`],
  ["bytes", (d) => `${format(d.bytes)} (${exactly(d.bytes)})`],
  ["kind", (d) => d.kind],
  ["block", (d) => (d.block < 0 ? "" : String(d.block))],
  ["line", (d) => d.where],
  ["why", (d) => d.why],
  ["made", (d) => d.comes],
  ["freed", (d) => d.goes],
];

function showStorage(i) {
  const list = $("storage");
  list.replaceChildren();
  if (i < 0) {
    $("storage-title").textContent = "Point at the picture";
    const hint = document.createElement("dd");
    hint.textContent = "Each layer is the storage of a tensor. Point at a layer, or tap it.";
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

// Shows the list of storages that are alive at the cursor's instant.
function pin() {
  pinned = chart.cursor;
  isLong = false;
  showAlive();
}

function showAlive() {
  const step = chart.step, {at} = pinned, groups = step.groups(at), total = step.total[at];
  const where = at === step.peakAt ? "Alive at the peak" : "Alive here";
  $("alive-title").textContent = `${where}: ${format(total)}`;
  const count = groups.reduce((sum, group) => sum + group.storages.length, 0);
  $("alive-about").textContent = `${step.name}, ${step.placeOf(at)}, after operator ` +
    `${at.toLocaleString("en")} of ${(step.length - 1).toLocaleString("en")}: ${exactly(total)} ` +
    `in ${count.toLocaleString("en")} storages`;
  const i = step.largest(at), about = i < 0 ? null : step.describe(i);
  $("largest").textContent = about ? `Largest tensor that the step made: ${about.name}, ` +
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
  else button.addEventListener("click", () => {
    pinned = {at: pinned.at, storage: storages[0]};
    point(pinned);
  });
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
    item.lastElementChild.textContent = format(step.ofKind[k][at], step.total[at]);
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

// Moves the cursor to the peak, and to the largest tensor there that the step made.
function toPeak() {
  const step = chart.step;
  move(step.peakAt);
  point({at: step.peakAt, storage: step.largest(step.peakAt)});
  list();
}

// Moves the cursor to {at, storage}, and shows what is there.
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

// ---- begin

function begin() {
  $("about").textContent = DATA.about;
  $("command").textContent = DATA.command;
  $("unit").textContent = UNIT;
  makePolicies();
  makeLegend();
  makeZoom();
  listenToPointers($("chart"));
  listenToKeys($("chart"));
  $("budget").addEventListener("input", () => {
    const typed = $("budget").valueAsNumber; // NaN while the field is empty
    if (typed >= 0) setBudget(typed * SIZE, true);
  });
  $("budget").addEventListener("change", () => setBudget(chart.budget)); // shows the number that is used
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
  const peaks = steps.map((step) => step.total[step.peakAt]);
  const between = (Math.min(...peaks) + none.total[none.peakAt]) / 2; // some policies fit, some do not
  setBudget(DATA.budget ?? Math.ceil(10 * between / SIZE) / 10 * SIZE);
  chart.isExample = DATA.budget === null; // until the user moves it
  chart.draw();
}

begin();
