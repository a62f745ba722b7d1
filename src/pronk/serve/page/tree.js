// A chat: a tree of messages, of which one path is shown. Plain data, as it is kept and exported.

export const MOST_MODELS = 4;

const unique = () => crypto.getRandomValues(new Uint32Array(3)).join("-");

export function newChat(models, options = {}, system = "") {
  const root = { id: unique(), parent: null, role: "root", children: [], chosen: null };
  const now = Date.now();
  return { id: unique(), title: "New chat", created: now, changed: now, models, options, system, root: root.id, nodes: { [root.id]: root } };
}

// A message behind `parent`, which becomes the one that is shown. Answers of one `group` are shown side by side.
export function add(chat, parent, role, fields) {
  const node = { id: unique(), parent: parent.id, role, text: "", children: [], chosen: null, ...fields };
  node.group ??= node.id;
  chat.nodes[node.id] = node;
  parent.children.push(node.id);
  parent.chosen = node.id;
  return node;
}

export function noTokens() {
  return { ids: [], bytes: [], logprobs: [], ms: [], tops: [] };
}

export function path(chat) {
  const found = [];
  for (let node = chat.nodes[chat.root]; node.chosen; found.push(node)) node = chat.nodes[node.chosen];
  return found;
}

export function last(chat) {
  return path(chat).at(-1) ?? chat.nodes[chat.root];
}

export function parentOf(chat, node) {
  return chat.nodes[node.parent];
}

// The answers that stand beside this one; itself among them.
export function beside(chat, node) {
  return parentOf(chat, node).children.map((id) => chat.nodes[id]).filter((other) => other.group === node.group);
}

// The branches at this place, one node of each, and which of them is shown.
export function branches(chat, node) {
  const found = new Map();
  for (const id of parentOf(chat, node).children) {
    const other = chat.nodes[id];
    if (!found.has(other.group)) found.set(other.group, other);
  }
  const nodes = [...found.values()];
  return { nodes, at: nodes.findIndex((other) => other.group === node.group) };
}

export function choose(chat, node) {
  for (let at = node; at.parent; at = parentOf(chat, at)) parentOf(chat, at).chosen = at.id;
}

// What a model is sent to answer: everything before `node`.
export function messagesBefore(chat, node) {
  const found = [];
  for (let at = parentOf(chat, node); at.role !== "root"; at = parentOf(chat, at)) found.unshift({ role: at.role, content: at.text });
  if (chat.system.trim()) found.unshift({ role: "system", content: chat.system });
  return found;
}

// Token details of the oldest answers go first, where a chat has more than `most` of them; the texts stay.
export function bounded(chat, most) {
  const answers = Object.values(chat.nodes).filter((node) => node.tokens);
  let left = answers.reduce((sum, node) => sum + node.tokens.ids.length, 0);
  for (const node of answers) {
    if (left <= most) break;
    left -= node.tokens.ids.length;
    node.tokens = null;
  }
  return chat;
}
