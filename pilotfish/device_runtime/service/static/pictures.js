// Pictures of the last minutes: a line of values over time, drawn as SVG.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 56;

/**
 * Draw a line of values into a picture's element. values: oldest first, null where unknown. away:
 * whether the edge was away, for each value. top: value at the upper end of the axis. format: formats
 * a value. span: text of the time span.
 */
export function drawLine(picture, { values, away, top, format, span }) {
  const drawing = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    role: "img",
    "aria-label": describe(values, away, format, span),
  });
  const step = WIDTH / (values.length - 1);
  for (const [first, last] of runs(away, Boolean)) {
    const x = (first - 0.5) * step;
    const width = (last - first + 1) * step;
    drawing.append(svg("rect", { class: "away", x, y: 0, width, height: HEIGHT }));
    drawing.append(svg("rect", { class: "away edge", x, y: HEIGHT - 3, width, height: 3 }));
  }
  for (const [first, last] of runs(values, (value) => value !== null)) {
    const points = values.slice(first, last + 1).map((value, i) => {
      const height = top ? Math.min(value / top, 1) : 0;
      return `${((first + i) * step).toFixed(1)} ${(HEIGHT - height * HEIGHT).toFixed(1)}`;
    });
    // a lone value is a line of no length, whose round ends make a dot
    drawing.append(svg("path", { d: `M${points.join(" L")}${last > first ? "" : " h0"}` }));
  }
  picture.querySelector(".plot").replaceChildren(drawing);
  const isEmpty = values.every((value) => value === null);
  picture.querySelector(".top").textContent = isEmpty ? "–" : format(top);
  picture.querySelector(".oldest").textContent = `${span} ago`;
  const remarks = [isEmpty && "No values yet.", away.includes(true) && "Red bar: the edge was away."];
  picture.querySelector(".remark").textContent = remarks.filter(Boolean).join(" ");
}

/** Return the least of 1, 2, 5, 10, 20, … times `unit` that is at least `value`. */
export function roundUp(value, unit) {
  for (let scale = unit; ; scale *= 10) {
    for (const factor of [1, 2, 5]) if (value <= factor * scale) return factor * scale;
  }
}

/** List the runs of items with a property, as [first index, last index]. */
function runs(items, has) {
  const found = [];
  items.forEach((item, i) => {
    if (!has(item)) return;
    if (found.length && found.at(-1)[1] === i - 1) found.at(-1)[1] = i;
    else found.push([i, i]);
  });
  return found;
}

/** Say in words what the picture shows. */
function describe(values, away, format, span) {
  const known = values.filter((value) => value !== null);
  if (!known.length) return `No values in the last ${span}.`;
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const lost = away.includes(true) ? " The edge was away for a part of this time." : "";
  return `In the last ${span} from ${format(least)} to ${format(most)}, last ${format(known.at(-1))}.${lost}`;
}

function svg(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
