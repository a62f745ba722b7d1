// What all parts of the page share: the chat that is open, the models that there are, answers under way.

import { ask } from "./api.js";
import { say } from "./dom.js";
import { Run } from "./answer.js";
import * as store from "./store.js";
import * as tree from "./tree.js";

const CHOSEN = "pronk.chat"; // in localStorage: which chat was open

export class App extends EventTarget {
  constructor() {
    super();
    this.models = [];
    this.chat = tree.newChat([]);
    this.runs = new Map(); // by node
  }

  // Events: "chats", "chat" (another one), "thread" (its messages), "settings", "chats opened" by a button, and "grew" with a node.
  tell(kind, detail) {
    this.dispatchEvent(new CustomEvent(kind, { detail }));
  }

  async begin() {
    const [{ data }] = await Promise.all([ask("/v1/models"), this.last()]);
    this.models = data;
    this.chat.models = this.known(this.chat.models);
    this.tell("settings");
  }

  async last() {
    const heads = await store.heads();
    const id = localStorage.getItem(CHOSEN);
    const found = heads.find((head) => head.id === id) ?? heads[0];
    if (found) await this.open(found.id);
    else this.fresh();
    this.tell("chats");
  }

  known(names) {
    const found = names.filter((name) => this.models.some((model) => model.id === name));
    return found.length || !this.models.length ? found : [this.models[0].id];
  }

  card(name) {
    return this.models.find((model) => model.id === name);
  }

  // A model is loaded when it is first asked for; then its card says more.
  async refresh() {
    this.models = (await ask("/v1/models")).data;
  }

  fresh() {
    const { models, options, system } = this.chat;
    this.show(tree.newChat(this.known([...models]), { ...options }, system));
  }

  async open(id) {
    // One that is being answered is here already, further than it was kept.
    const live = [...this.runs.values()].find((run) => run.chat.id === id)?.chat;
    const chat = live ?? (await store.get(id));
    if (!chat) return;
    if (this.models.length) chat.models = this.known(chat.models);
    for (const node of Object.values(chat.nodes)) if (node.role === "assistant" && !node.finish && !this.runs.has(node.id)) node.finish = "stopped";
    this.show(chat);
  }

  show(chat) {
    this.chat = chat;
    localStorage.setItem(CHOSEN, chat.id);
    this.tell("chat");
  }

  async remove(id) {
    for (const run of this.runs.values()) {
      if (run.chat.id !== id) continue;
      run.chat.removed = true;
      run.stop();
    }
    await store.remove(id);
    if (id === this.chat.id) this.show(tree.newChat(this.known(this.chat.models)));
    this.tell("chats");
  }

  async save(chat = this.chat) {
    if (chat.removed) return;
    chat.changed = Date.now();
    const gone = await store.put(chat).catch((error) => this.tell("problem", `This chat could not be kept: ${error.message}`));
    if (gone?.length) this.tell("problem", `There are more than ${store.MOST_CHATS} chats; the oldest was let go: ${gone.join(", ")}`);
    this.tell("chats");
  }

  // -- asking --

  // Of the chat that is shown; others go on being answered.
  get under() {
    return [...this.runs.values()].filter((run) => run.chat === this.chat);
  }

  get busy() {
    return this.under.length > 0;
  }

  send(text, parent = tree.last(this.chat)) {
    const { chat } = this;
    const node = tree.add(chat, parent, "user", { text });
    if (parent.id === chat.root) chat.title = text.trim().split("\n")[0].slice(0, 80) || "New chat";
    this.answer(node);
  }

  // By each of the chat's models, side by side.
  answer(question, models = this.chat.models) {
    const group = question.id + "/" + question.children.length;
    // Side by side all draw with one seed: what parts them is then no other draw.
    const seed = models.length > 1 ? Math.floor(Math.random() * 2 ** 32) : undefined;
    const nodes = models.map((model) => tree.add(this.chat, question, "assistant", { model, group, seed, tokens: tree.noTokens() }));
    question.chosen = nodes[0].id;
    this.run(nodes);
  }

  again(node) {
    this.answer(tree.parentOf(this.chat, node), [node.model]);
  }

  // The same answer up to a token, there another one, and on from it.
  branch(node, tokens) {
    const { chat } = this;
    const made = tree.add(chat, tree.parentOf(chat, node), "assistant", { model: node.model, tokens, begun: tokens.ids.length });
    tree.choose(chat, made);
    this.run([made]);
    return made;
  }

  run(nodes) {
    const { chat } = this;
    for (const node of nodes) {
      const run = new Run(chat, node, this.card(node.model)?.pronk?.sampling ?? {}, () => this.tell("grew", node));
      this.runs.set(node.id, run);
      run.go().then(async () => {
        this.runs.delete(node.id);
        this.tell("ended", node);
        say(node.error ?? `${node.model} has answered: ${node.tokens.ids.length} tokens`);
        if (!this.card(node.model)?.pronk) await this.refresh().catch(() => {});
        await this.save(chat);
      });
    }
    say("Answering");
    this.tell("thread");
    this.save(chat);
  }

  stop() {
    for (const run of this.under) run.stop();
  }

  choose(node) {
    tree.choose(this.chat, node);
    this.tell("thread");
    this.save();
  }
}
