// What can be asked of an answer besides its text, each with a line of what it does. Empty: as the model's makers
// advise, and where they say nothing of the temperature, as `pronk chat` has it.

// `none`: what it is where nobody says anything.
const number = (name, label, min, max, step, none, help) => ({ name, label, kind: "number", min, max, step, none, help });

export const OPTIONS = [
  number("temperature", "Temperature", 0, 2, 0.05, 1, "0 takes the likeliest token each time; above 1 unlikely ones come more often than the model has them."),
  number("top_p", "Top p", 0.01, 1, 0.01, 1, "Draw from the likeliest tokens that have this share of the probability together."),
  number("top_k", "Top k", 1, 1000, 1, "all", "Draw from this many of the likeliest tokens."),
  number("min_p", "Min p", 0, 1, 0.01, 0, "Leave out what is less likely than this share of the likeliest token."),
  number("repetition_penalty", "Repetition penalty", 0.1, 3, 0.05, 1, "Above 1, tokens that stand in the text already become less likely."),
  number("presence_penalty", "Presence penalty", -2, 2, 0.1, 0, "Taken off once from tokens that the answer has already."),
  number("frequency_penalty", "Frequency penalty", -2, 2, 0.1, 0, "Taken off for each time that the answer has a token already."),
  number("max_tokens", "Most tokens", 1, 1000000, 1, "as many as fit", "Where an answer is cut off; empty: at the end of the context."),
  number("seed", "Seed", 0, 2 ** 32 - 1, 1, "a new one", "The same seed draws the same answer again; empty: a new one each time, which the answer names."),
  { name: "stop", label: "Stop at", kind: "text", help: "The answer ends before this text." },
  {
    name: "speculative", label: "Guess ahead", kind: "choice", choices: [["", "no"], ["ngram", "from the text so far"]],
    help: "Tokens are guessed and checked several at a time: quicker where the text repeats itself, and never another answer.",
  },
  number("top_logprobs", "Alternatives kept", 0, 20, 1, 5, "How many other tokens are kept of each place, for looking inside; empty: 5."),
];

const OWN = { temperature: 0.7, top_p: 0.95 }; // at 1, small models lose their thread

// What an option is where nobody chose it.
export function usual({ name, none }, options, advised) {
  const { [name]: chosen, ...others } = options;
  const found = new Set(advised.map((each) => asked(others, each)[name] ?? each[name] ?? none));
  return found.size === 1 ? [...found][0] : "each model’s own";
}

// The fields of a request. `advised`: sampling, by the makers of the model that is asked.
export function asked(options, advised) {
  const said = [options.temperature ?? "", advised.temperature ?? ""].some((each) => each !== "");
  const found = { logprobs: true, top_logprobs: 5, ...(said ? {} : OWN) };
  for (const { name } of OPTIONS) {
    const value = options[name];
    if (value !== undefined && value !== "" && value !== null) found[name] = value;
  }
  return found;
}
