// Elements out of data. Nothing here, or anywhere in the page, turns text into HTML: texts become text nodes.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "on") for (const [event, handler] of Object.entries(value)) made.addEventListener(event, handler);
    else if (key === "class") made.className = value;
    else if (key in made && typeof value !== "string") made[key] = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function svg(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function button(text, does, given = {}) {
  return el("button", { type: "button", ...given, on: { click: does } }, text);
}

// A button of one sign, with the name that is read aloud and shown on hovering.
export function sign(mark, name, does, given = {}) {
  return button(mark, does, { class: "sign", "aria-label": name, title: name, ...given });
}

// Who is at a button is at the one of the same name when others take its place; or at the first of them.
export function swap(container, children) {
  const held = container.contains(document.activeElement) ? nameOf(document.activeElement) : null;
  container.replaceChildren(...children.filter(Boolean));
  if (held !== null) (named(container, held) ?? container.querySelector("button:not(:disabled)"))?.focus({ preventScroll: true });
}

export function nameOf(button) {
  return button.dataset.place ?? button.ariaLabel ?? button.textContent;
}

export function named(container, name) {
  return [...container.querySelectorAll("button:not(:disabled)")].find((each) => nameOf(each) === name);
}

// Said to who listens to the page rather than sees it.
export function say(text) {
  document.getElementById("status").textContent = text;
}

export function percent(p) {
  if (p >= 0.9995) return p === 1 ? "100 %" : ">99.9 %";
  return p >= 0.001 ? `${(100 * p).toFixed(1)} %` : p > 0 ? "<0.1 %" : "0 %";
}

export function number(value, digits = 1) {
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function bytes(value) {
  const units = ["bytes", "kB", "MB", "GB"];
  const at = value > 0 ? Math.min(3, Math.floor(Math.log10(value) / 3)) : 0;
  return `${number(value / 1000 ** at)} ${units[at]}`;
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied");
    flash(button, "Copied");
  } catch {
    flash(button, "The browser did not let it be copied");
  }
}

function flash(button, text) {
  const before = button.textContent;
  button.textContent = text;
  setTimeout(() => (button.textContent = before), 1200);
}
