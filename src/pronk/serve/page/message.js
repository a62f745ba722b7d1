// One message as it is shown, with what can be done with it.

import { button, copy, el, number, sign, swap } from "./dom.js";
import { Flow } from "./flow.js";
import { Strip } from "./strip.js";
import { branches, choose, parentOf } from "./tree.js";

const VIEWS = [
  ["text", "Text", "As Markdown"],
  ["tokens", "Tokens", "Each token, coloured by how much it surprised the model; open one to look inside"],
  ["raw", "Raw", "As the model wrote it"],
];

// "‹ 2/3 ›", where there is more than one branch.
export function turns(app, node) {
  const { nodes, at } = branches(app.chat, node);
  if (nodes.length < 2) return null;
  const go = (to) => () => {
    // Where that branch was left: its own choices stand.
    const parent = parentOf(app.chat, node);
    parent.chosen = nodes[to].id;
    choose(app.chat, parent);
    app.choose(nodes[to]);
  };
  return el(
    "span", { class: "turns", role: "group", "aria-label": "Branches" },
    sign("‹", "Branch before", go(at - 1), { disabled: at === 0 }),
    el("span", {}, `${at + 1}/${nodes.length}`),
    sign("›", "Branch behind", go(at + 1), { disabled: at === nodes.length - 1 }),
  );
}

export class Question {
  constructor(app, node) {
    Object.assign(this, { app, node });
    this.body = el("div", { class: "body" }, node.text);
    this.bar = el("div", { class: "does" });
    this.element = el("article", { class: "message question", "aria-label": "You" }, this.body, this.bar);
  }

  refresh() {
    const copying = button("Copy", () => copy(this.node.text, copying));
    swap(this.bar, [turns(this.app, this.node), copying, button("Edit", () => this.edit()), button("Ask again", () => this.app.answer(this.node))]);
  }

  edit() {
    const typed = el("textarea", { class: "edit", rows: 3, "aria-label": "The question, to be changed" });
    typed.value = this.node.text;
    const back = () => {
      this.body.replaceChildren(this.node.text);
      this.bar.querySelector("button:nth-last-child(2)")?.focus();
    };
    const ask = () => {
      const text = typed.value.trim();
      back();
      if (text) this.app.send(text, parentOf(this.app.chat, this.node));
    };
    typed.addEventListener("keydown", (event) => {
      if (event.key === "Escape") back();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        ask();
      }
    });
    this.body.replaceChildren(typed, el("div", { class: "row" }, button("Ask in its place", ask, { class: "main" }), button("Leave it", back)));
    typed.focus();
  }
}

export class AnswerView {
  constructor(app, node, view) {
    Object.assign(this, { app, node, view });
    this.body = el("div", { class: "body" });
    this.note = el("div", { class: "note" });
    this.facts = el("div", { class: "facts" });
    this.head = el("div", { class: "head" });
    this.bar = el("div", { class: "does" });
    this.element = el("article", { class: "message answer", "aria-label": `Answer of ${node.model}` }, this.head, this.note, this.body, this.facts, this.bar);
    this.places = [];
    this.show(view);
  }

  get running() {
    return this.app.runs.has(this.node.id);
  }

  show(view) {
    this.view = this.node.tokens || view !== "tokens" ? view : "text";
    this.drawn = null;
    this.body.replaceChildren();
    this.body.className = "body";
    if (this.view === "tokens") this.drawn = new Strip(this.body, this.node.tokens, (at) => this.app.tell("inside", { node: this.node, at }));
    else if (this.view === "text") this.drawn = new Flow(this.body);
    else this.body.append((this.raw = el("pre", { class: "raw", tabindex: "0" }, "")));
    this.refresh();
    if (this.view === "tokens") this.drawn.mark(this.places);
  }

  select(at) {
    if (this.view === "tokens") this.drawn.select(at);
  }

  refresh() {
    const views = el(
      "span", { class: "views", role: "group", "aria-label": "Shown as" },
      VIEWS.map(([view, label, title]) =>
        button(label, () => this.show(view), { title, "aria-pressed": String(this.view === view), disabled: view === "tokens" && !this.node.tokens })),
    );
    swap(this.head, [el("strong", { class: "model" }, this.node.model), turns(this.app, this.node), views]);
    this.grow();
  }

  grow() {
    const { node } = this;
    const ended = !this.running;
    if (this.view === "tokens") this.drawn.grow();
    else if (this.view === "text") this.drawn?.grow(node.text, ended);
    else {
      this.raw.firstChild ?? this.raw.append("");
      this.raw.firstChild.appendData(node.text.slice(this.raw.firstChild.length));
    }
    if (ended && this.view === "text") this.drawn = null; // all of it is there
    this.element.classList.toggle("running", !ended);
    this.told();
    if (ended !== this.barred) this.buttons((this.barred = ended));
  }

  told() {
    const { node } = this;
    const parts = node.tokens && !(node.error && !node.tokens.ids.length) ? [`${number(node.tokens.ids.length)} tokens`] : [];
    const { took, usage } = node;
    if (took?.tokens_per_s) parts.push(`${number(took.tokens_per_s)} tokens/s`);
    if (took) parts.push(`first after ${number(1000 * took.first_token_s, 0)} ms`);
    if (usage?.prompt_tokens_details.cached_tokens) parts.push(`${number(usage.prompt_tokens_details.cached_tokens)} of ${number(usage.prompt_tokens)} prompt tokens cached`);
    if (node.finish === "length") parts.push("cut off at the most tokens");
    if (node.finish === "stopped") parts.push("stopped");
    const text = parts.join(" · ");
    if (this.facts.textContent !== text) this.facts.textContent = text;
    if (node.error && !this.failed) this.element.append((this.failed = el("p", { class: "problem", role: "alert" }, node.error)));
  }

  buttons(ended) {
    const copying = button("Copy", () => copy(this.node.text, copying));
    const inside = button("Look inside", () => this.app.tell("inside", { node: this.node, at: 0, enters: true }), { disabled: !this.node.tokens?.ids.length });
    const does = ended ? [copying, button("Regenerate", () => this.app.again(this.node)), inside] : [button("Stop", () => this.app.runs.get(this.node.id)?.stop())];
    swap(this.bar, does);
  }
}
