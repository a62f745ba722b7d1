// What the server is asked, with the key where it wants one.

import { el, button } from "./dom.js";
import { events } from "./sse.js";

const KEY = "pronk.key"; // in sessionStorage: it goes with the tab

export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function fetched(path, body, signal) {
  for (;;) {
    const headers = body === undefined ? {} : { "Content-Type": "application/json" };
    const key = sessionStorage.getItem(KEY);
    if (key) headers.Authorization = `Bearer ${key}`;
    const options = { method: body === undefined ? "GET" : "POST", headers, signal, credentials: "omit" };
    if (body !== undefined) options.body = JSON.stringify(body);
    let response;
    try {
      response = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused(0, "the server does not answer; is it still running?");
    }
    if (response.ok) return response;
    const told = await response.json().catch(() => ({}));
    const { message = `the server said ${response.status}`, code } = told.error ?? {};
    if (response.status !== 401) throw new Refused(response.status, message, code);
    await askForKey(key ? "That key is wrong." : "This server wants a key.", key);
  }
}

export async function ask(path, body, signal) {
  return (await fetched(path, body, signal)).json();
}

// Lists of chunks of an answer, as they come.
export async function* stream(body, signal) {
  const response = await fetched("/v1/chat/completions", body, signal);
  for await (const found of events(response)) {
    const chunks = [];
    let ended = false;
    for (const data of found) {
      if (data === "[DONE]") ended = true;
      else {
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Refused(500, chunk.error.message, chunk.error.code);
        chunks.push(chunk);
      }
    }
    yield chunks;
    if (ended) return;
  }
  throw new Refused(0, "the server closed the connection before the answer was whole");
}

let asking = null; // one dialog, whoever waits for it

function askForKey(why, wrong) {
  if (sessionStorage.getItem(KEY) !== wrong) return Promise.resolve(); // given meanwhile
  asking ??= new Promise((resolve) => {
    const typed = el("input", { type: "password", id: "key", autocomplete: "off", required: true });
    const dialog = el(
      "dialog",
      { "aria-labelledby": "key-title" },
      el(
        "form",
        {
          on: {
            submit: (event) => {
              event.preventDefault();
              sessionStorage.setItem(KEY, typed.value.trim());
              dialog.close();
            },
          },
        },
        el("h2", { id: "key-title" }, why),
        el("label", { for: "key" }, "Key (forgotten when this tab is closed)"),
        typed,
        el("p", { class: "row" }, button("Go on", () => dialog.querySelector("form").requestSubmit(), { class: "main" })),
      ),
    );
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener("close", () => {
      dialog.remove();
      asking = null;
      resolve();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}
