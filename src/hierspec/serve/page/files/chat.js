// The conversation: messages, answers that stream in, stop, replay.

import { Answer } from "./answer.js";
import { byId, counted, element, rounded, speak } from "./dom.js";
import { Replay } from "./replay.js";
import { chat } from "./server.js";
import { Words } from "./words.js";

const IDEAS = [
  "Write a Python function that checks whether a word is a palindrome, with a docstring.",
  "List the planets of the solar system, one a line, each with one fact.",
  "Explain how a rainbow forms, in three short sentences.",
  "Write a short story about a lighthouse keeper and a very polite storm.",
];

export class Conversation {
  constructor(page) {
    this.page = page;
    this.messages = [];
    this.stopping = null; // AbortController while an answer is written
    const prompt = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopping) this.stop();
      else if (prompt.value.trim()) this.send(prompt.value.trim());
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.stopping) byId("composer").requestSubmit();
      }
    });
    prompt.addEventListener("input", grow);
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
    byId("ideas").replaceChildren(...IDEAS.map((idea) => element("li", {},
      element("button", { type: "button", onclick: () => this.send(idea) }, idea))));
  }

  stop() { this.stopping?.abort(); }

  async send(text) {
    if (this.stopping) return;
    byId("empty").hidden = true;
    byId("prompt").value = "";
    grow();
    this.messages.push({ role: "user", content: text });
    byId("conversation").append(element("article", { class: "asked", "aria-label": "You" }, text));
    await this.answer();
  }

  async answer() {
    const { page } = this, plan = page.plan(), answer = new Answer(plan.name, page.plainRate), words = new Words();
    const foot = element("footer", { class: "row small muted" }, "reading the prompt…");
    const article = element("article", { class: "answer writing", "aria-label": "Answer", "aria-busy": "true" }, words.root, foot);
    byId("conversation").append(article);
    article.scrollIntoView({ block: "end" });
    this.stopping = new AbortController();
    byId("send").textContent = "Stop";
    page.panel.begin(plan);
    page.watch(answer);
    try {
      const body = { ...page.body(plan.name), messages: this.messages };
      answer.ended = await chat(body, this.stopping.signal, (step) => {
        answer.add(step);
        const low = innerHeight + scrollY >= document.documentElement.scrollHeight - 120;
        words.add(step);
        words.shadow(answer.plainTokens);
        page.panel.step(answer, step);
        foot.textContent = `${counted(answer.tokens, "token")}…`;
        if (low) article.scrollIntoView({ block: "end" });
      });
    } catch (error) {
      if (error.name === "AbortError") answer.ended = "stopped";
      else { answer.ended = "error"; this.failed(article, error); }
    }
    this.finish(article, answer, words, foot);
  }

  finish(article, answer, words, foot) {
    this.stopping = null;
    byId("send").textContent = "Send";
    this.page.watch(null);
    words.shadow(null);
    article.classList.remove("writing");
    article.removeAttribute("aria-busy");
    if (!answer.steps.length) {
      foot.textContent = answer.ended === "stopped" ? "Stopped before the first token." : "";
      this.messages.pop();
      return;
    }
    this.page.panel.figures(answer);
    this.messages.push({ role: "assistant", content: answer.text });
    const ends = { stopped: "stopped", length: "cut at the longest answer", error: "broken off" }[answer.ended];
    const rate = answer.rate();
    const replay = element("button", { type: "button", class: "quiet", onclick: () => {
      if (this.stopping) return;
      replay.hidden = true;
      const shown = new Replay(answer, words, () => { replay.hidden = false; replay.focus(); });
      foot.before(shown.bar);
      shown.slider.focus();
    } }, "Replay slowly");
    const facts = [answer.plan, counted(answer.tokens, "token"), counted(answer.steps.length, "pass", "passes"),
      rate ? `${rounded(rate)} tokens a second` : null, ends].filter(Boolean);
    foot.replaceChildren(element("span", {}, facts.join(" · ")), replay);
    speak(`Answer finished. ${answer.text}`);
  }

  failed(article, error) {
    article.append(element("p", { class: "error", role: "alert" }, error.message));
    if (error.status === 401) this.page.askForKey();
  }
}

function grow() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, 200)}px`;
}
