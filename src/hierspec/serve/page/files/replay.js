// An answer once more, slowly: each pass first shows its draft, then what the model accepted and what it erased.

import { branches } from "./answer.js";
import { counted, element } from "./dom.js";
import { look } from "./sources.js";

const SPEEDS = [["slow", 900], ["calm", 420], ["quick", 140]]; // milliseconds between two moments

export class Replay {
  /** Moments: before everything, then for each pass its draft (where there is one) and its verdict. */
  constructor(answer, words, onDone) {
    Object.assign(this, { answer, words, onDone });
    this.moments = [{ passes: 0, draft: false }];
    answer.steps.forEach((step, at) => {
      if (step.rows > 1) this.moments.push({ passes: at, draft: true });
      this.moments.push({ passes: at + 1, draft: false });
    });
    this.at = 0;
    this.tray = element("div", { class: "tray", "aria-hidden": "true" });
    this.slider = element("input", {
      type: "range", min: 0, max: this.moments.length - 1, value: 0, "aria-label": "Moment of the replay",
      oninput: () => { this.pause(); this.show(Number(this.slider.value)); },
    });
    this.button = element("button", { type: "button", class: "quiet", onclick: () => this.toggle() }, "Play");
    this.pace = element("select", { "aria-label": "Speed of the replay" },
      ...SPEEDS.map(([name, ms], index) => element("option", { value: ms, selected: index === 1 }, name)));
    this.status = element("p", { class: "muted small", role: "status" });
    this.bar = element("div", { class: "replay", role: "group", "aria-label": "Replay" },
      this.tray,
      element("div", { class: "row" },
        this.button,
        element("button", { type: "button", class: "quiet", "aria-label": "One step back", onclick: () => this.nudge(-1) }, "←"),
        this.slider,
        element("button", { type: "button", class: "quiet", "aria-label": "One step on", onclick: () => this.nudge(1) }, "→"),
        this.pace,
        element("button", { type: "button", class: "quiet", onclick: () => this.leave() }, "Done")),
      this.status);
    this.bar.addEventListener("keydown", (event) => this.key(event));
    this.show(0);
  }

  key(event) {
    if (event.key === "Escape") this.leave();
    else if (event.key === " " && event.target === this.slider) this.toggle();
    else if (event.key === "ArrowRight" && event.target.matches("button")) this.nudge(1);
    else if (event.key === "ArrowLeft" && event.target.matches("button")) this.nudge(-1);
    else return;
    event.preventDefault();
  }

  nudge(by) { this.pause(); this.show(this.at + by); }

  toggle() {
    if (this.timer) return this.pause();
    if (this.at === this.moments.length - 1) this.show(0);
    this.button.textContent = "Pause";
    const next = () => {
      this.show(this.at + 1);
      this.timer = this.at < this.moments.length - 1 ? setTimeout(next, Number(this.pace.value)) : this.pause();
    };
    this.timer = setTimeout(next, 0);
  }

  pause() {
    clearTimeout(this.timer);
    this.timer = null;
    this.button.textContent = "Play";
    return null;
  }

  show(at) {
    const before = this.moments[this.at].passes;
    this.at = Math.min(this.moments.length - 1, Math.max(0, at));
    const { passes, draft } = this.moments[this.at], { steps } = this.answer;
    this.words.root.querySelector(".ghost")?.remove();
    if (passes < before || passes === 0) this.words.clear();
    steps.slice(passes < before ? 0 : before, passes).forEach((step) => this.words.add(step));
    const step = draft ? steps[passes] : steps[passes - 1];
    this.showDraft(step, draft);
    this.slider.value = this.at;
    const words = !step ? "Before the first pass." : draft
      ? `Pass ${passes + 1} of ${steps.length}: ${counted(step.rows - 1, "token")} drafted, to be verified in one pass.`
      : `Pass ${passes} of ${steps.length}: ${verdict(step)}`;
    this.status.textContent = words;
    this.slider.setAttribute("aria-valuetext", words);
  }

  showDraft(step, draft) {
    const rows = step ? branches(step) : [];
    this.tray.replaceChildren(...rows.map((row) => element("div", { class: "branch" }, ...row.map((token) =>
      element(draft || token.accepted ? "span" : "s", {
        class: `tok ${look(token.source)} ${draft ? "open" : token.accepted ? "accepted" : "erased"}`, title: token.source,
      }, token.text.replaceAll("\n", "⏎") || " ")))));
    if (!draft || !rows.length) return;
    this.words.block.append(element("span", { class: "ghost", "aria-hidden": "true" }, ...rows[0].map((token) =>
      element("span", { class: `tok ${look(token.source)}` }, token.text))));
  }

  leave() {
    this.pause();
    this.show(this.moments.length - 1);
    this.bar.remove();
    this.onDone();
  }
}

function verdict(step) {
  const drafted = step.rows - 1, accepted = drafted - step.rejected.length;
  if (!drafted) return "nothing was drafted, the model wrote one token.";
  const rejected = step.rejected.length ? `, ${step.rejected.length} erased` : "";
  const own = step.tokens > accepted ? ", and one of the model's own" : "";
  return `${accepted} of ${drafted} accepted${rejected}${own}.`;
}
