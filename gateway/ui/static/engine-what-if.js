// "What if?": runs the stretch that is shown again with other settings.

import { byId } from "./view.js";

// shown(): the state that is shown. spanMs: of the stretch while it is the live one. onRun(): there is something to draw.
export function setUpWhatIf({ past, timeline, panel, shown, spanMs, onRun }) {
  const form = byId("what-if-form");
  byId("what-if").addEventListener("toggle", () => {
    const state = shown();
    if (form.num_blocks.value || !state.isReady) return;
    form.num_blocks.value = 2 * state.numBlocks;
    form.num_host_blocks.value = state.numHostBlocks;
    form.preemption.value = state.preemption;
    form.num_watermark_blocks.value = state.watermark;
  });
  form.addEventListener("submit", async event => {
    event.preventDefault();
    const until = past.isOn ? past.until : shown().at;
    const since = past.isOn ? past.since : until - spanMs;
    const result = byId("what-if-result");
    result.textContent = "The requests run again …";
    try {
      const found = await past.rerun(since, until, Object.fromEntries(new FormData(form)));
      const pointsOf = ({ points }) => points.map(([at, used, waiting, running]) => ({ at, used, waiting, running }));
      timeline.other = pointsOf(found.after);
      timeline.other.scale = found.num_blocks / shown().numBlocks;
      const seconds = run => ((run.end_ms - since) / 1000).toFixed(1);
      const { before, after } = found;
      result.textContent = `${found.num_requests} requests by simulation: preemptions ${before.num_preemptions} with the settings as they are, ${after.num_preemptions} with these (${found.num_preemptions} there were); the last one ends after ${seconds(before)} s and ${seconds(after)} s. The dashed curves have these settings; blocks are shares of the pool.`;
      panel.dataset.whatIf = `${before.num_preemptions},${after.num_preemptions}`;
    } catch (error) {
      result.textContent = error.message;
    }
    onRun();
  });
}
