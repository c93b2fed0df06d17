// Elements from small pieces. Whatever comes from a run goes in as text, never as HTML.

/** An element: `h("p", {class: "note"}, "some text", otherElement)`. Functions are listeners: `{onclick: f}`. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(element.style, value);
    else if (key === "value" || key === "checked") element[key] = value;
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A select with a label; `options` are values, or pairs of value and text. */
export function choice(label, options, value, onchange) {
  const select = h("select", { onchange: () => onchange(select.value), "aria-label": label });
  for (const option of options) {
    const [key, text] = Array.isArray(option) ? option : [option, option];
    select.append(h("option", { value: String(key) }, String(text)));
  }
  select.value = String(value);
  return h("label", {}, h("span", { class: "soft" }, label), select);
}

export function tick(label, checked, onchange) {
  const box = h("input", { type: "checkbox", checked, onchange: () => onchange(box.checked) });
  return h("label", {}, box, label);
}

/** A number for people: four significant digits, and no more zeros than needed. */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);

/** Hand a file to the reader. */
export function download(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\w.-]+/g, "_") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** `section.name -> value` of a config.toml that Covey wrote: one setting on each line. */
export function settingsOf(text) {
  const found = new Map();
  let section = "";
  for (const line of text.split("\n")) {
    const head = /^\[(.+)\]$/.exec(line);
    const setting = /^([^=\s]+) = (.*)$/.exec(line);
    if (head) section = `${head[1]}.`;
    else if (setting) found.set(section + setting[1], setting[2]);
  }
  return found;
}
