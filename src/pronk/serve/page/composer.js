// Where the question is typed. Enter asks, Shift and Enter begin a line, Escape stops.

import { el } from "./dom.js";
import { soon } from "./pacing.js";

export class Composer {
  constructor(app, form) {
    this.app = app;
    this.typed = el("textarea", { id: "question", rows: 1, placeholder: "Ask anything", "aria-label": "Your question; Enter asks, Shift+Enter begins a line" });
    this.button = el("button", { type: "submit", class: "main" }, "Ask");
    form.append(this.typed, this.button);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (app.busy) app.stop();
      else this.ask();
    });
    this.typed.addEventListener("input", () => this.fit());
    this.typed.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!app.busy) this.ask();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && app.busy && app.stop());
    for (const kind of ["thread", "ended", "chat"]) app.addEventListener(kind, () => soon((this.drawing ??= () => this.draw())));
  }

  ask() {
    const text = this.typed.value.trim();
    if (!text || !this.app.chat.models.length) return;
    this.typed.value = "";
    this.fit();
    this.app.send(text);
  }

  fit() {
    this.typed.style.height = "auto";
    this.typed.style.height = `${Math.min(this.typed.scrollHeight + 2, 240)}px`;
  }

  draw() {
    this.button.textContent = this.app.busy ? "Stop" : "Ask";
  }
}
