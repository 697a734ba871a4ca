// Numbers as people read them; null is what is not known.

export const UNKNOWN = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

const known = (show) => (value) => (value == null || Number.isNaN(value) ? UNKNOWN : show(value));

export const integer = known((value) => whole.format(value));
export const compact = known((value) => short.format(value).replace("K", "k"));
export const percent = known((value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`);
export const watts = known((value) => (value < 10_000 ? `${whole.format(value)} W` : `${(value / 1000).toFixed(1)} kW`));
export const seconds = known((value) => {
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.1) return `${(value * 1e3).toFixed(1)} ms`;
  return value < 1 ? `${(value * 1e3).toFixed(0)} ms` : `${value.toFixed(1)} s`;
});
// For axes: no more digits than the ticks differ by.
export const axisWhole = (value) => (Number.isInteger(value) ? integer(value) : "");
export const axisPercent = (value) => `${Number((100 * value).toFixed(2))} %`;
export const axisSeconds = (value) => (value === 0 ? "0" : value < 1 ? `${Number((value * 1e3).toFixed(1))} ms` : `${Number(value.toFixed(1))} s`);
export const count = (value, thing) => `${whole.format(value)} ${thing}${value === 1 ? "" : "s"}`;
export const parameter = known((value) => String(Number(value.toPrecision(3))));
export const clock = (time_s) => new Date(time_s * 1000).toLocaleTimeString([], { hour12: false });
