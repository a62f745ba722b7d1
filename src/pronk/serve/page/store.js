// Chats, kept in this browser alone (IndexedDB), and no more than a bounded number of them.

import { bounded } from "./tree.js";

export const MOST_CHATS = 200;
const MOST_TOKENS = 60000; // of a chat, whose details are kept

let opened = null;
const inMemory = new Map(); // where the browser keeps nothing, as in some private windows

function database() {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open("pronk", 1);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("chats", { keyPath: "id" });
        request.result.createObjectStore("heads", { keyPath: "id" });
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = request.onblocked = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export async function keeps() {
  return (await database()) !== null;
}

// Newest first.
export async function heads() {
  const db = await database();
  const found = db ? await done(db.transaction("heads").objectStore("heads").getAll()) : [...inMemory.values()].map(head);
  return found.sort((a, b) => b.changed - a.changed);
}

export async function get(id) {
  const db = await database();
  return db ? done(db.transaction("chats").objectStore("chats").get(id)) : inMemory.get(id);
}

// Returns the titles of those that were let go for it.
export async function put(chat) {
  bounded(chat, MOST_TOKENS);
  const db = await database();
  if (db) {
    const both = db.transaction(["chats", "heads"], "readwrite");
    both.objectStore("heads").put(head(chat));
    await done(both.objectStore("chats").put(chat));
  } else inMemory.set(chat.id, chat);
  const gone = (await heads()).slice(MOST_CHATS);
  for (const each of gone) await remove(each.id);
  return gone.map((each) => each.title);
}

export async function remove(id) {
  const db = await database();
  inMemory.delete(id);
  if (!db) return;
  const both = db.transaction(["chats", "heads"], "readwrite");
  both.objectStore("heads").delete(id);
  await done(both.objectStore("chats").delete(id));
}

function head({ id, title, changed }) {
  return { id, title, changed };
}
