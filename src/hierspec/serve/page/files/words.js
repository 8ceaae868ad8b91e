// An answer as text on the page: a span a token, code in blocks, and a tip that tells where each token came from.

import { rejectedAt } from "./answer.js";
import { byId, counted, element, speak } from "./dom.js";
import { inWords, look } from "./sources.js";

const FENCE = "```";

export class Words {
  constructor() {
    this.root = element("div", {
      class: "words", tabindex: "0", role: "group",
      "aria-label": "Answer. The arrow keys go from token to token and tell who drafted it.",
    });
    explain(this);
    this.clear();
  }

  clear() {
    this.root.replaceChildren();
    this.spans = []; // one a piece; the second part of a piece with a line break belongs to it too
    this.told = new WeakMap(); // span -> its piece and step
    this.inCode = false;
    this.line = []; // spans of the line that is being written
    this.block = element("div", { class: "prose" });
    this.root.append(this.block);
  }

  add(step) {
    for (const piece of step.pieces) {
      const lines = piece.text.split("\n");
      const place = this.spans.length;
      lines.forEach((line, number) => {
        const last = number === lines.length - 1;
        const text = last ? line : line + "\n";
        if (!text && !(number === 0 && last)) return;
        const span = element("span", { class: `tok ${look(piece.source)}` }, text);
        this.told.set(span, { piece, step, place });
        if (number === 0) this.spans.push(span);
        this.block.append(span);
        this.line.push(span);
        if (!last) this.endLine();
      });
    }
  }

  /** A line that begins with three backticks opens or closes a block of code. */
  endLine() {
    const line = this.line;
    this.line = [];
    if (!line.map((span) => span.textContent).join("").trimStart().startsWith(FENCE)) return;
    this.inCode = !this.inCode;
    for (const span of line) span.classList.add("fence");
    const next = element("div", { class: this.inCode ? "code" : "prose" });
    if (this.inCode) next.append(...line);
    this.block.after(next);
    this.block = next;
  }

  /** A mark where plain decoding would be by now. */
  shadow(tokens) {
    this.marked?.classList.remove("shadow");
    this.marked = tokens === null ? null : this.spans[Math.floor(tokens)];
    this.marked?.classList.add("shadow");
  }
}

function explain(words) {
  const { root } = words;
  let at = -1;
  const show = (span) => {
    root.querySelector(".tok.at")?.classList.remove("at");
    span.classList.add("at");
    const told = words.told.get(span);
    at = told.place;
    tell(span, told);
  };
  const hide = () => {
    root.querySelector(".tok.at")?.classList.remove("at");
    byId("tip").hidden = true;
  };
  root.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".tok");
    if (span) show(span);
  });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("blur", () => { at = -1; hide(); });
  root.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step || !words.spans.length || event.defaultPrevented) return;
    event.preventDefault();
    const next = at < 0 ? (step > 0 ? 0 : words.spans.length - 1) : at + step;
    const span = words.spans[Math.min(words.spans.length - 1, Math.max(0, next))];
    span.scrollIntoView({ block: "nearest" });
    show(span);
    speak(byId("tip").textContent);
  });
}

const shown = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "\u00a0") || "\u00a0";

function tell(span, { piece, step }) {
  const tip = byId("tip");
  const depth = piece.depth > 0
    ? `Place ${piece.depth} of a draft of ${counted(step.rows - 1, "token")}; the model verified it and agreed.`
    : step.rows > 1 ? "The model wrote it in the pass that verified a draft." : "The model wrote it; nothing was drafted.";
  const rejected = rejectedAt(piece, step);
  const parts = [
    element("p", { class: "who" },
      element("b", { class: `tok ${look(piece.source)}` }, shown(piece.text)),
      piece.depth > 0 ? ` drafted by ${inWords(piece.source)}` : " written by the model itself"),
    element("p", {}, depth),
    rejected.length ? element("p", {}, "Rejected here:") : null,
    ...rejected.map((branch) => element("p", {},
      ...branch.map((token) => element("s", { class: `tok ${look(token.source)}` }, shown(token.text))),
      ` ${[...new Set(branch.map((token) => inWords(token.source)))].join(", ")}`)),
  ];
  tip.replaceChildren(...parts.filter(Boolean));
  tip.hidden = false;
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8));
  const below = box.bottom + 10, fits = below + tip.offsetHeight < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(8, fits ? below : box.top - tip.offsetHeight - 10)}px`;
}
