// How many drafts are accepted, by who drafted, as the answer grows: lines drawn by hand.

import { verified } from "./answer.js";
import { element, percent, svg } from "./dom.js";
import { look } from "./sources.js";

const WIDTH = 340, HEIGHT = 116, LEFT = 34, RIGHT = 10, TOP = 10, BOTTOM = 18;
const MEMORY = 0.85; // what an older pass counts for, beside the one after it
const LEAST_PASSES = 24; // that the chart is wide

export class Chart {
  constructor(root) { this.root = root; this.clear(); }

  clear() {
    this.passes = 0;
    this.lines = new Map(); // source -> { drafted, accepted, points: [[pass, share]] }
    this.draw();
  }

  step(step) {
    this.passes += 1;
    for (const [source, [drafted, accepted]] of verified(step)) {
      const line = this.lines.get(source) ?? { drafted: 0, accepted: 0, points: [] };
      this.lines.set(source, line);
      line.drafted = line.drafted * MEMORY + drafted;
      line.accepted = line.accepted * MEMORY + accepted;
      line.points.push([this.passes, line.accepted / line.drafted]);
    }
    this.waiting ??= requestAnimationFrame(() => { this.waiting = null; this.draw(); });
  }

  draw() {
    const passes = Math.max(LEAST_PASSES, this.passes);
    const x = (pass) => LEFT + (pass / passes) * (WIDTH - LEFT - RIGHT);
    const y = (share) => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);
    const grid = [0, 0.5, 1].flatMap((share) => [
      svg("path", { class: "grid", d: `M${LEFT} ${y(share)}H${WIDTH - RIGHT}` }),
      svg("text", { x: LEFT - 6, y: y(share) + 4, "text-anchor": "end" }, percent(share)),
    ]);
    const drawn = [...this.lines].map(([source, { points }]) => {
      const path = points.map(([pass, share], at) => `${at ? "L" : "M"}${x(pass).toFixed(1)} ${y(share).toFixed(1)}`).join("");
      const [pass, share] = points.at(-1);
      return svg("g", { class: look(source) },
        svg("path", { class: "curve", d: path }), svg("circle", { class: "dot", cx: x(pass), cy: y(share), r: 3.5 }));
    });
    const words = this.lines.size
      ? `Accepted of late: ${[...this.lines].map(([source, line]) => `${source} ${percent(line.points.at(-1)[1])}`).join(", ")}.`
      : "Nothing was drafted yet.";
    this.root.replaceChildren(
      svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": words },
        ...grid, ...drawn,
        svg("text", { x: WIDTH - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, this.passes ? `pass ${this.passes}` : "")),
      ...(this.lines.size ? [] : [element("p", { class: "muted small over" }, words)]));
  }
}
