// Where two answers to the same prompt stop being the same. In bytes: tokens may be parts of characters, and cut alike
// texts differently.

// The token of each in which they first differ, and whether one of them just ended there; null where they are the same.
export function parting(one, other) {
  const [a, b] = [one, other].map((node) => node.tokens.bytes.join(""));
  const alike = common(a, b);
  if (alike === a.length && alike === b.length) return null;
  return { tokens: [tokenAt(one, alike), tokenAt(other, alike)], ended: alike === Math.min(a.length, b.length) };
}

function common(a, b) {
  const most = Math.min(a.length, b.length);
  let at = 0;
  while (at < most && a.charCodeAt(at) === b.charCodeAt(at)) at++;
  return at;
}

// An answer that ended there has its length.
function tokenAt({ tokens: { bytes } }, until) {
  let sum = 0;
  for (let at = 0; at < bytes.length; at++) {
    sum += bytes[at].length;
    if (sum > until) return at;
  }
  return bytes.length;
}
