// Speed beside the estimate of plain decoding, and the panel's drawing, chart and legend.

import { Chart } from "./chart.js";
import { byId, element, percent, rounded } from "./dom.js";
import { Drawing } from "./drawing.js";
import { inWords, look } from "./sources.js";

const LATELY = 1.5; // seconds that the live figure is an average over

export class Panel {
  constructor() {
    this.drawing = new Drawing(byId("drawing"));
    this.chart = new Chart(byId("chart"));
  }

  begin(plan) {
    this.drawing.plan = null;
    this.drawing.show(plan);
    this.chart.clear();
    byId("legend").replaceChildren();
    for (const id of ["rate", "per-pass"]) byId(id).textContent = "–";
    byId("ratio").hidden = true;
    byId("work").classList.remove("live");
  }

  step(answer, step) {
    this.drawing.step(step);
    this.chart.step(step);
    this.figures(answer, LATELY);
  }

  figures(answer, seconds = Infinity) {
    const rate = answer.rate(seconds);
    byId("rate").textContent = rate === null ? "–" : rounded(rate);
    byId("work").classList.toggle("live", rate !== null);
    byId("per-pass").textContent = answer.tokensPerPass === null ? "–" : answer.tokensPerPass.toFixed(2);
    byId("plain").textContent = answer.plainRate ? `≈ ${rounded(answer.plainRate)}` : "–";
    const ratio = rate !== null && answer.plainRate ? rate / answer.plainRate : null;
    byId("ratio").hidden = ratio === null;
    byId("ratio").classList.toggle("slower", ratio < 1);
    byId("ratio").textContent = ratio === null ? "" : `${ratio.toFixed(2)}× plain`;
    legend(byId("legend"), answer);
  }
}

/** Who drafted how much of an answer. */
export function legend(list, answer) {
  const sources = answer.sources(), total = sources.reduce((sum, [, count]) => sum + count, 0);
  list.replaceChildren(...sources.map(([source, count]) =>
    element("li", {}, element("span", { class: `tok ${look(source)}` }, inWords(source)), ` ${percent(count / total)}`)));
}
