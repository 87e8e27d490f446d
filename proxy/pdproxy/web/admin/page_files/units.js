// Numbers as people read them. "–": not known.

export const UNKNOWN = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** Seconds. */
export function seconds(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 0.00995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
  return age(value);
}

/** Seconds, roughly. */
export function age(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  if (value < 129600) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
}

/** A number, or a number per second. */
export function number(value) {
  if (!known(value)) return UNKNOWN;
  for (const [size, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) {
      const scaled = value / (sign === "k" ? 1000 : size);
      return `${scaled.toFixed(scaled < 100 ? 1 : 0)} ${sign}`;
    }
  }
  return value >= 10 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

export function percent(part) {
  return known(part) ? `${Math.round(part * 100)} %` : UNKNOWN;
}

/** The next larger round number. */
export function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 1.5, 2, 3, 4, 5, 6, 8, 10]) if (value <= step * power * 1.0001) return step * power;
  return value;
}
