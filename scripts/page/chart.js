// Draws the picture: the layers of memory, and the lines and labels over them.

const CHANGE_MS = 350; // duration of the change from one policy's picture to the next
const THIN = 5; // pixels: a storage less high than this gets no line

class Chart extends Frame {
  constructor(canvas, steps, kinds) {
    super(canvas, steps);
    this.kinds = kinds;
    this.cursor = {at: 0, storage: -1};
  }

  // ---- what is shown

  show(step, animated) {
    const before = this.heights, rangeBefore = this.range;
    this.step = step;
    this.place();
    const rangeAfter = this.range = this.rangeOf(step);
    cancelAnimationFrame(this.frameAsked);
    const after = this.stackHeights();
    if (!animated || !before || before[0].length !== after[0].length) {
      this.heights = after;
      this.draw();
      return;
    }
    const start = performance.now();
    const change = (now) => {
      const done = Math.min(1, Math.max(0, (now - start) / CHANGE_MS)), t = done * (2 - done);
      this.heights = after.map((row, k) => row.map((h, c) => before[k][c] * (1 - t) + h * t));
      this.range = rangeAfter.map((bytes, i) => rangeBefore[i] * (1 - t) + bytes * t);
      if (done === 1) this.heights = after;
      this.draw(done < 1);
      if (done < 1) this.frameAsked = requestAnimationFrame(change);
    };
    change(start);
  }

  zoom(from, to) {
    const width = Math.max(this.longest / 2000, Math.min(this.longest, to - from));
    const start = Math.max(0, Math.min(this.longest - width, from));
    this.view = [start, start + width];
    this.show(this.step, false);
  }

  zoomBy(factor, x = (this.view[0] + this.view[1]) / 2) {
    this.zoom(x - (x - this.view[0]) * factor, x + (this.view[1] - x) * factor);
  }

  // Returns an array for each kind: the bytes in each column of pixels.
  stackHeights() {
    return this.step.ofKind.slice(0, this.kinds.length).map((bytes) =>
      Float64Array.from(this.columns, (at) => (at < 0 ? 0 : bytes[at])));
  }

  // ---- drawing

  color(name) {
    return getComputedStyle(this.canvas).getPropertyValue(name).trim();
  }

  draw(isChanging = false) {
    const {context: c, frame: f} = this;
    this.colors = {};
    for (const name of ["ink", "faint", "paper", "light", "edge", "accent"])
      this.colors[name] = this.color(`--${name}`);
    c.clearRect(0, 0, this.canvas.width, this.canvas.height);
    c.font = "12px system-ui, sans-serif";
    this.drawGrid();
    if (!this.heights) this.heights = this.stackHeights();
    this.drawLayers();
    if (!isChanging) {
      this.drawEdges();
      this.drawRibbon();
      this.drawBlock();
      this.drawStorage();
      this.drawCursor();
      this.drawPeak();
    }
    this.drawBudget();
    c.strokeStyle = this.colors.faint;
    c.strokeRect(f.left - 0.5, f.top - 0.5, f.width + 1, f.height + 1);
  }

  drawGrid() {
    const {context: c, frame: f} = this;
    const [bottom, top] = this.range;
    const [unit, size] = unitOf(top);
    const ticks = roundNumbers(bottom / size, top / size, 6);
    this.snap = (ticks[1] - ticks[0]) * size / 20; // bytes: a dragged budget is a multiple of this
    c.textAlign = "right";
    c.textBaseline = "middle";
    for (const n of ticks) {
      const y = Math.round(this.toY(n * size)) + 0.5;
      c.strokeStyle = this.colors.light;
      c.beginPath();
      c.moveTo(f.left, y);
      c.lineTo(f.left + f.width, y);
      c.stroke();
      c.fillStyle = this.colors.ink;
      c.fillText(String(n), f.left - 6, y);
    }
    c.textAlign = "left";
    c.fillText(this.isEnlarged ? `${unit}, not from 0` : unit, 4, f.top - 12);
  }

  drawLayers() {
    const {context: c, frame: f} = this;
    const below = new Float64Array(f.width);
    c.save();
    this.clip();
    this.heights.forEach((row, k) => {
      c.fillStyle = this.kinds[k][1];
      c.beginPath();
      for (let i = 0; i < f.width; ) {
        // Neighbouring columns of equal height are drawn as one rectangle.
        let end = i + 1;
        while (end < f.width && row[end] === row[i] && below[end] === below[i]) end++;
        if (row[i] > 0) {
          const y = this.toY(below[i] + row[i]);
          c.rect(f.left + i, y, end - i, this.toY(below[i]) - y);
        }
        i = end;
      }
      c.fill();
      for (let i = 0; i < f.width; i++) below[i] += row[i];
    });
    c.restore();
  }

  clip() {
    const {context: c, frame: f} = this;
    c.beginPath();
    c.rect(f.left, f.top, f.width, f.height);
    c.clip();
  }

  // Calls visit(storage, first column, last column, bytes below the storage in each column) for
  // each storage, bottom up, and stops when visit returns false.
  eachStorage(visit) {
    const step = this.step, columns = this.columns, below = new Float64Array(columns.length);
    const shown = columns.findIndex((at) => at < 0);
    const end = shown < 0 ? columns.length : shown;
    for (const i of step.stack) {
      const first = firstAtLeast(columns, end, step.born[i]);
      const last = firstAtLeast(columns, end, step.died[i] + 1) - 1;
      if (last < first) continue;
      if (visit(i, first, last, below) === false) return;
      for (let c = first; c <= last; c++) below[c] += step.bytes[i];
    }
  }

  // Draws a line under each storage that is high enough, and a stronger line under the first
  // storage of another block.
  drawEdges() {
    const {context: c, frame: f} = this;
    const least = THIN * (this.range[1] - this.range[0]) / f.height;
    const thin = new Path2D(), strong = new Path2D();
    // For each kind: are all storages of one block together high enough?
    const blocks = new Set(this.step.block).size;
    const isHigh = this.step.ofKind.map((bytes) =>
      bytes.reduce((a, b) => Math.max(a, b), 0) / blocks > 1.5 * least);
    let before = null; // block of the storage below
    this.eachStorage((i, first, last, below) => {
      const kind = this.step.kind[i];
      if (kind <= LAST_KIND_OF_STATE) return;
      const other = isHigh[kind] && before !== null && before !== this.step.block[i];
      before = this.step.block[i];
      if (this.step.bytes[i] < least && !other) return;
      const path = other ? strong : thin;
      let y = this.toY(below[first]);
      path.moveTo(f.left + first, y);
      for (let k = first; k <= last; k++) {
        const next = this.toY(below[k]);
        if (next !== y) {
          path.lineTo(f.left + k, y);
          path.moveTo(f.left + k, next);
          y = next;
        }
      }
      path.lineTo(f.left + last + 1, y);
    });
    c.save();
    this.clip();
    c.strokeStyle = this.colors.edge;
    c.lineWidth = 0.5;
    c.stroke(thin);
    c.lineWidth = 1;
    c.stroke(strong);
    c.restore();
  }

  // Draws the rows of phases, of blocks, and of the axis under the picture.
  drawRibbon() {
    const {context: c, frame: f} = this, y = f.top + f.height + 4;
    const lit = this.cursor.storage < 0 ? -1 : this.step.block[this.cursor.storage];
    c.save();
    c.beginPath();
    c.rect(f.left, y, f.width, 2 * RIBBON + 24);
    c.clip();
    c.textAlign = "center";
    c.textBaseline = "middle";
    for (const name of ["forward", "head", "backward", "optimizer"])
      this.box(this.phase(name), y, name, this.colors.light);
    for (const part of this.step.parts) {
      if (part.block === null) continue;
      const isLit = part.block === lit;
      this.box(part, y + RIBBON, String(part.block), isLit ? this.colors.accent : this.colors.light,
        isLit ? this.colors.paper : this.colors.ink);
    }
    const [unit, size] = DATA.axis === "seconds" ? [" ms", 1e-3] : ["%", 1e-2];
    c.fillStyle = this.colors.ink;
    for (const n of roundNumbers(this.view[0] / size, this.view[1] / size, f.width / 80))
      c.fillText(`${n}${unit}`, Math.max(f.left + 16, this.toX(n * size)), y + 2.5 * RIBBON + 1);
    c.restore();
    c.textAlign = "left";
    const rows = ["phase", "block", DATA.axis === "seconds" ? "time" : "FLOPs"];
    if (f.left > 50) rows.forEach((name, i) => c.fillText(name, 4, y + (i + 0.5) * RIBBON));
  }

  box(part, y, words, fill, ink = this.colors.ink) {
    const c = this.context;
    const from = this.toX(this.step.x[part.from]), to = this.toX(this.step.x[part.to + 1]);
    c.fillStyle = fill;
    c.fillRect(from + 0.5, y, Math.max(1, to - from - 1), RIBBON - 2);
    c.fillStyle = ink;
    const left = Math.max(from, this.frame.left);
    const right = Math.min(to, this.frame.left + this.frame.width);
    const width = c.measureText(words).width + 4;
    if (width < right - left) c.fillText(words, (left + right) / 2, y + RIBBON / 2 - 1);
    else if (words === "optimizer") c.fillText("optimizer ▸", left - width / 2 - 8, y + RIBBON / 2 - 1);
  }

  // Highlights the block of the storage under the cursor: the block's forward and backward, and the
  // recomputation in its backward.
  drawBlock() {
    const block = this.cursor.storage < 0 ? -1 : this.step.block[this.cursor.storage];
    if (block < 0) return;
    const {context: c, frame: f, step} = this;
    c.save();
    this.clip();
    for (const part of step.parts.filter((part) => part.block === block)) {
      const from = this.toX(step.x[part.from]), to = this.toX(step.x[part.to + 1]);
      c.fillStyle = this.colors.accent;
      c.globalAlpha = 0.14;
      c.fillRect(from, f.top, to - from, f.height);
      for (const [begin, end] of step.replays) {
        if (begin < part.from || begin > part.to) continue;
        const left = this.toX(step.x[begin]);
        c.globalAlpha = 0.2;
        c.fillRect(left, f.top, this.toX(step.x[end]) - left, f.height);
      }
    }
    c.restore();
  }

  // Outlines the storage under the cursor, from its first instant to its last.
  drawStorage() {
    const {context: c, frame: f, cursor, step} = this;
    if (cursor.storage < 0) return;
    this.eachStorage((i, first, last, below) => {
      if (i !== cursor.storage) return;
      const path = new Path2D();
      const height = Math.max(1.5, this.toY(0) - this.toY(step.bytes[i]));
      for (let k = first; k <= last; ) {
        let end = k + 1;
        while (end <= last && below[end] === below[k]) end++;
        path.rect(f.left + k, this.toY(below[k]) - height, end - k, height);
        k = end;
      }
      c.save();
      this.clip();
      c.fillStyle = this.colors.paper;
      c.globalAlpha = 0.45;
      c.fill(path);
      c.globalAlpha = 1;
      c.strokeStyle = this.colors.ink;
      c.stroke(path);
      c.restore();
      return false;
    });
  }

  drawPeak() {
    const {context: c, frame: f, step} = this, peak = step.total[step.peakAt];
    const x = this.toX((step.x[step.peakAt] + step.x[step.peakAt + 1]) / 2), y = this.toY(peak);
    if (x < f.left || x > f.left + f.width) return;
    c.fillStyle = this.colors.ink;
    c.beginPath();
    c.moveTo(x, y - 1);
    c.lineTo(x - 5, y - 9);
    c.lineTo(x + 5, y - 9);
    c.fill();
    c.font = "bold 13px system-ui, sans-serif";
    this.label(`peak ${format(peak)}, ${step.where}`, x, y - 17);
    c.font = "12px system-ui, sans-serif";
  }

  // Draws words on a pale background, inside the frame.
  label(words, x, y) {
    const {context: c, frame: f} = this, width = c.measureText(words).width + 8;
    const left = Math.max(f.left, Math.min(f.left + f.width - width, x - width / 2));
    c.fillStyle = this.colors.paper;
    c.globalAlpha = 0.85;
    c.fillRect(left, y - 8, width, 16);
    c.globalAlpha = 1;
    c.fillStyle = this.colors.ink;
    c.textAlign = "left";
    c.textBaseline = "middle";
    c.fillText(words, left + 4, y);
  }

  drawBudget() {
    if (this.budget === null) return;
    const {context: c, frame: f} = this, y = Math.round(this.budgetY()) + 0.5;
    const isAbove = this.budget > this.range[1], isBelow = this.budget < this.range[0];
    c.strokeStyle = this.colors.ink;
    c.lineWidth = 1.5;
    c.setLineDash([6, 4]);
    c.beginPath();
    c.moveTo(f.left, y);
    c.lineTo(f.left + f.width, y);
    c.stroke();
    c.setLineDash([]);
    c.lineWidth = 1;
    c.fillStyle = this.colors.ink;
    c.beginPath();
    c.arc(f.left + f.width, y, 7, 0, 2 * Math.PI); // the handle for a finger
    c.fill();
    const beyond = isAbove ? " (above)" : isBelow ? " (below)" : "";
    const words = this.isExample ? "for example" : "at most";
    this.label(`${words} ${format(this.budget)}${beyond}`, f.left + f.width - 70, y + (isBelow ? -11 : 11));
  }

  // Returns the y of the budget's line. A budget outside the picture has its line at the edge.
  budgetY() {
    const {top, height} = this.frame;
    return Math.max(top, Math.min(top + height, this.toY(this.budget)));
  }

  drawCursor() {
    const {context: c, frame: f, step, cursor} = this;
    const x = this.toX((step.x[cursor.at] + step.x[cursor.at + 1]) / 2);
    if (x < f.left || x > f.left + f.width) return;
    c.strokeStyle = this.colors.ink;
    c.beginPath();
    c.moveTo(x, f.top);
    c.lineTo(x, f.top + f.height + 4);
    c.stroke();
  }
}

// Returns about n round numbers between two others.
function roundNumbers(from, to, n) {
  const rough = (to - from) / n, power = 10 ** Math.floor(Math.log10(rough));
  const tick = [1, 2, 5, 10].find((k) => k * power >= rough) * power, first = Math.ceil(from / tick);
  return Array.from({length: Math.floor(to / tick) - first + 1}, (_, i) =>
    Number(((first + i) * tick).toPrecision(6)));
}

// Returns the first of columns 0 .. end - 1 that shows instant `at` or a later one; `end`: none.
// (Instants grow from column to column.)
function firstAtLeast(columns, end, at) {
  let low = 0, high = end;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (columns[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low;
}
