// A chat as a file: all of it as JSON, or the conversation that is shown as Markdown.

import { path, beside } from "./tree.js";

export function asJson(chat) {
  return JSON.stringify({ format: "pronk-chat", version: 1, ...chat }, null, 1);
}

export function asMarkdown(chat) {
  const parts = [`# ${chat.title}`];
  if (chat.system.trim()) parts.push("## System", chat.system);
  for (const node of path(chat)) {
    if (node.role === "user") parts.push("## You", node.text);
    else for (const each of beside(chat, node)) parts.push(`## ${each.model}`, each.text);
  }
  return parts.join("\n\n") + "\n";
}

export function download(chat, kind) {
  const text = kind === "json" ? asJson(chat) : asMarkdown(chat);
  const address = URL.createObjectURL(new Blob([text], { type: kind === "json" ? "application/json" : "text/markdown" }));
  const name = chat.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
  const link = document.createElement("a");
  link.href = address;
  link.download = `${name}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
