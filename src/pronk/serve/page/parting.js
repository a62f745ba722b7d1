// Where two answers to the same prompt stop being the same.

// The token of each in which their texts first differ; null where they are the same so far.
export function parting(one, other) {
  const alike = common(one.text, other.text);
  if (alike === one.text.length && alike === other.text.length) return null;
  return { characters: alike, tokens: [tokenAt(one, alike), tokenAt(other, alike)] };
}

function common(a, b) {
  const most = Math.min(a.length, b.length);
  let at = 0;
  while (at < most && a.charCodeAt(at) === b.charCodeAt(at)) at++;
  return at;
}

const encoder = new TextEncoder();

// In bytes, for tokens may be parts of characters. An answer that ended there has its length.
function tokenAt(node, characters) {
  const until = encoder.encode(node.text.slice(0, characters)).length;
  const { bytes } = node.tokens;
  let sum = 0;
  for (let at = 0; at < bytes.length; at++) {
    sum += bytes[at].length;
    if (sum > until) return at;
  }
  return bytes.length;
}
