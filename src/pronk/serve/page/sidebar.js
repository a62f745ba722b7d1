// The chats that this browser keeps.

import { button, el, sign } from "./dom.js";
import { heads, keeps } from "./store.js";

export class Sidebar {
  constructor(app, container) {
    Object.assign(this, { app, container });
    this.list = el("ul", { class: "chats" });
    container.append(
      el("div", { class: "row spread" }, el("p", { class: "name" }, "pronk"), (this.closes = sign("✕", "Close the list of chats", () => this.close(), { class: "sign narrow" }))),
      button("New chat", () => this.go(() => app.fresh()), { class: "main" }),
      this.list,
      (this.foot = el("p", { class: "faint" }, "Chats are kept in this browser alone.")),
    );
    app.addEventListener("chats opened", ({ detail }) => this.open(detail));
    container.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !container.classList.contains("open")) return;
      event.stopPropagation(); // it stops no answer
      this.close();
    });
    document.addEventListener("pointerdown", (event) => container.contains(event.target) || container.classList.remove("open"));
    keeps().then((kept) => kept || (this.foot.textContent = "This browser keeps nothing: chats end with this page."));
    for (const kind of ["chats", "chat"]) app.addEventListener(kind, () => this.draw());
  }

  // On a narrow screen it lies over the conversation. `by`: what it was opened with, which one comes back to.
  open(by) {
    this.by = by;
    this.container.classList.add("open");
    this.closes.focus();
  }

  close() {
    this.container.classList.remove("open");
    this.by?.focus();
  }

  go(does) {
    this.container.classList.remove("open");
    does();
    document.getElementById("question").focus();
  }

  async draw() {
    const found = await heads();
    this.list.replaceChildren(
      ...found.map(({ id, title }) =>
        el(
          "li", {},
          button(title, () => this.go(() => this.app.open(id)), { class: "chat", title, "aria-current": id === this.app.chat.id ? "page" : null }),
          sign("✕", `Delete “${title}”`, () => confirm(`Delete “${title}”? It is kept nowhere else.`) && this.app.remove(id)),
        )),
    );
  }
}
