// What the model looked at when it chose a token: the row of the token before, of one layer, of one head or of all.

import { el, percent } from "./dom.js";

export class Attention {
  constructor(inside) {
    Object.assign(this, { inside, layer: null, head: "mean", first: false });
  }

  draw(panel, node, at) {
    const far = this.inside.tooFar(node, at);
    if (far) return panel.replaceChildren(far);
    this.inside.later(panel, async () => {
      const look = await this.inside.looks.of(node);
      const token = look.prompt_tokens + at;
      if (token === 0) return [el("p", {}, "Nothing stands before the first token.")];
      this.layer = Math.min(this.layer ?? Math.floor(look.layers / 2), look.layers - 1);
      const made = { look, token, rows: await this.inside.looks.attention(node, token - 1, this.layer) };
      return [this.choices(panel, node, at, made), (this.picture = el("div", {})), ...this.redraw(made)];
    });
  }

  choices(panel, node, at, made) {
    const { look, rows } = made;
    const shown = el("output", {}, String(this.layer));
    const layer = el("input", { type: "range", id: "layer", min: "0", max: String(look.layers - 1), step: "1" });
    layer.value = String(this.layer);
    layer.addEventListener("input", () => (shown.textContent = layer.value));
    layer.addEventListener("change", async () => {
      this.layer = Number(layer.value);
      made.rows = await this.inside.looks.attention(node, made.token - 1, this.layer);
      this.redraw(made);
    });
    const head = el("select", { id: "head" }, ["mean", ...rows.keys()].map((each) => el("option", { value: String(each), selected: String(each) === String(this.head) }, each === "mean" ? "mean of all" : String(each))));
    head.addEventListener("change", () => {
      this.head = head.value;
      this.redraw(made);
    });
    const first = el("input", { type: "checkbox", id: "first", checked: this.first });
    first.addEventListener("change", () => {
      this.first = first.checked;
      this.redraw(made);
    });
    return el(
      "div", { class: "choices" },
      el("label", { for: "layer" }, "Layer "), layer, shown,
      el("label", { for: "head" }, "Head "), head,
      el("label", {}, first, " colour the first token too"),
    );
  }

  redraw({ look, token, rows }) {
    const row = this.head === "mean" || !rows[this.head] ? rows[0].map((_, n) => rows.reduce((sum, each) => sum + each[n], 0) / rows.length) : rows[this.head];
    const seen = row.slice(0, token); // up to the token before, which looks
    // Most heads rest on the first token where they find nothing: beside it all else would be pale.
    const most = Math.max(...(this.first || token < 2 ? seen : seen.slice(1)), 1e-9);
    const text = el("div", { class: "seen", role: "img", "aria-label": "The text, coloured by attention; the list below says the same" });
    look.tokens.slice(0, token + 1).forEach((each, n) => {
      const span = el("span", { class: n === token ? "token target" : "token", title: n < token ? `${n}: ${percent(row[n])}` : "the token that was chosen" }, shown(each));
      if (n < token && (n || this.first)) span.style.setProperty("--share", String(Math.min(1, row[n] / most)));
      text.append(span);
    });
    const top = [...seen.keys()].sort((a, b) => seen[b] - seen[a]).slice(0, 6);
    const list = el("ol", { class: "alternatives" }, top.map((n) => {
      const bar = el("span", { class: "bar" });
      bar.style.setProperty("--share", String(seen[n]));
      return el("li", {}, el("code", {}, JSON.stringify(look.tokens[n].piece)), el("span", { class: "share" }, percent(seen[n])), bar, el("span", { class: "faint" }, n ? `token ${n}` : "the first token"));
    }));
    this.picture.replaceChildren(text, el("h3", {}, "Most looked at"), list);
    text.lastChild.scrollIntoView({ block: "nearest" });
    return [];
  }
}

export function shown({ piece, special }) {
  return special && !piece ? "∅" : piece.replaceAll("\n", "↵\n");
}
