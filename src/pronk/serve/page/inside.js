// The panel that looks inside one answer, at one of its tokens.

import { el, sign } from "./dom.js";
import { Attention } from "./attention.js";
import { Cost } from "./cost.js";
import { Lens } from "./lens.js";
import { Looks } from "./looks.js";
import { Prompt } from "./prompt.js";
import { pieceOf } from "./strip.js";
import { TokenTab } from "./token.js";

export class Inside {
  constructor(app, container) {
    Object.assign(this, { app, container, looks: new Looks(app), node: null, at: 0 });
    this.tabs = [
      ["Token", new TokenTab(this)],
      ["Attention", new Attention(this)],
      ["Layers", new Lens(this)],
      ["Prompt", new Prompt(this)],
      ["Cost", new Cost(this)],
    ];
    this.list = el("div", { role: "tablist", class: "tabs", "aria-label": "What to look at" }, this.tabs.map(([name], n) =>
      el("button", { type: "button", role: "tab", id: `tab-${n}`, "aria-controls": "tab-panel", on: { click: () => this.turn(n), keydown: (event) => this.key(event, n) } }, name)));
    this.panel = el("div", { role: "tabpanel", id: "tab-panel", tabindex: "0", class: "tab-panel" });
    this.title = el("span", { class: "piece" });
    this.before = sign("‹", "Token before", () => this.step(-1));
    this.behind = sign("›", "Next token", () => this.step(1));
    container.append(
      el("div", { class: "row spread" }, el("h2", {}, "Look inside"), sign("✕", "Close", () => this.close())),
      el("div", { class: "row which" }, this.before, this.title, this.behind),
      this.list,
      this.panel,
    );
    container.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    app.addEventListener("inside", (event) => this.open(event.detail));
    app.addEventListener("chat", () => this.close());
    app.addEventListener("ended", (event) => event.detail === this.node && this.draw());
    this.shown = 0;
  }

  // `enters`: the keyboard goes into the panel, too. So it does for a token that is open already: Enter twice.
  open({ node, at, enters }) {
    const outside = !this.container.contains(document.activeElement);
    if (outside) this.from = document.activeElement; // where one comes back to
    const again = outside && this.node === node && this.at === at;
    this.node = node;
    this.at = Math.max(0, Math.min(at, node.tokens.ids.length - 1));
    this.container.hidden = false;
    this.draw();
    if (enters || again) this.list.children[this.shown].focus();
  }

  close() {
    this.container.hidden = true;
    this.node = null;
    if (this.from?.isConnected) this.from.focus();
  }

  step(by) {
    this.app.tell("inside", { node: this.node, at: this.at + by });
  }

  turn(n) {
    this.shown = n;
    this.draw();
  }

  key(event, n) {
    const to = { ArrowRight: n + 1, ArrowLeft: n - 1, Home: 0, End: this.tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.turn((to + this.tabs.length) % this.tabs.length);
    this.list.children[this.shown].focus();
  }

  draw() {
    const { node, at } = this;
    if (!node) return;
    const most = node.tokens.ids.length;
    this.before.disabled = at === 0;
    this.behind.disabled = at >= most - 1;
    this.title.replaceChildren(el("span", { class: "faint" }, `Token ${at + 1} of ${most} `), el("code", {}, JSON.stringify(pieceOf(node.tokens.bytes[at]))));
    [...this.list.children].forEach((tab, n) => {
      tab.setAttribute("aria-selected", String(n === this.shown));
      tab.tabIndex = n === this.shown ? 0 : -1;
    });
    this.panel.setAttribute("aria-labelledby", `tab-${this.shown}`);
    const held = this.panel.contains(document.activeElement);
    this.tabs[this.shown][1].draw(this.panel, node, at);
    if (held && !this.panel.contains(document.activeElement)) this.panel.focus(); // what was pressed is gone
  }

  // Shows what `work` makes once it is there, unless something else is looked at by then.
  async later(panel, work) {
    const mine = (this.latest = Symbol("what is waited for"));
    const waiting = setTimeout(() => this.latest === mine && panel.replaceChildren(el("p", { class: "faint", role: "status" }, "The model reads the text…")), 150);
    try {
      const made = await work();
      if (this.latest === mine) panel.replaceChildren(...made);
    } catch (error) {
      if (this.latest === mine) panel.replaceChildren(el("p", { class: "problem", role: "alert" }, error.message));
    } finally {
      clearTimeout(waiting);
    }
  }

  // Or a word of why there is none.
  tooFar(node, at) {
    const room = this.looks.room(node);
    return at < room ? null : el("p", {}, `The server looks at the first ${room} tokens of this answer; this one stands behind them.`);
  }
}
