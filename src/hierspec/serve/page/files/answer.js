// One answer: what each pass wrote and rejected, and what can be counted from that.

export class Answer {
  constructor(plan, plainRate = null) {
    this.plan = plan;
    this.plainRate = plainRate; // tokens a second of plain decoding, an estimate
    this.steps = [];
    this.ended = null; // stop, length, stopped (by the reader) or error
  }

  add(step) { this.steps.push(step); }

  get text() { return this.steps.map((step) => step.pieces.map((piece) => piece.text).join("")).join(""); }
  get tokens() { return sum(this.steps, (step) => step.tokens); }
  get tokensPerPass() { return this.steps.length ? this.tokens / this.steps.length : null; }

  /** Tokens a second after the first pass, which also read the prompt; of the last `seconds` only, where given. */
  rate(seconds = Infinity) {
    let tokens = 0, time = 0;
    for (let at = this.steps.length - 1; at > 0 && time < seconds; at--) {
      tokens += this.steps[at].tokens;
      time += this.steps[at].seconds;
    }
    return time > 0 ? tokens / time : null;
  }

  /** Tokens that plain decoding would have written by now, by the estimate. */
  get plainTokens() {
    if (!this.plainRate || !this.steps.length) return null;
    return Math.min(this.tokens, 1 + this.plainRate * sum(this.steps.slice(1), (step) => step.seconds));
  }

  /** Pieces of text by source, the commonest first. */
  sources() {
    const counts = new Map();
    for (const step of this.steps) {
      for (const piece of step.pieces) counts.set(piece.source, (counts.get(piece.source) ?? 0) + 1);
    }
    return [...counts].sort((a, b) => b[1] - a[1]);
  }
}

/** What a pass verified, by source: [drafted, accepted]. */
export function verified(step) {
  const counts = new Map();
  const count = (source, accepted) => {
    const [drafted, before] = counts.get(source) ?? [0, 0];
    counts.set(source, [drafted + 1, before + accepted]);
  };
  for (const piece of step.pieces) if (piece.depth > 0) count(piece.source, 1);
  for (const entry of step.rejected) count(entry.source, 0);
  return counts;
}

/** Index among a pass's tokens of a piece: accepted drafts come first, the model's own token last. */
const indexOf = (piece, step) => (piece.depth > 0 ? piece.depth - 1 : step.tokens - 1);

/** The draft of a pass as rows, one a branch: tokens with source and whether they were accepted. */
export function branches(step) {
  const written = step.pieces.filter((piece) => piece.depth > 0)
    .map((piece) => ({ text: piece.text, source: piece.source, accepted: true }));
  const parents = new Set(step.rejected.map((entry) => entry.parent));
  const rows = step.rejected.flatMap((entry, at) => (parents.has(at) ? [] : [chain(step.rejected, entry, written)]));
  const whole = rows.some((row) => row.filter((token) => token.accepted).length === written.length);
  return written.length && !whole ? [written, ...rows] : rows;
}

const chain = (rejected, entry, written) => [...written.slice(0, entry.at), ...tail(rejected, entry)];

function tail(rejected, entry) {
  const tokens = [];
  for (let node = entry; node; node = rejected[node.parent]) {
    tokens.unshift({ text: node.text, source: node.source, accepted: false });
  }
  return tokens;
}

/** What was rejected where a piece stands: branches, each a list of tokens. */
export function rejectedAt(piece, step) {
  const at = indexOf(piece, step), parents = new Set(step.rejected.map((entry) => entry.parent));
  return step.rejected.flatMap((entry, place) =>
    (entry.at === at && !parents.has(place) ? [tail(step.rejected, entry)] : []));
}

const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);
