// One token: how likely it was, and what else was; from each of these the answer can go on.

import { button, el, number, percent, say } from "./dom.js";
import { alternativesOf, instead } from "./answer.js";
import { bitsOf, pieceOf } from "./strip.js";

export class TokenTab {
  constructor(inside) {
    this.inside = inside;
  }

  draw(panel, node, at) {
    this.inside.latest = null;
    const { tokens } = node;
    const logprob = tokens.logprobs[at];
    const others = alternativesOf(tokens, at);
    const rank = others.findIndex((other) => other.id === tokens.ids[at]) + 1;
    const facts = el("dl", { class: "told" });
    const fact = (name, value) => facts.append(el("dt", {}, name), el("dd", {}, value));
    fact("Probability", percent(Math.exp(logprob)));
    fact("Surprise", `${bitsOf(logprob).toFixed(2)} bits`);
    const entropy = el("dd", {}, `at least ${atLeast(others).toFixed(2)} bits, by the ${others.length} that are known`);
    const ranked = el("dd", {}, rank ? `${rank}` : `behind the first ${others.length}`);
    facts.append(el("dt", {}, "Entropy before it"), entropy, el("dt", {}, "Rank"), ranked);
    fact("Id and bytes", `${tokens.ids[at]}: ${[...tokens.bytes[at]].map((byte) => byte.charCodeAt(0).toString(16).padStart(2, "0")).join(" ")}`);
    if (tokens.ms[at]) fact("Time", `${number(tokens.ms[at])} ms after the ${at ? "one before" : "question"}, as it arrived here: the mean of those that came together`);
    if (node.begun && at < node.begun) fact("Origin", at === node.begun - 1 ? "chosen by you" : "taken over from another branch");
    const exact = button("Exactly, by the whole vocabulary", () => this.exactly(node, at, entropy, ranked, exact), { class: "quiet" });
    panel.replaceChildren(
      facts, exact,
      el("h3", { id: "alternatives" }, "What was likely here"),
      others.length
        ? el("ol", { class: "alternatives", "aria-labelledby": "alternatives" }, others.map((other) => this.alternative(node, at, other)))
        : el("p", { class: "faint" }, "None were kept: the option “Alternatives kept” was 0."),
    );
  }

  alternative(node, at, other) {
    const came = other.id === node.tokens.ids[at];
    const piece = JSON.stringify(pieceOf(other.bytes));
    const bar = el("span", { class: "bar" });
    bar.style.setProperty("--share", String(other.probability));
    const go = () => {
      const made = this.inside.app.branch(node, instead(node.tokens, at, other));
      say(`A branch that goes on from ${piece}`);
      this.inside.app.tell("inside", { node: made, at });
    };
    return el(
      "li", { class: came ? "came" : "" },
      el("code", {}, other.bytes ? piece : `⟨${other.id}⟩`), el("span", { class: "share" }, percent(other.probability)), bar,
      // A token without text ends an answer as a rule: nothing goes on from there.
      came ? el("span", { class: "faint" }, "this one came") : button("Go on from this", go, { "aria-label": `Go on from this: ${piece}`, disabled: !other.bytes || this.inside.app.busy }),
    );
  }

  async exactly(node, at, entropy, ranked, button) {
    const far = this.inside.tooFar(node, at);
    if (far) return button.replaceWith(far);
    button.disabled = true;
    try {
      const look = await this.inside.looks.of(node);
      const token = look.tokens[look.prompt_tokens + at];
      entropy.textContent = `${token.entropy.toFixed(2)} bits`;
      ranked.textContent = `${number(token.rank)} of ${number(this.inside.app.card(node.model)?.pronk?.vocabulary ?? 0)}`;
      button.remove();
    } catch (error) {
      button.replaceWith(el("p", { class: "problem", role: "alert" }, error.message));
    }
  }
}

// What is not known adds least where it is all one token.
function atLeast(others) {
  const rest = Math.max(0, 1 - others.reduce((sum, other) => sum + other.probability, 0));
  const add = (p) => (p > 0 ? -p * Math.log2(p) : 0);
  return others.reduce((sum, other) => sum + add(other.probability), add(rest));
}
