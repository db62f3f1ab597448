// Maps pixels to the step: a column of pixels to an instant, and a row of pixels to bytes.
// Of all instants that a column covers, it shows the one with the most memory.

const RIBBON = 15; // pixels, the height of a row of phases or blocks

class Frame {
  constructor(canvas, steps) {
    Object.assign(this, {canvas, steps, step: steps[0]});
    this.budget = null; // bytes
    this.isExample = false; // is the budget an example, because none was given?
    const none = steps.find((step) => step.name === "none") || steps[0];
    this.least = none.total[none.peakAt]; // bytes: the axis reaches at least the peak of `none`
    this.longest = Math.max(...steps.map((step) => step.x[step.length]));
    this.view = [0, this.longest];
    this.isEnlarged = false; // does the vertical axis begin above weights and moments?
    this.heights = null; // (kinds x columns) bytes as drawn now
  }

  resize() {
    const {clientWidth: width, clientHeight: height} = this.canvas;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.context = this.canvas.getContext("2d");
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const left = width < 600 ? 46 : 64, top = 24;
    this.frame = {
      left, top, width: Math.max(1, width - left - 14), height: height - top - 3 * RIBBON - 10,
    };
    this.heights = null;
    this.place();
  }

  // Sets the instant that each column shows.
  place() {
    const {width} = this.frame, [from, to] = this.view, step = this.step;
    this.columns = new Int32Array(width);
    const end = step.x[step.length];
    for (let c = 0; c < width; c++) {
      const x = from + (to - from) * c / width;
      let best = x >= end ? -1 : step.at(x);
      const last = x >= end ? -1 : step.at(from + (to - from) * (c + 0.999) / width);
      for (let at = best + 1; at <= last; at++) if (step.total[at] > step.total[best]) best = at;
      this.columns[c] = best; // -1: the step has ended
    }
  }

  // Returns the bytes at the frame's lower and upper edge.
  rangeOf(step) {
    if (!this.isEnlarged)
      return [0, 1.12 * Math.max(this.least, step.total[step.peakAt], this.nearBudget)];
    let floor = 0;
    for (let k = 0; k <= LAST_KIND_OF_STATE; k++) floor += step.ofKind[k][0];
    const most = this.columns.reduce((most, at) => (at < 0 ? most : Math.max(most, step.total[at])),
      1.01 * floor); // (columns after the step have no instant)
    return [floor - 0.04 * (most - floor), most + 0.12 * (most - floor)];
  }

  // Returns the budget, but at most 1.25 times `least`: a high budget would make the picture flat.
  get nearBudget() {
    return this.budget === null ? 0 : Math.min(this.budget, 1.25 * this.least);
  }

  toX(x) {
    return this.frame.left + (x - this.view[0]) / (this.view[1] - this.view[0]) * this.frame.width;
  }

  toY(bytes) {
    const [bottom, top] = this.range;
    return this.frame.top + this.frame.height * (1 - (bytes - bottom) / (top - bottom));
  }

  fromX(px) {
    return this.view[0] + (px - this.frame.left) / this.frame.width * (this.view[1] - this.view[0]);
  }

  fromY(py) {
    const [bottom, top] = this.range;
    return bottom + (top - bottom) * (1 - (py - this.frame.top) / this.frame.height);
  }

  // Returns the instant and the storage at a position on the canvas: {at, storage}.
  under(px, py) {
    const c = Math.floor(px - this.frame.left);
    if (c < 0 || c >= this.frame.width || this.columns[c] < 0) return null;
    const at = this.columns[c];
    const inside = py >= this.frame.top && py <= this.frame.top + this.frame.height;
    return {at, storage: inside ? this.step.under(at, this.fromY(py)) : -1};
  }

  // Returns the part of the step at a position on the ribbon, the two rows under the picture. In
  // the first row the part is a whole phase.
  ribbonAt(px, py) {
    const row = Math.floor((py - this.frame.top - this.frame.height - 4) / RIBBON);
    if (row < 0 || row > 1 || px < this.frame.left) return null;
    const at = this.step.at(this.fromX(px)), part = this.step.part(at);
    if (!part || this.fromX(px) > this.step.x[this.step.length]) return null;
    return row === 0 ? this.phase(part.phase) : part;
  }

  // Returns a whole phase as one part.
  phase(name) {
    const parts = this.step.parts.filter((part) => part.phase === name);
    return {phase: name, block: null, from: parts[0].from, to: parts[parts.length - 1].to};
  }
}
