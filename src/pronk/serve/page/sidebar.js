// The chats that this browser keeps.

import { button, el, sign } from "./dom.js";
import { heads, keeps } from "./store.js";

export class Sidebar {
  constructor(app, container) {
    Object.assign(this, { app, container });
    this.list = el("ul", { class: "chats" });
    container.append(
      el("div", { class: "row spread" }, el("p", { class: "name" }, "pronk"), sign("✕", "Close the list of chats", () => container.classList.remove("open"), { class: "sign narrow" })),
      button("New chat", () => this.go(() => app.fresh()), { class: "main" }),
      this.list,
      (this.foot = el("p", { class: "faint" }, "Chats are kept in this browser alone.")),
    );
    keeps().then((kept) => kept || (this.foot.textContent = "This browser keeps nothing: chats end with this page."));
    for (const kind of ["chats", "chat"]) app.addEventListener(kind, () => this.draw());
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
