// What an answer took: time a token, what was read for it, what the cache saved, what guessing got right.

import { bytes, el, number, svg } from "./dom.js";

export class Cost {
  constructor(inside) {
    this.inside = inside;
  }

  draw(panel, node, at) {
    this.inside.latest = null;
    const facts = el("dl", { class: "told" });
    const fact = (name, value) => value && facts.append(el("dt", {}, name), el("dd", {}, value));
    const { took, usage, tokens } = node;
    const timed = tokens.ms.slice((node.begun ?? 0) + 1).filter((ms) => ms > 0);
    if (took) {
      fact("First token", `after ${number(1000 * took.first_token_s)} ms`);
      fact("Reading the prompt", took.prompt_tokens_per_s && `${number(took.prompt_tokens_per_s)} tokens/s`);
      fact("Answering", took.tokens_per_s && `${number(took.tokens_per_s)} tokens/s`);
    }
    if (timed.length) fact("A token, as it arrived here", `${number(middle(timed))} ms (median), ${number(Math.max(...timed))} ms at most`);
    if (usage) {
      const { cached_tokens: cached } = usage.prompt_tokens_details;
      fact("From the cache", `${number(cached)} of ${number(usage.prompt_tokens)} prompt tokens were not computed again`);
      const { accepted_prediction_tokens: right, rejected_prediction_tokens: wrong } = usage.completion_tokens_details;
      fact("Guessed ahead", right + wrong ? `${number(right)} of ${number(right + wrong)} guesses were right` : "nothing was guessed");
    }
    const shape = this.inside.app.card(node.model)?.pronk;
    if (shape) {
      const before = (usage ? usage.prompt_tokens - (node.begun ?? 0) : 0) + at;
      const kept = before * shape.kv_bytes_a_token;
      fact("Read for this token", `${bytes(shape.weight_bytes)} of weights (${shape.dtype}) and ${bytes(kept)} of keys and values (${shape.kv_dtype}), for a text alone; texts that share a pass share the weights`);
    }
    if (took) {
      fact("Seed", took.seed === null ? "" : String(took.seed));
      for (const warning of took.warnings ?? []) fact("The server says", warning);
    }
    panel.replaceChildren(facts, ...(timed.length > 1 ? [el("h3", {}, "Milliseconds a token"), chart(tokens.ms, at)] : []));
    if (!took && !this.inside.app.runs.has(node.id)) panel.append(el("p", { class: "faint" }, "The answer was stopped: the server told nothing of it."));
  }
}

function middle(values) {
  return values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)];
}

// At most 200 bars, each the slowest of its tokens; the first token, which waits for the prompt, is left out.
function chart(ms, at) {
  const shown = ms.slice(1);
  const each = Math.ceil(shown.length / 200);
  const bars = Array.from({ length: Math.ceil(shown.length / each) }, (_, n) => Math.max(...shown.slice(n * each, (n + 1) * each)));
  const most = Math.max(...bars, 1e-9);
  const wide = 300 / bars.length;
  const made = svg("svg", { viewBox: "0 0 300 80", class: "chart", role: "img", "aria-label": `Milliseconds a token, up to ${number(most)}` });
  bars.forEach((value, n) => {
    const high = (value / most) * 66;
    const own = Math.floor((at - 1) / each) === n;
    made.append(svg("rect", { x: (n * wide).toFixed(2), y: (80 - high).toFixed(2), width: Math.max(0.5, wide - 0.3).toFixed(2), height: high.toFixed(2), class: own ? "own" : "" }));
  });
  const label = svg("text", { x: 0, y: 9 });
  label.textContent = `${number(most)} ms`;
  made.append(label);
  return made;
}
