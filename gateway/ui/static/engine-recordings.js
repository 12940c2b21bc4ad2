// The choice of a recording beside the time machine's slider.

import { make } from "./view.js";

// Fills the choice with the recordings that the gateway has; it is hidden where there are none.
export async function listRecordings(past, choice, select) {
  let found;
  try {
    found = await past.recordings();
  } catch {
    return; // the feed reports the same
  }
  const options = found.map(file => {
    const about = `${file.name} · ${(file.bytes / 2 ** 20).toFixed(1)} MiB${file.is_damaged ? " · damaged" : ""}`;
    const option = make("option", { value: file.name }, about);
    option.disabled = Boolean(file.is_damaged && !file.first_ms); // nothing of it can be shown
    return option;
  });
  if (past.recording && !found.some(file => file.name === past.recording)) options.push(make("option", { value: past.recording }, past.recording));
  select.replaceChildren(select.firstElementChild, ...options);
  select.value = past.recording;
  choice.hidden = !found.length && !past.recording;
}
