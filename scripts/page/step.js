"use strict";
// The storages of one step, and queries about them. This file does not depend on the page.

const LAST_KIND_OF_STATE = 1; // kinds 0 and 1, weights and moments, exist all the time

class Step {
  // data: one of DATA.steps; all: DATA.
  constructor(data, all) {
    Object.assign(this, data);
    this.all = all;
    this.length = data.operators.length; // instants: before the step, and after each operator
    const n = data.label.length;
    this.born = new Int32Array(n);
    this.died = new Int32Array(n); // the last instant at which the storage exists
    this.bytes = new Float64Array(n);
    this.kind = new Uint8Array(n);
    for (let i = 0, at = 0; i < n; i++) {
      at += data.born[i]; // (the page has the differences)
      this.born[i] = at;
      this.died[i] = data.life[i] < 0 ? this.length - 1 : at + data.life[i];
      this.kind[i] = all.labels[data.label[i]][2];
      this.bytes[i] = all.labels[data.label[i]][5];
    }
    // The order of the layers, bottom up: by kind, and within a kind by birth.
    this.stack = Int32Array.from({length: n}, (_, i) => i);
    this.stack.sort((a, b) => this.kind[a] - this.kind[b] || a - b);
    this.addUp();
    this.x = this.axis(data.starts, data.x);
    this.parts = this.findParts();
  }

  // Sets the bytes at each instant: one array per kind, and their sum; and the instant of the peak.
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

  // Returns the positions (length + 1) on the axis at which the instants begin. Between two
  // `starts` they are spaced evenly.
  axis(starts, x) {
    const found = new Float64Array(this.length + 1);
    for (let at = 0, i = 0; at <= this.length; at++) {
      while (i + 2 < starts.length && starts[i + 1] <= at) i++;
      const share = (at - starts[i]) / (starts[i + 1] - starts[i]);
      found[at] = x[i] + (x[i + 1] - x[i]) * Math.min(1, Math.max(0, share));
    }
    return found;
  }

  // Returns the parts of the step in order, each {phase, block, from, to}. `from` is the first
  // instant of a part, and `to` is the last one.
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

  // Returns the instant at position x of the axis.
  at(x) {
    let low = 0, high = this.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.x[middle] <= x) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // Returns the storages that exist at an instant, bottom up.
  alive(at) {
    return Array.from(this.stack.filter((i) => this.born[i] <= at && at <= this.died[i]));
  }

  // Returns the storage at an instant and a height in bytes; -1: none.
  under(at, bytes) {
    let below = 0;
    for (const i of this.alive(at)) {
      below += this.bytes[i];
      if (bytes < below) return i;
    }
    return -1;
  }

  // ---- in words

  // Replaces offsets by block numbers: "blocks.<+1>.ln_1" in block 3 becomes "blocks.4.ln_1".
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

  // "backward of block 3, recomputation"
  placeOf(at) {
    const part = this.part(at);
    if (!part) return "before the step";
    const block = part.block === null ? "" : ` of block ${part.block}`;
    return part.phase + block + (this.isReplay(at) ? ", recomputation" : "");
  }

  // Returns the name of the operator that ran last. (Views do no work and have no name here.)
  operator(at) {
    while (at > 0 && !this.all.operators[this.operators[at]]) at--;
    return this.all.operators[this.operators[at]];
  }

  comes(i) {
    const at = this.born[i];
    if (!at) return "before the step";
    return `by ${this.operator(at)}, ${this.placeOf(at)} (operator ${at.toLocaleString("en")})`;
  }

  goes(i) {
    const at = this.died[i];
    if (this.life[i] < 0) return "no, stays for the next step";
    if (at === this.born[i]) return "at once";
    return `after ${this.operator(at)}, ${this.placeOf(at)} (operator ${at.toLocaleString("en")})`;
  }

  // Returns the largest storage at an instant that the step itself has made; -1: none.
  largest(at) {
    const made = this.alive(at).filter((i) => this.born[i] > 0);
    return made.reduce((a, b) => (a >= 0 && this.bytes[a] >= this.bytes[b] ? a : b), -1);
  }

  // Returns the groups at an instant, the largest first: [{name, kind, bytes, storages}]. Storages
  // that are equal except for their block make one group, as in `group_name_and_kind` of planner/record.py.
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

// Returns ["GiB", 2 ** 30]: the largest unit that is at most `bytes`; below 1 KiB, KiB.
function unitOf(bytes) {
  const units = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  return units.find(([, size]) => bytes >= size) || units[2];
}

// Returns bytes as text, in the unit of `like`: "1.23 GiB", and below 1 KiB "12 bytes".
function format(bytes, like = bytes) {
  const [unit, size] = unitOf(like);
  return like < size ? `${bytes} bytes`
    : `${(bytes / size).toFixed(unit === "GiB" ? 2 : 1)} ${unit}`;
}

function exactly(bytes) {
  return `${bytes.toLocaleString("en")} bytes`;
}
