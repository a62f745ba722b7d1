// What each layer would have said in a token's place, had it been the last.

import { el, number, percent } from "./dom.js";

export class Lens {
  constructor(inside) {
    this.inside = inside;
  }

  draw(panel, node, at) {
    const far = this.inside.tooFar(node, at);
    if (far) return panel.replaceChildren(far);
    this.inside.later(panel, async () => {
      const look = await this.inside.looks.of(node);
      const token = look.prompt_tokens + at;
      if (token === 0) return [el("p", {}, "Nothing stands before the first token.")];
      const lens = await this.inside.looks.lens(node, token);
      const rows = [...lens.layers].reverse().map((row) => this.row(row));
      const head = ["Layer", "Would have said", "The one that came"].map((text) => el("th", { scope: "col" }, text));
      const came = JSON.stringify(lens.came.piece);
      return [
        el("p", { class: "faint" }, `What stood after each layer, read as though it were the last; from below, the answer forms. ${came} came. Layers in between were never trained to be read so: it is a hint.`),
        el("div", { class: "wide" }, el("table", { class: "lens" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows))),
      ];
    });
  }

  row({ layer, top, probability, rank }) {
    const said = top.filter((each, n) => n === 0 || each.probability >= 0.001).map((each, n) => {
      const cell = el("span", { class: n ? "said faint" : "said" }, el("code", {}, JSON.stringify(each.piece)), ` ${percent(each.probability)}`);
      cell.style.setProperty("--share", String(each.probability));
      return cell;
    });
    return el("tr", {}, el("th", { scope: "row" }, layer < 0 ? "embedding" : String(layer)), el("td", {}, said), el("td", {}, `${percent(probability)}, rank ${number(rank)}`));
  }
}
