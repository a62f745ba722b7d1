// The conversation that is shown: questions, and answers, several side by side where several models were asked.

import { button, el, named, nameOf } from "./dom.js";
import { AnswerView, Question } from "./message.js";
import { soon } from "./pacing.js";
import { parting } from "./parting.js";
import { pieceOf } from "./strip.js";
import { beside, path } from "./tree.js";

export class Thread {
  constructor(app, container) {
    Object.assign(this, { app, container, views: new Map(), grown: new Set() });
    this.follows = true; // the end of the text, unless the reader scrolled away from it
    container.addEventListener("scroll", () => {
      this.follows = container.scrollHeight - container.scrollTop - container.clientHeight < 60;
    });
    app.addEventListener("chat", () => this.another());
    for (const kind of ["thread", "settings"]) app.addEventListener(kind, () => this.arrange());
    app.addEventListener("grew", (event) => this.grow(event.detail));
    app.addEventListener("ended", (event) => this.grow(event.detail));
    app.addEventListener("inside", ({ detail }) => this.views.get(detail.node.id)?.select(detail.at));
  }

  another() {
    this.views.clear();
    this.follows = true;
    this.arrange();
  }

  // Views are kept, so that what was drawn is never drawn again.
  arrange() {
    const rows = path(this.app.chat).map((node) => (node.role === "user" ? this.view(node).element : this.answers(node)));
    const held = document.activeElement;
    const at = [...this.container.children].findIndex((row) => row.contains(held));
    this.container.replaceChildren(...(rows.length ? rows : [this.welcome()]));
    if (held.isConnected && at >= 0) held.focus({ preventScroll: true }); // what is moved loses the keyboard
    for (const view of this.views.values()) if (view.element.isConnected) view.refresh();
    if (at >= 0 && !this.container.contains(document.activeElement)) this.regain(held, rows[at]);
    this.compare();
    this.scroll();
  }

  // Who was at a button that is gone is at its like in the row that took its place, or at the other one of a pair
  // (the last branch has none behind it), or else where the next question is typed.
  regain(held, row) {
    const pair = held.closest(".turns") && row?.querySelector(".turns button:not(:disabled)");
    const found = (row && named(row, nameOf(held))) ?? pair;
    (found || document.getElementById("question")).focus({ preventScroll: true });
  }

  welcome() {
    const models = this.app.chat.models.join(" and ");
    return el(
      "div", { class: "welcome" },
      el("h2", {}, models ? `Ask ${models}` : "pronk"),
      el("p", {}, "Every token of an answer can be opened: how likely it was, what else was, what the model looked at, what each layer would have said. Chats stay in this browser."),
    );
  }

  answers(node) {
    const nodes = beside(this.app.chat, node);
    if (nodes.length === 1) return this.view(node).element;
    const columns = nodes.map((each, at) => {
      const { element } = this.view(each, "tokens");
      element.classList.toggle("chosen", each === node);
      const on = each === node ? "The talk goes on from this one" : "Go on from this one";
      const choosing = button(on, () => this.app.choose(each), { class: "goes-on", "aria-pressed": String(each === node), "data-place": `column ${at}` });
      return el("div", { class: "column" }, element, choosing);
    });
    return el("div", { class: "columns", role: "group", "aria-label": "Answers side by side" }, columns);
  }

  // A branch that was begun at a token is shown as tokens.
  view(node, how = node.begun ? "tokens" : "text") {
    if (!this.views.has(node.id)) this.views.set(node.id, node.role === "user" ? new Question(this.app, node) : new AnswerView(this.app, node, how));
    return this.views.get(node.id);
  }

  grow(node) {
    this.grown.add(node);
    soon((this.drawing ??= () => this.draw()));
  }

  draw() {
    for (const node of this.grown) {
      const view = this.views.get(node.id);
      if (view?.element.isConnected) view.grow();
    }
    this.grown.clear();
    this.compare();
    this.scroll();
  }

  scroll() {
    if (this.follows) this.container.scrollTop = this.container.scrollHeight;
  }

  // Each answer beside the first of its row: where do they part?
  compare() {
    for (const node of path(this.app.chat)) {
      if (node.role !== "assistant") continue;
      const nodes = beside(this.app.chat, node).filter((each) => each.tokens);
      if (nodes.length < 2) continue;
      const [first, ...others] = nodes;
      const places = [];
      for (const other of others) {
        const found = parting(first, other);
        const growing = [first, other].some((each) => this.app.runs.has(each.id));
        const open = growing && (!found || found.ended); // the shorter one may still go on alike
        if (found && !open) places.push(found.tokens[0]);
        this.tell(other, first, found, open);
      }
      this.mark(first, places);
    }
  }

  tell(node, first, found, open) {
    const view = this.views.get(node.id);
    if (open) return;
    const key = found ? found.tokens.join() : "same";
    if (view.parted === key) return;
    view.parted = key;
    if (!found) {
      view.note.replaceChildren(`The same as ${first.model}’s.`);
      return this.mark(node, []);
    }
    const [there, here] = found.tokens;
    const piece = (each, at) => (at < each.tokens.bytes.length ? `“${pieceOf(each.tokens.bytes[at])}”` : "its end");
    const text = `Parts from ${first.model} at token ${here + 1}: ${piece(node, here)}, there ${piece(first, there)}`;
    view.note.replaceChildren(button(text, () => this.app.tell("inside", { node, at: Math.min(here, node.tokens.ids.length - 1) }), { class: "quiet" }));
    this.mark(node, [here]);
  }

  mark(node, places) {
    const view = this.views.get(node.id);
    if (view.places.join() === places.join()) return;
    view.places = places;
    if (view.view === "tokens") view.drawn.mark(places);
  }
}
