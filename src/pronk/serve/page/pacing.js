// Work that draws, once a frame at most however often it is asked for; in a hidden tab, where no frames come, by a timer.

const waiting = new Set();
let set = false;

export function soon(work) {
  waiting.add(work);
  if (set) return;
  set = true;
  if (document.hidden) setTimeout(run, 250);
  else requestAnimationFrame(run);
}

function run() {
  set = false;
  const now = [...waiting];
  waiting.clear();
  for (const work of now) work();
}

// A tab that was hidden, or is shown again, may have asked for the other kind.
document.addEventListener("visibilitychange", () => {
  if (set) setTimeout(() => set && run(), 0);
});
