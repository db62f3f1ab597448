"use strict";
// A step's storages, and what can be asked about them. Nothing here knows of a page.

const LAST_KIND_OF_STATE = 1; // weights and moments: there all the time

class Step {
  // data: one of DATA.steps; all: DATA.
  constructor(data, all) {
    Object.assign(this, data);
    this.all = all;
    this.length = data.operators.length; // instants: before the step, and after each operator
    const n = data.label.length;
    this.born = new Int32Array(n);
    this.died = new Int32Array(n); // the last instant at which it is there
    this.bytes = new Float64Array(n);
    this.kind = new Uint8Array(n);
    for (let i = 0, at = 0; i < n; i++) {
      at += data.born[i]; // written as differences
      this.born[i] = at;
      this.died[i] = data.life[i] < 0 ? this.length - 1 : at + data.life[i];
      this.kind[i] = all.labels[data.label[i]][2];
      this.bytes[i] = all.labels[data.label[i]][5];
    }
    // Bottom up: by kind, and within a kind as they were born.
    this.stack = Int32Array.from({length: n}, (_, i) => i);
    this.stack.sort((a, b) => this.kind[a] - this.kind[b] || a - b);
    this.addUp();
    this.x = this.axis(data.starts, data.x);
    this.parts = this.findParts();
  }

  // (kinds) arrays of the bytes at each instant, and their sum.
  addUp() {
    this.ofKind = this.all.kinds.map(() => new Float64Array(this.length + 1));
    for (let i = 0; i < this.bytes.length; i++) {
      this.ofKind[this.kind[i]][this.born[i]] += this.bytes[i];
      this.ofKind[this.kind[i]][this.died[i] + 1] -= this.bytes[i];
    }
    this.total = new Float64Array(this.length);
    for (const bytes of this.ofKind)
      for (let at = 0, now = 0; at < this.length; at++) {
        now += bytes[at];
        bytes[at] = now;
        this.total[at] += now;
      }
    this.peakAt = this.total.indexOf(this.total.reduce((a, b) => Math.max(a, b)));
  }

  // (length + 1) where each instant begins on the axis: between the `starts`, evenly.
  axis(starts, x) {
    const found = new Float64Array(this.length + 1);
    for (let at = 0, i = 0; at <= this.length; at++) {
      while (i + 2 < starts.length && starts[i + 1] <= at) i++;
      const share = (at - starts[i]) / (starts[i + 1] - starts[i]);
      found[at] = x[i] + (x[i + 1] - x[i]) * Math.min(1, Math.max(0, share));
    }
    return found;
  }

  // What the step does, in order: {phase, block, from, to}, the instants in between included.
  findParts() {
    const found = [];
    this.places.forEach(([from, phase, block], i) => {
      const to = (i + 1 < this.places.length ? this.places[i + 1][0] : this.length) - 1;
      const last = found[found.length - 1];
      if (last && last.phase === phase && last.block === block) last.to = to;
      else if (phase) found.push({phase, block, from, to});
    });
    return found;
  }

  part(at) {
    return this.parts.find((part) => part.from <= at && at <= part.to) || null;
  }

  isReplay(at) {
    return this.replays.some(([from, to]) => from <= at && at < to);
  }

  // The instant that is running at x.
  at(x) {
    let low = 0, high = this.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.x[middle] <= x) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // What is there at an instant, bottom up.
  alive(at) {
    return Array.from(this.stack.filter((i) => this.born[i] <= at && at <= this.died[i]));
  }

  // The storage at a height of so many bytes, or -1.
  under(at, bytes) {
    let below = 0;
    for (const i of this.alive(at)) {
      below += this.bytes[i];
      if (bytes < below) return i;
    }
    return -1;
  }

  // ---- in words

  // "blocks.<+1>.ln_1" of a storage of block 3 is "blocks.4.ln_1".
  text(i, which) {
    const words = this.all.labels[this.label[i]][which];
    return words.replace(/<([+-]\d+)>/g, (_, more) => this.block[i] + Number(more));
  }

  describe(i) {
    const [, , kind, shape, dtype, bytes, line] = this.all.labels[this.label[i]];
    const [where, code] = this.all.lines[line];
    return {
      name: this.text(i, 0), why: this.text(i, 1), kind: this.all.kinds[kind][2], shape, dtype, bytes,
      block: this.block[i], where, code, comes: this.comes(i), goes: this.goes(i),
    };
  }

  // "backward of block 3, replay"
  placeOf(at) {
    const part = this.part(at);
    if (!part) return "before the step";
    const block = part.block === null ? "" : ` of block ${part.block}`;
    return part.phase + block + (this.isReplay(at) ? ", replay" : "");
  }

  // The operator that ran last: (views, which have no name here, do nothing).
  operator(at) {
    while (at > 0 && !this.all.operators[this.operators[at]]) at--;
    return this.all.operators[this.operators[at]];
  }

  comes(i) {
    const at = this.born[i];
    if (!at) return "was there before the step";
    return `from ${this.operator(at)}, ${this.placeOf(at)} (operator ${at.toLocaleString("en")})`;
  }

  goes(i) {
    const at = this.died[i];
    if (this.life[i] < 0) return "stays for the next step";
    if (at === this.born[i]) return "at once";
    return `after ${this.operator(at)}, ${this.placeOf(at)} (operator ${at.toLocaleString("en")})`;
  }

  // The largest storage that the step itself has made, of those at an instant; or -1.
  largest(at) {
    const made = this.alive(at).filter((i) => this.born[i] > 0);
    return made.reduce((a, b) => (a >= 0 && this.bytes[a] >= this.bytes[b] ? a : b), -1);
  }

  // What is alike but for the block counts as one, as `group_of` in planner/record.py has it:
  // [{name, kind, bytes, storages}], the largest first.
  groups(at) {
    const found = new Map();
    for (const i of this.alive(at)) {
      const kind = this.kind[i], name = this.all.labels[this.label[i]][7], key = kind + name;
      if (!found.has(key)) found.set(key, {name, kind, bytes: 0, storages: []});
      found.get(key).bytes += this.bytes[i];
      found.get(key).storages.push(i);
    }
    for (const group of found.values())
      group.storages.sort((a, b) => this.bytes[b] - this.bytes[a] || a - b);
    return [...found.values()].sort((a, b) => b.bytes - a.bytes);
  }
}

// ["GiB", its bytes]: the largest unit of which there is at least one, or the smallest.
function unitOf(bytes) {
  const units = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  return units.find(([, size]) => bytes >= size) || units[2];
}

// "1.23 GiB"; and the bytes themselves.
function format(bytes) {
  const [unit, size] = unitOf(bytes);
  return bytes < size ? `${bytes} bytes`
    : `${(bytes / size).toFixed(unit === "GiB" ? 2 : 1)} ${unit}`;
}

function exactly(bytes) {
  return `${bytes.toLocaleString("en")} bytes`;
}
