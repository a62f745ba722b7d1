// What the model was really given: the chat template's text, raw, and the tokens that it was cut into.

import { button, copy, el } from "./dom.js";
import { Strip } from "./strip.js";

export class Prompt {
  constructor(inside) {
    this.inside = inside;
  }

  draw(panel, node) {
    this.inside.later(panel, async () => {
      const look = await this.inside.looks.of(node);
      const tokens = look.tokens.slice(0, look.prompt_tokens);
      const strip = el("div", {});
      const bytes = tokens.map((token) => (token.bytes.length ? String.fromCharCode(...token.bytes) : latin(token.piece)));
      const told = el("p", { class: "faint", role: "status" }, "");
      const made = new Strip(strip, { bytes, logprobs: tokens.map((token) => token.logprob) }, (at) => {
        const { id, piece, probability } = tokens[at];
        told.textContent = `${at + 1}: ${JSON.stringify(piece)}, id ${id}${probability === null ? "" : `, probability ${probability.toPrecision(3)}`}`;
      });
      made.container.classList.add("cut");
      const copying = button("Copy", () => copy(look.template_text, copying), { class: "quiet" });
      return [
        el("div", { class: "row spread" }, el("h3", {}, "As the chat template has it"), copying),
        el("pre", { class: "raw", tabindex: "0" }, look.template_text ?? ""),
        el("h3", {}, `Its ${tokens.length} tokens`), strip, told,
      ];
    });
  }
}

// Of a special token, which adds nothing to a text, its name.
function latin(piece) {
  return String.fromCharCode(...new TextEncoder().encode(piece));
}
