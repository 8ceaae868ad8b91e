// The page: what the server can do, what the reader chose, and the two views.

import { Conversation } from "./chat.js";
import { Contest } from "./compare.js";
import { byId, element, rounded } from "./dom.js";
import { Panel } from "./meters.js";
import { state, useKey } from "./server.js";
import { nameSources } from "./sources.js";

const KEPT = ["plan", "temperature", "seed", "max-tokens"]; // settings that outlive a reload; the API key does not
const LOOK_EVERY = 1000; // milliseconds between two looks at the server while an answer is written

class Page {
  constructor() {
    this.plans = [];
    this.plainRate = null;
    this.panel = new Panel();
    this.watched = null; // the answer that is being written
    byId("wishes").addEventListener("submit", (event) => event.preventDefault());
    byId("key").addEventListener("change", () => { useKey(byId("key").value); this.connect(); });
    for (const id of KEPT) byId(id).addEventListener("change", () => keep(id, byId(id).value));
    byId("plan").addEventListener("change", () => this.panel.begin(this.plan()));
  }

  async connect() {
    try {
      const now = await state();
      this.plans = now.plans.filter((plan) => !plan.refused);
      nameSources(this.plans);
      byId("model").textContent = `${now.model.name}, ${now.model.layers} layers`;
      this.fillPlans(now);
      this.look(now);
      this.panel.begin(this.plan());
      byId("plain").textContent = this.plainRate ? `≈ ${rounded(this.plainRate)}` : "–";
      notice("");
    } catch (error) {
      byId("model").textContent = "not connected";
      notice(error.message);
      if (error.status === 401) this.askForKey();
    }
  }

  fillPlans(now) {
    const wish = kept("plan"), names = this.plans.map((plan) => plan.name);
    const choices = { plan: names.includes(wish) ? wish : now.default_plan, "plan-a": "plain", "plan-b": now.default_plan };
    for (const [id, chosen] of Object.entries(choices)) {
      byId(id).replaceChildren(
        ...now.plans.map((plan) => element("option", {
          value: plan.name, selected: plan.name === chosen, disabled: Boolean(plan.refused), title: plan.refused,
        }, plan.name)));
    }
  }

  look(now) {
    this.plainRate = now.plain_tokens_per_second === null ? null : now.plain_tokens_per_second / Math.max(1, now.load.running);
    if (this.watched) this.watched.plainRate = this.plainRate;
    const { running, waiting } = now.load;
    byId("load").textContent = running || waiting ? `The server writes ${running} at once, ${waiting} wait.` : "";
  }

  /** Look at the server while this answer is written. */
  watch(answer) {
    this.watched = answer;
    clearInterval(this.timer);
    const look = () => state().then((now) => this.look(now), () => {});
    if (answer) this.timer = setInterval(look, LOOK_EVERY);
  }

  plan() { return this.planNamed(byId("plan").value); }

  planNamed(name) { return this.plans.find((plan) => plan.name === name) ?? { name: name || "auto", tiers: [{ name: "target", stores: [] }] }; }

  /** What every request says. */
  body(plan) {
    const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
    return {
      plan: plan === "default" ? undefined : plan,
      temperature: number("temperature"), seed: number("seed"), max_tokens: number("max-tokens"),
    };
  }

  askForKey() {
    byId("settings").open = true;
    byId("key").focus();
  }
}

function notice(sentence) {
  byId("notice").hidden = !sentence;
  byId("notice").textContent = sentence;
}

const kept = (name) => { try { return localStorage.getItem(`hierspec ${name}`); } catch { return null; } };
const keep = (name, value) => { try { localStorage.setItem(`hierspec ${name}`, value); } catch { /* private browsing */ } };

function useTheme() {
  const root = document.documentElement, button = byId("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  if (kept("theme")) root.dataset.theme = kept("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    keep("theme", root.dataset.theme);
    name();
  });
  dark.addEventListener("change", name);
  name();
}

function useTabs() {
  const tabs = ["chat", "compare"].map((view) => byId(`tab-${view}`));
  const choose = (tab) => {
    for (const each of tabs) {
      each.setAttribute("aria-selected", String(each === tab));
      each.tabIndex = each === tab ? 0 : -1;
      byId(each.getAttribute("aria-controls")).hidden = each !== tab;
    }
  };
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = tabs[(at + 1) % tabs.length];
      choose(other);
      other.focus();
    });
  });
}

for (const id of KEPT) if (id !== "plan" && kept(id) !== null) byId(id).value = kept(id);
if (matchMedia("(max-width: 60rem)").matches) for (const card of document.querySelectorAll("aside details")) card.open = false;
useTheme();
useTabs();
const page = new Page();
new Conversation(page);
new Contest(page);
page.connect();
