// Elements. All texts of the page go through here, and are set as text: none becomes markup.

const SVG = "http://www.w3.org/2000/svg";

/** Return an element with attributes and children. A child that is no element becomes text. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

/** Return an element of a drawing. */
export function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) set(made, name, value);
  made.append(...children);
  return made;
}

/** Set an attribute if it has changed. null: it has none. */
export function set(at, name, value) {
  if (value === null || value === undefined || value === false) {
    if (at.hasAttribute(name)) at.removeAttribute(name);
  } else if (at.getAttribute(name) !== String(value)) {
    at.setAttribute(name, value === true ? "" : String(value));
  }
}

/** Set an element's text if it has changed. */
export function say(at, text) {
  const wanted = text === null || text === undefined ? "" : String(text);
  if (at.textContent !== wanted) at.textContent = wanted;
}

export function byId(id) {
  return document.getElementById(id);
}

const kept = new WeakMap();

/**
 * Have the children of an element be those of a list. Elements of items that stay, stay: focus and
 * selection are not lost. keyOf(item, number): its name; make(item): its element; update(element, item).
 */
export function follow(parent, items, keyOf, make, update) {
  const before = kept.get(parent) ?? new Map();
  const now = new Map();
  let at = null;
  for (const [number, item] of items.entries()) {
    let key = keyOf(item, number);
    while (now.has(key)) key += " ";
    const one = before.get(key) ?? make(item);
    now.set(key, one);
    update(one, item);
    const wanted = at === null ? parent.firstChild : at.nextSibling;
    if (wanted !== one) parent.insertBefore(one, wanted);
    at = one;
  }
  for (const [key, one] of before) if (!now.has(key)) one.remove();
  kept.set(parent, now);
}
