// Colours of requests, phases and marks; those of a canvas follow the page's style.

const dark = matchMedia("(prefers-color-scheme: dark)");
const cache = new Map();

export const isDark = () => dark.matches;
export function onSchemeChange(act) {
  dark.addEventListener("change", () => { cache.clear(); act(); });
}

function rgbOf(hue, saturation, lightness) {
  const a = saturation * Math.min(lightness, 1 - lightness);
  const part = n => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (lightness - a * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [part(0), part(8), part(4)];
}

// Neighbouring numbers are far apart on the wheel, and differ in lightness.
export function rgbOfRequest(number, isPale = false) {
  const key = number * 2 + isPale;
  let found = cache.get(key);
  if (!found) {
    const hue = (number * 137.508) % 360;
    const step = [0, 0.09, -0.07][number % 3];
    const lightness = isDark() ? (isPale ? 0.22 : 0.58 + step) : (isPale ? 0.915 : 0.52 + step);
    found = rgbOf(hue, isPale ? 0.3 : 0.58, lightness);
    if (cache.size > 5000) cache.clear();
    cache.set(key, found);
  }
  return found;
}

export const css = ([r, g, b], alpha = 1) => `rgb(${r} ${g} ${b} / ${alpha})`;

export function theme() {
  return isDark()
    ? { back: [22, 24, 28], free: [33, 36, 43], cached: [52, 57, 68], text: [230, 232, 236], quiet: [160, 167, 180], line: [56, 61, 71], wrong: [255, 138, 154], accent: [143, 176, 255] }
    : { back: [255, 255, 255], free: [238, 240, 244], cached: [214, 219, 229], text: [27, 29, 33], quiet: [92, 99, 112], line: [213, 216, 222], wrong: [176, 0, 32], accent: [44, 92, 197] };
}

// Waiting, prefill, decode, preempted, swapped.
export const PHASE_RGB = () => isDark()
  ? [[96, 103, 117], [236, 176, 74], [92, 184, 122], [240, 110, 120], [176, 140, 240]]
  : [[170, 177, 190], [214, 142, 20], [42, 145, 82], [202, 40, 60], [124, 77, 205]];
