// A text that grows, as Markdown: what is whole is made into elements once; the last block alone is made anew.

import { soon } from "./pacing.js";
import { code, render } from "./markdown.js";

const SECTION = 30; // blocks
const SHARE = 8; // a block is made anew after this many times the time that it took

export class Flow {
  constructor(container) {
    this.container = container;
    this.tail = document.createElement("div");
    this.tail.className = "tail";
    container.append(this.tail);
    this.text = "";
    this.done = 0; // characters that stand before the tail
    this.seen = 0; // characters whose lines were looked at
    this.fence = null; // the mark that ends the code that we are in
    this.blank = false; // whether the line before was
    this.listed = false; // whether the block begins with a list's mark: its items may stand apart
    this.pause = 0;
  }

  grow(text, ended = false) {
    this.text = text;
    const ends = this.boundaries();
    if (ended && this.done < text.length) ends.push(text.length);
    for (const end of ends) {
      this.put(render(text.slice(this.done, end)));
      this.done = end;
    }
    if (ends.length) {
      this.open = null;
      this.tail.replaceChildren();
    }
    if (ended) this.tail.remove();
    else this.draw();
  }

  // In sections: a browser looks at each of them at each frame, whether it is to be seen.
  put(blocks) {
    if (!this.section || this.section.childElementCount >= SECTION) {
      this.section = document.createElement("div");
      this.section.className = "section";
      this.tail.before(this.section);
    }
    this.section.append(blocks);
  }

  // Where blocks end that are whole: at empty lines, unless code or a list goes on behind them.
  boundaries() {
    const found = [];
    let begun = this.done;
    for (;;) {
      const end = this.text.indexOf("\n", this.seen);
      if (end < 0) return found;
      const line = this.text.slice(this.seen, end);
      const listed = /^ {0,3}([-*+]|\d{1,9}[.)])\s/.test(line);
      if (this.fence) {
        if (line.trim().startsWith(this.fence) && !line.trim().replaceAll(this.fence[0], "")) this.fence = null;
      } else {
        const begins = this.blank && /^\S/.test(line) && !(this.listed && listed);
        if (begins) found.push((begun = this.seen));
        if (this.seen === begun) this.listed = listed;
        this.fence = line.match(/^ {0,3}(`{3,}|~{3,})/)?.[1] ?? null;
      }
      this.blank = !this.fence && line.trim() === "";
      this.seen = end + 1;
    }
  }

  draw() {
    const tail = this.text.slice(this.done);
    const fenced = this.fence && tail.match(/^ {0,3}(`{3,}|~{3,})([^\n]*)\n/);
    if (fenced) this.append(tail.slice(fenced[0].length), () => code({ text: "", lang: fenced[2].trim() }), "code");
    else if (tail.length > 20000) this.append(tail, () => render(" ".repeat(20001)).firstChild, "p");
    else {
      const begun = performance.now();
      if (begun < this.pause) {
        soon(this.later ??= () => this.tail.isConnected && this.draw());
        return;
      }
      this.open = null;
      this.tail.replaceChildren(render(tail));
      const ended = performance.now();
      this.pause = ended + SHARE * (ended - begun);
    }
  }

  // Of what nothing before changes: the new characters are appended to its text node.
  append(text, make, kind) {
    if (this.open !== kind) {
      const made = make();
      this.node = document.createTextNode("");
      (made.querySelector?.("code") ?? made).replaceChildren(this.node);
      this.tail.replaceChildren(made);
      this.open = kind;
    }
    this.node.appendData(text.slice(this.node.length));
  }
}
