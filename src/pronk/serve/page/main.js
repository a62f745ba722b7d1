// The page: its parts, and the server's models.

import { App } from "./app.js";
import { Composer } from "./composer.js";
import { Inside } from "./inside.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Thread } from "./thread.js";

const at = (id) => document.getElementById(id);
const app = new App();

new Sidebar(app, at("chats"));
const settings = new Settings(app, at("bar"));
new Thread(app, at("thread"));
new Composer(app, at("composer"));
new Inside(app, at("inside"));

window.addEventListener("unhandledrejection", (event) => settings.fail(event.reason?.message ?? "Something went wrong"));
window.addEventListener("error", (event) => settings.fail(event.message));

await app.begin();
at("question").focus();
document.documentElement.dataset.ready = "yes";
