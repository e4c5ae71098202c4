// Figures as text: shares, times, rates and sizes with their units.

export function percent(share) {
  return share === null ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}\u00a0%`;
}

export function seconds(value) {
  if (value < 0.000_995) return `${(1e6 * value).toFixed(0)}\u00a0µs`;
  if (value < 0.9995) return `${(1e3 * value).toFixed(value < 0.00995 ? 1 : 0)}\u00a0ms`;
  return `${value.toFixed(1)}\u00a0s`;
}

/** Format a duration in whole seconds, minutes, hours or days. value: seconds. */
export function duration(value) {
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function rate(bps) {
  if (bps < 1e6) return `${(bps / 1e3).toFixed(0)}\u00a0kbit/s`;
  if (bps < 1e9) return `${(bps / 1e6).toFixed(bps < 1e7 ? 1 : 0)}\u00a0Mbit/s`;
  return `${(bps / 1e9).toFixed(1)}\u00a0Gbit/s`;
}

export function byteSize(count) {
  if (count < 1000) return `${count} B`;
  return count < 1e6 ? `${(count / 1e3).toFixed(1)} kB` : `${(count / 1e6).toFixed(1)} MB`;
}

/** Set an element's text if it changes; the same text would be announced and painted again. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}
