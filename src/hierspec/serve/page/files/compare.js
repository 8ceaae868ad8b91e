// Two plans on one prompt with one seed: the texts beside each other, the verdict, and the race once more.

import { Answer } from "./answer.js";
import { byId, counted, element, rounded, speak } from "./dom.js";
import { legend } from "./meters.js";
import { chat } from "./server.js";
import { Words } from "./words.js";

export class Contest {
  constructor(page) {
    this.page = page;
    this.stopping = null;
    this.timers = [];
    byId("contest").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopping) this.stopping.abort();
      else if (byId("question").value.trim()) this.run();
    });
    byId("race").addEventListener("click", () => this.race());
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.stopping?.abort(); });
  }

  async run() {
    this.timers.forEach(clearTimeout);
    const plans = [byId("plan-a").value, byId("plan-b").value].map((name) => this.page.planNamed(name));
    const seed = byId("seed").value || String(crypto.getRandomValues(new Uint32Array(1))[0]);
    byId("verdict").hidden = byId("race").hidden = true;
    this.lanes = plans.map((plan) => new Lane(plan, this.page.plainRate));
    byId("lanes").replaceChildren(...this.lanes.map((lane) => lane.root));
    this.stopping = new AbortController();
    byId("run").textContent = "Stop";
    try {
      // One after the other, so that neither slows the other; each in a namespace of its own, so that the second
      // cannot draft from what the first wrote.
      for (const lane of this.lanes) await this.write(lane, Number(seed));
      this.judge();
    } catch (error) {
      if (error.name === "AbortError") this.tell("Stopped.", "");
      else this.tell(error.message, "bad");
      if (error.status === 401) this.page.askForKey();
    } finally {
      this.stopping = null;
      this.page.watch(null);
      byId("run").textContent = "Compare";
    }
  }

  async write(lane, seed) {
    lane.begin();
    this.page.panel.begin(lane.plan);
    this.page.watch(lane.answer);
    const body = {
      ...this.page.body(lane.plan.name), seed, namespace: `page compare ${crypto.randomUUID()}`,
      messages: [{ role: "user", content: byId("question").value.trim() }],
    };
    lane.answer.ended = await chat(body, this.stopping.signal, (step) => {
      lane.add(step);
      this.page.panel.step(lane.answer, step);
    });
    lane.finish();
    this.page.panel.figures(lane.answer);
  }

  judge() {
    const [first, second] = this.lanes.map((lane) => lane.answer);
    const same = first.text === second.text && first.tokens === second.tokens && first.ended === second.ended;
    if (!same) {
      const at = [...first.text].findIndex((letter, index) => letter !== [...second.text][index]);
      return this.tell(`Different, from character ${at < 0 ? Math.min(first.text.length, second.text.length) : at} on. Please report this defect.`, "bad");
    }
    this.tell(`Identical: both plans wrote the same ${counted(first.tokens, "token")}, character by character.${speeds(first, second)}`, "good");
    byId("race").hidden = false;
  }

  tell(sentence, kind) {
    const verdict = byId("verdict");
    verdict.className = `verdict ${kind}`;
    verdict.textContent = sentence;
    verdict.hidden = false;
    speak(sentence);
  }

  /** Both answers at once, each at the speed at which it was written. */
  race() {
    this.timers.forEach(clearTimeout);
    this.timers = this.lanes.flatMap((lane) => {
      lane.words.clear();
      lane.root.classList.add("writing");
      let time = 0;
      return lane.answer.steps.map((step, at) => {
        time += at ? step.seconds : 0; // both begin after the prompt is read
        return setTimeout(() => {
          lane.words.add(step);
          if (at === lane.answer.steps.length - 1) lane.root.classList.remove("writing");
        }, 1000 * time);
      });
    });
  }
}

function speeds(first, second) {
  const [fast, slow] = first.rate() >= second.rate() ? [first, second] : [second, first];
  if (!slow.rate() || first.plan === second.plan) return "";
  const ratio = (fast.rate() / slow.rate()).toFixed(2);
  return ratio === "1.00" ? " Both were as fast." : ` ${fast.plan} was ${ratio}× as fast as ${slow.plan}.`;
}

class Lane {
  constructor(plan, plainRate) {
    this.plan = plan;
    this.answer = new Answer(plan.name, plainRate);
    this.words = new Words();
    this.figure = element("span", { class: "muted" }, "waits");
    this.legend = element("ul", { class: "legend", "aria-label": "Who drafted" });
    this.root = element("article", { class: "lane", "aria-label": `Plan ${plan.name}` },
      element("h2", {}, plan.name, " ", this.figure), this.words.root, this.legend);
  }

  begin() {
    this.root.classList.add("writing");
    this.figure.textContent = "reads the prompt";
  }

  add(step) {
    this.answer.add(step);
    this.words.add(step);
    const rate = this.answer.rate();
    this.figure.textContent = `${rate ? `${rounded(rate)} tokens a second, ` : ""}${this.answer.tokensPerPass.toFixed(2)} a pass`;
    legend(this.legend, this.answer);
  }

  finish() { this.root.classList.remove("writing"); }
}
