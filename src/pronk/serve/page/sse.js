// Server-sent events out of a fetched body: EventSource cannot POST.

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new Error("the connection to the server broke off; what came is kept");
      });
      if (done) return;
      held += value;
      const whole = held.split(/\r?\n\r?\n/);
      held = whole.pop();
      const found = whole.map(dataOf).filter((data) => data !== null);
      if (found.length) yield found; // what came together is drawn together
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(event) {
  const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.length ? lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n") : null; // or a comment
}
