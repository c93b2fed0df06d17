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

/** Listeners that set one field of a view's `state`, then draw it: `set("step", Number)`. */
export const setter = (state, then) => (name, read = String) => (value) => { state[name] = read(value); then(); };

export function tick(label, checked, onchange) {
  const box = h("input", { type: "checkbox", checked, onchange: () => onchange(box.checked) });
  return h("label", {}, box, label);
}

/** A number for people: four significant digits, and no more zeros than needed. */
export function number(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return value.toLocaleString("en");
  const size = Math.abs(value);
  const short = Number(value.toPrecision(size < 1e-3 || size >= 1e7 ? digits - 1 : digits));
  return size < 1e-3 || size >= 1e7 ? short.toExponential() : String(short);
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${Number((100 * share).toFixed(1))} %`);

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 60) return `${number(seconds, seconds < 10 ? 2 : 3)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)] ?? null;
}

/** Hand a file to the reader. */
export function download(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\w.-]+/g, "_") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
