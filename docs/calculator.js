"use strict";
// What docs/calculator.html computes: the peak of a step by formulas, within 0.2 % of the planner's
// (tests/test_calculator.py), which simulates a step and takes seconds. Numbers are whole.
//
// Letters: B sequences of T tokens, N = B T; V vocabulary, L layers, C width, F that of the MLP,
// H heads; a = 2 bytes of an activation under autocast (to bfloat16 or float16), else 4. A shape s:
//   {B, T, V, L, C, F, H, positions, dropout, policy, layers (that it applies to), chunks (of the
//    head; 0 = chosen), precision, optimizer, moments, ddp, shards}
const {ceil, floor, max, min} = Math;
const low = (s) => (s.precision === "float32" ? 0 : 1); // is there autocast?
const recomputed = (s) => (s.policy === "none" ? 0 : s.layers); // blocks

// memory/head.py: the head runs in chunks of tokens, and their softmax in slices.
const countChunks = (tokens, V, asked, itemsize) =>
  max(1, min(asked || ceil((tokens * V * itemsize) / CHUNK), tokens));
const multiple = (n, of) => max(of, of * floor(n / of));
const rowsOfSlice = (tokens, V) =>
  min(tokens, multiple(max(floor(SLICE / V), floor(tokens / 32)), ROWS));

// planner/formulas.py
function countParameters({V, positions, L, C, F}) {
  return (V + positions) * C + 2 * C + L * (4 * C * C + 2 * C * F + 9 * C + F);
}

function optimizerBytes(s, P = countParameters(s), matrices = 4 * s.C * s.C + 2 * s.C * s.F) {
  const muon = s.optimizer === "muon" ? s.L : 0; // one moment, no counter, for blocks' matrices
  return (s.moments === "bfloat16" ? 2 : 4) * (2 * P - muon * matrices) +
    4 * (4 + 12 * s.L - 4 * muon);
}

function headBytes(s) {
  const {V, C} = s, N = s.B * s.T, amp = low(s), a = 4 - 2 * amp;
  if (s.chunks === 1) return 12 * V * N + 2 * amp * (V * C + N * C);
  const n = ceil(N / countChunks(N, V, s.chunks, a)), r = rowsOfSlice(n, V);
  const padded = amp ? PAD * ceil(V / PAD) : V;
  const softmax = 4 * r + 4 * V * r * amp;
  const copies = 2 * (padded + n) * C * amp, passing = max(softmax, a * n * C);
  return 4 * (V + N) * C + 13 * n + copies + a * padded * n + passing;
}

function stepFlops(s) { // of the matrix products, per token: [needed, replayed]
  const {V, L, C, F, T, policy} = s, again = twice(policy), wide = 2 * C * F;
  const flops = {c_attn: 6 * C * C, attention: 2 * T * C, c_proj: 2 * C * C, c_fc: wide, end: wide};
  const sum = (names) => names.reduce((total, name) => total + flops[name], 0);
  // A replay of a block's end makes the last mask, too, and that comes after the last matmul.
  if (s.dropout && again.includes("c_fc") && !kept(policy).includes("mask")) again.push("end");
  return [3 * (L * sum(Object.keys(flops)) + 2 * V * C), sum(again) * recomputed(s)];
}

// ---- A step, as what is born and what dies, at the instants at which most is alive: in the head,
// with which forward ends; in each block's backward, the last one first; in the optimizer. A GPU of
// NVIDIA's takes it: there attention and dropout have kernels of their own.
const KINDS = ["parameters", "optimizer", "gradients", "activations", "recomputed", "head",
  "temporaries"];
const WORKSPACES = 2 * 8320 * 1024; // of cuBLAS: planner/operators.py
function peak(s) { // {where, bytes, parts: {kind: bytes}}
  const walk = new Walk(s), policy = (i) => (i < recomputed(s) ? s.policy : "none");
  walk.state();
  walk.forward();
  walk.head();
  for (let i = s.L - 1; i >= 0; i--) walk.block(i, policy(i));
  walk.embeddings();
  walk.update();
  return {where: walk.where, bytes: walk.bytes, parts: walk.most};
}

class Walk {
  constructor(s) {
    const {B, T, H, C, F} = s, N = B * T, amp = low(s), a = 4 - 2 * amp, copies = 2 * amp;
    const ddp = Number(s.ddp), dropout = Number(s.dropout), n = s.shards, NC = N * C;
    Object.assign(this, {s, N, C, F, NC, amp, a, ddp, dropout, n, total: 0, bytes: 0});
    this.now = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
    this.place = "head";
    // What a block makes beside its input x, and in whose backward that goes. Under autocast a
    // linear layer's input comes with a copy of its weight.
    this.sizes = {
      ln_1: a * NC + 8 * N + copies * 3 * C * C, // c_attn; with mean and deviation
      x: 4 * NC, qkv: 3 * a * NC, attention: a * NC + 4 * N * H, // with the softmax's normaliser
      c_proj: copies * C * C, results: 2 * a * NC, mask: 2 * NC * dropout, // of both halves
      x2: 4 * NC, ln_2: a * NC + 8 * N + copies * C * F, // ln_2; c_fc
      c_fc: a * N * F, gelu: a * N * F + copies * C * F, // GELU; mlp.c_proj
    };
    // As attention's kernel rounds up T and a head's size
    this.inAttention = amp * 4 * B * H * 128 * ceil(T / 128) * (32 * ceil(C / H / 32) + 1);
  }

  add(...changes) { // kind, bytes that are born (or die: below 0), kind, bytes, ... in this order
    for (let i = 0; i < changes.length; i += 2) {
      this.now[changes[i]] += changes[i + 1];
      this.total += changes[i + 1];
      if (this.total <= this.bytes) continue;
      Object.assign(this, {bytes: this.total, most: {...this.now}, where: this.place});
    }
  }

  // ---- The parts of a step, in order

  state() { // weights and moments, and a step count of 4 for each tensor
    const {s, n} = this, held = s.L * this.inABlock(n) + this.outside(n);
    this.add("parameters", 4 * held, "gradients", 4 * held * this.ddp);
    this.add("optimizer", optimizerBytes(s, held, this.inMatrices(n)));
  }

  forward() { // what it leaves: ids, labels, a mask; what the blocks return, ln_f's statistics
    const {s, N, NC, n} = this, some = recomputed(s);
    this.add("temporaries", WORKSPACES, "activations", 24 * N + NC * this.dropout + 4 * NC);
    this.add("activations", some * this.kept(s.policy) + (s.L - some) * this.kept("none"));
    // The root's weights are whole; and the last block's buffer is still there.
    if (n > 1) this.add("parameters", 4 * this.inRoot(1) + 4 * n * this.inABlock(n));
  }

  kept(policy) { // of a block
    return kept(policy).reduce((sum, name) => sum + this.sizes[name], 0);
  }

  head() { // forward and backward
    const {N, C, NC, a, amp} = this, {V, chunks} = this.s, ofWeight = 4 * V * C, ofX = 4 * NC;
    const size = headBytes(this.s), kind = this.ddp ? "head" : "gradients";
    const normed = 4 * NC, kept = chunks === 1 && !amp ? "activations" : "temporaries"; // by ln_f
    let end = size - ofWeight;
    this.add(kept, normed);
    if (chunks === 1) {
      const gone = amp * (a * V * N + 2 * V * C); // of logits, a copy: before the weight's is cast
      end = (1 - amp) * a * V * N + 2 * amp * V * C + (1 + amp) * a * NC; // logits', weight's, x's
      this.add("head", size - 4 * V * N, "temporaries", -normed * amp);
      this.add("head", 4 * V * N, "head", -size); // backward begins
      this.add("head", end + gone, "head", -gone, kind, ofWeight, kept, -normed * (1 - amp));
    } else {
      this.add(kind, ofWeight, "head", end, "temporaries", -normed);
    }
    this.add("head", ofX - end);
    this.place = "backward"; // of ln_f
    this.add("temporaries", ofX, "head", -ofX, "activations", -4 * NC - 8 * N);
  }

  block(i, policy) { // its backward, from its end; the gradient of what it returned is there, 4 N C
    const {N, C, F, NC, a, inAttention} = this, ofWide = a * N * F;
    const result = policy === "selective" ? a * NC : 0; // of one c_proj
    Object.assign(this, {place: `backward, block ${i}`, policy, result});
    this.there = Object.fromEntries(kept(policy).map((name) => [name, "activations"]));

    this.gather(i);
    let ofUpdate = this.enterHalf();
    this.need("c_fc", "gelu");
    this.linear(F, C, ofUpdate, "gelu"); // mlp.c_proj
    this.weight(C * F);
    this.add("temporaries", ofWide, this.there.c_fc, -this.sizes.c_fc, "temporaries", -ofWide);
    this.need("ln_2");
    this.linear(C, F, ofWide, "ln_2"); // c_fc
    this.layerNorm(C * F);
    this.add(this.there.x2, -this.sizes.x2);

    ofUpdate = this.enterHalf();
    this.need("qkv", "attention");
    this.linear(C, C, ofUpdate, "c_proj"); // attn.c_proj
    this.weight(C * C);
    this.add("temporaries", 3 * a * NC + inAttention); // of q, k and v
    this.add(this.there.qkv, -this.sizes.qkv, this.there.attention, -this.sizes.attention);
    this.add("temporaries", -a * NC - inAttention);
    this.add("temporaries", 3 * a * NC, "temporaries", -3 * a * NC); // of all three, side by side
    this.need("ln_1");
    this.linear(C, 3 * C, 3 * a * NC, "ln_1"); // c_attn
    this.layerNorm(3 * C * C);
    this.add("activations", -4 * NC - this.result * (1 - this.dropout)); // x
    this.add("gradients", 4 * (9 * C + F) * (1 - this.ddp)); // of biases and gains
    this.reduce(i);
  }

  embeddings() { // backward of what comes before the blocks: the rest of the gradients
    const {C, NC, n, ddp} = this, {V, positions} = this.s, wide = 4 * NC * this.dropout;
    this.place = "backward";
    this.add("temporaries", wide, "temporaries", -wide, "activations", -NC * this.dropout);
    this.add("gradients", 4 * (positions * C + 2 * C) * (1 - ddp));
    const channels = ceil(C / ceil((V * C) / (2 * SLICE))); // at a time: TiedEmbeddingFunction
    this.add("temporaries", 4 * V * channels, "temporaries", -4 * V * channels - 4 * NC);
    this.add("head", -4 * V * C * ddp);
    if (n === 1) return;
    this.add("parameters", -4 * this.inRoot(1), "gradients", -4 * n * this.inABlock(n));
    for (const group of ["inRoot", "inPositions"]) {
      const share = 4 * this[group](n), whole = 4 * this[group](1);
      this.add("gradients", n * share, "gradients", share - whole, "gradients", -n * share);
    }
  }

  update() { // the gradients' norm, and what the optimizer copies
    const {s, n} = this, muon = s.optimizer === "muon" ? 1 : 0, lean = s.moments === "bfloat16";
    const matrices = this.matrices(n), areas = matrices.map(([rows, columns]) => rows * columns);
    const tables = [s.V, s.positions].map((rows) => ceil(rows / n) * s.C);
    const largest = max(...tables, ...(muon ? [] : areas));
    let most = lean ? 8 * min(largest, AT_A_TIME) : 0; // both moments of a piece, in float32
    // `nesterov_momentum` has gradients, momenta and a mean of both, 4 each, and that in bfloat16, 2; or
    // `orthogonalize`, in float32, what it gets and makes and 3 squares (in factors 5), 4 each.
    for (const [rows, columns] of muon ? matrices : []) {
      const alike = s.L * matrices.filter(([r, c]) => r === rows && c === columns).length;
      const together = min(alike, max(1, floor(AT_A_TIME / (rows * columns))));
      const size = together * rows * columns, square = together * min(rows, columns) ** 2;
      const products = 8 * size + (size > square ? 20 : 12) * square;
      most = max(most, s.precision === "bfloat16" ? 14 * size : max(12 * size, products));
    }
    // For the gradients' norm: norms of rows, those beside all vectors, that in float64.
    const rows = matrices.reduce((sum, [r]) => sum + r * s.L, (tables[0] + tables[1]) / s.C);
    const vectors = s.L * (this.inABlock(n) - this.inMatrices(n)) + 2 * ceil(s.C / n);
    this.place = "optimizer";
    this.add("temporaries", max(most, 4 * rows + 12 * (rows + vectors)));
  }

  // ---- The parts of a block's backward

  enterHalf() { // the gradient of its update; without autocast and dropout it is x's own
    const {NC, a, amp, dropout} = this, size = a * NC;
    this.add("temporaries", size * amp);
    this.need("mask"); // dropout is the last of a half, and goes back first
    this.add("temporaries", size * dropout, "temporaries", -size * amp * dropout);
    this.add(this.there.mask, -NC * dropout);
    return amp || dropout ? size : 0;
  }

  need(...names) { // replay, if one of them is not there, all that lies between two that are
    const {a, amp, NC, dropout, result} = this;
    const [, , byOperator] = RECOMPUTE[this.policy], between = byOperator ? "" : "|"; // (or all)
    const made = kept("none").map((name) => (name in this.there ? between : name)).join(" ");
    const missing = made.split("|").map(words).find((run) => run.some((it) => names.includes(it)));
    if (!missing) return;
    this.add("activations", -result); // x2 is made of it
    for (const name of missing) this.add(this.there[name] = "recomputed", this.sizes[name]);
    // Until the MLP returns, the call of it has ln_2's result, in float32 beside the copy.
    const ofMLP = missing.includes("ln_2") && missing.includes("gelu");
    const masked = dropout && missing.includes("mask"), returned = masked * (a * NC - result - NC);
    const beside = 4 * NC * amp * ofMLP + returned; // (the last mask is not there yet)
    this.add("recomputed", beside, "recomputed", -beside);
    if (!masked) return;
    // It ends with dropout, which has what the MLP returned, and makes a mask and as much.
    const updates = 2 * a * NC - result; // (`result`: that is there)
    this.add("recomputed", updates, "recomputed", -updates, "activations", -result);
  }

  linear(columns, rows, ofResult, input) { // gradients of input and weight come, its result's goes
    this.add("temporaries", this.a * this.N * columns);
    this.add(this.amp || this.ddp ? "temporaries" : "gradients", this.a * columns * rows);
    this.add("temporaries", -ofResult, this.there[input], -this.sizes[input]);
  }

  weight(elements) { // its gradient, in float32; in DDP it is added to what is there
    this.add(this.ddp ? "temporaries" : "gradients", 4 * elements * this.amp);
    this.add("temporaries", -2 * elements * this.amp - 4 * elements * this.ddp);
  }

  layerNorm(elements) { // after `weight` of the linear layer that follows it
    this.add("temporaries", 4 * this.NC * this.amp, "temporaries", -2 * this.NC * this.amp);
    this.weight(elements);
    this.add("temporaries", 4 * this.NC, "temporaries", -8 * this.NC);
  }

  // Shards: a block's weights are copied out of their buffer, the next one's takes its place
  gather(i) {
    if (this.n === 1) return;
    const buffer = 4 * this.n * this.inABlock(this.n);
    this.add("parameters", 4 * this.inABlock(1), "parameters", i === 0 ? -buffer : 0);
  }

  reduce(i) { // weights go, gradients too, into a buffer in the last one's place; a share stays
    if (this.n === 1) return;
    const whole = 4 * this.inABlock(1), share = 4 * this.inABlock(this.n);
    const buffer = i === this.s.L - 1 ? this.n * share : 0;
    this.add("parameters", -whole, "gradients", buffer, "gradients", share - whole);
  }

  // Elements that one of n processes has: of each weight an n-th of the rows, rounded up
  matrices(n) { // [rows, columns]
    const {C, F} = this;
    return [[3 * C, C], [C, C], [F, C], [C, F]].map(([rows, columns]) => [ceil(rows / n), columns]);
  }
  inMatrices(n) { return this.matrices(n).reduce((sum, [r, c]) => sum + r * c, 0); }
  inABlock(n) {
    return this.inMatrices(n) + ceil((3 * this.C) / n) + ceil(this.F / n) + 6 * ceil(this.C / n);
  }
  inRoot(n) { return ceil(this.s.V / n) * this.C + 2 * ceil(this.C / n); } // with ln_f
  inPositions(n) { return ceil(this.s.positions / n) * this.C; }
  outside(n) { return this.inRoot(n) + this.inPositions(n); } // of blocks
}

// ---- Tables, written by `python -m studies.calculator_tables`
const CHUNK = 83886080, SLICE = 4194304, PAD = 64, ROWS = 4, AT_A_TIME = 4194304;
const RECOMPUTE = { // policy: what it keeps beside a mask, multiplies twice; by operator?
  "none": ["x ln_1 qkv attention c_proj mask x2 ln_2 c_fc gelu", "", false],
  "cheap": ["x qkv attention c_proj mask x2 c_fc", "", false],
  "selective": ["x qkv attention c_fc results", "", true],
  "mlp": ["x ln_1 qkv attention c_proj mask x2", "c_fc", false],
  "attn": ["x mask x2 ln_2 c_fc gelu", "c_attn attention", false],
  "qkv": ["x qkv attention", "c_proj c_fc", false],
  "sdpa": ["x attention", "c_attn c_proj c_fc", true],
  "full": ["x", "c_attn attention c_proj c_fc", false]
};
const POLICIES = Object.keys(RECOMPUTE), words = (text) => text.match(/\w+/g) ?? [];
const kept = (p) => words(RECOMPUTE[p][0]), twice = (p) => words(RECOMPUTE[p][1]);
const SHAPES = {
  "gpt2": {"n_layers": 12, "n_heads": 12, "d_model": 768},
  "gpt2-medium": {"n_layers": 24, "n_heads": 16, "d_model": 1024},
  "gpt2-large": {"n_layers": 36, "n_heads": 20, "d_model": 1280},
  "gpt2-xl": {"n_layers": 48, "n_heads": 25, "d_model": 1600}
};
const CARDS = { // GiB. (Not Apple's: no formula here has the scores that attention keeps there.)
  "RTX 2080 Ti": 10.6, "RTX 3060 12GB": 11.6, "RTX 3070": 7.6, "RTX 3080 10GB": 9.6, "RTX 3090": 23.5,
  "RTX 4060": 7.6, "RTX 4060 Ti 16GB": 15.4, "RTX 4070": 11.6, "RTX 4070 Ti": 11.6, "RTX 4080": 15.4,
  "RTX 4090": 23.4, "RTX 5060 Ti 16GB": 15.4, "RTX 5070": 11.6, "RTX 5080": 15.4, "RTX 5090": 31.3,
  "V100 16GB": 15.7, "V100 32GB": 31.7, "T4": 14.5, "L4": 22.0, "A10G": 21.9,
  "RTX A6000": 47.4, "RTX 6000 Ada": 44.4, "L40S": 44.4, "A100 40GB": 39.3, "A100": 79.1,
  "A100 PCIe": 79.1, "H100": 79.1, "H100 PCIe": 79.1, "H200": 139.7, "B200": 178.3
};

// ---- What the trainers are asked for
const GIB = 2 ** 30, memoryOf = (card) => floor(CARDS[card] * GIB);
const forTensors = (room) => floor(room - max(0.1 * room, min(GIB, room / 4))); // trainer/device.py

const SMALL = { // the first command's model, and the defaults of all else
  layers: 3, width: 128, heads: 4, mlp: 512, length: 64, batch: 12, vocabulary: 1024,
  policy: "none", blocks: 3, precision: "bfloat16", optimizer: "adamw", moments: "float32",
  dropout: "off", head: "chunks", processes: 1, trainer: "ddp", card: "RTX 3060 12GB",
};

function modelOf({layers, heads, width}) { // its name, if it has one
  const same = (m) => m.n_layers === layers && m.n_heads === heads && m.d_model === width;
  return Object.keys(SHAPES).find((name) => same(SHAPES[name]));
}

function shapeOf(state) {
  return {
    B: state.batch, T: state.length, V: state.vocabulary, L: state.layers, C: state.width,
    F: state.mlp, H: state.heads, dropout: state.dropout === "on", policy: state.policy,
    positions: modelOf(state) ? max(1024, state.length) : state.length, layers: state.blocks,
    chunks: state.head === "chunks" ? 0 : 1, optimizer: state.optimizer, moments: state.moments,
    precision: state.precision, ddp: state.processes > 1 && state.trainer === "ddp",
    shards: state.trainer === "fsdp" ? state.processes : 1,
  };
}

function flags(state) {
  const model = modelOf(state), words = [], usual = {...SMALL, mlp: 4 * state.width};
  const add = (flag, name) => state[name] === usual[name] || words.push(flag, state[name]);
  if (model) Object.assign(usual, {length: 1024, vocabulary: 50257}), words.push("--model", model);
  else add("--n-layers", "layers"), add("--d-model", "width"), add("--n-heads", "heads");
  add("--d-ff", "mlp"), add("--seq-len", "length"), add("--batch-size", "batch");
  if (model && state.length > 1024) words.push("--max-position-embeddings", state.length);
  if (state.vocabulary !== usual.vocabulary) {
    if (state.vocabulary === 50257) words.push("--tokenizer-name", "gpt2");
    else words.push("--tokenizer-name", "bpe", "--vocab-size", state.vocabulary);
  }
  if (state.dropout === "on") words.push("--dropout", 0.1);
  if (state.precision === "float16") words.push("--amp-dtype", "float16");
  if (state.precision === "float32") words.push("--no-amp");
  add("--optimizer", "optimizer"), add("--moments-dtype", "moments");
  if (state.head !== "chunks") words.push("--loss-chunks", 1);
  return words;
}

function largestBatch(s, room) { // the most sequences that fit; 0: not even one
  let most = 0;
  for (let more = 2 ** 19; more >= 1; more /= 2) {
    if (peak({...s, B: most + more}).bytes <= room) most += more;
  }
  return most;
}

// The policy to run with on the card: where one has to be, `auto`, which knows mixes and times.
function advice(state) { // null: nothing fits
  const room = forTensors(memoryOf(state.card));
  const fits = (policy) => peak(shapeOf({...state, policy, blocks: state.layers})).bytes <= room;
  return fits("none") ? "none" : POLICIES.some(fits) ? "auto" : null;
}

function how({policy, blocks, layers}) { // it recomputes
  const some = blocks < layers && policy !== "auto" ? `:${blocks}` : "";
  return policy === "none" ? [] : ["--use-activation-checkpoint", policy + some];
}

function runCommand(state) {
  const start = state.processes === 1 ? ["python", "train_minimal.py"]
    : ["torchrun", `--nproc-per-node=${state.processes}`, `train_${state.trainer}.py`];
  return [...start, ...flags(state), ...how(state)].join(" ");
}

const onCard = (state) => [...flags(state), "--card", state.card.replaceAll(" ", "-")];

function planCommand(state) {
  const many = state.processes === 1 ? [] : ["--nproc-per-node", state.processes];
  if (many.length && state.trainer === "fsdp") many.push("--fsdp");
  return ["python", "-m", "scripts.plan_memory", ...onCard(state), ...many].join(" ");
}

function seeCommand(state) {
  return ["python", "-m", "scripts.memory_page", ...onCard(state), ...how(state)].join(" ");
}
