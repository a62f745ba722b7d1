// The bar above the conversation: models, side by side if several; system prompt and options; the chat as a file.

import { button, el, sign } from "./dom.js";
import { download } from "./export.js";
import { OPTIONS, usual } from "./options.js";
import { MOST_MODELS } from "./tree.js";

export class Settings {
  constructor(app, bar) {
    Object.assign(this, { app, bar });
    this.models = el("div", { class: "models", role: "group", "aria-label": "Models" });
    this.panel = el("div", { class: "options", id: "options", hidden: true, role: "region", "aria-label": "Options" });
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation(); // it stops no answer
      document.activeElement.blur(); // what was typed counts
      this.toggle();
      this.opens.focus();
    });
    this.opens = button("Options", () => this.toggle(), { "aria-expanded": "false", "aria-controls": "options" });
    bar.append(
      el(
        "div", { class: "row" },
        sign("☰", "Chats", (event) => app.tell("chats opened", event.currentTarget), { class: "sign narrow" }),
        this.models,
        el("span", { class: "gap" }),
        this.opens,
        this.exports(),
      ),
      this.panel,
      (this.problem = el("p", { class: "problem", role: "alert", hidden: true })),
    );
    for (const kind of ["chat", "settings"]) app.addEventListener(kind, () => this.draw());
    app.addEventListener("problem", (event) => this.fail(event.detail));
  }

  fail(text) {
    this.problem.hidden = !text;
    this.problem.textContent = text ?? "";
  }

  toggle() {
    this.panel.hidden = !this.panel.hidden;
    this.opens.setAttribute("aria-expanded", String(!this.panel.hidden));
    if (!this.panel.hidden) this.panel.querySelector("textarea").focus();
  }

  exports() {
    const chosen = el("select", { "aria-label": "Export this chat", class: "export" }, ["Export", "Markdown", "JSON"].map((text, n) => el("option", { value: ["", "md", "json"][n] }, text)));
    chosen.addEventListener("change", () => {
      if (chosen.value) download(this.app.chat, chosen.value);
      chosen.value = "";
    });
    return chosen;
  }

  draw() {
    const { chat, models } = this.app;
    const changed = () => {
      this.app.tell("settings");
      if (Object.keys(chat.nodes).length > 1) this.app.save();
    };
    const choice = (name, at) => {
      const select = el("select", { "aria-label": chat.models.length > 1 ? `Model ${at + 1}` : "Model" }, models.map(({ id }) => el("option", { value: id, selected: id === name }, id)));
      select.addEventListener("change", () => {
        chat.models[at] = select.value;
        changed();
      });
      if (chat.models.length < 2) return select;
      return el("span", { class: "model-choice" }, select, sign("✕", `Without ${name}`, () => (chat.models.splice(at, 1), changed())));
    };
    const more = () => {
      const other = models.find(({ id }) => !chat.models.includes(id)) ?? models[0];
      chat.models.push(other.id);
      changed();
    };
    const beside = button("+ beside", more, { title: "Ask one more model the same, side by side", disabled: !models.length || chat.models.length >= MOST_MODELS });
    this.models.replaceChildren(...chat.models.map(choice), beside);
    this.drawOptions(chat);
  }

  drawOptions(chat) {
    const system = el("textarea", { id: "system", rows: 3, placeholder: "None" });
    system.value = chat.system;
    system.addEventListener("change", () => {
      chat.system = system.value;
      if (Object.keys(chat.nodes).length > 1) this.app.save();
    });
    this.panel.replaceChildren(
      el("div", { class: "option wide" }, el("label", { for: "system" }, "System prompt"), system, el("p", { class: "faint" }, "What the model is told before the talk begins.")),
      ...OPTIONS.map((option) => this.option(chat, option)),
      el("div", { class: "row wide" }, button("As the model’s makers advise", () => {
        chat.options = {};
        this.draw();
      })),
    );
    this.tellUsual(chat);
  }

  // In each empty place what counts there. A temperature that is chosen changes what top p is.
  tellUsual(chat) {
    const advised = chat.models.map((model) => this.app.card(model)?.pronk?.sampling ?? {});
    for (const option of OPTIONS) if (option.kind === "number") this.panel.querySelector(`#option-${option.name}`).placeholder = usual(option, chat.options, advised);
  }

  option(chat, option) {
    const { name, label, kind, help } = option;
    const id = `option-${name}`;
    let input;
    if (kind === "choice") input = el("select", { id }, option.choices.map(([value, text]) => el("option", { value, selected: (chat.options[name] ?? "") === value }, text)));
    else if (kind === "number") input = el("input", { id, type: "number", min: String(option.min), max: String(option.max), step: option.step < 1 ? "any" : "1", inputmode: "decimal" });
    else input = el("input", { id, type: "text", placeholder: "nothing" });
    if (kind !== "choice") input.value = chat.options[name] ?? "";
    input.setAttribute("aria-describedby", `${id}-help`);
    const problem = el("p", { class: "problem", role: "alert", hidden: true });
    input.addEventListener("change", () => {
      const wrong = !input.validity.valid;
      problem.hidden = !wrong;
      problem.textContent = wrong ? `${input.validationMessage} Until it is changed, this counts: ${chat.options[name] ?? input.placeholder}.` : "";
      if (wrong) return;
      if (input.value === "") delete chat.options[name];
      else chat.options[name] = kind === "number" ? Number(input.value) : input.value;
      this.tellUsual(chat);
      if (Object.keys(chat.nodes).length > 1) this.app.save();
    });
    return el("div", { class: "option" }, el("label", { for: id }, label), input, problem, el("p", { class: "faint", id: `${id}-help` }, help));
  }
}
