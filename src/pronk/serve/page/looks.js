// What the server sees inside an answer: /v1/look, taken once an answer and asked again by its id.

import { ask } from "./api.js";
import { messagesBefore } from "./tree.js";

const PAGE = 1024; // tokens that the server shows at a time

export class Looks {
  constructor(app) {
    this.app = app;
    this.taken = new Map(); // by node
  }

  // {prompt_tokens, length, layers, heads, template_text, tokens}. Tokens of the answer stand behind the prompt's.
  async of(node) {
    const answered = node.tokens.ids.length;
    const known = this.taken.get(node.id);
    if (known?.answered === answered) return known.look;
    const taken = { answered, look: this.take(node) };
    this.taken.set(node.id, taken); // before it is there: who asks meanwhile waits for the same one
    taken.look.catch(() => this.taken.get(node.id) === taken && this.taken.delete(node.id));
    return taken.look;
  }

  async take(node) {
    const look = await ask("/v1/look", this.whole(node));
    while (look.tokens.length < look.length) {
      const start = look.tokens.length;
      const page = await ask("/v1/look", { model: node.model, look: look.id, start, stop: start + PAGE });
      look.tokens.push(...page.tokens);
    }
    return look;
  }

  whole(node) {
    return { model: node.model, messages: messagesBefore(this.app.chat, node), answer: node.tokens.ids.slice(0, this.room(node)), start: 0, stop: PAGE };
  }

  // How many tokens of the answer the server looks at.
  room(node) {
    const most = this.app.card(node.model)?.pronk?.look_tokens ?? Infinity;
    const prompt = node.usage ? node.usage.prompt_tokens - (node.begun ?? 0) : 0;
    return Math.max(0, Math.min(node.tokens.ids.length, most - prompt));
  }

  async attention(node, token, layer) {
    return (await this.again(node, { attention: { token, layer } })).attention.weights;
  }

  async lens(node, token) {
    return (await this.again(node, { lens: { token, k: 3 } })).lens;
  }

  // The server keeps few looks: one that was let go is taken once more.
  async again(node, wanted) {
    const look = await this.of(node);
    try {
      return await ask("/v1/look", { model: node.model, look: look.id, stop: 0, ...wanted });
    } catch (error) {
      if (error.code !== "look_not_found") throw error;
      const found = await ask("/v1/look", { ...this.whole(node), stop: 0, ...wanted });
      look.id = found.id;
      return found;
    }
  }
}
