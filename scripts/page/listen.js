// Handles mouse, touch and keys on the picture.

const pointers = new Map(); // pressed fingers or mouse: id -> {x, y}
let drag = null; // {what: "budget", "view" or "pinch", ...}

function listenToPointers(canvas) {
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return {x: event.clientX - box.left, y: event.clientY - box.top};
  };
  const onBudget = (p) => { // is p on the budget's line, or on its handle?
    const away = Math.abs(p.y - chart.budgetY());
    return away < 4 || away < 14 && p.x > chart.frame.left + chart.frame.width - 30;
  };

  // A finger on the budget moves the budget and does not scroll the page. Only the touch event comes
  // early enough to prevent scrolling.
  canvas.addEventListener("touchstart", (event) => {
    if (event.touches.length === 1 && onBudget(place(event.touches[0]))) event.preventDefault();
  }, {passive: false});

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return; // (another button opens a menu)
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
    if (drag && drag.what === "budget") {
      $("tip").hidden = true;
      return setBudget(Math.round(chart.fromY(p.y) / chart.snap) * chart.snap);
    }
    if (drag && drag.what === "pinch") return pinch();
    if (drag && pointers.size) {
      const moved = (p.x - drag.x) / chart.frame.width * (drag.view[1] - drag.view[0]);
      drag.moved = drag.moved || Math.abs(p.x - drag.x) > 4;
      if (drag.moved) return chart.zoom(drag.view[0] - moved, drag.view[1] - moved);
    }
    canvas.style.cursor = onBudget(p) ? "ns-resize" : chart.ribbonAt(p.x, p.y) ? "zoom-in" : "";
    if (event.pointerType !== "mouse") return; // a finger only scrolls
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
      pin();
    }
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => point(pinned)); // back to the instant whose list is shown

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

// Returns the distance between two fingers, the point between them, and the current view.
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
  const add = (name, act) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", act);
    $("zoom").append(button);
    return button;
  };
  add("peak", toPeak);
  add("whole step", () => chart.zoom(0, chart.longest));
  for (const phase of ["forward", "head", "backward"])
    add(phase, () => zoomTo(chart.phase(phase)));
  const enlarge = add("hide weights and moments", () => {
    chart.isEnlarged = !chart.isEnlarged;
    enlarge.textContent = `${chart.isEnlarged ? "show" : "hide"} weights and moments`;
    chart.show(chart.step, false);
  });
}

// ---- keys

// Moves the cursor to another instant. It stays on its storage if that exists then.
function move(to) {
  const step = chart.step, at = Math.max(0, Math.min(step.length - 1, to));
  const {storage} = chart.cursor;
  const isThere = storage >= 0 && step.born[storage] <= at && at <= step.died[storage];
  const x = step.x[at], width = chart.view[1] - chart.view[0];
  if (x < chart.view[0] || x > chart.view[1]) chart.zoom(x - width / 2, x + width / 2);
  point({at, storage: isThere ? storage : -1});
  say(`${step.placeOf(at)}, operator ${at}: ${format(step.total[at])}`);
}

function list() {
  pin();
  say($("alive-title").textContent);
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
      p: toPeak,
      "+": () => chart.zoomBy(0.5, step.x[at]),
      "-": () => chart.zoomBy(2, step.x[at]),
      0: () => chart.zoom(0, chart.longest),
      Enter: list,
    };
    const number = Number(event.key), key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (keys[key]) keys[key]();
    else if (number >= 1 && number <= steps.length) choose(number - 1);
    else return;
    event.preventDefault();
  });
}
