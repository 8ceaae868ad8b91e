// Elements from data. Whatever comes from a model or a server becomes a text node, never markup.

export const byId = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const element = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** For those who hear the page: one sentence, when there is something to say. */
export const speak = (sentence) => { byId("spoken").textContent = sentence; };

export const rounded = (number) => (number >= 100 ? number.toFixed(0) : number.toFixed(1));

export const percent = (share) => `${Math.round(100 * share)}%`;

export const counted = (count, noun, several = `${noun}s`) => `${count} ${count === 1 ? noun : several}`;
