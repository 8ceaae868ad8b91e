"use strict";
// Everything here is a comfort: without it the page shows the first text and the reader's own colours.
(() => {
  const root = document.documentElement;
  const one = (id) => document.getElementById(id);

  const theme = one("theme");
  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  theme.hidden = false;
  name();

  const choices = one("choices");
  if (!choices) return;
  const prompt = one("choose-prompt"), plan = one("choose-plan"), piece = one("piece");
  const hint = piece.textContent;
  choices.hidden = piece.hidden = false;

  const show = () => {
    let found = false;
    for (const part of document.querySelectorAll("#text [data-prompt]")) {
      const fits = part.dataset.prompt === prompt.value && (part.dataset.plan ?? plan.value) === plan.value;
      part.hidden = !fits;
      found ||= fits && part.matches(".answer");
    }
    one("no-answer").hidden = found;
    piece.textContent = hint;
  };
  prompt.addEventListener("change", show);
  plan.addEventListener("change", show);
  show(); // a browser that goes back keeps what was chosen

  const tell = (run) => {
    document.querySelector(".run.at")?.classList.remove("at");
    run.classList.add("at");
    const words = run.textContent.trim();
    piece.textContent = `“${words.length > 60 ? words.slice(0, 60) + "…" : words}”: ${run.title}`;
  };
  for (const words of document.querySelectorAll(".words")) {
    const runs = [...words.querySelectorAll(".run")];
    words.addEventListener("pointerover", (event) => {
      const run = event.target.closest(".run");
      if (run) tell(run);
    });
    words.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step || !runs.length) return;
      event.preventDefault();
      const place = runs.findIndex((run) => run.classList.contains("at"));
      const next = place < 0 ? (step > 0 ? 0 : runs.length - 1) : Math.min(runs.length - 1, Math.max(0, place + step));
      tell(runs[next]);
      runs[next].scrollIntoView({ block: "nearest" });
    });
  }
  for (const key of document.querySelectorAll(".keys button")) {
    key.disabled = false;
    key.addEventListener("click", () => {
      const answer = key.closest(".answer"), pressed = key.getAttribute("aria-pressed") === "true";
      for (const other of answer.querySelectorAll(".keys button")) other.setAttribute("aria-pressed", "false");
      key.setAttribute("aria-pressed", String(!pressed));
      for (const run of answer.querySelectorAll(".words .run")) {
        run.classList.toggle("dim", !pressed && !run.classList.contains(key.dataset.look));
      }
    });
  }
})();
