// The plan as a hierarchy: tiers stacked, stores beside them, and drafted tokens that rise, stay or fall away.

import { verified } from "./answer.js";
import { calm, percent, svg } from "./dom.js";
import { TARGET, look } from "./sources.js";

const WIDTH = 340, MIDDLE = 112, STORE_LEFT = 234, ROW = 46, GAP = 34, STORE = 24, TAPE = 28, TOP = 52;
const MOST_DOTS = 24;

export class Drawing {
  constructor(root) { this.root = root; this.plan = null; }

  show(plan) {
    if (this.plan === plan) return;
    this.plan = plan;
    this.clear();
  }

  clear() {
    const { tiers } = this.plan;
    this.counts = new Map(); // source -> [drafted, accepted]
    this.labels = new Map();
    this.routes = new Map(); // source -> points from where it drafts up to the target
    this.boxes = svg("g");
    this.lines = svg("g", { class: "lines" });
    let top = TOP;
    tiers.forEach((tier, level) => {
      const height = Math.max(ROW, tier.stores.length * (STORE + 6) - 6);
      this.tier(tier, level, top, height);
      top += height + GAP;
    });
    this.tape = Array.from({ length: TAPE }, (_, at) =>
      svg("rect", { class: "empty", x: 2 + at * 12, y: 4, width: 10, height: 14, rx: 3 }));
    this.dots = svg("g");
    const height = top - GAP + 4;
    this.root.replaceChildren(svg("svg", {
      viewBox: `0 0 ${WIDTH} ${height}`, class: "drawing", role: "img", "aria-label": inWords(this.plan),
    }, this.lines, this.dots, ...this.tape, this.boxes));
  }

  tier(tier, level, top, height) {
    const width = 200 - 26 * level, left = MIDDLE - width / 2, middle = top + height / 2;
    const edge = middle - ROW / 2, goal = level === 0 ? 24 : this.bottom; // of this box, and of what stands above it
    this.way = [[MIDDLE, edge], ...(level === 0 ? [[MIDDLE, 20]] : [[MIDDLE, goal], ...this.way])]; // up to the text
    this.lines.append(svg("path", { d: `M${MIDDLE} ${edge}V${goal}` }));
    this.bottom = edge + ROW;
    const source = level === 0 ? TARGET : tier.name;
    const under = level === 0 ? (tier.layers ? `${tier.layers} layers, verifies` : "verifies") : "nothing drafted yet";
    this.box(source, level === 0 ? "the model" : tier.name, under, left, middle - ROW / 2, width, ROW, 10);
    if (level > 0) this.routes.set(tier.name, this.way);
    tier.stores.forEach((store, number) => {
      const y = middle + (number - (tier.stores.length - 1) / 2) * (STORE + 6);
      this.lines.append(svg("path", { d: `M${STORE_LEFT} ${y}C${STORE_LEFT - 16} ${y} ${left + width + 16} ${middle} ${left + width} ${middle}` }));
      this.box(store, store, "", STORE_LEFT, y - STORE / 2, WIDTH - STORE_LEFT - 2, STORE, STORE / 2);
      this.routes.set(store, [[STORE_LEFT, y], [left + width, middle], ...this.way]);
    });
  }

  box(source, name, under, x, y, width, height, round) {
    const small = height < ROW, centre = { x: x + width / 2, "text-anchor": "middle" };
    const title = svg("text", { ...centre, y: y + (small ? height / 2 + 4 : 20), class: "name" }, name);
    const label = svg("text", { ...centre, y: y + height - 11, class: "under" }, under);
    this.boxes.append(svg("g", { class: `box ${look(source)}` },
      svg("rect", { x, y, width, height, rx: round }), title, ...(small ? [svg("title", {}, name)] : [label])));
    this.labels.set(source, small ? title : label);
  }

  /** What a pass did: tokens rise from who drafted them; those that were rejected end at the model. */
  step(step) {
    for (const [source, [drafted, accepted]] of verified(step)) {
      const [before, kept] = this.counts.get(source) ?? [0, 0];
      this.counts.set(source, [before + drafted, kept + accepted]);
      const label = this.labels.get(source);
      const share = percent((kept + accepted) / (before + drafted));
      if (label) label.textContent = label.classList.contains("under") ? `${share} of ${before + drafted} accepted` : `${source} ${share}`;
    }
    for (const piece of step.pieces) this.write(piece.source);
    if (calm()) return;
    let delay = 0;
    for (const piece of step.pieces) if (piece.depth > 0) this.fly(piece.source, true, delay += 35);
    for (const entry of step.rejected) this.fly(entry.source, false, delay += 20);
    this.fly(TARGET, true, delay);
  }

  write(source) {
    for (let at = 1; at < TAPE; at++) this.tape[at - 1].setAttribute("class", this.tape[at].getAttribute("class"));
    this.tape[TAPE - 1].setAttribute("class", `token ${look(source)}`);
  }

  fly(source, accepted, delay) {
    const way = source === TARGET ? [[MIDDLE, TOP], [MIDDLE, 20]] : this.routes.get(source);
    if (!way || this.dots.childElementCount >= MOST_DOTS || document.hidden) return;
    const points = accepted ? way : way.slice(0, -2); // those end where they reach the model
    const dot = svg("circle", { r: 3.5, class: `dot ${look(source)}` });
    this.dots.append(dot);
    const frames = points.map(([x, y], at) => ({
      transform: `translate(${x}px, ${y}px)${!accepted && at === points.length - 1 ? " scale(2.5)" : ""}`,
      opacity: at < points.length - 1 ? 1 : accepted ? 0.9 : 0,
    }));
    const flight = dot.animate(frames.length > 1 ? frames : [...frames, { ...frames[0], opacity: 0 }],
      { duration: 180 * frames.length + 120, delay, fill: "backwards", easing: "ease-out" });
    flight.finished.finally(() => dot.remove());
  }
}

function inWords(plan) {
  const tiers = plan.tiers.map((tier, level) => {
    const name = level === 0 ? "the model, which verifies" : `${tier.name}, which drafts up to ${tier.block} tokens`;
    return tier.stores.length ? `${name}, with the stores ${tier.stores.join(" and ")}` : name;
  });
  return `The plan ${plan.name}, from the top: ${tiers.join("; below it ")}.`;
}
