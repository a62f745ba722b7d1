// A text as its tokens, coloured by surprise; each can be opened, by pointer or by keys.

import { percent } from "./dom.js";
import { bytesOf } from "./answer.js";

// Tokens of an element at most. A browser lays out a line anew when something is appended to it, and looks at each
// block at each frame, whether it is to be seen.
const LINE = 300;
const BLOCK = 400;
const STEPS = [0.3, 1, 2, 3.5, 5, 7, 10]; // bits, from which on a colour is darker
const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

// As people read it: bytes that are no whole character by their numbers.
export function pieceOf(bytes) {
  if (!bytes) return "";
  try {
    return strict.decode(bytesOf(bytes));
  } catch {
    return [...bytes].map((each) => `\\x${each.charCodeAt(0).toString(16).padStart(2, "0")}`).join("");
  }
}

export function bitsOf(logprob) {
  return Math.abs(logprob / Math.LN2);
}

export function shade(bits) {
  return STEPS.filter((step) => bits >= step).length;
}

export class Strip {
  // `opens`: called with the place of a token. `tokens`: {bytes, logprobs}, which may grow.
  constructor(container, tokens, opens) {
    Object.assign(this, { container, tokens, opens, spans: [], line: null, focused: 0 });
    container.classList.add("strip");
    container.setAttribute("role", "group");
    container.setAttribute("aria-label", "Tokens, coloured by surprise; arrows move, Enter opens one");
    container.addEventListener("click", (event) => this.at(event) >= 0 && this.open(this.at(event)));
    container.addEventListener("keydown", (event) => this.key(event));
    container.addEventListener("focusin", (event) => this.at(event) >= 0 && this.name(this.at(event)));
    container.addEventListener("mouseover", (event) => this.at(event) >= 0 && this.name(this.at(event)));
    this.grow();
  }

  grow() {
    const { bytes, logprobs } = this.tokens;
    for (let at = this.spans.length; at < bytes.length; at++) {
      const piece = pieceOf(bytes[at]);
      const span = document.createElement("span");
      span.className = logprobs[at] === null ? "token" : `token b${shade(bitsOf(logprobs[at]))}`;
      span.textContent = piece === "" ? "∅" : piece.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
      span.n = at;
      span.tabIndex = at === 0 ? 0 : -1;
      span.setAttribute("role", "button");
      if (!this.line || this.line.childElementCount >= LINE || this.broken) this.begin(at);
      this.broken = piece.endsWith("\n");
      if (this.broken) span.textContent = span.textContent.slice(0, -1);
      this.line.append(span);
      this.spans.push(span);
      if (piece.trim() === "") this.name(at); // what has no letters says nothing of itself
    }
  }

  begin(at) {
    if (!this.block || at - this.blocked >= BLOCK) {
      this.block = document.createElement("div");
      this.block.className = "block";
      this.blocked = at;
      this.container.append(this.block);
    }
    this.line = document.createElement("div");
    this.line.className = "line";
    this.block.append(this.line);
  }

  at(event) {
    return event.target.n ?? -1;
  }

  // What is read aloud, given to a token when it is come to: ten thousand names at once would be too many.
  name(at) {
    const logprob = this.tokens.logprobs[at];
    const told = logprob === null ? "" : `: ${percent(Math.exp(logprob))}, ${bitsOf(logprob).toFixed(1)} bits`;
    const text = `token ${at + 1}, ${JSON.stringify(pieceOf(this.tokens.bytes[at]))}${told}`;
    this.spans[at].setAttribute("aria-label", text);
    this.spans[at].title = text;
  }

  key(event) {
    const at = this.at(event);
    if (at < 0) return;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.spans.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") this.open(at);
    else if (to === undefined || !this.spans[to]) return;
    else this.focus(to);
    event.preventDefault();
  }

  focus(at) {
    this.spans[this.focused].tabIndex = -1;
    this.spans[at].tabIndex = 0;
    this.focused = at;
    this.spans[at].focus();
  }

  open(at) {
    this.opens?.(at);
    this.select(at);
  }

  select(at) {
    this.selected?.removeAttribute("aria-pressed");
    this.selected = this.spans[at];
    this.selected?.setAttribute("aria-pressed", "true");
    this.selected?.scrollIntoView({ block: "nearest" });
  }

  // Where it parts from others: the same until there.
  mark(places) {
    for (const span of this.marked ?? []) span.classList.remove("parts");
    this.marked = places.map((at) => this.spans[at]).filter(Boolean);
    for (const span of this.marked) span.classList.add("parts");
    const first = Math.min(...places);
    this.container.querySelectorAll(".alike").forEach((span) => span.classList.remove("alike"));
    if (places.length) this.spans.slice(0, first).forEach((span) => span.classList.add("alike"));
  }
}
