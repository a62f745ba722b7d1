// An answer as it comes: its text, its tokens with their alternatives, and what it took.

import { stream } from "./api.js";
import { asked } from "./options.js";
import { messagesBefore } from "./tree.js";

export class Run {
  constructor(chat, node, advised, grew) {
    this.chat = chat;
    this.node = node;
    this.advised = advised;
    this.grew = grew;
    this.abort = new AbortController();
  }

  stop() {
    this.abort.abort();
  }

  // Never throws: what went wrong stands in the node.
  async go() {
    const { chat, node } = this;
    const begun = node.tokens.ids;
    const body = {
      model: node.model,
      messages: messagesBefore(chat, node),
      stream: true,
      stream_options: { include_usage: true },
      return_tokens_as_token_ids: true,
      seed: node.seed,
      ...asked(chat.options, this.advised),
    };
    if (begun.length) body.answer_ids = [...begun];
    // A beginning that ends amid a character has no text of its own: then the bytes say what the text is.
    const whole = new TextDecoder();
    const prefix = bytesOf(node.tokens.bytes.join(""));
    node.text = whole.decode(prefix, { stream: true });
    this.decoder = whole.decode() ? new TextDecoder() : null;
    this.decoder?.decode(prefix, { stream: true });
    this.last = performance.now();
    this.grew();
    try {
      for await (const chunks of stream(body, this.abort.signal)) {
        this.take(chunks);
        this.grew();
      }
    } catch (error) {
      if (error.name === "AbortError") node.finish = "stopped";
      else node.error = error.message;
    }
    this.ended = true;
    this.grew();
  }

  take(chunks) {
    const { node } = this;
    const entries = [];
    for (const chunk of chunks) {
      if (chunk.usage) node.usage = chunk.usage;
      if (chunk.pronk) node.took = chunk.pronk;
      const choice = chunk.choices[0];
      if (!choice) continue;
      if (choice.delta.content && !this.decoder) node.text += choice.delta.content;
      if (choice.finish_reason) node.finish = choice.finish_reason;
      if (choice.logprobs) entries.push(...choice.logprobs.content);
    }
    if (!entries.length) return;
    const now = performance.now();
    const each = (now - this.last) / entries.length;
    this.last = now;
    for (const entry of entries) {
      const { tokens } = node;
      tokens.ids.push(idOf(entry));
      tokens.bytes.push(String.fromCharCode(...entry.bytes));
      tokens.logprobs.push(entry.logprob);
      tokens.ms.push(Math.round(each * 100) / 100);
      // Flat, so that ten thousand of them are kept in a moment: id, bytes, log-probability; and the next.
      tokens.tops.push(entry.top_logprobs.flatMap((top) => [idOf(top), String.fromCharCode(...top.bytes), top.logprob]));
      if (this.decoder) node.text += this.decoder.decode(Uint8Array.from(entry.bytes), { stream: true });
    }
  }
}

function idOf(entry) {
  return Number(entry.token.slice("token_id:".length));
}

// Bytes are kept as a text of one character each.
export function bytesOf(text) {
  return Uint8Array.from(text, (character) => character.charCodeAt(0));
}

export function alternativesOf(tokens, at) {
  const flat = tokens.tops[at] ?? [];
  const found = [];
  for (let n = 0; n < flat.length; n += 3) found.push({ id: flat[n], bytes: flat[n + 1], probability: Math.exp(flat[n + 2]), logprob: flat[n + 2] });
  return found;
}

// The tokens up to place `at`, and there another one.
export function instead(tokens, at, other) {
  const cut = (list) => list.slice(0, at);
  return {
    ids: [...cut(tokens.ids), other.id],
    bytes: [...cut(tokens.bytes), other.bytes],
    logprobs: [...cut(tokens.logprobs), other.logprob],
    ms: [...cut(tokens.ms), 0],
    tops: [...cut(tokens.tops), tokens.tops[at]],
  };
}
