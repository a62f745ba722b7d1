// Markdown as elements. marked cuts it into tokens; elements are made of these here, so that HTML in an answer stays
// text, a link leads to the web or nowhere, and no picture is ever fetched.

import { el, button, copy } from "./dom.js";
import { lexer } from "./vendor/marked.esm.js";

const DEEPEST = 40; // of blocks in blocks
const LONGEST = 20000; // characters of a block: one that is longer is shown as it is, for cutting it takes too long

export function render(text) {
  const fragment = document.createDocumentFragment();
  if (text.length > LONGEST) {
    fragment.append(plain(text));
    return fragment;
  }
  try {
    fragment.append(...blocks(lexer(text), 0));
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // nested too deep for the stack
    fragment.replaceChildren(plain(text));
  }
  return fragment;
}

function plain(text) {
  return el("p", { class: "plain" }, text);
}

function blocks(tokens, depth) {
  if (depth > DEEPEST) return tokens.map((token) => token.raw);
  return tokens.map((token) => block(token, depth + 1)).filter((made) => made !== null);
}

function block(token, depth) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return el(`h${Math.min(6, token.depth + 2)}`, {}, inlines(token.tokens, depth));
    case "paragraph":
      return el("p", {}, inlines(token.tokens, depth));
    case "text":
      return el("span", {}, token.tokens ? inlines(token.tokens, depth) : unescaped(token.text));
    case "code":
      return code(token);
    case "hr":
      return el("hr");
    case "blockquote":
      return el("blockquote", {}, blocks(token.tokens, depth));
    case "list": {
      const list = el(token.ordered ? "ol" : "ul", {}, token.items.map((item) => el("li", {}, blocks(item.tokens, depth))));
      if (token.ordered && token.start > 1) list.start = token.start;
      return list;
    }
    case "checkbox":
      return el("input", { type: "checkbox", disabled: true, checked: token.checked });
    case "table":
      return table(token, depth);
    default:
      return plain(token.raw);
  }
}

export function code({ text, lang }) {
  const shown = el("code", {}, text);
  const language = (lang ?? "").match(/^[\w+#.-]{1,20}/)?.[0] ?? "";
  const copying = button("Copy", () => copy(shown.textContent, copying), { class: "quiet" });
  return el("div", { class: "code" }, el("div", { class: "codebar" }, el("span", {}, language), copying), el("pre", { tabindex: "0" }, shown));
}

function table({ header, rows, align }, depth) {
  const cell = (kind) => (each, n) => el(kind, { class: align[n] ? `align-${align[n]}` : null }, inlines(each.tokens, depth));
  const body = rows.map((row) => el("tr", {}, row.map(cell("td"))));
  return el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, header.map(cell("th")))), el("tbody", {}, body)));
}

function inlines(tokens, depth) {
  if (depth > DEEPEST) return tokens.map((token) => token.raw);
  return tokens.map((token) => inline(token, depth + 1));
}

function inline(token, depth) {
  switch (token.type) {
    case "text":
    case "escape":
      return token.tokens ? el("span", {}, inlines(token.tokens, depth)) : unescaped(token.text);
    case "strong":
    case "em":
    case "del":
      return el(token.type, {}, inlines(token.tokens, depth));
    case "codespan":
      return el("code", {}, token.text);
    case "br":
      return el("br");
    case "link":
      return link(token.href, inlines(token.tokens, depth));
    case "image":
      return link(token.href, [`picture: ${token.text || token.href}`]);
    case "checkbox":
      return block(token, depth);
    default:
      return token.raw;
  }
}

function link(href, children) {
  if (!/^(https?:\/\/|mailto:)/i.test(href)) return el("span", { title: href }, children);
  return el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, children);
}

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

function unescaped(text) {
  return text.replace(/&(?:(amp|lt|gt|quot|apos|nbsp)|#(\d{1,7})|#x([\da-f]{1,6}));/gi, (raw, name, decimal, hex) => {
    if (name) return ENTITIES[name.toLowerCase()];
    const point = decimal ? Number(decimal) : parseInt(hex, 16);
    return point > 0 && point <= 0x10ffff && !(point >= 0xd800 && point < 0xe000) ? String.fromCodePoint(point) : raw;
  });
}
