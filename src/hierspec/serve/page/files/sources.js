// Who drafts: each source has one colour and one underline all over the page, the same at every visit.

export const TARGET = "target";
const numbers = new Map();

/** Sources in the order of the server's plans, so that a source looks the same whichever plan runs first. */
export function nameSources(plans) {
  const drafters = plans.flatMap((plan) => plan.tiers.slice(1).map((tier) => tier.name));
  const stores = plans.flatMap((plan) => plan.tiers.flatMap((tier) => tier.stores));
  for (const source of [...drafters.slice(0, 1), ...stores, ...drafters]) look(source);
}

/** The class of a source. */
export function look(source) {
  if (source === TARGET) return "own";
  if (!numbers.has(source)) numbers.set(source, numbers.size);
  return `g${numbers.get(source) % 60}`;
}

export const inWords = (source) => (source === TARGET ? "the model itself" : source);
